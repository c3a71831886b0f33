"""Changed bytes of a file."""

from __future__ import annotations

import random
from pathlib import Path


def flip(chance: random.Random, file: Path) -> str:
    """Changes one byte, or 64 in a row."""
    data = bytearray(file.read_bytes())
    length = chance.choice([1, 64])
    start = chance.randrange(max(1, len(data) - length + 1))
    for at in range(start, min(start + length, len(data))):
        data[at] ^= chance.randint(1, 255)
    file.write_bytes(data)
    return f"{length} bytes changed at {start} of {len(data)}"
