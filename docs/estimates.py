"""Writes the estimates of memory: in the heads of configs, README's table and README's picture.

    python docs/estimates.py            all of them, in about ten minutes
    python docs/estimates.py NAME ...   the heads of some configs, and the table

A head names the machines that its config is for. This script fills in the figures:

    # Memory per GPU, estimated for full rows:
    #   1 x RTX 4090: 22.7 of 23.6 GiB
    #   1 x L4 with batch_size=1: ...

They are those of recipes/estimate_memory: a dry run of the recipe, no measurement. They include an
allowance for CUDA and for fragmentation. Where something is offloaded, the memory that the host
needs for all ranks follows. The tables of README.md (first machines only) and docs/guide/memory.md
come from the heads, the picture from a few more estimates. A machine that the config does not fit
is an error. tests/docs holds all of it current.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WITH_TABLE = (ROOT / "README.md", ROOT / "docs" / "guide" / "memory.md")
PICTURE = ROOT / "docs" / "memory.svg"
MACHINE = re.compile(
    r"#   (?P<ranks>\d+) x (?P<gpu>[\w ]+?)(?: with (?P<changes>[^:]+))?: (?P<says>.*)"
)
# Where a table stands, and the configs that it lists; without names, all.
TABLE = re.compile(
    r"(<!-- table of docs/estimates.py(?:: (?P<names>[\w ]+))? -->\n).*?(?=<!-- end -->)", re.DOTALL
)
GIB = 2**30

# The bars of the picture: label, config, ranks, changes. All have the same tokens per micro-batch
# and the same checkpointing, so only the method differs.
ALIKE = ("batch_size=1", "max_seq_len=2048", "activation.checkpointing=full")
SIZES = ("batch_size", "max_seq_len")
BF16 = ("quantization.format=none",)
BARS = (
    ("Llama-3-8B, 1 GPU", "full finetuning", "llama3_8b_full", 1, ()),
    ("", "LoRA, bf16 base", "llama3_8b_lora", 1, ()),
    ("", "QDoRA", "llama3_8b_qdora", 1, ()),
    ("Llama-3-70B, 2 GPUs", "LoRA, bf16 base", "llama3_70b_qlora", 2, BF16),
    ("", "QDoRA", "llama3_70b_qdora", 2, ()),
    ("", "QDoRA, base in the host", "llama3_70b_qdora_2x24gb", 2, ()),
)
# What the picture tells apart, and the estimator's kinds of tensors in each.
PARTS = {
    "base": ("parameters_quantized", "parameters_plain", "teacher"),
    "gathered layers": ("gathered_parameters",),
    "trained weights, gradients, optimizer": ("parameters_trained", "gradients", "optimizer_state"),
    "activations": ("activations", "workspace", "temporaries"),
}
COLOURS = ("#4477aa", "#66ccee", "#ee6677", "#ccbb44")  # Paul Tol's "bright" scheme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a config; default: all")
    names = parser.parse_args().names
    if unknown := set(names) - {file.stem for file in configs()}:
        parser.error(f"{min(unknown)}: no config that names machines")
    sys.path.insert(0, str(ROOT))
    for file in configs(names):
        file.write_text(with_figures(file))
        print(file.relative_to(ROOT), flush=True)
    for file in WITH_TABLE:
        file.write_text(with_table(file))
    if not names:
        PICTURE.write_text(picture())


def configs(names: Sequence[str] = ()) -> list[Path]:
    """The configs whose heads name machines."""
    files = sorted((ROOT / "configs").glob("*.yaml"))
    return [f for f in files if (not names or f.stem in names) and MACHINE.search(f.read_text())]


# Heads


def with_figures(file: Path) -> str:
    """The text of a config, with the figures of its machines."""

    def line(match: re.Match[str]) -> str:
        return match[0].removesuffix(match["says"]) + figures(file.stem, match)

    return MACHINE.sub(line, file.read_text())


def figures(config: str, machine: re.Match[str]) -> str:
    """What the head says of a machine: "22.7 of 23.6 GiB".

    Raises:
        ValueError: the config does not fit.
    """
    from qfsdp.planning.hardware import known_gpu
    from qfsdp.planning.predict import PROCESS_BYTES
    from qfsdp.planning.tracker import CHECKPOINT

    ranks = int(machine["ranks"])
    found = estimate(config, ranks, (machine["changes"] or "").split())
    available = known_gpu(machine["gpu"]).device_memory
    if found.reserved > available:
        needs = f"{found.reserved / GIB:.1f} of {available / GIB:.1f} GiB"
        raise ValueError(f"configs/{config}.yaml: {machine['gpu']}: {needs}; expected to fit")
    says = f"{found.reserved / GIB:.1f} of {available / GIB:.1f} GiB"
    if found.host.keys() > {CHECKPOINT}:  # something is offloaded
        says += f", {ranks * (PROCESS_BYTES + sum(found.host.values())) / GIB:.0f} GiB of the host"
    return says


def estimate(config: str, ranks: int, changes: Sequence[str]) -> Any:
    """The `Estimate` of a shipped config on GPUs."""
    from qfsdp.config.tool_config import read_training
    from qfsdp.planning.extrapolate import estimate_fast

    training = read_training(["--config", str(ROOT / f"configs/{config}.yaml"), *changes])
    recipe = training.recipe
    return estimate_fast(recipe.build_model, recipe.train_step, training.cfg, ranks)


# Table


def with_table(file: Path) -> str:
    """The text of a document, with its table of configs."""
    up = "../" * (len(file.relative_to(ROOT).parts) - 1)

    def table(match: re.Match[str]) -> str:
        listed = configs((match["names"] or "").split())
        most = 1 if match["names"] else None  # machines of a config
        rows = sorted(row for config in listed for row in [*rows_of(config, up)][:most])
        head = ("GPUs", "model, method", "GiB per GPU", "micro-batch", "config")
        lines = [head, ("---",) * len(head), *(cells for _, cells in rows)]
        return match[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    return TABLE.sub(table, file.read_text())


def rows_of(config: Path, up: str) -> Iterator[tuple[tuple[float, str], tuple[str, ...]]]:
    """A row for each machine that runs a config as it is: the key that sorts it, and its cells."""
    from qfsdp.planning.hardware import known_gpu

    text = config.read_text()
    title = text.splitlines()[1].removeprefix("# ").rstrip(".").partition(":")[0]
    method, _, model = title.partition(" on ")
    batch, length = (re.search(rf"(?m)^{key}: (\d+)", text) for key in SIZES)
    assert batch is not None and length is not None
    tokens = f"{batch[1]} x {int(length[1]):,} tokens"
    link = f"[{config.stem}]({up}configs/{config.name})"
    for machine in MACHINE.finditer(text):
        if machine["changes"] is None:
            ranks, gpu = int(machine["ranks"]), machine["gpu"]
            says = machine["says"].replace(" GiB", "", 1)
            key = (ranks * known_gpu(gpu).device_memory, config.stem)
            yield key, (f"{ranks} x {gpu}", f"{model}, {method}", says, tokens, link)


# Picture


def picture() -> str:
    return draw([bar[:2] for bar in BARS], [parts_of(*bar[2:]) for bar in BARS])


def parts_of(config: str, ranks: int, changes: Sequence[str]) -> dict[str, float]:
    """GiB on a GPU at the peak of a step, by part; and what is offloaded."""
    from qfsdp.planning.tracker import CHECKPOINT

    found = estimate(config, ranks, [*ALIKE, *changes])
    kinds = {kind: size / GIB for kind, size in found.at_peak.items()}
    parts = {part: sum(kinds.pop(k, 0.0) for k in names) for part, names in PARTS.items()}
    parts["activations"] += sum(kinds.values())
    offloaded = sum(size for kind, size in found.host.items() if kind != CHECKPOINT)
    return parts | {"host": offloaded / GIB}


STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328 }
  .soft { fill: #59636e } .strong { font-weight: 600 } .plain { font-weight: 400 }
  .end { text-anchor: end }
  .ground { fill: #ffffff } .limit { stroke: #59636e }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .soft { fill: #9198a1 }
    .ground { fill: #0d1117 } .limit { stroke: #9198a1 }
  }
"""
WIDTH, LEFT, BAR, STEP = 860, 215, 20, 32  # pixels
CARD = 23.6  # GiB of a "24 GB" RTX 3090 or 4090


