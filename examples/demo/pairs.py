"""`python -m qfsdp.examples.demo.pairs`: right and wrong solutions of arithmetic problems, for DPO.

The wrong solution of a problem is the right one with another result in its last step:

    {"question": "Mia has 4 bags ...", "chosen": "... 4 * 6 = 24 ...\\n#### 24",
     "rejected": "... 4 * 6 = 27 ...\\n#### 27"}
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from qfsdp.common.errors import user_errors

from . import arithmetic, cache_dir


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """`count` pairs `{"question", "chosen", "rejected"}`; they depend on `seed` only."""
    rng = random.Random(seed)
    made = []
    for problem in arithmetic.generate(count, seed):
        right = problem["answer"]
        result = int(right.rpartition("#### ")[2])
        wrong = rng.choice([n for n in range(max(result - 9, 0), result + 10) if n != result])
        head, _, tail = right.rpartition(f"= {result}")  # the last step
        rejected = f"{head}= {wrong}{tail.rpartition(' ')[0]} {wrong}"
        made.append({"question": problem["question"], "chosen": right, "rejected": rejected})
    return made


def write_pairs(out_dir: Path, train: int = 200, heldout: int = 100) -> tuple[Path, Path]:
    """Writes `pairs.jsonl` and `pairs_heldout.jsonl`, without common questions; their paths."""
    out_dir.mkdir(parents=True, exist_ok=True)
    made = pairs(train + heldout, seed=1)
    paths = (out_dir / "pairs.jsonl", out_dir / "pairs_heldout.jsonl")
    for path, rows in zip(paths, (made[:train], made[train:]), strict=True):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
    return paths


if __name__ == "__main__":
    with user_errors():
        for path in write_pairs(cache_dir() / "arithmetic"):
            print(path)
