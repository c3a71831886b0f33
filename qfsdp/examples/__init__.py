"""The examples: `python -m qfsdp.examples.demo.prepare` works in a checkout and from a wheel.

A wheel has them in this folder; in a checkout they lie next to the package.
"""

from pathlib import Path

if not (Path(__file__).parent / "demo").is_dir():
    __path__.append(str(Path(__file__).parents[2] / "examples"))
