"""A layer in tiles of tokens (`activation.tile_tokens: auto`) against the whole layer.

    OMP_NUM_THREADS=1 python benchmarks/tiles.py [--quick] [--json tiles.json] [--tokens 8192]

Train steps of one layer with SmolLM2-135M's shapes and random weights: NF4, LoRA of rank 16, full
checkpointing, a vocabulary of 1,024, one row of documents of 1,024 tokens, so that attention does
not hide what tiles cost. Both take a step in turn.

    tiled_over_whole_time        seconds
    tiled_over_whole_cpu         processor seconds of all threads; compare these on a busy machine
    loss_difference              of the first step
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import arguments, ratios, tell, usual_dtype
from qfsdp.data import Batch
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.planning.known_models import find_config
from tests.tiny import load_recipe


def write_layer(folder: Path, layers: int = 1) -> Path:
    """A model folder with some layers of SmolLM2-135M."""
    config = find_config("SmolLM2-135M") | {"vocab_size": 1024, "num_hidden_layers": layers}
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.from_dict(config))
    for name, param in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(param, std=0.02)
    tensors = {name: param.detach() for name, param in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_step(folder: Path, tokens: int, tiled: bool, device: str) -> Callable[[], float]:
    """A function that takes one train step and returns its loss."""
    recipe = load_recipe()
    cfg = recipe.Config(
        output_dir="unused",
        model=recipe.ModelConfig(str(folder), dtype=usual_dtype(device)),
        tokenizer=None,
        dataset=None,
        optimizer=None,
        adapter=AdapterConfig("lora", 16, 32),
        activation=ActivationConfig("full", tile_tokens="auto" if tiled else None),
    )
    world = recipe.init_world()
    clock = recipe.StepClock(world.device)
    model = recipe.load_model(cfg, world)
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-4)
    row = torch.arange(tokens).mul_(7919).remainder_(1024).unsqueeze(0)
    ends = torch.arange(0, tokens + 1, 1024, dtype=torch.int32)
    batch = Batch(row, row, tokens, torch.arange(tokens).remainder_(1024).unsqueeze(0), ends)
    return lambda: recipe.train_step(model, optimizer, None, [batch], 1.0, world, clock)["loss"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    tokens, rounds = (2048, 3) if args.quick else (args.tokens, args.repeat)
    clocks = {"time": time.perf_counter, "cpu": time.process_time}
    spent: dict[tuple[str, bool], list[float]] = {(c, t): [] for c in clocks for t in (False, True)}
    with tempfile.TemporaryDirectory() as folder:
        given = write_layer(Path(folder)), tokens
        steps = {tiled: build_step(*given, tiled, args.device) for tiled in (False, True)}
        first = {tiled: step() for tiled, step in steps.items()}
        for _ in range(rounds):
            for tiled, step in steps.items():
                before = {name: clock() for name, clock in clocks.items()}
                step()
                for name, clock in clocks.items():
                    spent[name, tiled].append(clock() - before[name])
    figures = {"loss_difference": abs(first[True] - first[False])}
    for name in clocks:
        figures |= ratios(f"tiled_over_whole_{name}", spent[name, True], spent[name, False])
    figures["whole_cpu_seconds"] = min(spent["cpu", False])
    tell(figures, args.json)


if __name__ == "__main__":
    main()
