"""Distillation: the teacher, a second model that is frozen, and the loss of an update.

The teacher is quantized, sharded and offloaded as the student is, and runs without gradients before
each forward pass of the student. Its last hidden states at the target tokens are kept, and its
output layer is gathered while the student's loss is computed (`qfsdp.modules.distillation`). Or
its log-probabilities are read from files, and it is not in memory (`qfsdp.training.teacher_cache`).
The loss is the mean over the target tokens of all ranks and micro-batches, so it does not depend on
how they are split.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.devices import sum_dtype
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.common.files import nearest_existing
from qfsdp.data.batch import IGNORE_INDEX, Batch
from qfsdp.data.token_ids import check_tokenizer_ids
from qfsdp.distributed.sharding import reshard
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.evaluation.inference_model import check_for_inference, load_for_inference
from qfsdp.modules.distillation import (
    DistillationConfig,
    Logits,
    Taught,
    most_likely,
    teacher_logits,
)
from qfsdp.modules.hub_models.config import AnyConfig, HubConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.training.locate_nonfinite import Part
from qfsdp.training.teacher_cache import TeacherCache, check_cache, shared_tokens

WITH_A_TEACHER = {
    "context_parallel": (1,),
    "offload_base": ("none", "cpu"),
}


@dataclass
class TeacherConfig:
    """Section `teacher`: the frozen model that a student learns from.

    Fields:
        model: as section `model`; one that qfsdp builds itself, with the student's tokens.
        quantization: as section `quantization`.
        adapter: a folder in PEFT's format, or null.
        logprobs: "live": the teacher runs in every step. "cache": before the first step it writes
            the log-probabilities of its `distillation.top_k` most likely tokens to
            `output_dir/teacher_logprobs`, and leaves memory; or another folder, for several runs.
    """

    model: ModelConfig
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    adapter: str | None = None
    logprobs: str = "live"

    def check(self) -> None:
        check_place("logprobs", self.logprobs)


def check_place(key: str, where: str) -> None:
    """Checks where log-probabilities are to be kept. Raises InvalidField."""
    if where not in ("live", "cache") and "/" not in where:
        raise InvalidField(key, where, "live, cache, or a folder with a /")
    if "/" in where and not nearest_existing(Path(where).expanduser()).is_dir():
        raise InvalidField(key, where, "a folder, not a file or a path in a file")


def of_teacher(cfg: Any) -> ShardingConfig:
    """How the teacher of a config is sharded: as the student. Its output layer is split too, if all
    of its logits count."""
    split = cfg.sharding.vocabulary == "split" and cfg.distillation.top_k is None
    return replace(cfg.sharding, vocabulary="split" if split else "gather", expert_parallel=1)


def check_sharding(sharding: ShardingConfig) -> None:
    """Raises UserError for a setting that is not for two models."""
    for key, values in WITH_A_TEACHER.items():
        if (value := getattr(sharding, key)) not in values:
            expected = " or ".join(map(str, values))
            raise UserError(f"sharding.{key}: {value}; expected {expected} with a teacher")


def check_teacher(cfg: Any, student: AnyConfig, tokenizer: Any) -> None:
    """Checks the teacher of a config, before anything is loaded.

    Args:
        student: the config of the model that is trained.
        tokenizer: its tokenizer, as `check_data` returns it.

    Raises:
        UserError: the teacher's folder or adapter is faulty, or it has other tokens, or fewer
            positions than a row has.
    """
    section: TeacherConfig = cfg.teacher
    found = section.model.any_config()
    if isinstance(found, HubConfig):
        raise UserError(
            f"teacher.model.path: '{section.model.path}' is built by transformers "
            f"({found.architecture}); expected a model that qfsdp builds itself"
        )
    sharding = of_teacher(cfg)
    check_for_inference(section.model, section.quantization, section.adapter, sharding)
    if found.max_position_embeddings < cfg.max_seq_len:
        raise UserError(
            f"max_seq_len: {cfg.max_seq_len}; expected at most {found.max_position_embeddings}, "
            f"the positions of teacher.model.path '{section.model.path}'"
        )
    tokens = min(found.vocab_size, student.vocab_size)
    if (most := cfg.distillation.top_k) is not None and most > tokens:
        raise UserError(f"distillation.top_k: {most}; expected at most {tokens}, the vocabulary")
    if cfg.sharding.vocabulary == "split" and found.vocab_size != student.vocab_size:
        rows = f"{found.vocab_size} rows, and the student's {student.vocab_size}"
        expected = f"expected auto or gather, as the teacher's vocabulary has {rows}"
        raise UserError(f"sharding.vocabulary: split; {expected}")
    check_cache(cfg)
    _check_tokens(tokenizer, section.model.folder, tokens, found.vocab_size == student.vocab_size)


def _check_tokens(tokenizer: Any, folder: Path, rows: int, equal: bool) -> None:
    """Checks that both models have the same tokens.

    A padded vocabulary has more rows than tokens, and models of a family are padded differently
    (Qwen2.5-7B has 152,064 rows, Qwen2.5-3B 151,936). So tokens are compared, not rows.

    Args:
        tokenizer: the student's.
        folder: of the teacher.
        rows: that both have.
        equal: whether both have as many.
    """
    from tokenizers import Tokenizer

    mine, where = getattr(tokenizer, "vocabulary", None), f"teacher.model.path: '{folder}'"
    if mine is None or not (folder / "tokenizer.json").exists():
        if not equal:
            expected = f"expected the student's vocabulary, or a tokenizer.json; both have {rows}"
            raise UserError(f"{where} has a vocabulary of another size; {expected}")
        return
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    for token, index in sorted(mine.items(), key=lambda item: item[1]):
        if theirs.get(token) != index:
            found = f"{token!r} is {index} in 'tokenizer', and {theirs.get(token, 'no token')} here"
            raise UserError(f"{where} has another tokenizer: {found}; expected the same tokens")
    check_tokenizer_ids(tokenizer, rows)


def load_teacher(cfg: Any, world: World, loader: Any, steps: int) -> Teacher:
    """The teacher of a config, loaded, or read from files after it has written what they lack.
    Every rank must call it.

    Args:
        loader: of the run, whose rows the teacher reads.
        steps: of the run.

    Raises:
        UserError: as `TeacherCache`; or `load_for_inference` raises it.
    """
    given = (cfg.teacher.model, cfg.teacher.quantization, cfg.teacher.adapter, of_teacher(cfg))

    def load() -> Teacher:
        model = load_for_inference(*given, world)
        return Teacher(model, cfg.distillation, world, shared_tokens(cfg))

    if cfg.teacher.logprobs == "live":
        return load()
    cache = TeacherCache(cfg, loader, world)
    if cache.lacks(steps):
        cache.fill(partial(load().most_likely, cache.top_k), steps)
        gc.collect()  # a model has cycles, and the student needs its memory
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return CachedTeacher(cache.of, cfg.distillation, world, cache.tokens)


class Teacher:
    """A frozen model, and what a student learns from it.

    Args:
        model: a `Decoder`, loaded or of a dry run, in evaluation. Its output is from now on the
            last hidden state.
        tokens: rows of the vocabulary that student and teacher both have.
    """

    def __init__(self, model: Any, config: DistillationConfig, world: World, tokens: int) -> None:
        self._model, self.config, self.world, self._tokens = model, config, world, tokens
        model.last_hidden = nn.Identity()
        model.output_name = "last_hidden"
        self._rows, model.head_rows = model.head_rows, None

    def begin(self, batches: Sequence[Batch]) -> Update:
        """Counts the target tokens of all ranks; every rank must call it."""
        targets = self.world.total(sum(batch.num_targets for batch in batches)).clamp_(min=1)
        return Update(self, targets)

    @contextmanager
    def taught(self, batch: Batch, sums: Tensor) -> Iterator[Taught]:
        """What the teacher says of a micro-batch's targets. Where all of its logits count, its
        output layer is gathered until the context ends."""
        if self.config.top_k is not None:
            said = self.most_likely(self.config.top_k, batch)
            yield Taught(said, self.config, sums, tokens=self._tokens)
            return
        with self._pass(batch) as (logits, hidden):
            yield Taught((hidden,), self.config, sums, logits, self._tokens)

    def most_likely(self, count: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """The most likely tokens of a micro-batch's targets: see the function of that name."""
        with self._pass(batch) as (logits, hidden), torch.no_grad():
            return most_likely(logits, hidden, count, self._tokens)

    @contextmanager
    def _pass(self, batch: Batch) -> Iterator[tuple[Logits, Tensor]]:
        """What computes logits, and the last hidden states of a micro-batch's targets."""
        model, head = self._model, self._model.lm_head
        ends = (batch.labels != IGNORE_INDEX).flatten()
        found = torch.nonzero_static(ends, size=batch.num_targets).squeeze(1)
        try:
            with torch.no_grad():
                hidden = model(
                    batch.tokens, batch.positions, cu_seqlens=batch.cu_seqlens, ends=found
                )
                if isinstance(head, FSDPModule):
                    head.unshard()
                first = 0
                if model.split is not None:
                    (head, _), first = model.split.own_part(head), model.split.first
            yield teacher_logits(head, hidden.dtype, self._rows, first), hidden
        finally:
            reshard(model)

    def parts(
        self, model: nn.Module, batches: Sequence[Batch], world: World
    ) -> Callable[[Batch], list[Part]]:
        """The loss of an update for a second look (`StepParts`)."""
        update = self.begin(batches)

        def parts_of(batch: Batch) -> list[Part]:
            loss = update.loss(model, batch)
            return [Part("the loss of distillation", loss, loss)]

        return parts_of


