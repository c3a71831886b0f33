"""Train weights themselves: all of a model, or some layers over a frozen, quantized rest.

    tune run recipes/full_finetune_distributed --config configs/llama3_8b_full.yaml [key=value ...]

Training all weights is full finetuning. Training only the blocks that recipes/block_expansion has
added is Llama-Pro. One process starts per visible accelerator, or as many as torchrun's flags give
(`tune run --nproc_per_node 2 recipes/full_finetune_distributed ...`). To change the recipe, copy
it: `tune cp recipes/full_finetune_distributed my_recipe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from qfsdp.checkpoint.compatibility import config_settings, data_settings
from qfsdp.checkpoint.resume import CheckpointConfig, Checkpointer, TrainState, check_resume
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig, check_disk, load_base
from qfsdp.checkpoint.weights.save import save_model
from qfsdp.cli.component import Component
from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.cli.launch import launch
from qfsdp.cli.signals import StopRequest
from qfsdp.data import Batch, PackedDataset, StepLoader, check_data
from qfsdp.distributed.gradients import clip_grad_norm, trainable_parameters
from qfsdp.distributed.sharding import shard_model, shard_rank
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, init_world
from qfsdp.memory.oom import Run, explain_out_of_memory
from qfsdp.memory.preflight import check_memory
from qfsdp.modules.adapters import refresh_dora_norms
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES, compute_dtype
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.trainable import TrainableConfig, check_trainable, set_trainable
from qfsdp.modules.transformer import ActivationConfig, Decoder
from qfsdp.tensor_subclasses.kernels.compiled import has_compiler, use_cache_dir
from qfsdp.training.metrics import RunLog, write_run_files
from qfsdp.training.optimizer import build_optimizer, build_scheduler, check_optimizer
from qfsdp.training.profiler import Profiler, ProfilerConfig
from qfsdp.training.throughput import Meter, StepClock
from qfsdp.training.validation import Validation, ValidationConfig


@dataclass
class Config:
    """Keys of the YAML file and the command line; each section documents its own keys."""

    output_dir: str
    model: ModelConfig
    tokenizer: Component
    dataset: Component
    optimizer: Component
    optimizer_in_backward: bool = False  # update with each gradient at once, and free it
    lr_scheduler: Component | None = None
    metric_logger: Component | None = None
    trainable: TrainableConfig = field(default_factory=TrainableConfig)
    quantization: QuantizationConfig = field(default_factory=lambda: QuantizationConfig("none"))
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    resume: str | None = None  # "auto", a checkpoint, or the output_dir of another run
    save_dtype: Literal["bf16", "fp32"] | None = None  # of output_dir/model; null: model.dtype
    batch_size: int = 1  # samples per rank and micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per update
    max_seq_len: int = 2048  # tokens; longer samples are cut
    packed: bool = False  # several samples in a row of max_seq_len; batch_size counts rows
    epochs: int = 1
    max_steps: int | None = None  # updates over all epochs; null: all of them
    clip_grad_norm: float | None = 1.0
    compile: bool = False  # compile every decoder layer
    compile_cache_dir: str | None = None  # for compiled code; null: PyTorch's choice
    seed: int = 0
    log_every_n_steps: int = 1
    device_memory: str | None = None  # of one accelerator, e.g. 24GiB; null: what it has
    preflight: bool = True  # estimate the memory first, and refuse a run that cannot fit

    def check(self) -> None:
        for name in ("batch_size", "gradient_accumulation_steps", "epochs", "log_every_n_steps"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "an integer of at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise InvalidField("max_steps", self.max_steps, "an integer of at least 1, or null")
        if self.max_seq_len < 2:
            raise InvalidField("max_seq_len", self.max_seq_len, "an integer of at least 2")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise InvalidField("clip_grad_norm", self.clip_grad_norm, "a number above 0, or null")
        check_trainable(self)


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight or row is loaded."""
    if cfg.metric_logger is not None:
        cfg.metric_logger.check("metric_logger")
    check_optimizer(cfg.optimizer, cfg.lr_scheduler)
    if cfg.compile and not has_compiler():
        raise UserError("compile: true needs a C++ compiler; expected g++, or compile=false")
    weights = ModelWeights(cfg.model.path)
    model = build_model(cfg, weights)
    weights.check(model)
    if cfg.sharding.offload_base == "disk":
        check_disk(model, weights)
    if cfg.max_seq_len > (positions := model.config.max_position_embeddings):
        limit = f"at most {positions}, the model's positions"
        raise UserError(f"max_seq_len: {cfg.max_seq_len}; expected {limit}")
    check_data(cfg.tokenizer, cfg.dataset, cfg.validation.sets)
    check_resume(cfg.resume, cfg.output_dir, lambda: config_settings(cfg))
    check_memory(cfg, build_model, train_step)


def build_model(cfg: Config, weights: ModelWeights) -> Decoder:
    """Builds the decoder on the meta device, without storage; frozen linears are quantized."""
    config = DecoderConfig.from_dir(cfg.model.folder)
    with torch.device("meta"):
        model = Decoder(config).to(compute_dtype(cfg.model.dtype))
    trained = set_trainable(model, cfg.trainable, cfg.model.folder)
    quantize_linears(model, cfg.quantization, weights.formats, plain=trained)
    model.set_activations(cfg.activation)
    if cfg.compile:
        model.compile_layers()
    return model


