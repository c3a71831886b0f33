"""The functions of `import qfsdp`: the same as the commands, and the process stays as it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import qfsdp
from tests.docs.test_guides import blocks, is_python
from tests.tiny import ROOT, run_recipe, write_tiny_model_with_tokenizer

NEW = ("sampling.max_new_tokens=4",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("api")
    sizes = {"intermediate_size": 256, "max_position_embeddings": 2048}
    write_tiny_model_with_tokenizer(folder / "tiny", smollm2_dir, **sizes)
    row = json.dumps({"question": "2 + 3?", "answer": "It is 5"}) + "\n"
    (folder / "questions.jsonl").write_text(row * 20)
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("QFSDP_EAGER_KERNELS", "1")


def rows() -> dict[str, Any]:
    columns = {"prompt_column": "question", "answer_column": "answer"}
    return {"_component_": "qfsdp.data.instruct_dataset", "source": "questions.jsonl"} | columns


def config(**changes: Any) -> dict[str, Any]:
    found = {
        "output_dir": "run",
        "model": {"path": Path("tiny"), "dtype": "fp32"},
        "tokenizer": {"_component_": "qfsdp.data.hf_tokenizer", "path": "${model.path}"},
        "dataset": rows(),
        "quantization": {"format": "none"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "max_seq_len": 64,
        "max_steps": 2,
        "preflight": False,
        "report": False,
    }
    return found | changes


def state() -> dict[str, Any]:
    """What a call must leave as it was."""
    return {
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "dtype": torch.get_default_dtype(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "group": dist.is_initialized(),
        "streams": (sys.stdout, sys.stderr),
        "working folder": os.getcwd(),
        "our threads": {t.name for t in threading.enumerate()} & {"watchdog", "MainThread"},
    }


def changed(before: dict[str, Any]) -> list[str]:
    now = state()
    return [name for name in before if before[name] != now[name]]


def test_importing_is_light() -> None:
    code = "import sys, qfsdp; print(sorted({'torch', 'omegaconf', 'yaml'} & {*sys.modules}))"
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert (ROOT / "qfsdp/py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = qfsdp.trian


# What is wrong -> the line of the command.
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "key": (
        lambda: qfsdp.train(config(), "adapter.rnak=8"),
        "unknown key 'adapter.rnak'; did you mean 'adapter.rank'?",
    ),
    "value": (lambda: qfsdp.train(config(batch_size=0)), "batch_size: 0 is not valid; expected"),
    "file": (lambda: qfsdp.train("lora.yaml"), "--config lora.yaml: no such file"),
    "recipe": (lambda: qfsdp.train(config(), recipe="recipes/lora"), "recipes/lora"),
    "tool": (lambda: qfsdp.train(config(), recipe="recipes/merge"), "recipes/merge: it trains"),
    "model": (lambda: qfsdp.load("tinny"), "model.path: "),
    "not loaded": (
        lambda: qfsdp.generate("run/adapter", "Why?"),  # type: ignore[arg-type]
        "model: 'run/adapter'; expected a loaded one: qfsdp.load(...)",
    ),
    "estimate": (lambda: qfsdp.estimate(config(), world_sise=2), "unknown key 'world_sise'"),
    "rows": (
        lambda: qfsdp.train(config(dataset=rows() | {"answer_column": "answr"})),
        "dataset.answer_column",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_the_commands_line(mistake: str, capfd: pytest.CaptureFixture[str]) -> None:
    call, line = WRONG[mistake]
    before = state()
    with pytest.raises(qfsdp.UserError) as raised:
        call()
    assert str(raised.value).startswith(line) or line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.__context__ is None  # whose frames would hold a model
    assert raised.value._render_traceback_() == [f"error: {raised.value}"]
    assert changed(before) == []
    assert capfd.readouterr() == ("", "")


def fail(*_: Any) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    raise qfsdp.UserError("a mistake amid the run")


@pytest.mark.long
def test_two_runs_and_a_failed_one_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With FSDP2, whose process group would make the second run fail."""
    sharded = config(sharding={"offload_base": "cpu"})
    before = state()
    first = qfsdp.train(sharded)
    second = qfsdp.train(sharded, "output_dir=run2")
    assert changed(before) == []
    assert [step["loss"] for step in first.metrics] == [step["loss"] for step in second.metrics]
    assert [step["step"] for step in first.metrics] == [1, 2]
    assert "adapter (PEFT format): run/adapter" in first.output
    assert capfd.readouterr() == ("", "")

    with monkeypatch.context() as patched:
        patched.setattr("qfsdp.training.metrics.MetricsFile.add", fail)
        with pytest.raises(qfsdp.UserError, match="^a mistake amid the run$"):
            qfsdp.train(sharded, "output_dir=run3")
    assert changed(before) == []
    qfsdp.train(config(output_dir="run4", max_steps=1), verbose=True)
    assert "adapter (PEFT format): run4/adapter" in capfd.readouterr().out


@pytest.mark.long
def test_the_model_in_hand_is_the_recipes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers and losses are those of recipes/generate and recipes/evaluate."""
    run = qfsdp.train(config(output_dir="run5"))
    answer = qfsdp.generate(run.model, "Why?", max_new_tokens=4)
    assert qfsdp.generate(run.model, ["Why?", "No?"], max_new_tokens=4)[0] == answer
    assert qfsdp.generate(run.model, [{"role": "user", "content": "Why?"}], max_new_tokens=4) == (
        answer
    )
    results = qfsdp.evaluate(run.model, {"loss": {"rows": rows()}})

    capsys.readouterr()
    shared = ["--config", os.devnull, f"adapter={run.result}"]
    run_recipe("generate", [*shared, "prompt=Why?", *NEW])
    assert capsys.readouterr().out == f"{answer}\n"
    sets = f"loss={json.dumps({'rows': rows()})}"
    run_recipe("evaluate", [*shared, "output=found.json", sets])
    found = json.loads((folder / "found.json").read_text())["results"]
    assert [result.value for result in results] == [row["value"] for row in found]
    with pytest.raises(qfsdp.UserError, match="max_new_token.*did you mean"):
        qfsdp.generate(run.model, "Why?", max_new_token=4)
    with pytest.raises(qfsdp.UserError, match="another model"):
        qfsdp.evaluate(run.model, {"model": {"path": "other"}, "loss": {"rows": rows()}})


@pytest.mark.long
def test_a_yaml_file_names_its_recipe(folder: Path) -> None:
    """As the file does that `qfsdp finetune` writes; a full run has a model."""
    text = json.dumps({**config(output_dir="full"), "model": {"path": "tiny", "dtype": "fp32"}})
    line = "# tune run recipes/full_finetune_distributed --config full.yaml\n"
    (folder / "full.yaml").write_text(f"{line}{text}")
    run = qfsdp.train("full.yaml", "~quantization", "max_steps=1")
    assert run.result == Path("full/model")
    assert isinstance(qfsdp.generate(run.model, "Why?", max_new_tokens=2), str)


@pytest.mark.long
def test_the_page_and_the_notebook_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/guide/python.md").read_text()
    (code,) = (block for block, _ in blocks(page) if is_python(block))
    assert len(code.splitlines()) <= 25
    exec(re.sub(r"Qwen/[\w.-]+", "tiny", code), {})
    out = capsys.readouterr().out
    assert "GiB, loss " in out and "questions perplexity" in out

    notebook = json.loads((ROOT / "examples/python.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= {"model": "tiny", "max_steps": 2}
    assert "did you mean 'adapter.rank'?" in capsys.readouterr().out
