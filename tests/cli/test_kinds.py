"""Components of the wrong kind: refused before they are called, in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.config.convert import as_component
from qfsdp.training.metric_logger import check_logger

OF_PYTHON = "is a part of Python itself; expected a class or function of torch, "
SILENT = "is a function that has no return annotation; expected one that names the class of "


def message(key: str, path: str, **arguments: Any) -> str:
    with pytest.raises(UserError) as info:
        Component(path, arguments).check(key, provided=None)
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("metric_logger", "subprocess.Popen"),
        ("metric_logger", "builtins.print"),
        ("optimizer", "sys.exit"),
        ("optimizer", "os.system"),
        ("lr_scheduler", "os.remove"),
        ("tokenizer", "pathlib.Path"),
        ("dataset", "builtins.eval"),
        ("dataset.sets.a", "shutil.rmtree"),
        ("validation.sets.a", "subprocess.run"),
        ("loss.a", "builtins.exec"),
        ("of_a_copied_recipe", "os.remove"),
        ("optimizer", "torch.os.system"),  # through a module that has imported it
        ("dataset", "qfsdp.config.component.importlib.import_module"),
    ],
)
def test_python_itself_fits_nowhere(key: str, path: str) -> None:
    assert message(key, path).startswith(f"{key}._component_: '{path}' {OF_PYTHON}")


def test_a_module_of_python_is_not_imported() -> None:
    assert "antigravity" not in sys.modules  # it opens a browser
    assert OF_PYTHON in message("dataset", "antigravity.geohash")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("key", "path", "wrong"),
    [
        ("optimizer", "torch.nn.Linear", "is no torch.optim.Optimizer; expected an optimizer"),
        ("lr_scheduler", "torch.optim.SGD", "is no torch.optim.lr_scheduler.LRScheduler; "),
        ("metric_logger", "torch.optim.SGD", "has no log_dict; expected a metric logger with "),
        ("metric_logger", "qfsdp.data.dummy_dataset", "returns a DummyDataset, which has no log_"),
        ("tokenizer", "torch.nn.Linear", "has no encode; expected a tokenizer with encode and "),
        ("tokenizer", "torch.hub.load_state_dict_from_url", "returns a dict, which has no encode"),
        ("tokenizer", "torch.load", SILENT),
        ("metric_logger", "torch.manual_seed", "returns a Generator, which has no log_dict"),
        ("dataset", "torch.optim.SGD", "has no __len__; expected a map-style dataset (__len__, "),
        ("dataset", "torch.hub.download_url_to_file", "is a function that takes no tokenizer"),
        ("dataset", "torch.utils.data.IterableDataset", "has no __len__"),
        (
            "optimizer",
            "torch.save",
            "is a function that takes no params and has no return annotation",
        ),
    ],
)
def test_wrong_kind(key: str, path: str, wrong: str) -> None:
    assert wrong in message(key, path)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("optimizer", "torch.optim.AdamW"),
        ("optimizer", "torchao.optim.AdamW8bit"),
        ("optimizer", "bitsandbytes.optim.AdamW8bit"),
        ("lr_scheduler", "torch.optim.lr_scheduler.LambdaLR"),
        ("lr_scheduler", "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"),
        ("lr_scheduler", "qfsdp.training.cosine_with_warmup"),
        ("metric_logger", "torchtune.training.metric_logging.DiskLogger"),
        ("metric_logger", "torchtune.training.metric_logging.StdoutLogger"),
        ("metric_logger", "torchtune.training.metric_logging.WandBLogger"),
        ("tokenizer", "qfsdp.data.hf_tokenizer"),
        ("tokenizer", "torchtune.models.llama3.llama3_tokenizer"),
        ("tokenizer", "torchtune.models.qwen2_5.qwen2_5_tokenizer"),
        ("dataset", "qfsdp.data.alpaca_dataset"),  # a partial
        ("dataset", "torchtune.datasets.alpaca_cleaned_dataset"),
        ("dataset", "torchtune.datasets.chat_dataset"),
        ("validation.sets.a", "tests.toy_data.Samples"),
        ("dataset", "parts_of_a_user.rows"),
        ("dataset", "parts_of_a_user.said"),
        ("of_a_copied_recipe", "parts_of_a_user.quiet"),
    ],
)
def test_right_kind(own: None, key: str, path: str) -> None:
    pytest.importorskip(path.partition(".")[0])
    Component(path).check(key, provided=None)


OWN = """

def broken(tokenizer):
    raise ValueError("no server")
def rows(tokenizer): return 5
def said() -> list[int]: return [1]
def quiet(): return 5
def tokenizer() -> "Tokenizer": return Tokenizer()
class Tokenizer:
    def encode(self, text): ...
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("key", "path", "wrong"),
    [
        ("dataset", "rows", "returned a int, which has no __len__; expected a map-style dataset"),
        ("tokenizer", "tokenizer", "returned a Tokenizer, which has no pad_id; expected a token"),
    ],
)
def test_what_a_component_returns_is_checked(own: None, key: str, path: str, wrong: str) -> None:
    given = {"tokenizer": None} if key == "dataset" else {}
    with pytest.raises(UserError, match=f"^{key}: 'parts_of_a_user.{path}' {wrong}"):
        as_component(f"parts_of_a_user.{path}", key).build(**given)


def test_a_component_that_raises(own: None) -> None:
    """One line, with the place in the user's file."""
    with pytest.raises(UserError) as info:
        as_component("parts_of_a_user.broken", "dataset").build(tokenizer=None)
    text = str(info.value)
    assert text.startswith("dataset: 'parts_of_a_user.broken' failed: ValueError: no server (")
    assert text.endswith("parts_of_a_user.py, line 4)")


def test_package_of_a_logger_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfsdp.training.metric_logger.find_spec", lambda name: None)
    logger = Component("torchtune.training.metric_logging.WandBLogger")
    with pytest.raises(UserError, match="WandBLogger' needs the package wandb, which is not"):
        check_logger(logger)


def test_argument_that_a_logger_ignores() -> None:
    """TensorBoardLogger takes any argument and reads none of them."""
    path = "torchtune.training.metric_logging.TensorBoardLogger"
    assert "takes no argument 'foo'" in message("metric_logger", path, log_dir="x", foo=1)
