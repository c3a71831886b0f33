"""examples/gptq.py: its mistakes, and its folder where LLMCOMPRESSOR_PYTHON names the Python of an
environment with llmcompressor, which needs an older transformers than ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import gptq
from tests.tiny import ROOT, write_tiny_model_with_tokenizer

THEIRS = os.environ.get("LLMCOMPRESSOR_PYTHON")
TEXT = "Ann has 3 apples and buys 4 more. She then has 7 apples, and gives 2 to Tom."
FORMS = (
    {"text": TEXT},
    {"question": "2 + 3?", "answer": "5"},
    {"messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "5"}]},
)


def written(folder: Path, *rows: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 96, "intermediate_size": 192}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "nowhere"}, "model: 'nowhere' has no config.json; expected a model folder"),
        ({"rows": "nowhere"}, "rows: 'nowhere' is no file; expected a .jsonl file"),
        ({"output": "/"}, "output: '/' exists; expected a new folder"),
        ({"--group-size": "64"}, "group_size: 64; expected a divisor of 96 (hidden_size)"),
        ({"--group-size": "0"}, "group_size: 0; expected at least 1"),
        ({"--samples": "0"}, "samples: 0; expected at least 1"),
    ],
)
def test_mistakes_come_before_anything_is_loaded(
    change: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = written(tmp_path / "model", *FORMS)
    words = {"model": str(folder), "rows": f"{folder}/rows.jsonl", "output": f"{tmp_path}/out"}
    words |= {"--group-size": "32"} | change
    flags = [f"{name}={value}" for name, value in words.items() if name.startswith("--")]
    monkeypatch.setattr(sys, "argv", ["gptq.py", *list(words.values())[:3], *flags])
    with pytest.raises(SystemExit) as end:
        gptq.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "is empty; expected rows to calibrate with"),
        (({"x": 1},), "row 1: expected text, messages, or question and answer"),
        (({"text": "a"}, 3), "row 2: expected text, messages, or question and answer"),
    ],
)
def test_mistakes_in_rows(rows: tuple[object, ...], message: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", *rows)
    words = {"model": folder, "rows": folder / "rows.jsonl", "output": tmp_path / "out"}
    sizes = {"group_size": 32, "samples": 8, "max_seq_len": 64}
    with pytest.raises(ValueError, match=message):
        gptq.check(gptq.argparse.Namespace(**words, **sizes))


def test_a_chat_has_one_first_token() -> None:
    """A template writes the first token; a tokenizer such as Llama 3's would write another."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="?")
    tokenizer.chat_template = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert gptq.tokens(chat, tokenizer, 9)["input_ids"] == [0, 1, 2]
    assert gptq.tokens("a b", tokenizer, 9)["input_ids"] == [0, 1, 2]
    assert gptq.tokens("a b", tokenizer, 2)["input_ids"] == [0, 1]


@pytest.mark.long
@pytest.mark.skipif(THEIRS is None, reason="LLMCOMPRESSOR_PYTHON names no Python")
def test_transformers_loads_what_it_writes(smollm2_dir: Path, tmp_path: Path) -> None:
    """Text that was read is nearer to the whole weights' logits than by nearest numbers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_tiny_model_with_tokenizer(
        tmp_path / "model", smollm2_dir, hidden_size=96, intermediate_size=192
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in FORMS * 4))
    command = [str(THEIRS), "examples/gptq.py", str(model), str(rows), str(tmp_path / "out")]
    done = subprocess.run([*command, "--group-size=32"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, packed, nearest = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (model, tmp_path / "out", model)
    )
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    tokens = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        for name, weight in nearest.named_parameters():
            if weight.ndim == 2 and "layers" in name:
                groups = weight.view(len(weight), -1, 32)
                scale = groups.abs().amax(-1, keepdim=True) / 7.5
                rounded = (groups / scale).round().clamp(-8, 7) * scale
                weight.copy_(rounded.view_as(weight))
        expected, found, other = (each(tokens).logits for each in (whole, packed, nearest))
    errors = [((logits - expected).norm() / expected.norm()).item() for logits in (found, other)]
    print(errors)
    assert 0 < errors[0] < errors[1]
