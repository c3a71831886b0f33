"""The metric loggers of a run: checked, built and told the config before anything is loaded, and
they may fail later without ending the run."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qfsdp.common.errors import UserError
from qfsdp.common.files import json_object, why, write_json, writing
from qfsdp.common.long_waits import long_wait
from qfsdp.common.messages import first_line
from qfsdp.common.terminal import warn
from qfsdp.config.component import Component
from qfsdp.config.component_types import LOGGER, check_built
from qfsdp.config.load import as_omegaconf

if TYPE_CHECKING:
    from omegaconf import DictConfig

# torchtune's loggers import these packages only when they are built.
_NEEDS = {
    "CometLogger": "comet_ml",
    "MLFlowLogger": "mlflow",
    "TensorBoardLogger": "tensorboard",
    "WandBLogger": "wandb",
}

# Of a logger. Libraries of services end the process where they have no login or lose their service.
FAILURES = (Exception, SystemExit)


class MetricLogger(Protocol):
    """What every metric logger has; torchtune's (TensorBoard, W&B, ...) have `log_config` too."""

    def log_dict(self, payload: dict[str, Any], step: int) -> None: ...
    def close(self) -> None: ...


def check_logger(loggers: Component | list[Component] | None) -> None:
    """Checks the config's loggers without building them: that may create files, or runs elsewhere.
    Raises UserError: `Component.check` finds a mistake, or a logger's package is not installed."""
    for logger in _as_list(loggers):
        key = logger.key or "metric_logger"
        logger.check(key)
        package = _NEEDS.get(logger.path.rpartition(".")[2])
        if logger.path.startswith("torchtune.") and package and find_spec(package) is None:
            raise UserError(
                f"{key}._component_: '{logger.path}' needs the package {package}, which is not "
                f"installed; expected pip install {package}, or another logger"
            )


def build_logger(
    loggers: Component | list[Component] | None, rank: int, cfg: Any = None
) -> MetricLogger | None:
    """The loggers on rank 0, as one; None on other ranks, and where the config names none.

    Args:
        loggers: `metric_logger` of the config.
        cfg: the recipe's config. Loggers that have `log_config` are told it, with all defaults and
            interpolations written out and without keys of services. If it resumes a run, W&B and
            MLflow continue the run of `output_dir`. None: they are told nothing.

    Raises:
        UserError: as `SafeLogger`; or `output_dir` cannot be made.
    """
    if rank != 0 or not _as_list(loggers):
        return None
    if cfg is not None:  # Comet's logger makes a folder in it, and not itself
        output_dir = Path(cfg.output_dir).expanduser()
        with writing("output_dir", output_dir):
            output_dir.mkdir(parents=True, exist_ok=True)
    built = Loggers([SafeLogger(logger, cfg) for logger in _as_list(loggers)])
    if cfg is not None:
        built.log_config(_told(cfg))
    return built


def _as_list(loggers: Component | list[Component] | None) -> list[Component]:
    return [loggers] if isinstance(loggers, Component) else loggers or []


def _told(cfg: Any) -> DictConfig:
    """The config as loggers are told it; torchtune's write it to `output_dir`, too."""
    config = as_omegaconf(cfg)
    config.output_dir = str(Path(cfg.output_dir).expanduser())
    config.pop("resume", None)  # of this start, not of the run; MLflow takes no other value later
    loggers = config.get("metric_logger")
    for node in loggers if isinstance(loggers, Sequence) else [loggers or {}]:
        node.pop("api_key", None)  # of Comet: it must not take "***" for one
    return config


def _in_home(value: Any) -> Any:
    """A path "~" or "~/..." in the user's home: loggers make a folder named "~"."""
    is_path = isinstance(value, str) and (value == "~" or value.startswith("~/"))
    return os.path.expanduser(value) if is_path else value


class Loggers:
    """Several loggers as one."""

    def __init__(self, loggers: list[SafeLogger]) -> None:
        self._loggers = loggers

    def log_config(self, config: DictConfig) -> None:
        """Calls every logger's `log_config`."""
        for logger in self._loggers:
            logger.log_config(config)

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        """Calls every logger's `log_dict`."""
        for logger in self._loggers:
            logger.log_dict(payload, step=step)

    def close(self) -> None:
        """Closes every logger, the last one first: each restores what it found."""
        for logger in reversed(self._loggers):
            logger.close()


