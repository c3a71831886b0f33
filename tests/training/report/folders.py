"""Folders of runs as training leaves them, without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CONFIG = """output_dir: runs/{name}
model:
  path: models/tiny
  dtype: bf16
adapter:
  method: dora
  rank: {rank}
batch_size: 2
"""


def write_run(folder: Path, steps: int = 40, rank: int = 16, name: str | None = None) -> Path:
    """A run with losses, validation, phases and memory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG.format(name=name or folder.name, rank=rank))
    (folder / "machine.json").write_text(
        json.dumps({"recipe": "qdora_distributed", "world_size": 2, "device": "NVIDIA L4"})
    )
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 2 * math.exp(-step / 20) + rank / 100
        rows.append(
            {
                "step": step,
                "loss": loss,
                "grad_norm": 1 / step,
                "lr": 1e-4 * (1 - step / steps / 2),
                "tokens_per_second_per_rank": 1000.0 + step % 7,
                "seconds_per_step": 0.5,
                "peak_memory_gib": 10.5,
                "memory/parameters_quantized_gib": 4.0,
                "memory/gradients_gib": 0.25,
                "model_flops_utilization": 0.4,
                "seconds/forward": 0.125,
                "seconds/backward": 0.25,
                "seconds/optimizer": 0.0625,
            }
        )
        if step % 10 == 0:
            rows.append({"step": step, "validation/heldout/loss": loss + 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_evaluation(file: Path, adapter: str | None, right: list[bool]) -> Path:
    """A file of recipes/evaluate with its questions and answers."""
    value = sum(right) / len(right)
    result = {
        **{"section": "exact_match", "name": "sums", "metric": "exact_match", "value": value},
        **{"interval": [value - 0.125, value + 0.125], "count": len(right), "unit": "rows"},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"adapter": adapter, "level": 0.95, "results": [result]}))
    rows = [
        {"row": at, "question": f"{at} + 1?", "answer": f"it is {at}{one}", "right": one}
        for at, one in enumerate(right)
    ]
    answers = file.with_name(f"{file.stem}.exact_match.sums.jsonl")
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
