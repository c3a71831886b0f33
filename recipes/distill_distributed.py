"""Distill a teacher into adapters: both models quantized and sharded, the losses by next tokens.

    tune run recipes/distill_distributed --config configs/smollm2_135m_distill.yaml [key=value ...]

The teacher is a second model with the same tokens: a larger one, or the same with an adapter. To
change the recipe, copy it: `tune cp recipes/distill_distributed my_recipe.py`. This file shows
which weights are frozen, adapted and sharded, and what one update does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qfsdp.checkpoint.adapter_files import adapter_export, save_adapter
from qfsdp.checkpoint.adapter_start import adapter_texts, check_start, start_adapters
from qfsdp.checkpoint.compatibility import config_settings, data_settings
from qfsdp.checkpoint.resume import CheckpointConfig, Checkpointer, TrainState, check_resume
from qfsdp.checkpoint.weights.load import ModelConfig, ModelWeights, load_base
from qfsdp.checkpoint.weights.quantize import open_weights
from qfsdp.config.component import Component
from qfsdp.data import Batch, Loader, build_dataset, check_data, packed, step_loader
from qfsdp.distributed.global_batch import check_global_batch, split_batch
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.world import DistributedConfig, ShardingConfig, World, init_world
from qfsdp.launch.start import StopRequest, launch
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.linears import AdapterConfig, add_adapters, parameter_groups
from qfsdp.modules.distillation import DistillationConfig
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.planning.preflight import Run, check_memory, explain_out_of_memory
from qfsdp.training.distillation import Teacher, TeacherConfig, check_teacher, load_teacher
from qfsdp.training.metrics import RunLog, build_logger, check_logger, write_run_files
from qfsdp.training.nonfinite import NonFiniteWatch, OnNonFinite, start_loss_scale
from qfsdp.training.optimizer import build_optimizer, build_scheduler, check_optimizer, choose_lr
from qfsdp.training.run_config import check_model, check_run_config, use_cache_dir
from qfsdp.training.steps import forward_backward, optim_step
from qfsdp.training.teacher_cache import shared_tokens
from qfsdp.training.throughput import Meter, Profiler, ProfilerConfig, StepClock
from qfsdp.training.validation import Validation, ValidationConfig


@dataclass
class Config:
    """Keys of the YAML file and the command line; each section documents its own keys."""

    output_dir: str  # for the adapter, checkpoints, metrics and the resolved config
    model: ModelConfig
    teacher: TeacherConfig
    tokenizer: Component  # of the model, e.g. qfsdp.data.hf_tokenizer
    dataset: Component  # what is trained on, e.g. qfsdp.data.instruct_dataset
    optimizer: Component  # e.g. torch.optim.AdamW, torchao.optim.AdamW8bit
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    lr_scheduler: Component | None = None  # null: a constant learning rate
    metric_logger: Component | list[Component] | None = None  # or a list of loggers
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    push_to_hub: str | None = None  # org/name, for output_dir/adapter; a new one is private
    resume: str | None = None  # "auto", a checkpoint, or the output_dir of another run
    batch_size: int = 1  # samples per rank and micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per update
    global_batch_size: int | None = None  # samples per update; decides the micro-batches if given
    max_seq_len: int = 2048  # tokens; longer samples are cut
    packed: bool = False  # several samples in a row of max_seq_len; batch_size counts rows
    epochs: int = 1  # passes over the dataset
    max_steps: int | None = None  # updates over all epochs; null: all of them
    clip_grad_norm: float | None = 1.0  # largest norm of all gradients together; null: not clipped
    on_nonfinite: OnNonFinite = "stop"  # NaN in a loss or gradient: "stop", or "skip" the update
    compile: bool = False  # compile every decoder layer
    compile_cache_dir: str | None = None  # for compiled code; null: PyTorch's choice
    seed: int = 0  # of the order of samples, dropout and new adapters
    log_every_n_steps: int = 1  # updates between two lines of metrics
    device_memory: str | None = None  # of one accelerator, e.g. 24GiB; null: what it has
    report: bool = True  # at the end, write report.html and loss.png to output_dir
    preflight: bool = True  # estimate the memory first, and refuse a run that cannot fit

    def check(self) -> None:
        check_run_config(self)


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight or row is loaded."""
    check_resume(cfg.resume, cfg.output_dir)  # whether it is there
    check_logger(cfg.metric_logger)
    choose_lr(cfg)
    check_optimizer(cfg.optimizer, cfg.lr_scheduler, cfg.adapter.lora_plus_ratio)
    check_global_batch(cfg)
    weights = cfg.model.weights()
    model = build_model(cfg, weights)
    check_model(cfg, model, weights)
    check_start(cfg.adapter, model, weights)
    data = (cfg.tokenizer, cfg.dataset, cfg.validation.sets, model.config.vocab_size)
    check_teacher(cfg, model.config, tokenizer=check_data(*data))
    check_resume(cfg.resume, cfg.output_dir, lambda: config_settings(cfg))
    check_memory(cfg, build_model, train_step)


def build_model(cfg: Config, weights: ModelWeights) -> AnyDecoder:
    """Builds the decoder on the meta device, without storage: linears quantized, adapters added."""
    model = cfg.model.build()
    quantize_linears(model, cfg.quantization, weights.formats)
    add_adapters(model, cfg.adapter)
    model.set_activations(cfg.activation)
    if cfg.compile:
        model.compile_layers()
    return model


