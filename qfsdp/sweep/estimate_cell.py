"""Fills in a cell by an estimate: memory from a dry run, time from a roofline, without a GPU."""

from __future__ import annotations

from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.common.sizes import format_size
from qfsdp.config.tool_config import Training
from qfsdp.planning.hardware import Hardware
from qfsdp.planning.predict import Predictor, step_tokens
from qfsdp.sweep.cells import Cell
from qfsdp.sweep.results import FAILED, FITS, TOO_LARGE

GIB = 2**30


def estimate_cell(training: Training, cell: Cell, hardware: Hardware, ranks: int) -> dict[str, Any]:
    """What a step of the cell's config takes on `ranks` GPUs of one machine.

    Returns:
        "status" and "reason", and of a config that could be estimated: "allocated_gib" (peak of
        tensors), "memory_gib" (with fragmentation and the CUDA context), "host_gib" (of the
        machine); where it fits also "seconds_per_step", "samples_per_second", "tokens_per_second"
        (of all ranks) and "bound" (what limits the speed).
    """
    recipe, cfg = training.recipe, cell.cfg
    functions = (recipe.build_model, recipe.train_step)
    try:
        found = Predictor(*functions, cfg, ranks, ranks, hardware)({})
    except UserError as error:
        return {"status": FAILED, "reason": str(error)}
    memory = {
        "allocated_gib": sum(found.kinds.values()) / GIB,
        "memory_gib": found.device_bytes / GIB,
        "host_gib": found.host_bytes / GIB,
    }
    if not found.fits(hardware):
        of_host = found.fits_device(hardware)
        needs = format_size(found.host_bytes if of_host else found.device_bytes)
        has = format_size((hardware.host_memory or 0) if of_host else hardware.device_memory)
        where = "host memory" if of_host else "a GPU"
        reason = f"needs {needs} of {where}, which has {has}"
        return {"status": TOO_LARGE, "reason": reason, **memory}
    rows = step_tokens(cfg) / cfg.max_seq_len * ranks
    return {
        "status": FITS,
        **memory,
        "seconds_per_step": found.time.seconds,
        "samples_per_second": rows / found.time.seconds,
        "tokens_per_second": found.tokens_per_second,
        "bound": found.time.bound,
    }
