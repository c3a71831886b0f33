"""Writes the tables of docs/internals/roofline.md: what steps take, by find_fit's own code.

    python docs/roofline.py            all tables, in some minutes

Figures are those of `qfsdp.planning.predict.Predictor`: memory, bytes and operations from dry runs
of the recipe, seconds from a roofline with the rates that were measured on one H200 (the file
below). tests/docs/test_roofline.py holds the page current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "internals" / "roofline.md"
MEASURED = ROOT / "benchmarks" / "results" / "2026-11-22_h200.json"
TABLE = re.compile(r"(<!-- table of docs/roofline.py: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)

# The steps of benchmarks/gpu_train_step.py: 8B shapes, rank 16, rows of 2,048 tokens, everything
# kept for backward. Case of the results file -> config.
ALONE = ("adapter.rank=16", "adapter.alpha=32", "activation.checkpointing=none", "packed=false")
ALONE += ("gradient_accumulation_steps=1", "max_seq_len=2048")
STEPS = {"LoRA over bf16": "llama3_8b_lora", "QLoRA": "llama3_8b_qlora", "QDoRA": "llama3_8b_qdora"}
# The ways to run 70B QDoRA on eight cards; micro-batches of 1 and 4 rows of 2,048 tokens.
WAYS = {
    "full_shard": (),
    "shard_grad_op": ("sharding.strategy=shard_grad_op",),
    "hybrid_full_shard, 2 x 4": ("sharding.strategy=hybrid_full_shard", "sharding.shard=4"),
    "ddp": ("sharding.strategy=ddp",),
    "full_shard, base in the host": ("sharding.offload_base=cpu",),
}
ROWS = (1, 4)
RANKS = 8
# Rows that ranks share: how many ranks, their card, and the link that limits the exchange, bytes/s;
# None: that of the card. Two machines have one network card each.
LINKS: dict[str, tuple[int, str, float | None]] = {
    "8 H100, NVLink": (8, "h100", None),
    "8 RTX 4090, PCIe": (8, "rtx4090", None),
    "16 H100, 2 machines, 400 Gbit/s": (16, "h100", 0.8 * 400e9 / 8),
}
SHARED = (("Llama-3.1-8B", 2**15), ("Llama-3.1-8B", 2**17), ("Llama-3.1-8B", 2**20))
SHARED += (("Llama-3.3-70B", 2**17),)
HOST_BANDWIDTH = 300e9  # bytes/s of a server's memory, read and written; not measured


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(with_tables())


def with_tables(names: Iterable[str] | None = None) -> str:
    """The text of the page with its tables, or with some of them."""

    def table(match: re.Match[str]) -> str:
        if names is not None and match[2] not in names:
            return match[0]
        head, *rows = TABLES[match[2]]()
        lines = [head, ["---"] * len(head), *rows]
        return match[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    return TABLE.sub(table, PAGE.read_text())


# Hardware


def measured() -> dict[str, float]:
    """ "CASE/NAME" or "NAME" -> value, of the first two runs of the results file."""
    runs = json.loads(MEASURED.read_text())["runs"][:2]
    figures = [figure for run in runs for figure in run["figures"]]
    return {"/".join(f[k] for k in ("case", "name") if k in f): f["value"] for f in figures}


def card(name: str) -> Any:
    """A known GPU with the rates that were measured on the H200: products and the link to the host
    as they are, memory by the ratio of the vendor's figures. Links between cards, and the host's
    memory, were not measured."""
    from qfsdp.planning.hardware import GPUS, known_gpu

    found = measured()
    return replace(
        known_gpu(name),
        matmul_rate=found["bf16 products"] * 1e12,
        memory_bandwidth=found["copies within it"] * 1e12 * GPUS[name][2] / GPUS["h200"][2],
        pcie=found["from the host"] * 1e9,
        host_bandwidth=HOST_BANDWIDTH,
    )


def predicted(config: str, changes: Iterable[str], gpu: str, ranks: int) -> tuple[Any, Any, int]:
    """The `Prediction` of a shipped config with changes, the `Load` of one rank, and the kernels
    that it starts."""
    from qfsdp.config.tool_config import read_training
    from qfsdp.planning import predict
    from qfsdp.planning.extrapolate import estimate_fast

    training = read_training(["--config", str(ROOT / f"configs/{config}.yaml"), *changes])
    functions, found = (training.recipe.build_model, training.recipe.train_step), []

    def kept(*args: Any) -> Any:
        found.append(estimate_fast(*args))
        return found[-1]

    given = (training.cfg, ranks, ranks, card(gpu))
    predictor = predict.Predictor(*functions, *given, estimate=kept)
    prediction = predictor({})
    model = predictor._model(training.cfg)
    return prediction, predict.step_load(model, training.cfg, found[0], ranks), found[0].launches


# Tables


def check() -> Iterable[list[str]]:
    """One card: predicted steps beside measured ones."""
    head = ["step", "TFLOP", "kernels", "products, s", "dequantize, s", "predicted, s"]
    yield [*head, "measured, s", "ratio", "us per kernel"]
    for tokens in (2048, 8192):
        for method in STEPS:
            now, load, launches = step_alone(method, tokens)
            took = measured()[f"ours, {method}, {tokens:,} tokens/step"]
            yield [
                f"{method}, {tokens:,} tokens",
                f"{load.flops / 1e12:.0f}",
                f"{launches:,}",
                f"{now.time.parts['compute']:.3f}",
                f"{now.time.parts['dequantize']:.3f}",
                f"{now.time.seconds:.3f}",
                f"{took:.3f}",
                f"{took / now.time.seconds:.2f}",
                f"{took / launches * 1e6:.0f}",
            ]


def step_alone(method: str, tokens: int) -> tuple[Any, Any, int]:
    """`predicted` for one of the measured steps."""
    return predicted(STEPS[method], (*ALONE, f"batch_size={tokens // 2048}"), "h200", 1)


def strategies() -> Iterable[list[str]]:
    """Eight H100: a micro-batch of each way to run."""
    head = ["way to run", "rows", "GiB", "TFLOP", "kernels", "sent, GB", "copied, GB"]
    head += ["arithmetic, s", "transfer, s", "exposed, s", "host, s", "step, s", "tokens/s"]
    yield [*head, "of products"]
    gpu = card("h100")
    _, _, kernels = step_alone("QLoRA", 2048)
    per_kernel = measured()["ours, QLoRA, 2,048 tokens/step"] / kernels
    for way, changes in WAYS.items():
        for rows in ROWS:
            batch = (f"batch_size={rows}", "gradient_accumulation_steps=1", "packed=false")
            now, load, launches = predicted("llama3_70b_qdora", (*changes, *batch), "h100", RANKS)
            parts = now.time.parts
            busy = parts["compute"] + parts["dequantize"]
            moving = max(parts[part] for part in ("wire", "PCIe", "host memory"))
            exposed = now.time.seconds - parts["optimizer"] - busy
            fits = "" if now.device_bytes <= gpu.device_memory else " (too much)"
            yield [
                way,
                str(rows),
                f"{now.device_bytes / 2**30:.1f}{fits}",
                f"{load.flops / 1e12:.0f}",
                f"{launches:,}",
                f"{load.wire_bytes / 1e9:.1f}",
                f"{load.to_device_bytes / 1e9:.1f}",
                f"{busy:.2f}",
                f"{moving:.2f}",
                f"{exposed:.3f}",
                f"{launches * per_kernel:.2f}",
                f"{now.time.seconds:.2f}",
                f"{now.tokens_per_second:,.0f}",
                f"{load.flops / now.time.seconds / gpu.matmul_rate:.2f}",
            ]


def exchange() -> Iterable[list[str]]:
    """The exchange of shared rows over the products, both in seconds of one rank and step."""
    from qfsdp.config.tool_config import read_training
    from qfsdp.planning import predict, roofline
    from qfsdp.planning.hardware import known_gpu
    from qfsdp.training.throughput import step_flops

    yield ["model", "tokens", *LINKS]
    config = str(ROOT / "configs/llama3_1_8b_qlora_512k_1x80gb.yaml")
    for name, tokens in SHARED:
        words = [f"model.path={name}", f"max_seq_len={tokens}", f"model.max_positions={tokens}"]
        training = read_training(["--config", config, *words])
        functions = (training.recipe.build_model, training.recipe.train_step)
        model = predict.Predictor(*functions, training.cfg, 1, 1, card("h100"))._model(training.cfg)
        shape, flops = model.config, step_flops(model, [tokens], tokens).hardware
        of_token = 2 * 2 * shape.num_key_value_heads * shape.head_dim  # keys and values in bf16
        row = []
        for ranks, gpu, network in LINKS.values():
            rates = card(gpu) if gpu == "h100" else known_gpu(gpu)
            sent = 4 * (ranks - 1) / ranks * tokens * of_token * shape.num_hidden_layers
            moving = sent / (network or rates.interconnect or rates.pcie)
            busy = flops / ranks / (roofline.EFFICIENCY * rates.matmul_rate)
            row.append(f"{100 * moving / busy:.1f} % of {busy:,.1f} s")
        yield [name, f"{tokens:,}", *row]


TABLES: dict[str, Callable[[], Iterable[list[str]]]] = {
    "check": check,
    "strategies": strategies,
    "exchange": exchange,
}

if __name__ == "__main__":
    main()
