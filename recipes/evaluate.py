"""Measure a base model, with or without an adapter: losses, perplexities, answers, benchmarks.

    tune run recipes/evaluate --config configs/evaluate.yaml \\
        model.path=meta-llama/Meta-Llama-3-8B-Instruct adapter=runs/x/adapter output=x.json
    tune run recipes/evaluate --config configs/evaluate.yaml \\
        'lm_eval.tasks=[arc_easy,arc_challenge,hellaswag]' lm_eval.limit=200

Four kinds of measurements, each for any number of sets in the config:

    loss          held-out loss of training datasets, over their target tokens
    text          perplexity of text files, in windows
    exact_match   answers to questions, compared as numbers (GSM8K, Orca-Math)
    lm_eval       tasks of lm-eval (ARC, HellaSwag, TruthfulQA, ...): pip install lm-eval

Prints a table with confidence intervals, and writes it to `output` as JSON. Every question with its
answer, and the loss of every batch, go to .jsonl files in the same folder. Several ranks share the
work: one process per visible accelerator, or `--nproc_per_node N`. The base may be plain, quantized
while it is loaded, or stored quantized; with an adapter it is that of the adapter's run unless
keys say otherwise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.checkpoint.adapter_base import OfAdapter, model_tokenizer, tell_another_base
from qfsdp.checkpoint.saved_template import build_tokenizer
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.component import Component
from qfsdp.data import build_dataset, check_dataset
from qfsdp.data.files.json_lines import append_rows, check_new_file
from qfsdp.data.token_ids import check_tokenizer_ids
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, init_world
from qfsdp.evaluation.exact_match import ExactMatchConfig, Question, exact_match, read_questions
from qfsdp.evaluation.generation import SamplingConfig, check_lengths
from qfsdp.evaluation.inference_model import check_for_inference, load_for_inference
from qfsdp.evaluation.lm_harness import LMEvalConfig, load_tasks, run_tasks
from qfsdp.evaluation.perplexity import (
    MeanLoss,
    TextConfig,
    TextWindows,
    dataset_loss,
    text_windows,
)
from qfsdp.evaluation.prompts import stop_ids
from qfsdp.evaluation.results import (
    Result,
    exact_match_results,
    format_table,
    loss_results,
    write_results,
)
from qfsdp.launch.start import launch
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.hub_models.refused import check_hub_answers
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.planning.oom import Run, explain_out_of_memory


@dataclass
class Config(OfAdapter):
    """Keys of the YAML file and the command line; each section documents its own keys."""

    model: ModelConfig
    output: str  # a .json file
    tokenizer: Component = field(default_factory=model_tokenizer)  # of the model
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    sharding: ShardingConfig = field(default_factory=lambda: ShardingConfig(strategy="ddp"))
    adapter: str | None = None  # a folder in PEFT's format: `adapter/` of a run, or PEFT's own
    loss: dict[str, Component] = field(default_factory=dict)  # name: a dataset as for training
    text: dict[str, TextConfig] = field(default_factory=dict)  # name: perplexity of a text file
    exact_match: dict[str, ExactMatchConfig] = field(default_factory=dict)  # name: questions
    lm_eval: LMEvalConfig = field(default_factory=LMEvalConfig)
    batch_size: int = 8  # samples, windows or questions per rank and forward pass
    max_seq_len: int = 2048  # tokens per sample of `loss`; longer samples are cut

    def check(self) -> None:
        if self.batch_size < 1:
            raise InvalidField("batch_size", self.batch_size, "an integer of at least 1")
        if self.max_seq_len < 2:
            raise InvalidField("max_seq_len", self.max_seq_len, "an integer of at least 2")


@dataclass
class Sets:
    """All sets by name, tokenized; read before any weight."""

    tokenizer: Any
    stops: set[int]
    loss: dict[str, Any]
    text: dict[str, TextWindows]
    questions: dict[str, list[Question]]
    tasks: dict[str, Any]  # lm-eval's


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is loaded."""
    if not (cfg.loss or cfg.text or cfg.exact_match or cfg.lm_eval.tasks):
        raise UserError("loss, text, exact_match, lm_eval.tasks: all empty; expected at least one")
    tell_another_base(cfg)
    cfg.tokenizer.check("tokenizer")
    for name, dataset in cfg.loss.items():
        check_dataset(f"loss.{name}", dataset)
    check_new_file("output", Path(cfg.output).expanduser(), suffix=".json")
    positions = cfg.model.any_config().max_position_embeddings
    windows = {f"text.{name}.window": text.window for name, text in cfg.text.items()}
    if cfg.loss:
        windows["max_seq_len"] = cfg.max_seq_len
    for key, length in windows.items():
        if length > positions:
            raise UserError(f"{key}: {length}; expected at most {positions}, the model's positions")
    model = check_for_inference(cfg.model, cfg.quantization, cfg.adapter, cfg.sharding)
    answers = cfg.exact_match or cfg.lm_eval.tasks
    strategy = cfg.sharding.strategy if answers else None
    check_hub_answers(cfg, model.config, strategy)
    sets = read_sets(cfg)
    check_tokenizer_ids(sets.tokenizer, model.config.vocab_size, sets.loss | sets.text)
    for name, questions in sets.questions.items():
        sampling = SamplingConfig(max_new_tokens=cfg.exact_match[name].max_new_tokens)
        try:
            check_lengths([question.prompt for question in questions], sampling, model)
        except UserError as error:
            raise UserError(f"exact_match.{name}: {error}") from None


