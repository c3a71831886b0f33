"""A normalizer that doubles a text again and again is refused before it gets one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers

from qfsdp.cli.errors import UserError
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
