"""What is combined in `test_combinations.py`: methods, families, and what recipes do with them.

    python -m tests.recipes.combinations [FAMILY ...]

runs the whole product of methods, formats, families and actions instead of a covering part of it,
and prints a table: cells that ran, that were refused in one line, that failed, and their seconds.
Dtypes, packing, tied weights and targets change along with the cells.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.config.tool_config import read_tool_config
from qfsdp.data import hf_tokenizer
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.inference_model import load_adapters_of_one_base, load_for_inference
from qfsdp.evaluation.prompts import prompt_tokens, stop_ids
from qfsdp.launch.ranks import leave_process_group
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.data.test_tokenizer import CHATML, byte_level, write_folder
from tests.json_lines import json_lines, metric_lines
from tests.models import cpu_world
from tests.modules.test_families import EXPERTS, GEMMA, GLM4_MOE, GPT_OSS, GRANITE, randomized
from tests.tiny import ROOT, load_recipe, run_recipe

SIZES = {
    "vocab_size": 416,
    "hidden_size": 64,  # 32 divides all sizes: the groups of W4A16 and MXFP4
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
SHARED = {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "glm4": ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gemma3": ("gemma3_text", {**GEMMA, "head_dim": 16, "sliding_window_pattern": 2}),
    "granite": ("granite", GRANITE),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, **SHARED, "moe_intermediate_size": 32}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": ("gpt_oss", {**GPT_OSS, "intermediate_size": 32, "sliding_window": 7}),
    "glm4-moe": (
        "glm4_moe",
        {**GLM4_MOE, "moe_intermediate_size": 32, "head_dim": 16, "n_shared_experts": 1},
    ),
}
METHODS = ("lora", "dora", "ia3", "llama-pro", "full", "dpo")
FORMATS = ("nf4", "hqq", "mxfp4", "none")
TARGETS = ("usual", "head", "router", "experts", "some")
ROWS = 6
NEW = 5  # generated tokens


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    family: str
    method: str = "lora"
    format: str = "nf4"
    tied: bool = False
    targets: str = "usual"
    dtype: str = "fp32"
    packed: bool = False


AXES: dict[str, Sequence[Any]] = {
    "family": list(FAMILIES),
    "method": METHODS,
    "format": FORMATS,
    "tied": (False, True),
    "targets": TARGETS,
    "dtype": ("fp32", "bf16"),
    "packed": (False, True),
}


@dataclass
class Shop:
    """Makes models, data and runs once, and hands them to all cells of a process."""

    folder: Path
    made: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def data(self) -> Path:
        """Rows for training, for preferences, and for a task of lm-eval."""
        folder = self.folder / "data"
        folder.mkdir()
        asked = [f"What is {n} + {n}?" for n in range(ROWS)]
        rows = [{"prompt": q, "answer": f"It is {2 * n}."} for n, q in enumerate(asked)]
        pairs = [{"prompt": q, "chosen": str(2 * n), "rejected": "No"} for n, q in enumerate(asked)]
        task = [
            {"question": q, "choices": ["one", "two", "3", "4"], "subject": "astronomy"}
            | {"answer": n % 4}
            for n, q in enumerate(asked)
        ]
        for name, of in (("rows", rows), ("pairs", pairs), ("mmlu.test", task)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
        (folder / "text.txt").write_text(" ".join(asked))
        return folder

    def model(self, family: str, tied: bool, expanded: bool = False) -> Path:
        """A random model folder of a family, with a tokenizer; `expanded`: with new blocks."""
        key = (family, tied, expanded)
        if key in self.made:
            return self.made[key]
        folder = self.folder / f"{family}{'-tied' * tied}{'-pro' * expanded}"
        if expanded:
            words = [f"model.path={self.model(family, tied)}", f"output_dir={folder}"]
            words += ["rate=null", "new_blocks=2"]
            run_recipe("block_expansion", [*of_config("block_expansion"), *words])
        else:
            kind, changes = FAMILIES[family]
            config = CONFIG_MAPPING[kind](**SIZES | changes | {"tie_word_embeddings": tied})
            randomized(config).save_pretrained(folder)
            write_folder(folder, byte_level(), chat_template=CHATML, eos_token="<|im_end|>")
        return self.made.setdefault(key, folder)

    def config(self, case: Case) -> tuple[str, Path, Path]:
        """The recipe of a case, its config file, and its model."""
        recipe = {"dpo": "dpo_distributed", "full": "full_finetune_distributed"}
        recipe["llama-pro"] = recipe["full"]
        name = recipe.get(case.method, "qdora_distributed")
        folder = self.folder / f"run-{len(self.made)}"
        model = self.model(case.family, case.tied, case.method == "llama-pro")
        return name, self._written(case, name, folder, model), model

    def _written(self, case: Case, recipe: str, folder: Path, model: Path) -> Path:
        dataset = {"_component_": "qfsdp.data.instruct_dataset"}
        dataset |= {"source": f"{self.data}/rows.jsonl"}
        dataset |= {"prompt_column": "prompt", "answer_column": "answer"}
        if case.method == "dpo":
            dataset = {"_component_": "qfsdp.data.preference_dataset"}
            dataset |= {"source": f"{self.data}/pairs.jsonl"}
        optimizer = {"_component_": "torch.optim.AdamW", "lr": 1e-2, "fused": True}
        config: dict[str, Any] = {
            "output_dir": str(folder),
            "model": {"path": str(model), "dtype": case.dtype},
            "tokenizer": {"_component_": "qfsdp.data.hf_tokenizer", "path": str(model)},
            "dataset": dataset,
            "optimizer": optimizer,
            "quantization": {"format": case.format},
            "batch_size": 2,
            "max_seq_len": 96,
            "packed": case.packed,
            "max_steps": 2,
            "epochs": 2,  # packed, all rows are one batch
            "preflight": False,
            "report": False,
        }
        if case.method in ("full", "llama-pro"):
            config["trainable"] = {"layers": trained_layers(case)}
        else:
            method = "lora" if case.method == "dpo" else case.method
            config["adapter"] = {"method": method, "rank": 4, "alpha": 8}
            if case.method == "ia3":
                config["adapter"] = {"method": method}
            if case.targets != "usual":
                config["adapter"]["targets"] = adapted(case)
        file = folder.with_suffix(".yaml")
        head = f"# tune run recipes/{recipe} --config {file}\n"
        file.write_text(head + json.dumps(config))
        return file

    def run(self, case: Case) -> Run:
        """A finished run of a case; raises again what it raised."""
        if case not in self.made:
            recipe, config, model = self.config(case)
            run = Run(case, recipe, config, model, self)
            try:
                run.train(f"output_dir={run.folder}", "checkpoint={every_n_steps: 1, keep_last: 9}")
                leave_process_group()  # which full finetuning joins where a CPU multiplies bf16
                self.made[case] = run
            except Exception as error:
                self.made[case] = error
        if isinstance(found := self.made[case], Exception):
            raise found
        return found


def trained_layers(case: Case) -> str | list[int]:
    """Not all of them over a quantized base: trained weights are never quantized."""
    if case.method == "llama-pro":
        return "expanded"
    return "all" if case.format == "none" else [1]


def adapted(case: Case) -> list[str]:
    """`adapter.targets`, of names that the family has; in dense families experts are its MLP."""
    mixture = case.family in ("mixtral", "gpt-oss") or case.family.endswith("moe")
    queries = "qkv_proj" if case.family == "phi3" else "q_proj"
    if case.targets == "head":
        return ["all-linear", "lm_head"]
    if case.targets == "router":
        return ["all-linear", "router" if case.family == "gpt-oss" else "gate"]
    if case.targets == "experts" and (mixture or case.family in ("phi3", "glm4")):
        return ["gate_up_proj", "down_proj"]
    shared = case.family in ("qwen2-moe", "glm4-moe")
    return ["up_proj", "down_proj"] if case.targets == "experts" or shared else [queries, "o_proj"]


def of_config(name: str) -> list[str]:
    return ["--config", str(ROOT / f"configs/{name}.yaml")]


@dataclass
class Run:
    """A run, and what recipes need to go on with it."""

    case: Case
    recipe: str
    config: Path
    base: Path
    shop: Shop
    count: int = 0

    @property
    def folder(self) -> Path:
        return self.config.with_suffix("")

    @property
    def adapter(self) -> Path | None:
        return self.folder / "adapter" if self.case.method not in ("full", "llama-pro") else None

    @property
    def model(self) -> Path:
        """The folder that inference loads: the base of the adapter, or the trained model."""
        return self.base if self.adapter is not None else self.folder / "model"

    @property
    def format(self) -> str:
        return self.case.format if self.adapter is not None else "none"

    def new(self, suffix: str = "") -> Path:
        self.count += 1
        return self.folder / f"out-{self.count}{suffix}"

    def train(self, *words: str) -> None:
        run_recipe(self.recipe, ["--config", str(self.config), *words])

    def words(self, dtype: str | None = None) -> list[str]:
        """What all recipes of inference take."""
        given = [f"model.path={self.model}", f"model.dtype={dtype or self.case.dtype}"]
        given += [f"quantization.format={self.format}"]
        return given if self.adapter is None else [*given, f"adapter={self.adapter}"]

    def loaded(self) -> nn.Module:
        """The trained model, as `generate` and `evaluate` build it."""
        model = ModelConfig(str(self.model), dtype=self.case.dtype)
        given = (model, QuantizationConfig(self.format))
        adapter = None if self.adapter is None else str(self.adapter)
        return load_for_inference(*given, adapter, ShardingConfig("ddp"), cpu_world())

    @property
    def comparable(self) -> bool:
        """Whether recipes/evaluate computes what the run computes. A trained model is written with
        its frozen weights as they were, not as the run quantized them."""
        return self.case.dtype == "fp32" and self.format == self.case.format


TOKENS = torch.randint(8, 400, (2, 24), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return (out if isinstance(out, Tensor) else out.logits).float()


def same(found: Tensor, expected: Tensor, dtype: str, what: str) -> None:
    """Logits of size 1 to 10, computed in other ways. In bf16 a token of a mixture may go to
    another expert, so one position of four may be further apart."""
    apart = (found - expected).abs().amax(-1).flatten()
    share, bound = (1.0, 2e-4) if dtype == "fp32" else (0.75, 0.25)
    at = apart.quantile(share).item()
    assert at <= bound, f"{what}: logits are {at:.2g} apart; expected at most {bound:.2g}"


# ---- actions ------------------------------------------------------------------------------------


def train(run: Run) -> None:
    losses = [line["loss"] for line in metric_lines(run.folder) if "loss" in line]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses), losses


def resume(run: Run) -> None:
    """The second step again, from the checkpoint after the first."""
    folder = run.new()
    run.train(f"output_dir={folder}", f"resume={run.folder}/checkpoints/step_00000001")
    where = "model" if run.adapter is None else "adapter"
    for file in (run.folder / where).glob("*.safetensors"):
        assert file.read_bytes() == (folder / where / file.name).read_bytes(), "resumed differs"


def validate(run: Run) -> None:
    """The loss of recipes/evaluate for the same rows."""
    folder, source = run.new(), "pairs" if run.case.method == "dpo" else "rows"
    kind = "preference" if run.case.method == "dpo" else "instruct"
    held = f"_component_: qfsdp.data.{kind}_dataset, source: {run.shop.data}/{source}.jsonl"
    columns = "" if kind == "preference" else ", prompt_column: prompt, answer_column: answer"
    sets = f"validation.sets.held={{{held}{columns}}}"
    run.train(f"output_dir={folder}", sets, "validation.eval_every=1")
    (*_, last) = (line for line in metric_lines(folder) if "validation/held/loss" in line)
    if kind == "instruct" and run.comparable:
        (found,) = evaluated(run, "loss", f"loss.held={{{held}{columns}}}")
        assert abs(found - last["validation/held/loss"]) < 1e-4, (found, last)


def evaluated(run: Run, metric: str, *words: str) -> list[float]:
    """Values of recipes/evaluate."""
    output = run.new(".json")
    given = [*of_config("evaluate"), "~loss", "~exact_match", *run.words(), f"output={output}"]
    run_recipe("evaluate", [*given, f"tokenizer.path={run.model}", "max_seq_len=96", *words])
    results = json.loads(output.read_text())["results"]
    return [result["value"] for result in results if metric in (result["metric"], result["name"])]


def lm_eval(run: Run) -> None:
    words = ["lm_eval.tasks=[mmlu]", f"lm_eval.local_data={run.shop.data}", "batch_size=3"]
    text = f"text.some={{file: {run.shop.data}/text.txt, window: 16}}"
    (found,) = evaluated(run, "mmlu", *words, text)
    assert 0 <= found <= 1


def lm_eval_inside(run: Run) -> None:
    """The scores of recipes/evaluate for the run's adapter, or model."""
    folder, words = run.new(), ["lm_eval.tasks=[mmlu]", f"lm_eval.local_data={run.shop.data}"]
    source = "pairs" if run.case.method == "dpo" else "rows"
    kind = "preference" if run.case.method == "dpo" else "instruct"
    held = f"_component_: qfsdp.data.{kind}_dataset, source: {run.shop.data}/{source}.jsonl"
    held += "" if kind == "preference" else ", prompt_column: prompt, answer_column: answer"
    inside = [f"validation.{word}" for word in words]
    run.train(f"output_dir={folder}", f"validation.sets.held={{{held}}}", *inside)
    (*_, last) = (line for line in metric_lines(folder) if "validation/mmlu/acc" in line)
    if run.comparable:
        (found,) = evaluated(run, "mmlu", *words)
        assert abs(found - last["validation/mmlu/acc"]) < 1e-9, (found, last)