class CachedTeacher(Teacher):
    """A teacher whose most likely tokens were written before.

    Args:
        said: a micro-batch -> what `Taught` takes of it: ids and log-probabilities, `[n, top_k]`.
        tokens: as of `Taught`.
    """

    def __init__(
        self,
        said: Callable[[Batch], tuple[Tensor, ...]],
        config: DistillationConfig,
        world: World,
        tokens: int | None = None,
    ) -> None:
        self._said, self.config, self.world, self._columns = said, config, world, tokens

    @classmethod
    def of_a_dry_run(cls, config: DistillationConfig, world: World) -> CachedTeacher:
        """One who says nothing in particular."""

        def said(batch: Batch) -> tuple[Tensor, ...]:
            ids = batch.tokens.new_zeros(batch.num_targets, config.top_k or 1, dtype=torch.int32)
            return ids, ids.float()

        return cls(said, config, world)

    @contextmanager
    def taught(self, batch: Batch, sums: Tensor) -> Iterator[Taught]:
        yield Taught(self._said(batch), self.config, sums, tokens=self._columns)


class Update:
    """The losses of one update's micro-batches, and what is logged of them.

    Args:
        targets: `[]`, target tokens of all ranks.
    """

    def __init__(self, teacher: Teacher, targets: Tensor) -> None:
        self._teacher, self._targets, device = teacher, targets, teacher.world.device
        self._sums = torch.zeros(2, dtype=sum_dtype(device), device=device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The part of the update's loss that is a micro-batch's, `[]`, with gradients."""
        given = {"cu_seqlens": batch.cu_seqlens, "num_targets": batch.num_targets}
        with self._teacher.taught(batch, self._sums) as taught:
            summed: Tensor = model(
                batch.tokens, batch.positions, labels=batch.labels, taught=taught, **given
            )
        return summed / self._targets

    def metrics(self) -> dict[str, float]:
        """What is logged of the update: `divergence` and, if it counts, `labels_loss`, means over
        the target tokens of all ranks. Every rank must call it."""
        apart, labelled = self._teacher.world.sum_of(self._sums).tolist()
        targets = self._targets.item()
        found = {"divergence": apart / targets}
        if self._teacher.config.weight < 1:
            found["labels_loss"] = labelled / targets
        return found