def read_sets(cfg: Config) -> Sets:
    """Reads and tokenizes all sets; raises UserError for a wrong one."""
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.adapter)
    return Sets(
        tokenizer,
        stop_ids(tokenizer, cfg.model.folder),
        loss={name: build_dataset(f"loss.{name}", d, tokenizer) for name, d in cfg.loss.items()},
        text={
            name: text_windows(f"text.{name}", text, tokenizer) for name, text in cfg.text.items()
        },
        questions={
            name: read_questions(f"exact_match.{name}", entry, tokenizer)
            for name, entry in cfg.exact_match.items()
        },
        tasks=load_tasks(cfg.lm_eval) if cfg.lm_eval.tasks else {},
    )


def evaluate(cfg: Config, model: AnyDecoder, sets: Sets, world: World) -> list[Result]:
    """Measures everything; the results are the same on every rank."""
    results: list[Result] = []
    pad_id = sets.tokenizer.pad_id
    for name, dataset in sets.loss.items():
        loss = dataset_loss(
            model, dataset, cfg.batch_size, world, pad_id, cfg.max_seq_len, f"loss.{name}"
        )
        write_parts(cfg, f"loss.{name}", loss, world)
        results += loss_results("loss", name, loss)
    for name, windows in sets.text.items():
        loss = dataset_loss(model, windows, cfg.batch_size, world, pad_id, None, f"text.{name}")
        write_parts(cfg, f"text.{name}", loss, world)
        results += loss_results("text", name, loss)
    for name, questions in sets.questions.items():
        found = exact_match(
            model,
            questions,
            cfg.exact_match[name],
            sets.tokenizer,
            sets.stops,
            world,
            cfg.batch_size,
            rows_file(cfg, f"exact_match.{name}"),
            f"exact_match.{name}",
        )
        results += exact_match_results(name, found)
    if sets.tasks:
        scores, rows = run_tasks(
            cfg.lm_eval, sets.tasks, model, sets.tokenizer, sets.stops, world, cfg.batch_size
        )
        for s in scores:
            results.append(Result("lm_eval", s.task, s.metric, s.value, s.interval, s.rows, "rows"))
        for task, of_task in rows.items() if world.rank == 0 else ():
            append_rows(rows_file(cfg, f"lm_eval.{task}"), of_task)
    return results


def rows_file(cfg: Config, name: str) -> Path:
    """The file for the questions and answers of one set, in the folder of `output`."""
    output = Path(cfg.output).expanduser()
    return output.with_name(f"{output.stem}.{name}.jsonl")


def write_parts(cfg: Config, name: str, loss: MeanLoss, world: World) -> None:
    """Keeps the loss of each batch, so that models can be compared on the same samples."""
    if world.rank == 0:
        file = rows_file(cfg, name)
        file.unlink(missing_ok=True)
        append_rows(file, [{"loss": total, "targets": targets} for total, targets in loss.parts])


def measure(cfg: Config, model: AnyDecoder, sets: Sets, world: World) -> list[Result]:
    """Measures everything, prints a table, and writes it to `output`."""
    started = time.perf_counter()
    results = evaluate(cfg, model, sets, world)
    if world.rank == 0:
        about = {
            "model": cfg.model.path,
            "dtype": cfg.model.dtype,
            "quantization": cfg.quantization.format,
            "adapter": cfg.adapter,
            "seconds": time.perf_counter() - started,
        }
        print(format_table(results), flush=True)  # first: the disk may be full
        write_results(Path(cfg.output).expanduser(), results, about)
        print(f"evaluation: {cfg.output}")
    return results


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    world = init_world(cfg.sharding)
    sets = read_sets(cfg)
    run.model = model = load_for_inference(
        cfg.model, cfg.quantization, cfg.adapter, cfg.sharding, world
    )
    measure(cfg, model, sets, world)


if __name__ == "__main__":
    launch(__file__, Config, check, main)
