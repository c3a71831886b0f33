"""Mixtures of experts against transformers and PEFT: logits, greedy tokens, all gradients.

    python benchmarks/mixture_parity.py

Random tiny models of six families that use all switches of their family (hidden size 132, five or
six experts; `TINY` in tests/modules/test_families.py), fp32, the same weights on both sides. The
columns:

    logits    largest absolute difference from transformers' logits
    greedy    how many of the greedily generated tokens are transformers'
    experts, router, others
              gradients of the weights against transformers': the norm of the difference over the
              norm, the largest of any tensor
    adapters  gradients of LoRA on all linears, experts and router against PEFT's, as above

The exit status is 1 if logits differ by more than 1e-4, a gradient by more than 1e-5, or a token.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from qfsdp.checkpoint.adapter_files import adapter_parameters, save_adapter
from qfsdp.checkpoint.expert_adapter_files import to_peft
from qfsdp.common.quiet import quiet_torchao
from qfsdp.distributed.world import World
from qfsdp.evaluation.generation import SamplingConfig, generate
from tests.checkpoint.test_expert_adapter_files import PEFT_SCRIPT, adapted, in_file
from tests.modules.test_families import NEW, ours, random_tokens, reference, with_our_names
from tests.peft_oracle import run_peft

# Family -> its name of a router, of which PEFT adapts the linear.
FAMILIES = {
    "qwen3-moe-dense-layers": "gate",
    "qwen2-moe": "gate",
    "olmoe": "gate",
    "mixtral": "gate",
    "glm4-moe": "gate",
    "gpt-oss": "router",
}
COLUMNS = ("logits", "greedy", "experts", "router", "others", "adapters")
CPU = World(torch.device("cpu"))
TOKENS = random_tokens()
LABELS = F.pad(TOKENS[:, 1:], (0, 1), value=-100)
Figures = dict[str, float]


def relative(found: Tensor | None, expected: Tensor | None, least: float = 0.0) -> float:
    """The norm of the difference over the norm, or over `least` if that is larger."""
    assert found is not None and expected is not None
    return float((found - expected).norm()) / max(float(expected.norm()), least)


def part_of(name: str) -> str:
    if ".experts." in name and "shared_expert" not in name:
        return "experts"
    return "router" if ".gate." in name or ".router." in name else "others"


def of_the_model(family: str) -> Figures:
    """Logits, and gradients of the summed cross entropy to every weight."""
    theirs = reference(family)
    model = ours(theirs)
    found, expected = model(TOKENS), theirs(TOKENS).logits
    figures = {"logits": float((found - expected).abs().max())}
    model(TOKENS, labels=LABELS).backward()
    F.cross_entropy(expected.flatten(0, 1), LABELS.flatten(), reduction="sum").backward()
    given = {name: param.grad for name, param in theirs.named_parameters()}
    wanted = with_our_names(given, theirs.config.model_type)
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if wanted.keys() != trained.keys():
        raise SystemExit(f"{family}: other weights than transformers': {wanted.keys() ^ trained}")
    # A bias of keys changes no softmax where there are no positions: its gradient is rounding.
    least = 1e-2 * max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in trained.items():
        part, apart = part_of(name), relative(gradient, wanted[name], least)
        figures[part] = max(figures.get(part, 0.0), apart)
    return figures


def greedy(family: str) -> tuple[int, int]:
    """Generated tokens that are transformers', and all of them."""
    theirs = reference(family)
    theirs.generation_config.eos_token_id = None
    prompts = [TOKENS[0, :5].tolist(), TOKENS[1, :11].tolist()]
    answers = generate(ours(theirs), prompts, SamplingConfig(max_new_tokens=NEW), set(), CPU)
    same = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = theirs.generate(  # type: ignore[operator]
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, pad_token_id=0
        )
        expected = whole[0, len(prompt) :].tolist()
        same += sum(a == b for a, b in zip(answer, expected, strict=True))
    return same, NEW * len(prompts)


def of_adapters(folder: Path) -> Figures:
    """The largest difference of an adapter's gradient from PEFT's, of each family."""
    gradients = {}
    for family, router in FAMILIES.items():
        place, theirs = folder / family, reference(family)
        theirs.config.save_pretrained(place / "model")
        save_file(theirs.state_dict(), place / "base.safetensors")
        torch.save(LABELS, place / "labels.pt")
        model, config = adapted(family, ["all-linear", router])
        save_adapter(model, config, "base", place / "adapter", CPU)
        F.cross_entropy(model(TOKENS).flatten(0, 1), LABELS.flatten()).backward()
        own = {n: p.grad for n, p in adapter_parameters(model).items() if p.grad is not None}
        gradients[family] = to_peft(own, config)
    places = [folder / family for family in FAMILIES]
    found = run_peft(PEFT_SCRIPT, folder, {"x": torch.zeros(1)}, TOKENS, folder, *places)
    figures = {}
    for family, own in gradients.items():
        theirs = found[str(folder / family)]["grads"]
        if {in_file(name, own) for name in theirs} != own.keys():
            raise SystemExit(f"{family}: other adapters than PEFT's")
        figures[family] = max(relative(own[in_file(name, own)], g) for name, g in theirs.items())
    return figures


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    quiet_torchao()
    os.environ.setdefault("QFSDP_EAGER_KERNELS", "1")
    with tempfile.TemporaryDirectory() as folder:
        adapters = of_adapters(Path(folder))
    print(f"{'family':24}" + "".join(f"{column:>10}" for column in COLUMNS))
    bad = False
    for family in FAMILIES:
        figures = of_the_model(family) | {"adapters": adapters[family]}
        same, tokens = greedy(family)
        gradients = max(figures[part] for part in COLUMNS[2:])
        bad |= figures["logits"] > 1e-4 or gradients > 1e-5 or same < tokens
        cells = [f"{same}/{tokens}" if c == "greedy" else f"{figures[c]:.1e}" for c in COLUMNS]
        print(f"{family:24}" + "".join(f"{cell:>10}" for cell in cells))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
