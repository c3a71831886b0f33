"""Score rows with a reward model or classifier: its loss and accuracy, and the scores of every row.

    tune run recipes/score --config configs/score.yaml adapter=runs/x/adapter \\
        dataset.source=pairs.jsonl output=scores.jsonl

The adapter is one of recipes/reward_distributed, or PEFT's of task type SEQ_CLS. `output` has a
line for every row that is used, in their order: `{"row": 0, "scores": [[chosen], [rejected]]}` of a
pair, `{"row": 0, "scores": [[class 0, class 1, ...]], "label": 1}` of a text. `row` counts the rows
that are used: those that a line on stderr leaves out have no number. Several ranks share the work:
one process per visible accelerator, or `--nproc_per_node N`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.checkpoint.adapter_base import OfAdapter, model_tokenizer, tell_another_base
from qfsdp.checkpoint.saved_template import build_tokenizer
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import check_bounds
from qfsdp.common.files import whole_file
from qfsdp.config.component import Component
from qfsdp.data import check_dataset
from qfsdp.data.files.json_lines import check_new_file, to_lines
from qfsdp.data.preferences.batch import PairBatch
from qfsdp.data.preferences.loader import PreferenceLoader
from qfsdp.data.preferences.tokenized import RowLimit, build_preferences
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, init_world
from qfsdp.evaluation.inference_model import (
    check_for_inference,
    evaluating,
    load_for_inference,
    stored_head,
)
from qfsdp.launch.start import launch
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.score_head import HeadConfig
from qfsdp.planning.oom import Run, explain_out_of_memory
from qfsdp.training.scores import ScoreObjective, last_scores


@dataclass
class Config(OfAdapter):
    """Keys of the YAML file and the command line; each section documents its own keys."""

    adapter: str  # a folder in PEFT's format with a score head
    model: ModelConfig
    dataset: Component  # as for recipes/reward_distributed
    output: str  # a .jsonl file
    tokenizer: Component = field(default_factory=model_tokenizer)  # of the model
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    sharding: ShardingConfig = field(default_factory=lambda: ShardingConfig(strategy="ddp"))
    batch_size: int = 8  # pairs or texts per rank and forward pass
    max_seq_len: int = 2048  # tokens; longer samples are cut

    def check(self) -> None:
        check_bounds(self, "batch_size", least=1, most=2**20)
        check_bounds(self, "max_seq_len", least=2)


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is loaded."""
    tell_another_base(cfg)
    head = stored_head(cfg.adapter)
    cfg.tokenizer.check("tokenizer")
    check_dataset("dataset", cfg.dataset)
    check_new_file("output", Path(cfg.output).expanduser(), suffix=".jsonl")
    model = check_for_inference(cfg.model, cfg.quantization, cfg.adapter, cfg.sharding, head)
    cfg.model.check_length(cfg.max_seq_len, model.config.max_position_embeddings)


def build_loader(cfg: Config, head: HeadConfig, world: World) -> PreferenceLoader:
    """This rank's batches of the rows, in their order."""
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.adapter)
    rows, limit = cfg.model.any_config().vocab_size, RowLimit(cfg.max_seq_len)
    return PreferenceLoader(
        build_preferences("dataset", cfg.dataset, tokenizer, rows, limit, classes=head.classes),
        batch_size=cfg.batch_size,
        gradient_accumulation_steps=1,
        rank=world.rank,
        world_size=world.size,
        seed=0,
        pad_id=tokenizer.pad_id,
        max_seq_len=cfg.max_seq_len,
        shuffle=False,
    )


def score(
    cfg: Config, head: HeadConfig, model: AnyDecoder, loader: PreferenceLoader, world: World
) -> dict[str, Any]:
    """Scores all rows and writes them; returns loss, accuracy and means of rewards."""
    batches = list(loader.epoch())
    update = ScoreObjective(head).begin(batches, world)
    mine: list[dict[str, Any]] = []
    with evaluating(model):
        for batch in (batch.to(world.device) for batch in batches):
            scores = last_scores(model, batch)
            update.loss(batch, scores)
            mine += lines_of(batch, loader.items_of(batch), scores.tolist())
    lines = sorted((line for part in world.gather(mine) for line in part), key=lambda x: x["row"])
    with world.same_error():
        if world.rank == 0:
            with whole_file(Path(cfg.output).expanduser()) as file:
                file.write_text(to_lines(lines), encoding="utf-8")
    return update.metrics()


def lines_of(batch: PairBatch, items: list[int], scores: list[Any]) -> list[dict[str, Any]]:
    """A line for each row of a batch."""
    if batch.desirable is None:
        return [{"row": row, "scores": scores[2 * at : 2 * at + 2]} for at, row in enumerate(items)]
    labels = batch.desirable.long().tolist()
    found = zip(items, scores, labels, strict=True)
    return [{"row": row, "scores": [one], "label": label} for row, one, label in found]


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    world = init_world(cfg.sharding)
    head = stored_head(cfg.adapter)
    loader = build_loader(cfg, head, world)
    run.model = model = load_for_inference(
        cfg.model, cfg.quantization, cfg.adapter, cfg.sharding, world, head
    )
    found = score(cfg, head, model, loader, world)
    if world.rank == 0:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        print(f"{len(loader.items)} rows: {numbers}\nscores: {cfg.output}")


if __name__ == "__main__":
    launch(__file__, Config, check, main)
