"""Import paths of earlier versions, for recipes that users have copied: they work until 0.3.

An import of an old path hands out the names of today's module, and says where that is.
`qfsdp/__init__.py` asks here for modules that Python does not find.
"""

from __future__ import annotations

import importlib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# (old package, new package): names of modules, with "=new name" where that changed too.
_PACKAGES = {
    ("qfsdp.cli", "qfsdp.common"): (
        "durations=sizes errors files file_digests messages output printable progress quiet "
        "sealed secret_keys=printable sizes terminal slow=long_waits"
    ),
    ("qfsdp.cli", "qfsdp.config"): (
        "config=load kinds=component_types recipes=recipe_files component convert "
        "foreign_keys interpolations reference "
        "tool_config"
    ),
    ("qfsdp.cli", "qfsdp.hub"): "hub=download hub_errors=errors hub_upload=upload",
    ("qfsdp.cli", "qfsdp.launch"): (
        "launch=start estimates=preflight_findings agent lost_peers nodes ranks signals watchdog"
    ),
    ("qfsdp.memory", "qfsdp.planning"): (
        "advice changes estimate extrapolate graph_pools hardware kernel_memory "
        "known_models oom patches predict preflight report roofline search tracker "
        "wire=collective_bytes"
    ),
    ("qfsdp.memory.sweep", "qfsdp.sweep"): (
        "cells estimate_cell figures=output measure_cell output prices published results "
        "tables=output"
    ),
    ("qfsdp.memory.doctor", "qfsdp.cli.doctor"): "checks run steps",
    ("qfsdp.modules", "qfsdp.modules.attention"): (
        "attention=self_attention document_attention=documents document_lengths "
        "shared_attention=shared_prompts sink_attention=sinks kv_cache request_cache"
    ),
    ("qfsdp.modules", "qfsdp.modules.adapters"): (
        "adapter_config=config adapters=linears folded_linear=folded row_norms reference"
    ),
    ("qfsdp.modules", "qfsdp.modules.low_rank"): (
        "adapted_linear=product adapted_linear_ops=product same_input=linear"
    ),
    ("qfsdp.modules.low_rank", "qfsdp.modules.low_rank"): "grouped=linear",
    ("qfsdp.modules.adapters", "qfsdp.modules.adapters"): "low_rank_linear=linears",
    ("qfsdp.modules", "qfsdp.modules.experts"): (
        "experts=stacked adapted_experts=adapted expert_product=product mixture router routing"
    ),
    ("qfsdp.data", "qfsdp.data.chat"): (
        "answer_form=trained_spans chat_template chat_tokenizer choose_template context_columns "
        "messages special_tokens template_process trained_spans"
    ),
    ("qfsdp.data", "qfsdp.data.preferences"): (
        "preferences=tokenized preference_batch=batch preference_datasets=datasets "
        "preference_loader=loader preference_rows=rows shared_prompts"
    ),
    ("qfsdp.data", "qfsdp.data.files"): (
        "csv_files=file_records data_files file_records file_rows json_lines parquet_files "
        "row_stream=file_rows rows"
    ),
    ("qfsdp.common", "qfsdp.common"): "durations=sizes secret_keys=printable",
    ("qfsdp.data", "qfsdp.data"): "text=pretokenized row_progress=tokenized_dataset",
    ("qfsdp.sweep", "qfsdp.sweep"): "figures=output tables=output",
    ("qfsdp.modules", "qfsdp.modules"): (
        "norms=mlp model_parts=decoder_base varying_lengths=decoder_base"
    ),
    ("qfsdp.checkpoint.weights", "qfsdp.checkpoint.weights"): (
        "progress=read huge_pages=load hub_names=other_names"
    ),
    ("qfsdp.checkpoint", "qfsdp.checkpoint"): "adapter_digests=tensor_file safe_reader=state_files",
    ("qfsdp.data.chat", "qfsdp.data.chat"): "answer_form=trained_spans",
    ("qfsdp.data.files", "qfsdp.data.files"): "csv_files=file_records",
    ("qfsdp.training", "qfsdp.training"): (
        "second_look=locate_nonfinite metrics_file=metrics logger_runs=metric_logger "
        "step_clock=steps"
    ),
    ("qfsdp.training.report", "qfsdp.training.report"): "png=drawing svg=page at_end=sections",
    ("qfsdp.evaluation.judging", "qfsdp.examples.judge"): (
        "exchanges generated_questions=questions questions verdicts"
    ),
}
MOVED = {
    f"{old}.{name.split('=')[0]}": f"{new}.{name.split('=')[-1]}"
    for (old, new), names in _PACKAGES.items()
    for name in names.split()
}
# Modules that some names have left: their `__getattr__` calls `name_that_left`.
LEFT = {"qfsdp.distributed.gradients": "qfsdp.training.steps"}
# Packages with no module left.
_GONE = {"qfsdp.evaluation.judging"} | {f"qfsdp.memory{name}" for name in ("", ".sweep", ".doctor")}


class OldPath:
    """Loads an old path as a module that takes every name from the module of today."""

    def create_module(self, spec: ModuleSpec) -> None:
        """None: Python makes an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old not in _GONE:
            tell(old, MOVED[old])
            vars(module)["__getattr__"] = lambda name: name_of_today(old, name)


def spec_of(name: str) -> ModuleSpec | None:
    """How an old path is loaded, and `qfsdp.examples`, which a wheel has in the package and a
    checkout beside it; None for any other name."""
    if name == "qfsdp.examples":
        found = ModuleSpec(name, None, is_package=True)
        found.submodule_search_locations = [str(Path(__file__).parents[2] / "examples")]
        return found
    if name in _GONE or name in MOVED:
        return ModuleSpec(name, OldPath(), is_package=name in _GONE)  # type: ignore[arg-type]
    return None


def name_in_package(package: str, name: str) -> Any:
    """A name of the module that `package` was; `__getattr__` of such a package calls this. Raises
    AttributeError: the module has no such name, or it is a module of the package."""
    if name.startswith("__") or f"{package}.{name}" in MOVED.values():
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = name_of_today(package, name)
    tell(package, MOVED[package])
    return value


def name_that_left(module: str, name: str) -> Any:
    """A name that was in `module`. Raises AttributeError: it never was."""
    today = importlib.import_module(LEFT[module])
    if name.startswith("__") or name not in vars(today):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    tell(f"{module}.{name}", f"{LEFT[module]}.{name}", "name")
    return getattr(today, name)


def name_of_today(old: str, name: str) -> Any:
    return getattr(importlib.import_module(MOVED[old]), name)


def tell(old: str, new: str, what: str = "module") -> None:
    """Says once, on rank 0, where a module or a name is now."""
    warn = importlib.import_module("qfsdp.common.terminal").warn
    if old not in _told:
        _told.add(old)
        warn(f"the {what} {old} is {new} now; its old path works until qfsdp 0.3")


_told: set[str] = set()
