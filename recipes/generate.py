"""Answer one prompt, or a file of them, with a base model and an adapter.

    tune run recipes/generate --config configs/generate.yaml \\
        model.path=meta-llama/Meta-Llama-3-8B-Instruct adapter=runs/x/adapter prompt="Why?"
    tune run recipes/generate --config configs/generate.yaml \\
        prompts=questions.jsonl prompt_column=question output=answers.jsonl

The answer to one prompt is printed while it is generated. For a file, every row is written to
`output` with its answer as `completion`, in the order of the file. The column of prompts holds
texts, or lists of `{"role": ..., "content": ...}`. Further columns have what comes before a prompt:
`system_column`, `history_column`, `tools_column`, as in the dataset of a training run. The base may
be plain, quantized while it is loaded, or stored quantized; with an adapter it is that of the
adapter's run unless keys say otherwise.

Several ranks divide the prompts: one process per visible accelerator, or `--nproc_per_node N`. With
`sharding.strategy: ddp` each rank holds the whole base; other strategies gather each layer for
every token.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.checkpoint.adapter_base import OfAdapter, model_tokenizer, tell_another_base
from qfsdp.checkpoint.saved_template import build_tokenizer
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.common.files import not_written, write_text
from qfsdp.common.printable import printable, printable_json
from qfsdp.config.component import Component
from qfsdp.data.chat.context_columns import check_columns, system_of
from qfsdp.data.chat.messages import text_of
from qfsdp.data.encode import naming
from qfsdp.data.files.json_lines import check_new_file, read_rows, to_lines
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, init_world
from qfsdp.evaluation.generation import SamplingConfig, check_lengths, generate, generate_all
from qfsdp.evaluation.inference_model import check_for_inference, load_for_inference
from qfsdp.evaluation.prompts import in_context, prompt_tokens, stop_ids
from qfsdp.evaluation.text_stream import TextStream
from qfsdp.launch.start import launch
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.hub_models.refused import check_hub_answers
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.planning.oom import Run, explain_out_of_memory
from qfsdp.tensor_subclasses.kernels.compiled import check_compile, use_cache_dir

COMPLETION = "completion"
CONTEXT = ("system_column", "history_column", "tools_column")


@dataclass
class Config(OfAdapter):
    """Keys of the YAML file and the command line; each section documents its own keys."""

    model: ModelConfig
    tokenizer: Component = field(default_factory=model_tokenizer)  # of the model
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    sharding: ShardingConfig = field(default_factory=lambda: ShardingConfig(strategy="ddp"))
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    adapter: str | None = None  # a folder in PEFT's format: `adapter/` of a run, or PEFT's own
    prompt: str | None = None  # one prompt, or
    prompts: str | None = None  # a .jsonl file of prompts
    prompt_column: str = "prompt"  # column of `prompts`
    system_column: str | None = None  # column of `prompts` with a system message
    history_column: str | None = None  # column with earlier turns, as pairs or messages
    tools_column: str | None = "tools"  # column with functions that the model may call
    system_prompt: str | None = None  # before every prompt without a system message of its row
    chat_template: bool = True  # false: prompts are texts to continue
    batch_size: int = 8  # prompts per rank at a time
    output: str | None = None  # a .jsonl file, for `prompts`; null: standard output
    compile: bool = False  # compile every decoder layer for new tokens; pays for many prompts
    compile_cache_dir: str | None = None  # for compiled code; null: PyTorch's choice

    def check(self) -> None:
        if self.batch_size < 1:
            raise InvalidField("batch_size", self.batch_size, "an integer of at least 1")
        if self.prompt is not None and self.prompts is not None:
            raise InvalidField("prompts", self.prompts, "null with prompt; one of the two")
        if self.output is not None and self.prompt is not None:
            raise InvalidField("output", self.output, "null with prompt; it is for prompts")
        for name in ("system_prompt", "system_column", "history_column"):
            if getattr(self, name) is not None and not self.chat_template:
                raise InvalidField(name, getattr(self, name), "null without chat_template")


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is loaded."""
    if cfg.prompt is None and cfg.prompts is None:
        raise UserError('prompt: null; expected prompt="TEXT" or prompts=FILE.jsonl')
    tell_another_base(cfg)
    cfg.tokenizer.check("tokenizer")
    check_compile(cfg.compile, cfg.compile_cache_dir)
    if cfg.output is not None:
        check_new_file("output", Path(cfg.output).expanduser())
    model = check_for_inference(cfg.model, cfg.quantization, cfg.adapter, cfg.sharding)
    check_hub_answers(cfg, model.config, cfg.sharding.strategy)
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.adapter)
    stop_ids(tokenizer, cfg.model.folder)
    check_lengths(tokenized(cfg, tokenizer, rows_of(cfg)), cfg.sampling, model)


