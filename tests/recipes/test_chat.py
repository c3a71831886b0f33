"""Conversations on the terminal: the answers of `generate`, commands, Ctrl-C, a real terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.prompts import prompt_tokens, stop_ids
from tests.models import cpu_world
from tests.tiny import ROOT, load_recipe, write_tiny_model_with_tokenizer

NEW = 6


@pytest.fixture(scope="module")
def model_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_with_tokenizer(tmp_path_factory.mktemp("tiny") / "model", smollm2_dir)


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("chat")


def config(recipe: ModuleType, model_dir: Path, *more: str) -> Any:
    words = ["--config", str(ROOT / "configs/chat.yaml"), f"model.path={model_dir}"]
    return load_config(recipe.Config, [*words, f"sampling.max_new_tokens={NEW}", *more])


def expected_answer(cfg: Any, messages: list[dict[str, str]], new: int = NEW) -> str:
    world, tokenizer = cpu_world(), cfg.tokenizer.build()
    given = (cfg.model, cfg.quantization, None, ShardingConfig("ddp"), world)
    prompt = prompt_tokens(tokenizer, messages, True, None)
    stops = stop_ids(tokenizer, cfg.model.folder)
    (answer,) = generate(load_for_inference(*given), [prompt], SamplingConfig(new), stops, world)
    return str(tokenizer.decode(answer))


def talk(
    recipe: ModuleType, cfg: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> list[str]:
    """What is printed after each line; the last ends the conversation."""
    given, printed = iter(lines), []

    def answer(prompt: str) -> str:
        printed.append(capsys.readouterr().out)
        line = next(given, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", answer)
    recipe.check(cfg)
    recipe.main(cfg)
    return [*printed, capsys.readouterr().out][1:]


@pytest.mark.usefixtures("eager")
def test_a_conversation(
    recipe: ModuleType, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    cfg = config(recipe, model_dir)
    lines = ["Why?", "And then?", "/reset", "And then?", "/system Be short.", "Why?", "", "/help"]
    lines += ["/rest", "^C", "a " * 300, "/system", "Why?", "/exit"]
    (why, then, reset, again, system, short, empty, told, wrong, stopped, long, none, last, end) = (
        talk(recipe, cfg, lines, monkeypatch, capsys)
    )
    chat = [{"role": "user", "content": "Why?"}]
    assert why == last == recipe.printable(expected_answer(cfg, chat)) + "\n"
    chat.append({"role": "assistant", "content": expected_answer(cfg, chat)})
    chat.append({"role": "user", "content": "And then?"})
    assert then == recipe.printable(expected_answer(cfg, chat)) + "\n"
    assert again == recipe.printable(expected_answer(cfg, chat[2:])) + "\n" != then
    assert reset == system == none == "The conversation begins anew.\n"
    with_system = [{"role": "system", "content": "Be short."}, *chat[:1]]
    assert short == recipe.printable(expected_answer(cfg, with_system)) + "\n" != why
    assert empty == end == "" and "/system TEXT" in told and "/reset" in told
    assert wrong == "/rest: no such command; /help lists them\n"
    assert stopped == "\n/exit or Ctrl-D ends\n"
    assert re.fullmatch(r"the conversation has \d+ tokens; .* 256 positions: /reset .*\n", long)


@pytest.mark.usefixtures("eager")
def test_an_answer_ends_at_the_original_context_of_longrope(
    recipe: ModuleType, smollm2_dir: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """As it does at the last position: what is longer was refused."""
    said = [{"role": "user", "content": "Hello"}]
    tokenizer = config(recipe, smollm2_dir).tokenizer.build()
    original = len(prompt_tokens(tokenizer, said, True, None)) + 3
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, rope_scaling=rope)
    cfg = config(recipe, tmp_path / "model")
    printed = talk(recipe, cfg, ["Hello"], monkeypatch, capsys)
    assert printed[0] == expected_answer(cfg, said, new=3) + "\n"


@pytest.mark.usefixtures("eager")
def test_ctrl_c_stops_an_answer(
    recipe: ModuleType, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What was printed stays in the conversation; an answer that has not begun leaves no trace."""
    cfg = config(recipe, model_dir, "sampling.max_new_tokens=50")
    kept: list[Any] = []
    tokens = cfg.tokenizer.build().encode("Once upon", add_eos=False)

    def interrupted(*args: Any) -> None:
        *_, show = args
        for token in [] if kept else tokens:
            show([token])
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "generate", interrupted)
    before = recipe.Conversation.answer

    def answer(self: Any, text: str) -> None:
        try:
            before(self, text)
        finally:
            kept.append([dict(message) for message in self.messages])

    monkeypatch.setattr(recipe.Conversation, "answer", answer)
    first, second, _ = talk(recipe, cfg, ["Why?", "And then?"], monkeypatch, capsys)
    said = "Once upon"
    assert first == f"{said} [stopped]\n" and second == "[stopped before the answer began]\n"
    assert kept[0] == kept[1] and [message["content"] for message in kept[0]] == ["Why?", said]


def test_control_characters_are_not_printed(recipe: ModuleType) -> None:
    assert recipe.printable("a\x1b[2J\x9b1m\r\x07b\n\tż\x7f") == (
        "a\\x1b[2J\\x9b1m\\r\\x07b\n\tż\\x7f"
    )


def test_mistakes_are_told_before_anything_is_loaded(recipe: ModuleType, model_dir: Path) -> None:
    for word, message in (
        ("adapter=nowhere", "nowhere does not exist; expected an adapter"),
        ("model.path=nowhere", "nowhere"),
        ("sampling.top_p=0", "sampling.top_p: 0.0 is not valid"),
        ("prompt=hello", "unknown key 'prompt'"),
    ):
        with pytest.raises(UserError, match=message):
            recipe.check(config(recipe, model_dir, word))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UserError, match="--nproc_per_node: 2 ranks; expected 1"):
            recipe.check(config(recipe, model_dir))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", None)  # `qfsdp chat ... <&-`
        with pytest.raises(UserError, match="standard input is closed"):
            recipe.check(config(recipe, model_dir))


def of_a_terminal() -> None:
    """Runs in a new process: makes its stdin the terminal that controls it, so that Ctrl-C there
    interrupts it."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background


@pytest.mark.slow
def test_a_real_terminal(model_dir: Path, recipe: ModuleType) -> None:
    """`qfsdp chat`: an answer as it comes, Ctrl-C in the middle of a long one, Ctrl-D."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "qfsdp.cli.command", "chat", f"model.path={model_dir}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen(
        [*command, "model.dtype=fp32", "sampling.max_new_tokens=200"],
        cwd=ROOT,
        env=environment | {"TERM": "dumb", "QFSDP_EAGER_KERNELS": "1"},
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=of_a_terminal,
    )
    os.close(its)

    def read_until(pattern: str, written: str = "") -> str:
        while not re.search(pattern, written):
            written += os.read(ours, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
        return written

    try:
        assert "Ctrl-D ends" in read_until(r"> $")
        os.write(ours, b"Why?\n")
        read_until(r"> Why\?\n.{5}|^Why\?\n.{5}")  # the answer has begun
        os.write(ours, b"\x03")
        assert "[stopped]" in read_until(r"\n> $")
        os.write(ours, b"\x04")
        assert process.wait(600) == 0
    finally:
        process.kill()
        os.close(ours)
