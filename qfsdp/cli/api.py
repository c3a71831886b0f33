"""The functions of `import qfsdp`: what the recipes do, called from Python.

    run = qfsdp.train("configs/smollm2_135m_qlora.yaml", "max_steps=20")
    qfsdp.generate(run.model, "What is 2 + 3?")

Each runs the recipe of its purpose in this process, as one rank, with the same checks and the same
lines about mistakes. A config is a YAML file or a dict of the same keys; words behind it are those
of the command line. When a function returns or raises, the process is as it was: environment,
random numbers, signal handlers, streams, and no process group that it has started.
"""

# Importing this module imports no torch.

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar
from unittest.mock import patch

from qfsdp.common import progress
from qfsdp.common.devices import accelerator, check_system
from qfsdp.common.errors import UserError, limits_of_the_system
from qfsdp.common.printable import printable, redacted
from qfsdp.common.quiet import quiet_torchao
from qfsdp.common.terminal import closed_at_end
from qfsdp.config import load as configs
from qfsdp.config import recipe_files
from qfsdp.launch.ranks import (
    check_environment,
    check_one_process,
    leave_process_group,
    torchrun_flags,
)

if TYPE_CHECKING:
    from qfsdp.evaluation.results import Result
    from qfsdp.planning.estimate import Estimate

Config: TypeAlias = str | Path | Mapping[str, Any]
Prompt: TypeAlias = str | list[dict[str, Any]]
P = ParamSpec("P")
T = TypeVar("T")
RESULTS = ("adapter", "model")  # folders that training recipes write


# ---- the process ---------------------------------------------------------------------------------


