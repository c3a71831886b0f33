"""Every model family against transformers, on random tiny models that use all its switches.

    python benchmarks/families.py [MODEL ...] [--json families.json]

Columns: the largest difference of fp32 logits; the largest difference of any gradient, relative to
the largest number of that gradient; greedy tokens that are equal, of all; lines of the family's
file. The models are those of `tests/modules/test_families.py`, which holds the bounds;
`tests/recipes/test_families.py` quantizes, trains, resumes, exports and merges them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from qfsdp.common.quiet import quiet_torchao

quiet_torchao()

from qfsdp.distributed.world import World  # noqa: E402
from qfsdp.evaluation.generation import SamplingConfig, generate  # noqa: E402
from qfsdp.modules.families import FAMILIES  # noqa: E402
from qfsdp.modules.transformer import Decoder  # noqa: E402
from tests.modules import test_families as tiny  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help="names in TINY; default: all")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    found = {}
    print(f"{'model':26}{'logits':>9}{'gradients':>11}{'greedy':>8}{'lines':>7}")
    for name in args.models or tiny.TINY:
        found[name] = row = measure(name)
        print(
            f"{name:26}{row['logits']:9.1e}{row['gradients']:11.1e}{row['greedy']:>8}"
            f"{row['lines']:7}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def measure(name: str) -> dict[str, Any]:
    """The figures of one tiny model."""
    model, tokens = tiny.reference(name), tiny.random_tokens()
    decoder = tiny.ours(model)
    expected = model(tokens).logits
    logits = tiny.max_difference(decoder(tokens), expected)
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    decoder(tokens, labels=labels).backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return {
        "logits": logits,
        "gradients": apart(decoder, model),
        "greedy": equal_tokens(decoder, model, tokens),
        "lines": lines_of(type(model).__name__),
    }


def apart(decoder: Decoder, model: Any) -> float:
    """The largest difference of gradients, relative to the largest number of each. Gradients that
    are rounding alone (keys' biases without positions) count to a hundredth of the largest."""
    theirs = tiny.with_our_names(
        {key: p.grad for key, p in model.named_parameters()}, model.config.model_type
    )
    largest = max(gradient.abs().max().item() for gradient in theirs.values())
    return max(
        tiny.max_difference(parameter.grad, theirs[key])
        / max(theirs[key].abs().max().item(), 1e-2 * largest)
        for key, parameter in decoder.named_parameters()
        if parameter.grad is not None
    )


def equal_tokens(decoder: Decoder, model: Any, tokens: torch.Tensor) -> str:
    """Greedy tokens of two prompts that are equal, of all: "28/28"."""
    model.generation_config.eos_token_id = None
    prompts = [tokens[0, :5].tolist(), tokens[1, :11].tolist()]
    config = SamplingConfig(max_new_tokens=tiny.NEW)
    answers = generate(decoder, prompts, config, set(), World(tiny.CPU))
    same = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=tiny.NEW, pad_token_id=0
        )
        wanted = whole[0, len(prompt) :].tolist()
        same += sum(a == b for a, b in zip(answer, wanted, strict=True))
        total += len(wanted)
    return f"{same}/{total}"


def lines_of(architecture: str) -> int:
    """Lines of the file that reads the family's config.json."""
    file = inspect.getsourcefile(FAMILIES[architecture])
    return len(Path(str(file)).read_text().splitlines())


if __name__ == "__main__":
    main()