class SafeLogger:
    """Calls a metric logger until it fails; then prints one warning, and the run goes on without.

    All metrics are in `metrics.jsonl` as well, so a full disk or a lost connection must not end a
    run. TensorBoard's logger writes in a thread: its traceback there is left out too.

    Args:
        component: the logger as the config names it.
        cfg: as in `build_logger`.

    Raises:
        UserError: it cannot be built, and not because of the system (OSError).
    """

    def __init__(self, component: Component, cfg: Any = None) -> None:
        component = replace(component, kwargs={k: _in_home(v) for k, v in component.kwargs.items()})
        self._name, self._key = component.path.rpartition(".")[2], component.key or "metric_logger"
        self._logger: MetricLogger | None = None
        self._failed = False
        self._others = set(threading.enumerate())
        self._threads: set[threading.Thread] | None = None  # of the logger, once it is built
        self._default_hook, threading.excepthook = threading.excepthook, self._thread_failed
        try:
            with long_wait(f"{self._key}: starting {self._name}"):
                self._logger = continued(component, cfg).call()
                keep_run_id(component, cfg)
        except OSError as error:
            self._fail(error)
        except UserError:
            raise
        except FAILURES as error:
            never_freed(error)
            expected = "expected a logger that can be built, or metric_logger=null"
            where = f"{self._key}: '{component.path}'"
            raise UserError(f"{where} failed: {first_line(error)}; {expected}") from error
        else:
            check_built(self._key, component.path, self._logger, LOGGER)
        self._threads = set(threading.enumerate()) - self._others

    def log_config(self, config: DictConfig) -> None:
        """Calls the logger's `log_config` if it has one. If that fails, it still gets metrics."""
        tell = getattr(self._logger, "log_config", None)
        try:
            if tell is not None:
                with long_wait(f"{self._key}: telling {self._name} the config"):
                    tell(config)
        except FAILURES as error:
            problem = f"{type(error).__name__}: {why(error)}"
            warn(f"{self._key}: {self._name} did not take the config ({problem})")

    def log_dict(self, metrics: dict[str, float], step: int) -> None:
        """Calls the logger's `log_dict`."""
        if self._logger is not None:
            try:
                self._logger.log_dict(dict(metrics), step=step)  # it may take keys out
            except FAILURES as error:
                self._fail(error)

    def close(self) -> None:
        """Closes the logger."""
        if self._logger is not None:
            try:
                with long_wait(f"{self._key}: closing {self._name}"):
                    self._logger.close()
            except FAILURES as error:
                self._fail(error)
        threading.excepthook = self._default_hook

    def _thread_failed(self, failed: threading.ExceptHookArgs, /) -> None:
        thread, mine = failed.thread, self._threads
        of_logger = thread not in self._others if mine is None else thread in mine
        if of_logger and failed.exc_value is not None:
            self._fail(failed.exc_value)
        else:
            self._default_hook(failed)

    def _fail(self, error: BaseException) -> None:
        logger, self._logger = self._logger, None
        never_freed(logger or error)
        if not self._failed:  # else another thread was first
            self._failed = True
            warn(
                f"{self._key}: {self._name} failed ({type(error).__name__}: {why(error)}); the run "
                "goes on without it; metrics.jsonl has the same metrics"
            )


def never_freed(value: object) -> None:
    """Keeps a logger that has failed for ever, or the error of its constructor, which refers to it.
    Its destructor would close it again, and print the same error or that it has no file."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


# ---- a resumed run continues its run at W&B or MLflow --------------------------------------------
# Its id lies in `<output_dir>/logger_runs.json`. W&B takes it as an argument, MLflow from the
# environment: torchtune's logger does not pass on its `run_id`. A run at Comet is continued only if
# the config gives its `experiment_key`.

FILE = "logger_runs.json"
WANDB, MLFLOW = "WandBLogger", "MLFlowLogger"
MLFLOW_VARIABLE = "MLFLOW_RUN_ID"


def continued(component: Component, cfg: Any) -> Component:
    """The logger with the arguments that continue the run whose id is kept, if `cfg.resume` says so
    and the config names no other run."""
    known = _known(cfg)
    name = component.path.rpartition(".")[2]
    if cfg is None or cfg.resume is None or name not in known:
        return component
    if name == WANDB and "id" not in component.kwargs:
        arguments = {"resume": "allow", **component.kwargs, "id": known[name]}
        return Component(component.path, arguments, component.key)
    if name == MLFLOW and not {"run_id", "run_name"} & component.kwargs.keys():
        os.environ.setdefault(MLFLOW_VARIABLE, known[name])  # MLflow removes it once it is used
    return component


def keep_run_id(component: Component, cfg: Any) -> None:
    """Writes the id of the run that the logger has started; does nothing for other loggers. Raises
    OSError."""
    name = component.path.rpartition(".")[2]
    if cfg is None or not component.path.startswith("torchtune.") or name not in (WANDB, MLFLOW):
        return
    package = sys.modules["wandb" if name == WANDB else "mlflow"]
    run = package.run if name == WANDB else package.active_run()
    if run is not None:
        run_id = run.id if name == WANDB else run.info.run_id
        write_json(_file(cfg), _known(cfg) | {name: run_id})


def _file(cfg: Any) -> Path:
    return Path(cfg.output_dir).expanduser() / FILE


def _known(cfg: Any) -> dict[str, str]:
    """Logger -> id of its run, as an earlier run has kept it; empty if nothing can be read."""
    return json_object(_file(cfg)) if cfg is not None else {}
