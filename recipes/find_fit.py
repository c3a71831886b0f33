"""Find the fastest way to run a training config on given GPUs, before there are any.

    tune run recipes/find_fit --config configs/llama3_70b_qdora.yaml \\
        gpu=rtx4090 world_size=2 host_memory=64GiB [key=value ...]

Tries sharding strategies, activation checkpointing and offload, from plain data parallelism to a
base on disk, each with the largest micro-batch that fits. The number of samples in a step stays
that of the config. Memory comes from dry runs of the training recipe (no GPU, no weights), time
from a roofline. Prints a table, the fastest first, and the best as overrides to paste.

Keys of `Config` below describe the hardware; all others change the training config.
`benchmarks/bandwidth.py` measures a machine for `hardware=FILE.json`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.sizes import format_size
from qfsdp.config.tool_config import Training, run_tool
from qfsdp.distributed.global_batch import split_batch
from qfsdp.planning.changes import as_words, as_yaml
from qfsdp.planning.hardware import Hardware, HardwareConfig, check_bf16, device_memory_of
from qfsdp.planning.predict import Predictor, check_process_fits
from qfsdp.planning.search import Trial, candidates, search
from qfsdp.training.learning_rate import any_lr
from qfsdp.training.optimizer import check_optimizer
from qfsdp.training.run_config import add_new_tokens


@dataclass
class Config(HardwareConfig):
    """The hardware: the fields of `HardwareConfig`, and the number of GPUs."""

    world_size: int = 1  # GPUs
    local_world_size: int | None = None  # GPUs per machine; null: all are in one machine

    def check(self) -> None:
        super().check()
        check_bounds(self, "world_size", least=1, most=2**16)
        local = self.local_world_size or self.world_size
        if local < 1 or self.world_size % local:
            raise InvalidField("local_world_size", local, f"a divisor of {self.world_size}")


def show_hardware(cfg: Config, hardware: Hardware) -> None:
    def rate(value: float | None) -> str:
        return "PCIe" if value is None else f"{value / 1e9:.0f} GB/s"

    host = "enough" if hardware.host_memory is None else format_size(hardware.host_memory)
    network = "" if hardware.network is None else f"network {rate(hardware.network)}, "
    print(
        f"{cfg.world_size} GPUs of {format_size(hardware.device_memory)}, "
        f"{hardware.matmul_rate / 1e12:.0f} TFLOP/s, memory {rate(hardware.memory_bandwidth)}, "
        f"to each other {rate(hardware.interconnect)}, PCIe {rate(hardware.pcie)}; "
        f"{network}machine: {host} memory of {rate(hardware.host_bandwidth)}, "
        f"disk {rate(hardware.disk)}"
    )


def show_trial(trial: Trial, hardware: Hardware) -> None:
    """Prints one line per trial while the search goes on."""
    prediction = trial.prediction
    device, host = format_size(prediction.device_bytes), format_size(prediction.host_bytes)
    if trial.fits:
        verdict = f"micro-batch {trial.batch}, {prediction.time.seconds:.1f} s per step"
    elif not prediction.fits_device(hardware):
        verdict = f"does not fit: one sample takes {device} of every GPU"
    else:
        verdict = f"does not fit: one sample takes {host} of host memory"
    print(f"  {trial.candidate.name}: {verdict}", flush=True)


def show_table(fitting: Sequence[Trial]) -> None:
    rows = [("way to run", "batch", "per GPU", "host RAM", "s/step", "tokens/s", "bound by")]
    for trial in fitting:
        p = trial.prediction
        sizes = format_size(p.device_bytes), format_size(p.host_bytes)
        speed = f"{p.time.seconds:.1f}", f"{p.tokens_per_second:.0f}"
        rows.append((trial.candidate.name, str(trial.batch), *sizes, *speed, p.time.bound))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *padded]))
    print(
        "\nper GPU: with fragmentation, CUDA context and NCCL, as estimate_memory says below its "
        "peak\nhost RAM: of a machine, with 3 GiB for each process"
    )


def show_best(best: Trial) -> None:
    changes = best.prediction.changes
    if not changes:
        print("\nThe config as it is, is the best.")
        return
    print(f"\nThe best as overrides:\n\n{as_words(changes)}\n\nor in the config:\n")
    print(as_yaml(changes))
    if best.candidate.offload == "base_to_disk":
        print("A base on disk needs a quantized model folder; tune run recipes/quantize writes it.")


def show_expert_parallel(best: Trial, predict: Predictor, ranks: int) -> None:
    """Says of a mixture on several GPUs whether dividing its experts pays."""
    experts, changes = predict.experts, best.prediction.changes
    parts = math.gcd(ranks, experts)
    if parts == 1 or best.candidate.strategy == "ddp":
        return
    try:
        divided = predict(changes | {"sharding.expert_parallel": parts})
    except UserError:  # its rows are not divided by the ranks
        return
    seconds, before = divided.time.seconds, best.prediction.time.seconds
    print(
        f"sharding.expert_parallel={parts} {'pays' if seconds < before else 'does not pay'}: "
        f"{seconds:.1f} s per step instead of {before:.1f}, "
        f"{format_size(divided.device_bytes)} per GPU"
    )


def main(cfg: Config, training: Training) -> None:
    began, train = time.perf_counter(), training.cfg
    split_batch(train, cfg.world_size)
    add_new_tokens(train)
    check_optimizer(any_lr(train.optimizer), train.lr_scheduler)
    hardware = cfg.build(device_memory_of(train))
    check_bf16(cfg.gpu, train.model.dtype)
    local = cfg.local_world_size or cfg.world_size
    check_process_fits(hardware, local)
    machines = cfg.world_size // local
    if machines > 1 and hardware.network is None:
        raise UserError(
            f"network: null; expected what a machine sends to the other {machines - 1}, such as "
            "network=12GB for 100 Gb/s (benchmarks/bandwidth.py measures it)"
        )
    samples = train.batch_size * train.gradient_accumulation_steps
    show_hardware(cfg, hardware)
    print(f"{samples} samples of {train.max_seq_len} tokens per GPU and step, as the config has it")
    sys.stdout.flush()  # the search may take a minute
    functions = (training.recipe.build_model, training.recipe.train_step)
    predict = Predictor(*functions, train, cfg.world_size, local, hardware)
    tried = []
    rows = (predict.takes_tiles, predict.sharing_ranks)
    ways = candidates(cfg.world_size, machines, *rows)
    for trial in search(ways, predict, samples, hardware):
        show_trial(trial, hardware)
        tried.append(trial)
    fitting = sorted((t for t in tried if t.fits), key=lambda t: t.prediction.time.seconds)
    if not fitting:
        needs = f"{format_size(min(t.prediction.device_bytes for t in tried))} of every GPU"
        if on_gpu := [t.prediction for t in tried if t.prediction.fits_device(hardware)]:
            needs = f"{format_size(min(p.host_bytes for p in on_gpu))} of host memory"
        raise UserError(f"nothing fits; the smallest needs {needs}")
    show_table(fitting)
    show_best(fitting[0])
    show_expert_parallel(fitting[0], predict, cfg.world_size)
    print(f"found in {time.perf_counter() - began:.0f} s, by {predict.count} dry runs")


if __name__ == "__main__":
    run_tool(Config, main)
