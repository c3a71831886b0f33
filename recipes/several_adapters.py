"""Train several LoRA or DoRA adapters in one pass over a frozen, quantized, sharded base.

    tune run recipes/several_adapters --config configs/smollm2_135m_several.yaml [key=value ...]

Each adapter has its own rank, rate, data, schedule and folder, and the losses of a run of its own
(recipes/qdora_distributed). A micro-batch holds the rows of all, so a weight is gathered and
dequantized once. To change it, copy it: `tune cp recipes/several_adapters my_recipe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qfsdp.checkpoint.adapter_files import check_adapter
from qfsdp.checkpoint.adapter_start import start_adapters
from qfsdp.checkpoint.compatibility import config_settings
from qfsdp.checkpoint.resume import CheckpointConfig, Checkpointer, TrainState, check_resume
from qfsdp.checkpoint.weights.load import ModelConfig, ModelWeights, load_base
from qfsdp.checkpoint.weights.quantize import open_weights
from qfsdp.common.progress import at_step
from qfsdp.config.component import Component
from qfsdp.data import PackedDataset, StepLoader, build_dataset, check_data, check_dataset
from qfsdp.data.joined import JoinedBatch, JoinedLoader
from qfsdp.distributed.global_batch import check_global_batch, split_batch
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.world import DistributedConfig, ShardingConfig, World, init_world
from qfsdp.launch.start import StopRequest, launch
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.several import add_several, alone, named
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.planning.preflight import Run, check_memory, explain_out_of_memory, micro_batch_tokens
from qfsdp.training import several
from qfsdp.training.metrics import RunLog, build_logger, check_logger, write_run_files
from qfsdp.training.nonfinite import NonFiniteWatch, OnNonFinite
from qfsdp.training.optimizer import check_optimizer, choose_lr
from qfsdp.training.run_config import check_model, check_run_config
from qfsdp.training.several_validation import SeveralValidation
from qfsdp.training.steps import forward_backward
from qfsdp.training.throughput import Meter, StepClock
from qfsdp.training.validation import ValidationConfig


@dataclass
class Config:
    """Keys of the YAML file and the command line; each section documents its own keys."""

    output_dir: str  # for adapters/NAME, checkpoints, metrics and the resolved config
    model: ModelConfig
    tokenizer: Component  # of the model, e.g. qfsdp.data.hf_tokenizer
    adapters: dict[str, several.OneConfig]  # a section for each adapter, by its name
    optimizer: Component  # of each adapter, e.g. torch.optim.AdamW, torchao.optim.AdamW8bit
    dataset: Component | None = None  # of the adapters without one of their own
    lr_scheduler: Component | None = None  # null: a constant learning rate
    metric_logger: Component | list[Component] | None = None  # or a list of loggers
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    resume: str | None = None  # "auto", a checkpoint, or the output_dir of another run
    batch_size: int = 1  # samples of each adapter per rank and micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per update
    global_batch_size: int | None = None  # samples per adapter and update; decides micro-batches
    max_seq_len: int = 2048  # tokens; longer samples are cut
    packed: bool = False  # several samples in a row of max_seq_len; batch_size counts rows
    epochs: int = 1  # passes over each dataset
    max_steps: int | None = None  # updates over all epochs; null: all of them
    clip_grad_norm: float | None = 1.0  # largest norm of an adapter's gradients; null: not clipped
    on_nonfinite: OnNonFinite = "stop"  # NaN in a loss or gradient: "stop", or "skip" its update
    compile: bool = False  # must be false: several adapters run uncompiled
    seed: int = 0  # of the order of samples and new adapters
    log_every_n_steps: int = 1  # updates between two lines of metrics
    device_memory: str | None = None  # of one accelerator, e.g. 24GiB; null: what it has
    report: bool = True  # at the end, write report.html and loss.png to output_dir
    preflight: bool = True  # estimate the memory first, and refuse a run that cannot fit

    def check(self) -> None:
        several.check_several(self)
        for name in self.adapters:
            with named(name):
                check_run_config(several.single(self, name))


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight or row is loaded."""
    check_resume(cfg.resume, cfg.output_dir)  # whether it is there
    check_logger(cfg.metric_logger)
    check_global_batch(cfg)
    weights = cfg.model.weights()
    model = build_model(cfg, weights)
    check_model(cfg, model, weights)
    for name in cfg.adapters:
        with named(name):
            one = several.single(cfg, name)
            choose_lr(one)
            check_optimizer(one.optimizer, one.lr_scheduler)
            if one.adapter.start_from is not None:
                check_adapter(one.adapter, one.adapter.start_from, alone(model, name))
        check_dataset(several.dataset_key(cfg, name), one.dataset)
    check_data(cfg.tokenizer, one.dataset, cfg.validation.sets, model.config.vocab_size)
    check_resume(cfg.resume, cfg.output_dir, lambda: config_settings(cfg))
    check_memory(cfg, build_model, train_step)


def build_model(cfg: Config, weights: ModelWeights) -> AnyDecoder:
    """Builds the decoder on the meta device, without storage: linears quantized, adapters added."""
    model = cfg.model.build()
    quantize_linears(model, cfg.quantization, weights.formats)
    add_several(model, cfg.adapters)
    model.set_activations(cfg.activation)
    return model