def generate(run: Run) -> None:
    """Greedy answers are the likeliest tokens of whole rows, without a cache."""
    output, prompts = run.new(".jsonl"), run.new(".jsonl")
    asked = ["Why?", "What is 17 + 25, and why?"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    words = [f"prompts={prompts}", f"output={output}", f"sampling.max_new_tokens={NEW}"]
    words += [f"tokenizer.path={run.model}", *run.words()]
    run_recipe("generate", [*of_config("generate"), *words])
    found = [line["completion"] for line in json_lines(output)]
    if run.case.dtype == "fp32":
        assert found == [greedy(run, text) for text in asked]


def greedy(run: Run, text: str) -> str:
    tokenizer, model = hf_tokenizer(str(run.model)), run.loaded()
    tokens, new = prompt_tokens(tokenizer, text, True, None), []
    stops = stop_ids(tokenizer, run.model)
    while len(new) < NEW and not (new and new[-1] in stops):
        with torch.no_grad():
            new.append(int(model(torch.tensor([tokens + new]))[0, -1].argmax()))
    return str(tokenizer.decode([token for token in new if token not in stops]))


def merged(run: Run) -> Path:
    """A plain folder of the trained model in fp32."""
    if run.adapter is None:
        return run.model
    folder = run.new()
    words = [*run.words(), f"output_dir={folder}", "dtype=fp32"]
    run_recipe("merge", [*of_config("merge"), *words])
    return folder


def of_transformers(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def merge(run: Run) -> None:
    same(logits(of_transformers(merged(run))), logits(run.loaded()), run.case.dtype, "merged")


def exported(run: Run, format: str, *more: str) -> Path:
    folder = run.new()
    words = [*of_config("export"), f"format={format}", f"output_dir={folder}", *more]
    run_recipe("export", [*words, "adapter=null", *run.words()])
    return folder


def export_gguf(run: Run) -> None:
    """The file's matrices are those of the merged model, rounded to 16 bits."""
    from tests.checkpoint.test_gguf import as_in_transformers, contents

    (file,) = exported(run, "gguf", "gguf_type=f16").glob("*.gguf")
    found = as_in_transformers(*contents(file))
    expected = of_transformers(merged(run)).state_dict()
    for name, value in found.items():
        torch.testing.assert_close(value.float(), expected[name], rtol=2e-3, atol=1e-4)


def export_w4a16(run: Run) -> None:
    """transformers loads the folder, with the logits of the integers and scales in it."""
    from tests.checkpoint.test_w4a16 import dequantized

    folder = exported(run, "w4a16", "group_size=32")
    numbers = dequantized(load_file(folder / "model.safetensors"))
    expected = of_transformers(merged(run))
    for name, value in expected.state_dict().items():
        if name in numbers:
            apart = (numbers[name] - value).norm() / value.norm()
            assert apart < (0.15 if "proj" in name else 0.01), (name, apart)
            value.copy_(numbers[name])
    same(logits(of_transformers(folder)), logits(expected), "fp32", "w4a16")


def export_vllm(run: Run) -> None:
    folder = exported(run, "lora")
    assert (folder / "adapter_model.safetensors").is_file()


def preflight(run: Run) -> None:
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        run.train(f"output_dir={run.new()}", "preflight=true", "max_steps=1")
    assert "memory:" in said.getvalue() and "not estimated" not in said.getvalue(), said.getvalue()


def tool(config: Path, name: str, *words: str) -> str:
    recipe, said = load_recipe(name), io.StringIO()
    recipe.draw = lambda *_: None  # half a second each
    argv = ["--config", str(config), *words]
    with redirect_stdout(said):
        recipe.main(*read_tool_config(recipe.Config, argv))
    return said.getvalue()


def estimate_memory(run: Run) -> None:
    config = run.folder / "config.yaml"  # what the run wrote
    said = tool(config, "estimate_memory", "world_size=2", "device_memory=24GiB")
    assert "between steps:" in said, said


def find_fit(run: Run) -> None:
    said = tool(run.config, "find_fit", "gpu=rtx4090", "world_size=2", "batch_size=1")
    assert "found in" in said, said


def chat(run: Run) -> None:
    """An answer on the terminal: that of `generate`."""
    lines, said = iter(["Why?"]), io.StringIO()

    def answer(_: str = "") -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    words = [*run.words(), f"sampling.max_new_tokens={NEW}", f"tokenizer.path={run.model}"]
    with mock.patch("builtins.input", answer), redirect_stdout(said):
        run_recipe("chat", [*of_config("chat"), *words])
    if run.case.dtype == "fp32":
        assert said.getvalue().strip() == load_recipe("chat").printable(greedy(run, "Why?")).strip()


def serve(run: Run) -> None:
    """A base and its adapter in one process compute what `generate` does."""
    recipe = load_recipe("serve")
    words = [word for word in run.words() if not word.startswith("adapter=")]
    adapters = {} if run.adapter is None else {"mine": str(run.adapter)}
    words += [f"adapters.{name}={folder}" for name, folder in adapters.items()]
    words += ["model_name=base", "port=0", f"tokenizer.path={run.model}"]
    cfg = load_config(recipe.Config, [*of_config("serve"), *words])
    recipe.check(cfg)
    models = load_adapters_of_one_base(cfg.model, cfg.quantization, "base", adapters, cpu_world())
    expected = logits(run.loaded())
    same(logits(models["mine" if adapters else "base"]), expected, "fp32", "served")


ACTIONS = {
    action.__name__: action
    for action in (
        train, resume, validate, lm_eval, lm_eval_inside, generate, merge, export_gguf,
        export_w4a16, export_vllm, preflight, estimate_memory, find_fit, chat, serve,
    )
}  # fmt: skip


# ---- cells --------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """`kind` is "ran", "refused" or "failed"; `said` the refusal, or the traceback."""

    kind: str
    said: str
    seconds: float


def run_cell(shop: Shop, case: Case, action: str) -> Outcome:
    """Runs an action on what a case trained. A refusal is a UserError of one line."""
    started, quiet = time.perf_counter(), io.StringIO()
    try:
        with redirect_stderr(quiet), redirect_stdout(quiet):
            ACTIONS[action](shop.run(case))
        kind, said = "ran", ""
    except UserError as error:
        said = str(error)
        late = any(at.name == "explained" for at in traceback.extract_tb(error.__traceback__))
        kind = "failed" if "\n" in said or late else "refused"
        said = f"not found by `check` of the recipe: {said}" if late else said
    except (Exception, SystemExit):
        kind, said = "failed", traceback.format_exc()
    finally:
        leave_process_group()
    return Outcome(kind, said, time.perf_counter() - started)


def covering(axes: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every two values of two axes stand together at least once; greedy.

    Each row begins with a pair that no row has yet. Every other axis takes the value that has most
    such pairs with the values that the row has already.
    """
    draw, names = random.Random(seed), list(axes)
    order = {name: at for at, name in enumerate(names)}
    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
    }

    def pair(one: tuple[str, Any], other: tuple[str, Any]) -> Any:
        return (one, other) if order[one[0]] < order[other[0]] else (other, one)

    rows, waiting = [], sorted(left, key=repr)
    draw.shuffle(waiting)
    for first in waiting:
        if first not in left:
            continue
        row = dict(first)
        for name in sorted(set(names) - row.keys(), key=lambda n: (-len(axes[n]), order[n])):
            values = list(axes[name])
            draw.shuffle(values)
            row[name] = max(
                values, key=lambda v: sum(pair((name, v), item) in left for item in row.items())
            )
        left -= {pair(*two) for two in itertools.combinations(row.items(), 2)}
        rows.append({name: row[name] for name in names})
    return rows


def covering_cells() -> list[tuple[Case, str]]:
    rows = covering({"action": list(ACTIONS)} | AXES)
    return [(Case(**row), action) for row in rows for action in [row.pop("action")]]


def all_cases(families: Sequence[str]) -> Iterator[Case]:
    """The product of families, methods and formats; what is left changes along."""
    small = itertools.cycle(itertools.product((False, True), TARGETS, ("fp32", "fp32", "bf16")))
    packed = itertools.cycle((False, False, True, False, True))
    for family, method, format in itertools.product(families, METHODS, FORMATS):
        tied, targets, dtype = next(small)
        yield Case(family, method, format, tied, targets, dtype, next(packed))


def table(outcomes: Sequence[tuple[Case, str, Outcome]]) -> str:
    """Cells that ran, were refused and failed, by family, method and action."""
    lines = []
    for title in ("family", "method", "format", "action"):
        groups: dict[str, list[Outcome]] = {}
        for case, action, outcome in outcomes:
            name = action if title == "action" else getattr(case, title)
            groups.setdefault(name, []).append(outcome)
        lines.append(f"\n{title:20}{'ran':>8}{'refused':>9}{'failed':>8}{'seconds':>9}")
        for name, of in groups.items():
            kinds = [sum(o.kind == kind for o in of) for kind in ("ran", "refused", "failed")]
            seconds = sum(o.seconds for o in of)
            lines.append(f"{name:20}{kinds[0]:8}{kinds[1]:9}{kinds[2]:8}{seconds:9.0f}")
    return "\n".join(lines)


def main(folder: Path, families: Sequence[str]) -> None:
    shop, outcomes = Shop(folder), []
    cases = list(all_cases(families))
    random.Random(0).shuffle(cases)  # what is wrong with a family is seen early
    for case in cases:
        for action in ACTIONS:
            outcome = run_cell(shop, case, action)
            outcomes.append((case, action, outcome))
            print(outcome.kind, f"{outcome.seconds:.1f}", action, case, flush=True)
            if outcome.said:
                print("   ", outcome.said.strip().replace("\n", "\n    "), flush=True)
    print(table(outcomes))


if __name__ == "__main__":
    import os
    import tempfile

    os.environ.setdefault("QFSDP_EAGER_KERNELS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), sys.argv[1:] or list(FAMILIES))
