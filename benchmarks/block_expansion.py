"""Checks block expansion: the right number of blocks, in the right places, with equal logits.

    python benchmarks/block_expansion.py [--quick] [--json [FILE]]

First part: every depth from 2 to 80 with every rate from 0.01 to 1.00. The number of new blocks
must be rate * depth, rounded half up. The runs of old blocks between new ones must differ in length
by at most one. No two new blocks may be neighbours, and all old blocks must be there in order.
Second part: SmolLM2-135M with 8 more blocks against the original, in qfsdp and in transformers.

    cases, wrong_numbers, wrong_places      counts of the first part
    places_32                               the number of cases at depth 32, and their places
    smollm2_<implementation>_<dtype>        largest difference of a logit; 0 means equal bits

Exits with status 1 if anything is wrong. `--quick` runs the first part only. `--json` without a
file prints the figures as JSON only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.checkpoint.weights.expand import (
    block_sources,
    blocks_of_rate,
    expand_folder,
    expanded_positions,
)
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.distributed.world import World
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder

NEW_BLOCKS = 8


def well_placed(depth: int, count: int) -> bool:
    """Whether `count` new blocks are spread evenly among all `depth` old ones."""
    places, sources = expanded_positions(depth, count), block_sources(depth, count)
    old = [source for at, source in enumerate(sources) if at not in places]
    gaps = [b - a - 1 for a, b in pairwise([-1, *places])]
    even = max(gaps) - min(gaps) <= 1 and min(gaps) >= 1
    after = all(sources[place] == sources[place - 1] for place in places)
    return len(places) == count and even and after and old == list(range(depth))


def check_places() -> dict[str, Any]:
    figures: dict[str, Any] = {"cases": 0, "wrong_numbers": 0, "wrong_places": 0}
    places_32: dict[str, list[int]] = {}
    for depth in range(2, 81):
        for hundredths in range(1, 101):
            count = blocks_of_rate(depth, hundredths / 100)
            figures["cases"] += 1
            figures["wrong_numbers"] += count != (2 * hundredths * depth + 100) // 200
            figures["wrong_places"] += count > 0 and not well_placed(depth, count)
            if depth == 32:
                rate = f"{hundredths / 100:.2f}"
                places_32[rate] = expanded_positions(depth, count) if count else []
    return figures | {"places_32": places_32}


def our_logits(folder: Path, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(folder)).to(dtype)
    load_base(model, ModelWeights(folder), torch.device("cpu"))
    with torch.no_grad():
        return model(tokens)


def their_logits(folder: Path, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(tokens).logits


def check_bits() -> dict[str, float]:
    old, figures = prepare_model(cache_dir()), {}
    tokens = torch.randint(0, 49152, (2, 64), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / "expanded"
        expand_folder(ModelWeights(old), NEW_BLOCKS, new, World(torch.device("cpu")))
        for name, logits in (("qfsdp", our_logits), ("transformers", their_logits)):
            for short, dtype in COMPUTE_DTYPES.items():
                before, after = (logits(path, dtype, tokens) for path in (old, new))
                figures[f"smollm2_{name}_{short}"] = (after - before).abs().max().item()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="no model")
    parser.add_argument("--json", nargs="?", const="-", help="write the figures here, or print")
    args = parser.parse_args()
    bits = {} if args.quick else check_bits()
    figures = check_places() | bits
    if args.json == "-":
        print(json.dumps(figures, indent=2))
    else:
        for rate, places in figures["places_32"].items():
            print(f"depth 32, rate {rate}: {len(places)} new, at {' '.join(map(str, places))}")
        for key, value in figures.items():
            if key != "places_32":
                print(f"{key} {value:g}")
        if args.json:
            Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    if figures["wrong_numbers"] or figures["wrong_places"] or any(bits.values()):
        sys.exit("wrong: see the figures above")


if __name__ == "__main__":
    main()
