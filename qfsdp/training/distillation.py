"""Distillation: the teacher, a second model that is frozen, and the loss of an update.

The teacher is quantized, sharded and offloaded as the student is, and runs without gradients before
each forward pass of the student. Its last hidden states at the target tokens are kept, and its
output layer is gathered while the student's loss is computed (`qfsdp.modules.distillation`). The
loss is the mean over the target tokens of all ranks and micro-batches, so it does not depend on how
they are split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.devices import sum_dtype
from qfsdp.common.errors import UserError
from qfsdp.data.batch import IGNORE_INDEX, Batch
from qfsdp.data.token_ids import check_tokenizer_ids
from qfsdp.distributed.gradients import total_loss
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.evaluation.inference_model import check_for_inference, load_for_inference
from qfsdp.modules.distillation import DistillationConfig, Taught
from qfsdp.modules.hub_models.config import AnyConfig, HubConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.training.locate_nonfinite import Part

WITH_A_TEACHER = {
    "context_parallel": (1,),
    "offload_base": ("none", "cpu"),
    "vocabulary": ("auto", "gather"),
}


@dataclass
class TeacherConfig:
    """Section `teacher`: the frozen model that a student learns from.

    Fields:
        model: as section `model`; one that qfsdp builds itself, with the student's tokens.
        quantization: as section `quantization`.
        adapter: a folder in PEFT's format, or null.
    """

    model: ModelConfig
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    adapter: str | None = None


def of_teacher(sharding: ShardingConfig) -> ShardingConfig:
    """How the teacher is sharded: as the student, its output layer gathered."""
    return replace(sharding, vocabulary="gather", expert_parallel=1)


def check_sharding(sharding: ShardingConfig) -> None:
    """Raises UserError for a setting that is not for two models."""
    for key, values in WITH_A_TEACHER.items():
        if (value := getattr(sharding, key)) not in values:
            expected = " or ".join(map(str, values))
            raise UserError(f"sharding.{key}: {value}; expected {expected} with a teacher")


def check_teacher(cfg: Any, student: AnyConfig) -> None:
    """Checks the teacher of a config, before anything is loaded.

    Args:
        student: the config of the model that is trained.

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
    sharding = of_teacher(cfg.sharding)
    check_for_inference(section.model, section.quantization, section.adapter, sharding)
    if found.max_position_embeddings < cfg.max_seq_len:
        raise UserError(
            f"max_seq_len: {cfg.max_seq_len}; expected at most {found.max_position_embeddings}, "
            f"the positions of teacher.model.path '{section.model.path}'"
        )
    tokens = min(found.vocab_size, student.vocab_size)
    if (most := cfg.distillation.top_k) is not None and most > tokens:
        raise UserError(f"distillation.top_k: {most}; expected at most {tokens}, the vocabulary")
    _check_tokens(cfg, tokens, found.vocab_size == student.vocab_size)


def _check_tokens(cfg: Any, rows: int, equal: bool) -> None:
    """Checks that both models have the same tokens.

    A padded vocabulary has more rows than tokens, and models of a family are padded differently
    (Qwen2.5-7B has 152,064 rows, Qwen2.5-3B 151,936). So tokens are compared, not rows.

    Args:
        rows: that both have.
        equal: whether both have as many.
    """
    from tokenizers import Tokenizer

    tokenizer, folder = cfg.tokenizer.build(), cfg.teacher.model.folder
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


def load_teacher(cfg: Any, world: World) -> Teacher:
    """Loads the teacher of a config; every rank must call it."""
    given = (cfg.teacher.model, cfg.teacher.quantization, cfg.teacher.adapter)
    model = load_for_inference(*given, of_teacher(cfg.sharding), world)
    return Teacher(model, cfg.distillation, world)


class Teacher:
    """A frozen model, and what a student learns from it.

    Args:
        model: a `Decoder`, loaded or of a dry run, in evaluation. Its output is from now on the
            last hidden state.
    """

    def __init__(self, model: Any, config: DistillationConfig, world: World) -> None:
        self._model, self.config, self.world = model, config, world
        model.last_hidden = nn.Identity()
        model.output_name = "last_hidden"
        self._rows, model.head_rows = model.head_rows, None

    def begin(self, batches: Sequence[Batch]) -> Update:
        """Counts the target tokens of all ranks; every rank must call it."""
        targets = self.world.total(sum(batch.num_targets for batch in batches)).clamp_(min=1)
        return Update(self, targets)

    @contextmanager
    def taught(self, batch: Batch, sums: Tensor) -> Iterator[Taught]:
        """What the teacher says of a micro-batch's targets. Its output layer is gathered until the
        context ends."""
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
            yield Taught(head, hidden, self.config, sums, self._rows)
        finally:
            for module in model.modules():  # without a backward pass FSDP2 keeps some gathered
                if isinstance(module, FSDPModule):
                    module.reshard()

    def parts(
        self, model: nn.Module, batches: Sequence[Batch], world: World
    ) -> Callable[[Batch], list[Part]]:
        """The loss of an update for a second look (`StepParts`)."""
        update = self.begin(batches)

        def parts_of(batch: Batch) -> list[Part]:
            loss = update.loss(model, batch)
            return [Part("the loss of distillation", loss, loss)]

        return parts_of


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
        apart, labelled = total_loss(self._sums, self._teacher.world).tolist()
        targets = self._targets.item()
        found = {"divergence": apart / targets}
        if self._teacher.config.weight < 1:
            found["labels_loss"] = labelled / targets
        return found