def load_model(cfg: Config, world: World, resumed: bool = False) -> AnyDecoder:
    """Builds, shards and loads the model; every rank reads and quantizes its own rows."""
    weights = open_weights(cfg.model, cfg.quantization, world)
    model = build_model(cfg, weights)
    shard_model(model, cfg.sharding, world)
    load_base(model, weights, world.device, cfg.sharding, progress=world.rank == 0)
    start_adapters(model, cfg.adapter, cfg.model.path, cfg.seed, resumed)
    return model.train()


def build_loader(cfg: Config, world: World) -> Loader:
    """Builds the loader of this rank's share of every global step."""
    tokenizer = cfg.tokenizer.build()
    dataset = build_dataset("dataset", cfg.dataset, tokenizer, shared_tokens(cfg))
    if cfg.packed:
        dataset = packed(dataset, cfg.max_seq_len, cfg.seed)
    return step_loader(
        dataset,
        batch_size=cfg.batch_size,
        gradient_accumulation_steps=split_batch(cfg, world.size),
        rank=world.rank,
        world_size=world.size,
        seed=cfg.seed,
        pad_id=tokenizer.pad_id,
        max_seq_len=cfg.max_seq_len,
        fill_rows=cfg.compile,  # compiled code serves batches of any length, but of one size
        context_parallel=cfg.sharding.context_parallel,
    )


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    batches: list[Batch],
    clip: float | None,
    world: World,
    clock: StepClock,
    teacher: Teacher,
) -> dict[str, float]:
    """One update from this rank's micro-batches. The loss is the mean over the target tokens of all
    ranks and micro-batches, so it does not depend on how samples are split over them."""
    update = teacher.begin(batches)

    def loss_of(b: Batch) -> Tensor:
        return update.loss(model, b)  # the teacher's pass, then the student's

    loss = forward_backward(loss_of, batches, optimizer, world, clock, model)
    metrics = optim_step(model, optimizer, loss, world, clip=clip, scheduler=scheduler, clock=clock)
    return metrics | update.metrics()


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    world = init_world(cfg.sharding, cfg.distributed)
    torch.manual_seed(cfg.seed + world.rank)  # for dropout; nothing else uses it
    choose_lr(cfg)  # where optimizer.lr is auto
    output_dir = Path(cfg.output_dir).expanduser()
    use_cache_dir(cfg.compile_cache_dir, report=cfg.compile and world.rank == 0)
    profiler = Profiler(cfg.profiler, output_dir, world)
    files = adapter_texts(cfg)
    export = adapter_export(cfg.adapter, cfg.model.path, files)
    checkpoints = Checkpointer(cfg.checkpoint, output_dir, world, export)
    logger = build_logger(cfg.metric_logger, world.rank, cfg)  # before anything is read
    loader = build_loader(cfg, world)
    total_steps = min(cfg.epochs * loader.steps_per_epoch, cfg.max_steps or 2**62)
    validation = Validation(cfg, world, output_dir, total_steps)
    origin = checkpoints.find(cfg.resume, lambda: config_settings(cfg) | data_settings(loader))
    write_run_files(output_dir, cfg, __file__, world.rank)
    teacher, clip = load_teacher(cfg, world, loader, total_steps), cfg.clip_grad_norm
    run.model = model = load_model(cfg, world, resumed=origin is not None)
    run.optimizer = optimizer = build_optimizer(cfg.optimizer, parameter_groups(model, cfg.adapter))
    start_loss_scale(optimizer, cfg.model.dtype)  # of fp16; otherwise does nothing
    scheduler = build_scheduler(cfg.lr_scheduler, optimizer, total_steps)
    state = TrainState(model, optimizer, scheduler, loader.keep_in(validation.progress))
    first_step = checkpoints.load(origin, state)  # 0 without one
    watch = NonFiniteWatch(cfg.on_nonfinite, state, checkpoints, world, teacher.parts)
    log = RunLog(output_dir, logger, first_step, total_steps, world.rank)
    log.introduce(cfg, model, loader, world, validation.sets)
    run.clock = clock = StepClock(world.device)
    meter = Meter(model, world, clock, optimizer)
    save = partial(save_adapter, model, cfg.adapter, cfg.model.path, world=world, files=files)
    with StopRequest() as signals:
        validation.run(first_step, model, log, meter, save)
        for step in validation.steps(first_step):  # to total_steps, or until patience ends
            run.step = step
            with profiler.step(step):
                with clock.phase("data"):
                    batches = loader.step(step - 1)
                metrics = train_step(
                    model, optimizer, scheduler, batches, clip, world, clock, teacher
                )
            metrics = watch.after(step, batches, metrics)
            meter.add(batches)
            stop, due = checkpoints.agree(step, signals.received, meter)
            with clock.phase("logging"):
                if step % cfg.log_every_n_steps == 0 or step == total_steps:
                    log.log(step, metrics | meter.read())
                log.advance()
            validation.run(step, model, log, meter, save)  # if it is due
            last = step == total_steps or validation.is_over
            if due or stop or last:
                checkpoints.save(step, state)
            if stop and not last:
                break
        else:
            write, which = validation.result(save)  # the best state, if patience has ended it
            checkpoints.save_result(write, output_dir / "adapter", cfg)
            log.say(f"adapter (PEFT format): {output_dir / 'adapter'}{which}")
        checkpoints.close()
    log.close(cfg.report)


if __name__ == "__main__":
    launch(__file__, Config, check, main)