def draw(labels: Sequence[tuple[str, str]], bars: Sequence[dict[str, float]]) -> str:
    """The picture as SVG: a horizontal bar of GiB per GPU for each label (group, method)."""
    most = max(sum(bar[part] for part in PARTS) for bar in bars)
    scale = (WIDTH - LEFT - 75) / most
    shapes, y = [*legend()], 76
    top = y - 6
    for (group, method), bar in zip(labels, bars, strict=True):
        if group:
            y += 14
            shapes.append(f'<text x="16" y="{y}" class="strong">{group}, GiB per GPU</text>')
            y += 12
        x = float(LEFT)
        shapes.append(f'<text x="{LEFT - 10}" y="{y + 15}" class="end">{method}</text>')
        for part, colour in zip(PARTS, COLOURS, strict=True):
            width = bar[part] * scale
            shapes.append(rect(x, y, width, colour))
            x += width
        says = f"{sum(bar[part] for part in PARTS):.1f}"
        says += f" and {bar['host']:.1f} of host memory" if bar["host"] else ""
        ground = f'class="ground" width="{8 + 7.5 * len(says):.0f}" height="{BAR}"'
        shapes.append(f'<rect x="{x + 4:.1f}" y="{y}" {ground}/>')  # hides the line of the limit
        shapes.append(f'<text x="{x + 8:.1f}" y="{y + 15}">{says}</text>')
        y += STEP
    limit = LEFT + CARD * scale
    shapes.insert(0, f'<path class="limit" stroke-dasharray="4 4" d="M{limit:.1f} {top}V{y}"/>')
    shapes.append(f'<text x="{limit:.1f}" y="{y + 16}" class="soft">24 GB card</text>')
    height = y + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>Memory of a training step, 2,048 tokens per micro-batch</title>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def legend() -> Iterator[str]:
    details = (
        '<tspan class="soft plain" dx="8">estimated tensors, 2,048 tokens per micro-batch</tspan>'
    )
    yield f'<text x="16" y="26" class="strong">Memory of a training step{details}</text>'
    x = 16.0
    for part, colour in zip(PARTS, COLOURS, strict=True):
        yield f'<rect x="{x}" y="42" width="12" height="12" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="53" class="soft">{part}</text>'
        x += 42 + 7.2 * len(part)


def rect(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'


if __name__ == "__main__":
    main()
