"""Writes a 4-bit folder by GPTQ: the model that `recipes/merge` wrote, calibrated with your rows.

    python examples/gptq.py models/merged my_data.jsonl models/mine_gptq [--group-size 64]

Needs `pip install llmcompressor` in an environment of its own, as that pins an older transformers;
qfsdp need not be there. Runs on a CPU or a GPU. The folder has the layout of compressed-tensors, as
that of `recipes/export format=w4a16` has: transformers and vLLM load it.

Rows have a `text`, or `messages` that the model's chat template writes, or a `question` and an
`answer`. They should look like what the model will read; 128 to 512 are usual.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder with 16-bit weights")
    parser.add_argument("rows", type=Path, help="a .jsonl file")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--group-size", type=int, default=128, help="weights that share a scale")
    parser.add_argument("--samples", type=int, default=128, help="rows that are read, at most")
    parser.add_argument("--max-seq-len", type=int, default=512, help="tokens of a row, at most")
    args = parser.parse_args()
    try:
        rows = check(args)
    except ValueError as error:
        parser.error(str(error))
    quantize(args, rows)


def check(args: argparse.Namespace) -> list[list[dict[str, str]] | str]:
    """Texts or conversations; raises ValueError for what is wrong, before anything is loaded."""
    config = args.model / "config.json"
    if not config.is_file():
        raise ValueError(f"model: '{args.model}' has no config.json; expected a model folder")
    if args.output.exists():
        raise ValueError(f"output: '{args.output}' exists; expected a new folder")
    for key in ("group_size", "samples", "max_seq_len"):
        if getattr(args, key) < 1:
            raise ValueError(f"{key}: {getattr(args, key)}; expected at least 1")
    shape = json.loads(config.read_text())
    for key in ("hidden_size", "intermediate_size"):
        if shape.get(key, 0) % args.group_size:
            raise ValueError(
                f"group_size: {args.group_size}; expected a divisor of {shape[key]} ({key})"
            )
    if not args.rows.is_file():
        raise ValueError(f"rows: '{args.rows}' is no file; expected a .jsonl file")
    lines = args.rows.read_text(encoding="utf-8").splitlines()[: args.samples]
    found = [read(f"rows: {args.rows}, row {at}", line) for at, line in enumerate(lines, 1)]
    if not found:
        raise ValueError(f"rows: '{args.rows}' is empty; expected rows to calibrate with")
    return found


def read(place: str, line: str) -> list[dict[str, str]] | str:
    try:
        row = json.loads(line)
    except ValueError:
        raise ValueError(f"{place}: no JSON; expected one object on each line") from None
    columns = row.keys() if isinstance(row, dict) else ()
    if "text" in columns:
        return str(row["text"])
    if "messages" in columns:
        return list(row["messages"])
    if {"question", "answer"} <= {*columns}:
        pair = (("user", row["question"]), ("assistant", row["answer"]))
        return [{"role": role, "content": text} for role, text in pair]
    raise ValueError(f"{place}: expected text, messages, or question and answer")


def tokens(row: list[dict[str, str]] | str, tokenizer: Any, most: int) -> dict[str, Any]:
    """What the model reads of a row, at most `most` tokens. A chat template writes its own first
    token, which the tokenizer would write again."""
    is_text = isinstance(row, str)
    text = row if is_text else tokenizer.apply_chat_template(row, tokenize=False)
    cut = {"truncation": True, "max_length": most}
    return dict(tokenizer(text, add_special_tokens=is_text, **cut))


def quantize(args: argparse.Namespace, rows: list[list[dict[str, str]] | str]) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    data = Dataset.from_list([tokens(row, tokenizer, args.max_seq_len) for row in rows])
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": args.group_size}}
    recipe = GPTQModifier(ignore=["lm_head"], config_groups={"group_0": group})
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        max_seq_length=args.max_seq_len,
        num_calibration_samples=len(rows),
    )
    model.save_pretrained(args.output, save_compressed=True)
    tokenizer.save_pretrained(args.output)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