def load_model(cfg: Config, world: World, resumed: bool = False) -> AnyDecoder:
    """Builds, shards and loads the model; every rank reads and quantizes its own rows."""
    weights = open_weights(cfg.model, cfg.quantization, world)
    model = build_model(cfg, weights)
    shard_model(model, cfg.sharding, world, micro_batch_tokens(cfg))
    load_base(model, weights, world.device, cfg.sharding, progress=world.rank == 0)
    for name, adapter in cfg.adapters.items():
        seed = several.single(cfg, name).seed
        start_adapters(alone(model, name), adapter, cfg.model.path, seed, resumed)
    return model.train()


def build_loader(cfg: Config, world: World) -> JoinedLoader:
    """Builds the loaders of this rank's share of every step, one for each adapter."""
    tokenizer, loaders = cfg.tokenizer.build(), {}
    rows, accumulation = cfg.model.any_config().vocab_size, split_batch(cfg, world.size)
    for name in cfg.adapters:
        one = several.single(cfg, name)
        dataset = build_dataset(several.dataset_key(cfg, name), one.dataset, tokenizer, rows)
        loaders[name] = StepLoader(
            PackedDataset(dataset, cfg.max_seq_len, one.seed) if cfg.packed else dataset,
            batch_size=cfg.batch_size,
            gradient_accumulation_steps=accumulation,
            rank=world.rank,
            world_size=world.size,
            seed=one.seed,
            pad_id=tokenizer.pad_id,
            max_seq_len=cfg.max_seq_len,
        )
    return JoinedLoader(loaders, cfg.epochs, cfg.max_steps)


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    schedules: LRScheduler | None,
    batches: list[JoinedBatch],
    clip: float | None,
    world: World,
    clock: StepClock,
) -> dict[str, float]:
    """One update of every adapter from this rank's micro-batches. The loss of an adapter is the
    mean over its own target tokens of all ranks and micro-batches; gradients are those of the
    losses' sum, in which no adapter sees another's rows."""
    targets = several.targets_of_each(batches, world)
    losses = torch.zeros_like(targets)

    def loss_of(b: JoinedBatch) -> Tensor:
        of_each = several.summed_losses(model, b) / targets
        losses.add_(of_each.detach())
        return of_each.sum()

    forward_backward(loss_of, batches, optimizer, world, clock, model)
    trained = [count > 0 for count in batches[0].rows]
    return several.update_each(model, optimizer, schedules, losses, trained, clip, world, clock)


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    world = init_world(cfg.sharding, cfg.distributed)
    for name in cfg.adapters:
        choose_lr(several.single(cfg, name))  # where a rate is auto
    output_dir = Path(cfg.output_dir).expanduser()
    files = several.texts_of_each(cfg)
    checkpoints = Checkpointer(cfg.checkpoint, output_dir, world, several.export_each(cfg, files))
    logger = build_logger(cfg.metric_logger, world.rank, cfg)  # before anything is read
    loader = build_loader(cfg, world)
    total_steps, clip = loader.total_steps, cfg.clip_grad_norm
    validation = SeveralValidation(cfg, world, output_dir, loader.steps)
    origin = checkpoints.find(
        cfg.resume, lambda: config_settings(cfg) | several.settings_of_each(loader)
    )
    write_run_files(output_dir, cfg, __file__, world.rank)
    run.model = model = load_model(cfg, world, resumed=origin is not None)
    optimizer, schedules = several.build_optimizers(cfg, model, loader.steps)
    run.optimizer = optimizer
    state = TrainState(model, optimizer, schedules, validation.progress)
    first_step = checkpoints.load(origin, state)  # 0 without one
    watch = NonFiniteWatch(cfg.on_nonfinite, state, checkpoints, world, several.losses_to_look_at)
    log = RunLog(output_dir, logger, first_step, total_steps, world.rank)
    for name, of_one in loader.loaders.items():
        log.say(several.in_words(cfg, name, of_one, loader.steps[name]))
    run.clock = clock = StepClock(world.device)
    meter = Meter(model, world, clock, optimizer)
    saves = several.saves_of_each(cfg, model, world, files)
    with StopRequest() as signals:
        validation.run(first_step, model, log, meter, saves)
        for step in range(first_step + 1, total_steps + 1):
            run.step = step
            at_step(step)  # for the watchdog
            with clock.phase("data"):
                batches = loader.step(step - 1)
            metrics = train_step(model, optimizer, schedules, batches, clip, world, clock)
            metrics = watch.after(step, batches, metrics)
            meter.add(batches)
            stop, due = checkpoints.agree(step, signals.received, meter)
            with clock.phase("logging"):
                if step % cfg.log_every_n_steps == 0 or step == total_steps:
                    log.log(step, metrics | meter.read())
                log.advance()
            validation.run(step, model, log, meter, saves)  # if it is due
            if due or stop or step == total_steps:
                checkpoints.save(step, state)
            if stop and step < total_steps:
                break
        else:
            for name, write in saves.items():
                checkpoints.save_result(write, output_dir / "adapters" / name)
                log.say(f"adapter {name} (PEFT format): {output_dir / 'adapters' / name}")
        checkpoints.close()
    log.close(cfg.report)


if __name__ == "__main__":
    launch(__file__, Config, check, main)
