"""A resumed run continues its run at W&B or MLflow: its id lies in `<output_dir>/logger_runs.json`.

W&B takes the id as an argument, MLflow from the environment: torchtune's logger does not pass on
its `run_id`. A run at Comet is continued only if the config gives its `experiment_key`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from qfsdp.common.files import json_object, write_json
from qfsdp.config.component import Component

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
