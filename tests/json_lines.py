"""Files of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """What a run has logged: steps and validations, in order."""
    return json_lines(run / "metrics.jsonl")
