"""Interpolations of a config: what reads the environment stays unread in what others see."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.common.printable import is_secret
from qfsdp.config.component import Component
from qfsdp.config.load import as_omegaconf, load_config, resolved_yaml, to_yaml

SECRET_TEXT = "sk-47eleven-words"


@dataclass
class Section:
    api_key: str | None = None
    eos_token: str = "</s>"
    max_new_tokens: int = 3
    port: float = 1.0


@dataclass
class Config:
    name: str = "a"
    copy: str = "b"
    seed: int = 0
    service: Section = field(default_factory=Section)
    logger: Component | None = None
    words: list[Any] = field(default_factory=list)


def load(folder: Path, text: str, *words: str) -> Config:
    (folder / "c.yaml").write_text(text)
    return load_config(Config, ["--config", str(folder / "c.yaml"), *words])


CONFIG = """
name: run-${oc.env:QFSDP_SECRET}
copy: ${name}
service: {port: "${oc.env:QFSDP_PORT,2.5}", eos_token: "<${oc.env:QFSDP_SECRET}>"}
logger: {_component_: logging.Logger, name: "${oc.env:QFSDP_SECRET}"}
words: [1, "${oc.env:QFSDP_SECRET}", "${copy}", "\\\\${name}", "${seed}"]
"""


def test_what_reads_the_environment_is_written_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFSDP_SECRET", SECRET_TEXT)
    config = load(tmp_path, CONFIG)
    assert config.copy == f"run-{SECRET_TEXT}" and config.service.port == 2.5
    text = to_yaml(config)
    assert SECRET_TEXT not in text and SECRET_TEXT in resolved_yaml(config)
    assert text.count("${oc.env:QFSDP_SECRET}") == 4 and "copy: ${name}" in text
    assert load(tmp_path, text) == config
    monkeypatch.setenv("QFSDP_SECRET", "another value")
    assert load(tmp_path, text).copy == "run-another value"  # it is read again
    config.name = "changed"
    assert "name: changed\n" in to_yaml(config)


def test_loggers_that_resolve_get_the_interpolation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omegaconf import OmegaConf

    monkeypatch.setenv("QFSDP_SECRET", SECRET_TEXT)
    told: Any = OmegaConf.to_container(as_omegaconf(load(tmp_path, CONFIG)), resolve=True)
    assert SECRET_TEXT not in str(told)
    assert told["words"] == [1, "${oc.env:QFSDP_SECRET}", "${copy}", "${name}", 0]


def test_secrets_of_the_config_are_masked(tmp_path: Path) -> None:
    text = to_yaml(load(tmp_path, f"service: {{api_key: {SECRET_TEXT}}}"))
    assert SECRET_TEXT not in text and "eos_token: </s>" in text and "max_new_tokens: 3" in text
    assert "api_key: null" in to_yaml(load(tmp_path, "seed: 1"))


@pytest.mark.parametrize(
    "name", ["api_key", "apikey", "API_KEY", "token", "hf_token", "password", "client_secret"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["tokenizer", "eos_token", "pad_token", "max_new_tokens", "key", "monkey", "tokens"]
)
def test_other_names(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("seed=${oc.env:QFSDP_SECRET}", SECRET_TEXT),
        ("seed=${oc.env:QFSDP_SECRET}", "pin7"),
        ("seed=${oc.decode:${oc.env:QFSDP_SECRET}}", "[" + SECRET_TEXT),
        ("service=${oc.env:QFSDP_SECRET}", SECRET_TEXT),
        ("service.port=x-${oc.env:QFSDP_SECRET}", SECRET_TEXT),
        ("--api_key=sk-47eleven-words", SECRET_TEXT),
        ("service.token={a: sk-47eleven-words", SECRET_TEXT),
    ],
)
def test_errors_do_not_print_it(
    word: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QFSDP_SECRET", value)
    with pytest.raises(UserError) as raised:
        load(tmp_path, "seed: 1", word)
    assert value not in str(raised.value) and "\n" not in str(raised.value)


def lines(form: str, count: int = 11, between: str = "", times: int = 10) -> list[str]:
    """`v1: ...` and so on: a form, in which N stands for the number before, many times over."""
    values = [between.join([form.replace("N", str(n))] * times) for n in range(count)]
    return [f"v{n}: {f'[{v}]' if between else repr(v)}" for n, v in enumerate(values, 1)]


BOMBS = {
    "text": lines("${vN}"),
    "lists": lines('"${vN}"', between=", "),
    "names": [*(f"i{n}: v{n}" for n in range(12)), *lines("${${iN}}")],
    "decode": lines("${oc.decode:${vN}}"),
    "long": lines("${vN}", 2, times=900),
    "mappings": [
        f"v{n + 1}: {{" + ", ".join(f"k{k}: '${{v{n}}}'" for k in range(10)) + "}"
        for n in range(11)
    ],
}


@pytest.mark.parametrize("kind", BOMBS)
def test_interpolations_that_multiply(kind: str, tmp_path: Path) -> None:
    first = "v0: '" + "x" * (10_000 if kind == "long" else 10) + "'"
    with pytest.raises(UserError, match="multiply"):
        load(tmp_path, "\n".join([first, *BOMBS[kind], "seed: 1"]))
