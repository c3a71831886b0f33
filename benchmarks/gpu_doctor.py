"""`qfsdp doctor` as a part of the GPU suite: its rows, and how many are red.

python benchmarks/gpu_doctor.py [--quick] [--json doctor.json]

doctor_red, doctor_green    rows; what a row says is in the output
doctor/ROW/FIGURE           its numbers, such as bytes a second of links
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, base_arguments, tell
from qfsdp.cli.doctor.run import rows


def main() -> None:
    args = base_arguments(__doc__).parse_args()
    found: Figures = {"doctor_red": 0, "doctor_green": 0}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), None, 300 if args.quick else 60):
            print(f"{row.state:9} {row.seconds:5.1f} s  {row.name}: {row.text}", flush=True)
            if row.advice is not None and row.state == "red":
                print(f"          {row.advice}")
            if f"doctor_{row.state}" in found:
                found[f"doctor_{row.state}"] += 1
            for key, value in row.figures.items():
                if isinstance(value, int | float):
                    found[f"doctor/{row.name}/{key}"] = value
    tell(found, args.json)


if __name__ == "__main__":
    main()