def load_model(cfg: Config, world: World) -> Decoder:
    """Builds, shards and loads the model; every rank reads and quantizes its own rows."""
    weights = ModelWeights(cfg.model.path)
    model = build_model(cfg, weights)
    shard_model(model, cfg.sharding, world)
    load_base(model, weights, world.device, cfg.sharding, progress=world.rank == 0)
    return model.train()


def build_loader(cfg: Config, world: World) -> StepLoader:
    """Builds the loader of this rank's share of every global step."""
    tokenizer = cfg.tokenizer.build()
    dataset = cfg.dataset.build(tokenizer=tokenizer)
    if cfg.packed:
        dataset = PackedDataset(dataset, cfg.max_seq_len, cfg.seed)
    return StepLoader(
        dataset,
        batch_size=cfg.batch_size,
        gradient_accumulation_steps=cfg.gradient_accumulation_steps,
        rank=world.rank,
        world_size=world.size,
        seed=cfg.seed,
        pad_id=tokenizer.pad_id,
        max_seq_len=cfg.max_seq_len,
        fill_rows=cfg.compile,  # compiled code serves batches of any length, but of one size
    )


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    batches: list[Batch],
    clip: float | None,
    world: World,
    clock: StepClock,
) -> dict[str, float]:
    """One update from this rank's micro-batches. The loss is the mean over the target tokens of all
    ranks and micro-batches, so it does not depend on how samples are split over them."""
    targets = max(world.sum(sum(batch.num_targets for batch in batches)), 1)
    loss = torch.zeros((), device=world.device)
    for batch in batches:
        b = batch.to(world.device)
        with clock.phase("forward"):
            part = model(b.tokens, b.positions, labels=b.labels, cu_seqlens=b.cu_seqlens) / targets
        with clock.phase("backward"):
            part.backward()
        loss += part.detach()
    with clock.phase("optimizer"):
        grad_norm = clip_grad_norm(trainable_parameters(model), clip)
        lr = float(optimizer.param_groups[0]["lr"])  # a tensor in some optimizers
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    with clock.phase("norm_refresh"):
        refresh_dora_norms(model)  # A and B have changed; they change nowhere else
    return {"loss": world.sum(loss.item()), "grad_norm": grad_norm.item(), "lr": lr}


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    world = init_world(cfg.sharding, casts=cfg.trainable.casts(cfg.model.dtype))
    torch.manual_seed(cfg.seed + shard_rank(cfg.sharding, world))  # for stochastic rounding
    output_dir = Path(cfg.output_dir).expanduser()
    use_cache_dir(cfg.compile_cache_dir, report=cfg.compile and world.rank == 0)
    profiler = Profiler(cfg.profiler, output_dir, world)
    checkpoints = Checkpointer(cfg.checkpoint, output_dir, world)
    loader = build_loader(cfg, world)
    total_steps = min(cfg.epochs * loader.steps_per_epoch, cfg.max_steps or 2**62)
    validation = Validation(cfg, world, output_dir, total_steps)
    origin = checkpoints.find(cfg.resume, lambda: config_settings(cfg) | data_settings(loader))
    write_run_files(output_dir, cfg, __file__, world.rank)
    run.model = model = load_model(cfg, world)
    trained = trainable_parameters(model)
    run.optimizer = optimizer = build_optimizer(cfg.optimizer, trained, cfg.optimizer_in_backward)
    scheduler = build_scheduler(cfg.lr_scheduler, optimizer, total_steps)
    state = TrainState(model, optimizer, scheduler, validation.progress)
    first_step = checkpoints.load(origin, state)  # 0 without one

    log = RunLog(output_dir, cfg.metric_logger, first_step, total_steps, world.rank)
    run.clock = clock = StepClock(world.device)
    meter = Meter(model, world, clock, optimizer)
    save_dtype = COMPUTE_DTYPES[cfg.save_dtype or cfg.model.dtype]
    save = partial(save_model, model, ModelWeights(cfg.model.path), save_dtype, world=world)
    with StopRequest() as signals:
        validation.run(first_step, model, log, meter, save)
        for step in validation.steps(first_step):  # to total_steps, or until patience ends
            run.step = step
            with profiler.step(step):
                with clock.phase("data"):
                    batches = loader.step(step - 1)
                metrics = train_step(
                    model, optimizer, scheduler, batches, cfg.clip_grad_norm, world, clock
                )
            meter.add(batches)
            with clock.phase("logging"):
                if step % cfg.log_every_n_steps == 0 or step == total_steps:
                    log.log(step, metrics | meter.read())
                log.advance()
            validation.run(step, model, log, meter, save)  # if it is due
            stop, due = checkpoints.agree(step, signals.received)
            last = step == total_steps or validation.is_over
            if due or stop or last:
                checkpoints.save(step, state)
            if stop and not last:
                break
        else:
            save(output_dir / "model")
            log.say(f"model: {output_dir / 'model'}")
        checkpoints.close()
    log.close()


if __name__ == "__main__":
    launch(__file__, Config, check, main)
