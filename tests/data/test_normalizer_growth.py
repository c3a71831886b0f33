"""A normalizer or decoder that doubles a text again and again is refused before it gets one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from qfsdp.common.errors import UserError
from qfsdp.data import normalizer_check
from qfsdp.data.tokenizer_folder import TokenizerFolder


def folder(path: Path, *rules: Any) -> TokenizerFolder:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    made: Any = normalizers.Sequence(list(rules))
    tokenizer.normalizer = made
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return TokenizerFolder(str(path))


@pytest.mark.parametrize("pattern", ["a", Regex("a")])
def test_a_bomb(pattern: Any, tmp_path: Path) -> None:
    rules = [normalizers.Replace(pattern, "aa") for _ in range(30)]
    with pytest.raises(UserError, match="tokenizer.json: its normalizer .* over 1.. times longer"):
        folder(tmp_path, normalizers.Sequence(rules[:15]), *rules[15:]).backend()


def test_usual_rules(tmp_path: Path) -> None:
    usual = (normalizers.Prepend("_"), normalizers.Replace(" ", "_"), normalizers.NFKC())
    assert folder(tmp_path, *usual).backend().normalizer is not None
    spelled = [normalizers.Replace(chr(0x2100 + n), "(a)") for n in range(30)]
    assert folder(tmp_path, *spelled).backend().normalizer is not None
    assert folder(tmp_path, normalizers.Replace("a", "aa")).backend().encode("a").ids == [0, 0]


def test_a_bomb_for_added_tokens(tmp_path: Path) -> None:
    """`tokenizers` applies the normalizer to added tokens while it loads the file."""
    rules = [normalizers.Replace("a", "aa") for _ in range(40)]
    found = folder(tmp_path, *rules)
    file = tmp_path / "tokenizer.json"
    settings = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    settings["added_tokens"] = [{"id": 2, "content": "a", "normalized": True, **flags}]
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="its normalizer makes a text over 1.. times longer"):
        found.backend()


def test_patterns_that_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading them cannot be interrupted: it is tried in another process first."""
    monkeypatch.setattr(normalizer_check, "LIMIT_S", 3.0)
    found = folder(tmp_path, normalizers.Replace(Regex("(?=(a+)+b)" * 2000), "c"))
    file = tmp_path / "tokenizer.json"
    settings = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    settings["added_tokens"] = [{"id": 2, "content": "a" * 9000 + "b", "normalized": True, **flags}]
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="tokenizer.json: its normalizer needs over 3 s for the"):
        found.backend()


def test_a_bomb_with_other_steps_between(tmp_path: Path) -> None:
    rules = [normalizers.Replace("a", "AA"), normalizers.Lowercase()] * 30
    with pytest.raises(UserError, match="its normalizer makes a text over 1.. times longer"):
        folder(tmp_path, *rules).backend()


def test_a_bomb_in_the_decoder(tmp_path: Path) -> None:
    found = folder(tmp_path)
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    steps: Any = decoders.Sequence([decoders.Replace("a", "aa") for _ in range(30)])
    tokenizer.decoder = steps
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="its decoder makes a text over 1.. times longer"):
        found.backend()