def _here(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates what runs in this process as one rank: nothing is printed, unless it is given
    `verbose`, and the process is afterwards as before."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        failed = ""
        quiet_torchao()
        try:
            with limits_of_the_system(), patch.dict(os.environ), ExitStack() as stack:
                if not kwargs.get("verbose"):
                    text = io.StringIO()
                    stack.enter_context(redirect_stdout(text))
                    stack.enter_context(redirect_stderr(text))
                check_system()
                check_environment()
                check_one_process()
                stack.enter_context(torchrun_flags("1", "1"))
                stack.enter_context(_torch_as_before())
                stack.enter_context(closed_at_end())
                return function(*args, **kwargs)
        except UserError as error:
            failed = printable(redacted(str(error)))
        raise UserError(failed)  # without the frames of the first one, which hold the model

    return called


@contextmanager
def _torch_as_before() -> Iterator[None]:
    """Random numbers and how functions are compiled; leaves a process group that is new."""
    import torch
    import torch.distributed as dist

    device, joined = accelerator(), dist.is_available() and dist.is_initialized()
    if device is None:
        generators = torch.random.fork_rng([])
    else:
        generators = torch.random.fork_rng([0], device_type=device.type)
    with generators, torch.compiler.set_stance("default"):
        try:
            yield
        finally:
            if not joined:
                leave_process_group()


# ---- the functions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run that `train` has made.

    Fields:
        folder: its `output_dir`: config, metrics, checkpoints, the result and its page.
        metrics: the lines of `metrics.jsonl`, such as {"step": 1, "loss": 2.3, ...}.
        output: what the recipe printed; "" if it was shown.
    """

    folder: Path
    metrics: list[dict[str, float | None]]
    output: str

    @property
    def result(self) -> Path:
        """The folder of the adapter or model. Raises UserError if the run was stopped before."""
        for folder in (self.folder / name for name in RESULTS):
            if folder.is_dir():
                return folder
        raise UserError(f"{self.folder}: no {' or '.join(RESULTS)}; expected a run that has ended")

    @cached_property
    def model(self) -> Model:
        """The result, loaded once as `load` does."""
        return load(self.result)


@dataclass(frozen=True)
class Model:
    """A model in memory, to generate and evaluate with.

    Fields:
        decoder: the PyTorch module, in eval mode.
        tokenizer: its tokenizer, with `encode` and `decode`.
        config: the config of recipes/generate that it was loaded with.
        stops: tokens that end an answer.
        world: its device.
    """

    decoder: Any
    tokenizer: Any
    config: Any
    stops: set[int]
    world: Any


@_here
def train(config: Config, *words: str, recipe: str | None = None, verbose: bool = False) -> Run:
    """Trains as `qfsdp run RECIPE --config CONFIG` does, on one device, and returns the run.

    An interrupt saves a checkpoint and returns; the word `resume=auto` then goes on.

    Args:
        config: a YAML file, by its path or name, or a dict of the same keys.
        words: `key=value` and `~key`, as on the command line.
        recipe: by its name or path; None: the one that the first line of the file names, for a
            dict recipes/qdora_distributed.
        verbose: print what the recipe prints.

    Raises:
        UserError: a mistake, in the recipe's own line.
    """
    from qfsdp.hub.upload import push_results
    from qfsdp.launch.start import checked
    from qfsdp.training.report.run_folder import METRICS, read_steps

    module = _training_recipe(config, recipe)
    cfg = _read(module.Config, config, words)
    checked(module.check, cfg)
    progress.begin()
    module.main(cfg)
    gc.collect()  # the model has cycles, and the next one needs its memory
    push_results()
    folder = Path(cfg.output_dir).expanduser()
    output = sys.stdout.getvalue() if isinstance(sys.stdout, io.StringIO) else ""
    return Run(folder, read_steps(folder / METRICS), output)


@_here
def load(source: str | Path, *words: str) -> Model:
    """Loads an adapter with its base, or a model, on one device.

    Args:
        source: a folder or a name on the hub. An adapter knows its base.
        words: keys of recipes/generate, such as `quantization.format=nf4`, `model.dtype=fp32` and
            `system_prompt=TEXT`.

    Raises:
        UserError: as recipes/generate.
    """
    from qfsdp.checkpoint.adapter_base import base_of
    from qfsdp.checkpoint.saved_template import build_tokenizer
    from qfsdp.distributed.world import init_world
    from qfsdp.evaluation.inference_model import load_for_inference
    from qfsdp.evaluation.prompts import stop_ids
    from qfsdp.launch.start import checked

    recipe, name = _recipe("recipes/generate"), str(source)
    named = {"model": {"path": name}} if base_of(name) is None else {"adapter": name}
    cfg = _read(recipe.Config, {**named, "prompt": "Hello"}, words)
    short = replace(cfg.sampling, max_new_tokens=1)  # `generate` says how long an answer may be
    checked(recipe.check, replace(cfg, sampling=short))
    world = init_world(cfg.sharding)
    if world.mesh is not None:  # its process group would have to stay
        raise UserError("sharding: it shards or offloads the base; expected a plain `ddp`")
    parts = (cfg.model, cfg.quantization, cfg.adapter, cfg.sharding)
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.adapter)
    stops = stop_ids(tokenizer, cfg.model.folder)
    return Model(load_for_inference(*parts, world), tokenizer, cfg, stops, world)


@_here
def generate(model: Model, text: Prompt | Sequence[Prompt], **sampling: float) -> Any:
    """Answers a prompt, or each of several.

    Args:
        model: as `load` and `Run.model` return it.
        text: a text, or a conversation of {"role": ..., "content": ...}; or a list of these.
        sampling: keys of section `sampling`, such as `max_new_tokens` and `temperature`.

    Returns:
        The answer, or the list of answers.

    Raises:
        UserError: as recipes/generate.
    """
    one = isinstance(text, str) or (bool(text) and isinstance(text[0], dict) and "role" in text[0])
    from qfsdp.evaluation.generation import check_lengths, generate_all

    cfg, recipe = _loaded(model).config, _recipe("recipes/generate")
    if sampling:
        tree = {"model": {"path": cfg.model.path}, "sampling": vars(cfg.sampling) | sampling}
        cfg = replace(cfg, sampling=_read(recipe.Config, tree, ()).sampling)
    rows = [{cfg.prompt_column: prompt} for prompt in ([text] if one else text)]
    prompts = recipe.tokenized(cfg, model.tokenizer, rows)
    check_lengths(prompts, cfg.sampling, model.decoder)
    how = (cfg.sampling, model.stops, model.world, cfg.batch_size)
    answers = generate_all(model.decoder, prompts, *how)
    texts = [model.tokenizer.decode(answer) for answer in answers]
    return texts[0] if one else texts


@_here
def evaluate(model: Model, config: Config, *words: str) -> list[Result]:
    """Measures a model as recipes/evaluate does.

    Args:
        model: as `load` and `Run.model` return it.
        config: keys of recipes/evaluate but those of the model: sections `loss`, `text`,
            `exact_match` and `lm_eval`; with `output` the results and each question go to files.
        words: `key=value` and `~key`.

    Returns:
        A result per set and metric, with `name`, `metric`, `value`, `interval` and `count`.

    Raises:
        UserError: as recipes/evaluate.
    """
    with TemporaryDirectory() as folder:
        from qfsdp.launch.start import checked

        recipe, of = _recipe("recipes/evaluate"), _loaded(model).config
        tree = {"output": f"{folder}/results.json", "model": {"path": of.model.path}}
        cfg = _read(recipe.Config, config, words, below=tree)
        same = ("model", "tokenizer", "quantization", "sharding", "adapter")
        if cfg.model.path != of.model.path or cfg.adapter not in (None, of.adapter):
            raise UserError("model.path, adapter: another model; expected no keys of the model")
        cfg = replace(cfg, **{name: getattr(of, name) for name in same})
        checked(recipe.check, cfg)
        results: list[Result] = recipe.measure(
            cfg, model.decoder, recipe.read_sets(cfg), model.world
        )
        return results


@_here
def estimate(config: Config, *words: str, recipe: str | None = None, **keys: Any) -> Estimate:
    """The memory of a training step, as recipes/estimate_memory finds it; needs neither weights nor
    a GPU.

    Args:
        config, words, recipe: as for `train`.
        keys: of recipes/estimate_memory: `world_size`, `local_world_size`, `target`, `gpu`.

    Returns:
        Bytes of a rank: `peak`, `at_peak` by kind of tensor, `reserved`, `steady`, `host`.

    Raises:
        UserError: as recipes/estimate_memory.
    """
    from qfsdp.config.tool_config import Training

    tool = _recipe("recipes/estimate_memory")
    module = _training_recipe(config, recipe)
    training = Training(module, _read(module.Config, config, words), [])
    found: Estimate = tool.estimate(_read(tool.Config, keys, ()), training)
    return found


# ---- recipes and configs -------------------------------------------------------------------------


def _loaded(model: Any) -> Model:
    if not isinstance(model, Model):
        raise UserError(f"model: {str(model)!r}; expected a loaded one: qfsdp.load(...)")
    return model


def _recipe(name: str) -> ModuleType:
    file = recipe_files.find_recipe(name)
    if file is None:
        from qfsdp.config.right_forms import no_recipe

        raise UserError(no_recipe("qfsdp", name))
    return recipe_files.load_recipe(file)


def _training_recipe(config: Config, name: str | None) -> ModuleType:
    if name is None and not isinstance(config, Mapping):
        name = recipe_files.recipe_file_of(_path(config))
    recipe = _recipe(name or recipe_files.DEFAULT_RECIPE)
    if not hasattr(recipe, "train_step"):
        raise UserError(f"{name}: it trains nothing; expected a training recipe")
    return recipe


def _path(config: str | Path) -> str:
    return recipe_files.find_config(str(config)) or str(config)


def _read(
    schema: type, config: Config, words: Sequence[str], below: Mapping[str, Any] | None = None
) -> Any:
    """A typed config; keys of `below` are weaker than those of `config`."""
    if not isinstance(config, Mapping):
        path = _path(config)
        config = configs.read_yaml(path)
    else:
        path = "config"
    tree = {**(below or {}), **_plain(config)}
    configs.change(schema, tree, configs.split_words(words, schema)[1])
    return configs.config_of(schema, path, configs.over_defaults(schema, tree))


def _plain(value: Any) -> Any:
    """A copy as YAML would give it: paths are text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
