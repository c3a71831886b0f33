"""W4A16 against bf16: perplexity, and what loads the folder.

    python benchmarks/w4a16.py --text FILE [--quick] [--json w4a16.json]

recipes/export writes SmolLM2-135M-Instruct in groups of 64 and of 32 weights. transformers loads
the folders through compressed-tensors, and the plain one as it is; all read the same text in
windows of 1,024 tokens. Linears of the source lie on a 4-bit grid of 32 weights that has an offset;
W4A16 is symmetric, so it costs all the same.

    perplexity/bf16, perplexity/w4a16_GROUP    of transformers
    ratio/w4a16_GROUP                          over that of bf16
    bytes/bf16, bytes/w4a16_GROUP              of the folders
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.timing import Figures, arguments, table, tell
from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.data import hf_tokenizer
from qfsdp.evaluation.perplexity import TextConfig, TextWindows, text_windows

ROOT = Path(__file__).parent.parent
WINDOW = 1024


def export(model: Path, folder: Path, group: int) -> None:
    """Runs recipes/export in a process."""
    words = [f"model.path={model}", f"output_dir={folder}", f"group_size={group}", "format=w4a16"]
    words += ["adapter=null", "quantization.format=none"]
    config = f"--config={ROOT}/configs/export.yaml"
    subprocess.run([sys.executable, str(ROOT / "recipes/export.py"), config, *words], check=True)


def perplexity(folder: Path, windows: TextWindows) -> float:
    """Of transformers' model in bf16; the first token of a window is no target."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    total = targets = 0.0
    with torch.no_grad():
        for at in range(len(windows)):
            tokens = windows[at]["tokens"][None]
            logits = model(tokens).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
            total, targets = total + loss.item(), targets + tokens.shape[1] - 1
    return math.exp(total / targets)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a plain text file")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the text; 0: all")
    args = parser.parse_args()
    groups, tokens = ((64,), 1024) if args.quick else ((64, 32), args.tokens)
    model = prepare_model(cache_dir())
    config = TextConfig(str(args.text), window=WINDOW, max_tokens=tokens or None)
    windows = text_windows("text", config, hf_tokenizer(str(model)))
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"bf16": model}
        for group in groups:
            folders[f"w4a16_{group}"] = folder = Path(scratch) / str(group)
            export(model, folder, group)
        for name, folder in folders.items():
            figures[f"perplexity/{name}"] = perplexity(folder, windows)
            figures[f"ratio/{name}"] = figures[f"perplexity/{name}"] / figures["perplexity/bf16"]
            figures[f"bytes/{name}"] = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    lines = [["", "perplexity", "over bf16", "MiB"]]
    for name in folders:
        ppl, ratio, size = (figures[f"{key}/{name}"] for key in ("perplexity", "ratio", "bytes"))
        lines.append([name, f"{ppl:.2f}", f"{ratio:.3f}", f"{size / 2**20:.1f}"])
    table(lines)
    tell({}, args.json, figures)


if __name__ == "__main__":
    main()
