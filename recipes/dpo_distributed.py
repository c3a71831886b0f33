"""Preference tuning of adapters over one quantized, sharded base: DPO and its family.

    tune run recipes/dpo_distributed --config configs/llama3_8b_dpo.yaml [key=value ...]

The reference is the same base, its adapters off or as the run began: no second model is in memory.
To change what an update does, copy it: `tune cp recipes/dpo_distributed my_recipe.py`.
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
from qfsdp.data import check_data
from qfsdp.data.preferences.loader import PairBatch, PreferenceLoader, RowLimit, build_preferences
from qfsdp.distributed.global_batch import check_global_batch, split_batch
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.world import DistributedConfig, ShardingConfig, World, init_world
from qfsdp.launch.start import StopRequest, launch
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.linears import AdapterConfig, add_adapters, keep_start, parameter_groups
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.planning.preflight import Run, check_memory, explain_out_of_memory, micro_batch_tokens
from qfsdp.training.metrics import RunLog, build_logger, check_logger, write_run_files
from qfsdp.training.nonfinite import NonFiniteWatch, OnNonFinite, start_loss_scale
from qfsdp.training.optimizer import build_optimizer, build_scheduler, check_optimizer, choose_lr
from qfsdp.training.preference import Losses, Objective, Reference, check_packed, sequence_logprobs
from qfsdp.training.preference_validation import PreferenceValidation, ValidationConfig
from qfsdp.training.reference_cache import cached_logprobs
from qfsdp.training.run_config import add_new_tokens, check_model, check_run_config, use_cache_dir
from qfsdp.training.steps import forward_backward, optim_step
from qfsdp.training.throughput import Meter, Profiler, ProfilerConfig, StepClock


@dataclass
class Config:
    """Keys of the YAML file and the command line; each section documents its own keys."""

    output_dir: str  # for the adapter, checkpoints, metrics and the resolved config
    model: ModelConfig
    tokenizer: Component  # of the model, e.g. qfsdp.data.hf_tokenizer
    dataset: Component  # what is trained on, e.g. qfsdp.data.preference_dataset
    optimizer: Component  # e.g. torch.optim.AdamW, torchao.optim.AdamW8bit
    loss: Losses = field(default_factory=lambda: Component("sigmoid"))  # or a mix
    reference: Reference = "base"  # the adapters off; "start": as the run begins; "none": SimPO
    reference_logprobs: str = "live"  # "cache": computed ahead, kept in output_dir; or a folder
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
    batch_size: int = 1  # pairs per rank and micro-batch; packed: rows
    gradient_accumulation_steps: int = 1  # micro-batches per update
    global_batch_size: int | None = None  # pairs per update; decides the micro-batches if given
    max_seq_len: int = 2048  # tokens of a prompt and an answer; longer ones are cut
    packed: bool = False  # several pairs in a row of max_seq_len; batch_size counts rows
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
    add_new_tokens(cfg)
    rows = cfg.model.any_config().vocab_size
    check_data(cfg.tokenizer, cfg.dataset, cfg.validation.sets, rows)
    choose_lr(cfg)
    check_optimizer(cfg.optimizer, cfg.lr_scheduler, cfg.adapter.lora_plus_ratio)
    check_global_batch(cfg)
    weights = cfg.model.weights()
    model = build_model(cfg, weights)
    check_model(cfg, model, weights)
    check_start(cfg.adapter, model, weights)
    check_packed(cfg.packed, cfg.max_seq_len, model.config)
    check_resume(cfg.resume, cfg.output_dir, lambda: config_settings(cfg))
    check_logger(cfg.metric_logger)  # imports torchtune: over a second
    check_memory(cfg, build_model, train_step)


def build_model(cfg: Config, weights: ModelWeights) -> AnyDecoder:
    """Builds the decoder on the meta device, without storage: linears quantized, adapters added."""
    model = cfg.model.build()
    quantize_linears(model, cfg.quantization, weights.formats)
    add_adapters(model, cfg.adapter)
    keep_start(model, cfg.reference, cfg.adapter)
    model.set_activations(cfg.activation)
    if cfg.compile:
        model.compile_layers()
    return model


def load_model(cfg: Config, world: World, resumed: bool = False) -> AnyDecoder:
    """Builds, shards and loads the model; every rank reads and quantizes its own rows."""
    weights = open_weights(cfg.model, cfg.quantization, world)
    model = build_model(cfg, weights)
    shard_model(model, cfg.sharding, world, micro_batch_tokens(cfg))
    load_base(model, weights, world.device, cfg.sharding, progress=world.rank == 0)
    start_adapters(model, cfg.adapter, cfg.model.path, cfg.seed, resumed)
    return model.train()


def build_loader(cfg: Config, world: World) -> PreferenceLoader:
    """Builds the loader of this rank's share of every global step."""
    tokenizer = cfg.tokenizer.build()
    rows = cfg.model.any_config().vocab_size
    return PreferenceLoader(  # packed: both answers of a pair are in one row
        build_preferences("dataset", cfg.dataset, tokenizer, rows, RowLimit.of(cfg)),
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
    batches: list[PairBatch],
    clip: float | None,
    world: World,
    clock: StepClock,
    objective: Objective,
) -> dict[str, float]:
    """One update. The loss is a mean over all pairs, however ranks and micro-batches split them."""
    update = objective.begin(model, batches, world)

    def loss_of(b: PairBatch) -> Tensor:
        with clock.phase("reference"):  # first: its activations are freed
            reference = objective.reference(model, b)
        return update.loss(b, reference, sequence_logprobs(model, b))

    loss = forward_backward(loss_of, batches, optimizer, world, clock, model)
    metrics = optim_step(model, optimizer, loss, world, clip=clip, scheduler=scheduler, clock=clock)
    return metrics | update.metrics()


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    world = init_world(cfg.sharding, cfg.distributed)
    torch.manual_seed(cfg.seed + world.rank)  # for dropout; nothing else uses it
    choose_lr(cfg)  # where optimizer.lr is auto
    add_new_tokens(cfg)  # of the tokenizer, if it has some
    output_dir = Path(cfg.output_dir).expanduser()
    use_cache_dir(cfg.compile_cache_dir, report=cfg.compile and world.rank == 0)
    profiler = Profiler(cfg.profiler, output_dir, world)
    files = adapter_texts(cfg)
    export = adapter_export(cfg.adapter, cfg.model.path, files)
    checkpoints = Checkpointer(cfg.checkpoint, output_dir, world, export)
    logger = build_logger(cfg.metric_logger, world.rank, cfg)  # before anything is read
    loader = build_loader(cfg, world)
    objective, clip = Objective(cfg.loss, cfg.reference, loader.paired), cfg.clip_grad_norm
    total_steps = min(cfg.epochs * loader.steps_per_epoch, cfg.max_steps or 2**62)
    validation = PreferenceValidation(cfg, world, output_dir, total_steps)
    origin = checkpoints.find(cfg.resume, lambda: config_settings(cfg) | data_settings(loader))
    write_run_files(output_dir, cfg, __file__, world.rank)
    run.model = model = load_model(cfg, world, resumed=origin is not None)
    run.optimizer = optimizer = build_optimizer(cfg.optimizer, parameter_groups(model, cfg.adapter))
    start_loss_scale(optimizer, cfg.model.dtype)  # of fp16; otherwise does nothing
    scheduler = build_scheduler(cfg.lr_scheduler, optimizer, total_steps)
    state = TrainState(model, optimizer, scheduler, loader.keep_in(validation.progress))
    first_step = checkpoints.load(origin, state)  # 0 without one
    watch = NonFiniteWatch(cfg.on_nonfinite, state, checkpoints, world, objective.parts)
    log = RunLog(output_dir, logger, first_step, total_steps, world.rank)
    log.introduce(cfg, model, loader, world, validation.sets)
    run.clock = clock = StepClock(world.device)
    meter = Meter(model, world, clock, optimizer)
    save = partial(save_adapter, model, cfg.adapter, cfg.model.path, world=world, files=files)
    with StopRequest() as signals:
        loader.reference = cached_logprobs(cfg, loader, model, objective, world, total_steps)
        validation.run(first_step, model, log, meter, save)
        for step in validation.steps(first_step):  # to total_steps, or until patience ends
            run.step = step
            with profiler.step(step):
                with clock.phase("data"):
                    batches = loader.step(step - 1)
                metrics = train_step(
                    model, optimizer, scheduler, batches, clip, world, clock, objective
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
