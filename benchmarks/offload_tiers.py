"""Speed and memory of a step with the frozen base on the device, in host memory or on disk.

    python benchmarks/offload_tiers.py [--quick] [--json PATH]

A model of random weights; its quantized base is three times the memory that the process may take
(resident anonymous memory above the start). One process for each tier; they take one step each in
turn. "disk, cold" drops the files from the page cache before every step. Losses must be equal bit
for bit.

    host_over_resident_tokens, disk_over_resident_tokens, disk_cold_over_resident_tokens
    disk_memory_over_packed    memory above the start over bytes of the quantized base, base on
                               disk; must be below 1/3
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.memory import private_bytes
from benchmarks.timing import arguments, ratios, spread, table, tell
from qfsdp.checkpoint.weights.qfsdp_layout import MANIFEST, SETTINGS_DIGESTS
from qfsdp.common.files import sha256
from qfsdp.common.sealed import read_sealed, sealed_json
from qfsdp.config.recipe_files import load_recipe
from qfsdp.distributed.gradients import trainable_parameters

ROOT = Path(__file__).parents[1]
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
TIERS: dict[str, Any] = {"resident": "none", "host": "cpu", "disk": "disk", "disk, cold": "disk"}


def write_quantized_model(folder: Path, layers: int, sizes: dict[str, Any] = SIZES) -> int:
    """Writes a quantized folder with the same bytes in every layer; returns the bytes of its
    quantized weights. Drawing and quantizing 3 G numbers would take long."""
    from qfsdp.checkpoint.weights.folder import ModelWeights
    from qfsdp.checkpoint.weights.quantize import quantize_folder
    from qfsdp.distributed.world import World
    from qfsdp.modules.decoder_config import DecoderConfig
    from qfsdp.modules.quantized_linear import QuantizationConfig
    from qfsdp.modules.transformer import Decoder

    with tempfile.TemporaryDirectory(dir=folder) as work:
        plain, quantized = Path(work) / "plain", Path(work) / "quantized"
        plain.mkdir()
        config = sizes | {"num_hidden_layers": 1}
        (plain / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        model = Decoder(DecoderConfig.from_dict(config))
        tensors = {
            name: torch.ones_like(p) if p.dim() == 1 else torch.randn_like(p) * p.shape[-1] ** -0.5
            for name, p in model.named_parameters()
        }
        save_file({k: v.bfloat16() for k, v in tensors.items()}, plain / "model.safetensors")
        world = World(torch.device("cpu"))
        quantize_folder(ModelWeights(plain), QuantizationConfig(), quantized, world)
        return _repeat_layer(quantized, folder, layers)


def _repeat_layer(one: Path, folder: Path, layers: int) -> int:
    first = "model.layers.0."
    tensors: dict[str, torch.Tensor] = {}
    for path in one.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weight_map: dict[str, str] = {}
    for at in range(layers):
        chosen = {k: v for k, v in tensors.items() if at == 0 or k.startswith(first)}
        renamed = {k.replace(first, f"model.layers.{at}."): v for k, v in chosen.items()}
        file_name = f"model-{at + 1:05}-of-{layers:05}.safetensors"
        save_file(renamed, folder / file_name)
        weight_map |= dict.fromkeys(renamed, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((one / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    manifest = read_sealed(one / MANIFEST)
    manifest["files"] = {}  # no digests of 5 GB
    manifest[SETTINGS_DIGESTS] = {"config.json": sha256(folder / "config.json")}
    manifest["weights"] = {
        name.replace(first, f"model.layers.{at}."): weight
        for name, weight in manifest["weights"].items()
        for at in range(layers)
    }
    (folder / MANIFEST).write_text(sealed_json(manifest))
    layer_bytes = sum(
        v.numel() for k, v in tensors.items() if k.startswith(first) and v.dtype.itemsize == 1
    )
    return layer_bytes * layers


def work(
    tier: str, folder: Path, tokens: int, ring: int, pipe: Connection, ends: bool = True
) -> None:
    """Loads the model, takes one step per message, and answers with seconds, loss and memory."""
    from qfsdp.data import Batch
    from qfsdp.distributed.strategy import ShardingConfig
    from qfsdp.modules.adapters.config import AdapterConfig
    from qfsdp.training.steps import StepClock

    recipe: Any = load_recipe(ROOT / "recipes/qdora_distributed.py")
    os.environ.update(RANK="0", WORLD_SIZE="1")
    _load_the_compiler()
    before, since = private_bytes(), time.perf_counter()
    cfg = recipe.Config(
        output_dir="unused",
        model=recipe.ModelConfig(str(folder)),
        tokenizer=None,
        dataset=None,
        optimizer=None,
        adapter=AdapterConfig(rank=2),
        sharding=ShardingConfig(offload_base=TIERS[tier], ring_memory=str(ring)),
        activation=recipe.ActivationConfig("full"),
    )
    world = recipe.init_world(cfg.sharding)
    model = recipe.load_model(cfg, world)
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-4, fused=True)
    numbers = torch.arange(tokens)[None] * 7919 % SIZES["vocab_size"]
    batch = Batch(numbers, numbers, tokens)
    clock = StepClock(world.device)
    pipe.send(time.perf_counter() - since)
    while pipe.recv() == "step":
        if tier == "disk, cold":
            _drop_from_cache(folder)
        since = time.perf_counter()
        loss = recipe.train_step(model, optimizer, None, [batch], 1.0, world, clock)["loss"]
        pipe.send((time.perf_counter() - since, loss, private_bytes() - before))
    if ends:
        os._exit(0)  # gloo's threads may abort the interpreter as it shuts down


def _load_the_compiler() -> None:
    """Takes its 150 MB of code and caches before memory is measured."""
    from qfsdp.tensor_subclasses import nf4

    nf4.quantize(torch.randn(512, 512)).dequantize(torch.bfloat16)


def _drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    args = arguments(__doc__).parse_args()
    layers, tokens, steps = (6, 32, 2) if args.quick else (60, 128, 5)
    context = mp.get_context("spawn")
    found: dict[str, list[tuple[float, float, int]]] = {tier: [] for tier in TIERS}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as work_dir:
        folder = Path(work_dir)
        base_bytes = write_quantized_model(folder, layers)
        pipes, ring = {}, max(base_bytes // 20, 3 * base_bytes // layers)
        for tier in TIERS:
            pipes[tier], theirs = context.Pipe()
            values = (tier, folder, tokens, ring, theirs)
            context.Process(target=work, args=values, daemon=True).start()
            theirs.close()  # so that reading fails if the process ends
        for tier, pipe in pipes.items():
            print(f"{tier}: loaded in {pipe.recv():.1f} s", file=sys.stderr)
        for _ in range(steps + 1):  # the first step is not counted
            for tier, pipe in pipes.items():
                pipe.send("step")
                found[tier].append(pipe.recv())
        for pipe in pipes.values():
            pipe.send("end")
    rows = [("", "s/step", "tokens/s", "MB above start", "last loss")]
    figures: dict[str, float] = {"packed_mb": base_bytes / 1e6}
    for tier, results in found.items():
        seconds, losses, memory = zip(*results, strict=True)
        assert losses == tuple(result[1] for result in found["resident"]), f"{tier}: {losses}"
        key = tier.replace(", ", "_")
        figures |= spread(f"{key}_tokens_per_second", [tokens / s for s in seconds[1:]])
        figures[f"{key}_mb"] = max(memory) / 1e6
        speed = f"{figures[f'{key}_tokens_per_second']:.1f}"
        middle = f"{sorted(seconds[1:])[len(seconds[1:]) // 2]:.2f}"
        rows.append((tier, middle, speed, f"{max(memory) / 1e6:.0f}", f"{losses[-1]:.6f}"))
        if tier != "resident":
            over = [r[0] for r in found["resident"][1:]]
            figures |= ratios(f"{key}_over_resident_tokens", over, seconds[1:])
    figures["disk_memory_over_packed"] = figures["disk_mb"] / figures["packed_mb"]
    print(f"quantized base {base_bytes / 1e6:.0f} MB, ring {ring / 1e6:.0f} MB, {layers} layers")
    table(rows)
    tell(figures, args.json)


if __name__ == "__main__":
    main()