def rows_of(cfg: Config) -> list[dict[str, Any]]:
    """The rows of the file, or one row with the single prompt."""
    if cfg.prompts is None:
        return [{cfg.prompt_column: cfg.prompt}]
    rows = read_rows("prompts", cfg.prompts, cfg.prompt_column)
    if any(COMPLETION in row for row in rows):
        raise UserError(f"prompts: '{cfg.prompts}' has a column {COMPLETION!r}; expected none")
    named = {name: getattr(cfg, name) for name in CONTEXT}
    check_columns(rows, cfg.prompts, named, {cfg.prompt_column}, "")
    return rows


def tokenized(cfg: Config, tokenizer: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of every row's prompt."""
    prompts = []
    for number, row in enumerate(rows, start=1):
        prompt = row[cfg.prompt_column]
        try:
            if not isinstance(prompt, list) and prompt is not None:
                prompt = text_of(prompt)
            system_prompt, tools = cfg.system_prompt, row.get(cfg.tools_column or "")
            if prompt is not None and (cfg.system_column or cfg.history_column):
                prompt = in_context(prompt, row, cfg.system_column, cfg.history_column)
                system_prompt = None if system_of(row, cfg.system_column) else system_prompt
            with naming(f"prompt {number} of {len(rows)}"):
                tokens = prompt_tokens(tokenizer, prompt, cfg.chat_template, system_prompt, tools)
        except UserError as error:
            raise UserError(f"prompt {number} of {len(rows)}: {error}") from None
        prompts.append(tokens)
    return prompts


def stream(
    model: AnyDecoder, prompt: list[int], cfg: Config, tokenizer: Any, stops: set[int], world: World
) -> None:
    """Answers one prompt on rank 0's terminal; the other ranks have a part in its layers."""
    text = TextStream(tokenizer)

    def show(new: list[int | None]) -> None:
        if new and new[0] is not None:
            print(printable(text.push(new[0])), end="", flush=True)

    generate(model, [prompt] if world.rank == 0 else [], cfg.sampling, stops, world, show)
    if world.rank == 0:
        print(printable(text.end()), flush=True)


def write_answers(rows: list[dict[str, Any]], texts: list[str], output: str | None) -> None:
    """Writes the rows with their answers as JSON lines; if that fails, to standard output."""
    lines = to_lines(row | {COMPLETION: text} for row, text in zip(rows, texts, strict=True))
    if output is None:
        print(printable_json(lines), end="")
        return
    try:
        write_text(Path(output).expanduser(), lines)
    except OSError as error:
        print(printable_json(lines), end="", flush=True)
        failed = not_written(Path(output), error)
        raise UserError(f"output: {failed}; the answers are on standard output") from None


@explain_out_of_memory
def main(cfg: Config, run: Run) -> None:
    world = init_world(cfg.sharding)
    use_cache_dir(cfg.compile_cache_dir, report=cfg.compile and world.rank == 0)
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.adapter)
    rows = rows_of(cfg)
    prompts = tokenized(cfg, tokenizer, rows)
    stops = stop_ids(tokenizer, cfg.model.folder)
    run.model = model = load_for_inference(
        cfg.model, cfg.quantization, cfg.adapter, cfg.sharding, world
    )
    if cfg.compile:
        model.compile_layers()
    if cfg.prompts is None:
        return stream(model, prompts[0], cfg, tokenizer, stops, world)
    since = time.perf_counter()
    answers = generate_all(model, prompts, cfg.sampling, stops, world, cfg.batch_size)
    seconds = time.perf_counter() - since
    if world.rank == 0:
        write_answers(rows, [tokenizer.decode(answer) for answer in answers], cfg.output)
        count = sum(map(len, answers))
        print(
            f"{len(answers)} answers, {count} tokens in {seconds:.1f} s "
            f"({count / seconds:.1f} tokens/s): {cfg.output or 'standard output'}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    launch(__file__, Config, check, main)
