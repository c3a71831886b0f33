"""Draws what `make demo` printed as a picture of a terminal, for the README.

    make demo 2>&1 | tee demo.txt
    python docs/demo_picture.py demo.txt      # writes docs/demo.svg

Lines of waiting and most steps are left out; the others are as they were printed, cut to the
picture's width.
"""

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "demo.svg"
WIDTH = 98
# What a newcomer wants to see, in the order of the output.
SHOWN = re.compile(
    r"demo: held-out loss|demo: 3/4 training \d|demo: tune run|model  |trained  |memory  |"
    r"\d\d:\d\d:\d\d step (1|2|4|8|16|24|32)/|question:|before:|after:|demo: finished"
)


def shown_lines(output: str) -> list[str]:
    """The lines of `output` for the picture, the first two questions with their answers."""
    lines = [line for line in re.split(r"[\r\n]+", output) if SHOWN.match(line)]
    questions = [place for place, line in enumerate(lines) if line.startswith("question:")]
    third = slice(questions[2], questions[2] + 3) if len(questions) > 2 else slice(0)
    del lines[third]
    return lines


def draw(output: str) -> str:
    """An SVG of a terminal with the lines of `output` that `shown_lines` takes."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text("$ make demo", style="bold green"))
    for line in shown_lines(output):
        cut = line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
        start = cut.startswith(("demo:", "question:"))
        style = "bold" if start else "green" if cut.startswith("after:") else ""
        console.print(Text(cut, style=style))
    return console.export_svg(title="qfsdp", unique_id="demo")


def main() -> None:
    """Reads the output from a file and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="what `make demo` printed")
    svg = draw(parser.parse_args().output.read_text())
    # A picture in a README can load no fonts; the reader's own monospace font is right.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    PICTURE.write_text("".join(line.rstrip() + "\n" for line in svg.splitlines()))
    print(f"{PICTURE.name}: {len(svg) // 1000} kB")


if __name__ == "__main__":
    main()
