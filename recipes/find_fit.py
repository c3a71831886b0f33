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

import time
from collections.abc import Sequence
from dataclasses import dataclass

from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.cli.sizes import format_size
from qfsdp.cli.tool_config import Training, run_tool
from qfsdp.memory.changes import as_words, as_yaml
from qfsdp.memory.hardware import Hardware, HardwareConfig, device_memory_of
from qfsdp.memory.predict import Predictor
from qfsdp.memory.search import Trial, candidates, search


@dataclass
class Config(HardwareConfig):
    """The hardware: the fields of `HardwareConfig`, and the number of GPUs."""

    world_size: int = 1  # GPUs
    local_world_size: int | None = None  # GPUs per machine; null: all are in one machine

    def check(self) -> None:
        super().check()
        if self.world_size < 1:
            raise InvalidField("world_size", self.world_size, "an integer of at least 1")
        local = self.local_world_size or self.world_size
        if local < 1 or self.world_size % local:
            raise InvalidField("local_world_size", local, f"a divisor of {self.world_size}")


def show_hardware(cfg: Config, hardware: Hardware) -> None:
    def rate(value: float | None) -> str:
        return "PCIe" if value is None else f"{value / 1e9:.0f} GB/s"

    host = "enough" if hardware.host_memory is None else format_size(hardware.host_memory)
    print(
        f"{cfg.world_size} GPUs of {format_size(hardware.device_memory)}, "
        f"{hardware.matmul_rate / 1e12:.0f} TFLOP/s, memory {rate(hardware.memory_bandwidth)}, "
        f"to each other {rate(hardware.interconnect)}, PCIe {rate(hardware.pcie)}; "
        f"machine: {host} memory of {rate(hardware.host_bandwidth)}, disk {rate(hardware.disk)}"
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


def show_best(best: Trial) -> None:
    changes = best.prediction.changes
    if not changes:
        print("\nThe config as it is, is the best.")
        return
    print(f"\nThe best as overrides:\n\n{as_words(changes)}\n\nor in the config:\n")
    print(as_yaml(changes))
    if best.candidate.offload == "base_to_disk":
        print("A base on disk needs a quantized model folder; tune run recipes/quantize writes it.")


def main(cfg: Config, training: Training) -> None:
    began, train = time.perf_counter(), training.cfg
    hardware = cfg.build(device_memory_of(train))
    samples = train.batch_size * train.gradient_accumulation_steps
    show_hardware(cfg, hardware)
    print(f"{samples} samples of {train.max_seq_len} tokens per GPU and step, as the config has it")
    local = cfg.local_world_size or cfg.world_size
    functions = (training.recipe.build_model, training.recipe.train_step)
    predict = Predictor(*functions, train, cfg.world_size, local, hardware)
    tried = []
    for trial in search(candidates(cfg.world_size), predict, samples, hardware):
        show_trial(trial, hardware)
        tried.append(trial)
    fitting = sorted((t for t in tried if t.fits), key=lambda t: t.prediction.time.seconds)
    if not fitting:
        least = min(trial.prediction.device_bytes for trial in tried)
        raise UserError(f"nothing fits; the smallest needs {format_size(least)} of every GPU")
    show_table(fitting)
    show_best(fitting[0])
    print(f"found in {time.perf_counter() - began:.0f} s, by {predict.count} dry runs")


if __name__ == "__main__":
    run_tool(Config, main)
