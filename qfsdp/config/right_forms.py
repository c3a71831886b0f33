"""The right form of words that many type wrong; each is the end of an error's one line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import get_type_hints

from qfsdp.common.errors import UserError
from qfsdp.common.files import why
from qfsdp.common.messages import did_you_mean, nearest
from qfsdp.common.printable import masked_word
from qfsdp.config import recipe_files as recipes

DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz")
TORCHRUN = (
    *("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "max_restarts"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone"),
)
LAST_LINE = 'expected launch(__file__, Config, check, main) at its end, if __name__ == "__main__"'
# What others call a method -> the recipe, and the words for it.
METHODS = {
    **dict.fromkeys(("lora", "qlora", "sft", "qdora", "finetune", "train"), "qdora_distributed"),
    **dict.fromkeys(("orpo", "kto", "simpo", "ipo", "cpo", "rlhf"), "dpo_distributed"),
    **dict.fromkeys(("rm", "reward", "classify"), "reward_distributed"),
    **dict.fromkeys(("distill", "gkd", "kd"), "distill_distributed"),
    **dict.fromkeys(("infer", "inference", "predict"), "generate"),
    **dict.fromkeys(("eval", "benchmark"), "evaluate"),
}


def not_understood(word: str, second: str, third: str, schema: type) -> str:
    """The message for a word of a command line that is no `key=value`, and the two after it."""
    shown, bare = masked_word(word), word.lstrip("-")
    told = f"'{shown}' is not understood; overrides are written key=value"
    if word.startswith("--") and second and not second.startswith("-"):
        return f"'{shown} ...': overrides are written without dashes: {bare}={quote(second)}"
    if second == "=":
        return f"'{shown} = ...': overrides are written without spaces: {word}={quote(third)}"
    if second.startswith("=") and len(second) > 1:
        return f"'{shown} ...': overrides are written without spaces: {word}{quote(second)}"
    keys = get_type_hints(schema)
    word = second if word == "-c" else word
    if word.endswith((".yaml", ".yml")):
        return f"{told}; a config is given as --config {quote(word)}"
    is_adapter = os.path.isfile(os.path.join(word, "adapter_config.json"))
    is_adapter |= os.path.basename(os.path.normpath(word)) in ("adapter", "best")
    if is_adapter and ("adapter" in keys or "adapters" in keys):
        return f"{told}: {'adapter' if 'adapter' in keys else 'adapters.NAME'}={quote(word)}"
    if word.endswith(DATA_FILES) and "dataset" in keys:
        return f"{told}: dataset.source={quote(word)}"
    if os.path.isfile(os.path.join(word, "config.json")) and "model" in keys:
        return f"{told}: model.path={quote(word)}"
    return told


def check_no_file(key: str, value: str) -> None:
    """Raises UserError if a component's path is a data file: it is the dataset's `source`."""
    is_set = key.startswith(("validation.sets.", "loss."))
    if not value.endswith(DATA_FILES) or not (key == "dataset" or is_set):
        return
    builder = f"{key}._component_=qfsdp.data.instruct_dataset " if is_set else ""
    raise UserError(f"{key}: {value!r} is a file; expected {builder}{key}.source={quote(value)}")


def no_command(program: str, word: str, commands: Sequence[str]) -> str:
    """The message for a command that there is none, such as the name of a recipe."""
    stem = os.path.basename(word).removesuffix(".py").lower()
    told = f"{program} {word}: no such command"
    recipe = f"recipes/{METHODS.get(stem, stem)}"
    if recipes.find_file(recipe):
        config = recipe.replace("recipes", "configs", 1)
        config = f"{config}.yaml" if recipes.find_file(config) else "CONFIG"
        short = f"{program} finetune MODEL ROWS or " if recipe == recipes.DEFAULT_RECIPE else ""
        return f"{told}; expected {short}{program} run {recipe} --config {config}"
    return f"{told}{did_you_mean(nearest(stem, commands)) or '; expected ' + ', '.join(commands)}"


def no_recipe(program: str, name: str) -> str:
    """The message for a name that no recipe has."""
    told, stem = f"{name}: no such recipe", os.path.basename(name).removesuffix(".py").lower()
    config = recipes.find_config(name) if not name.endswith(".py") else None
    if config and config.endswith((".yaml", ".yml")):
        owner = recipes.recipe_of_config(config) or recipes.DEFAULT_RECIPE
        return f"{name}: a config, no recipe; expected {program} run {owner} --config {name}"
    if stem in ("grpo", "ppo"):
        example = "examples/grpo/train.py --config examples/grpo/smollm2_135m.yaml"
        return f"{told}; GRPO is an example: {program} run {example}"
    if stem in METHODS:
        return f"{told}{did_you_mean(f'recipes/{METHODS[stem]}')}"
    if (file := Path(name if name.endswith(".py") else f"{name}.py")).is_file():
        return f"{file}{_wrong_recipe(file)}; expected a recipe: Config and main at its top level"
    return told + (
        did_you_mean(recipes.similar_name("recipes", name))
        or f"; expected one that `{program} ls` lists, or a Python file that defines Config and "
        "main"
    )


def _wrong_recipe(file: Path) -> str:
    """What an edited copy of a recipe lacks."""
    try:
        defined = recipes.defined_names(file)
    except SyntaxError as error:
        return f", line {error.lineno}: not valid Python: {error.msg}"
    except (OSError, ValueError) as error:
        return f": cannot be read: {why(error)}"
    return f": defines no {' and no '.join(sorted({'Config', 'main'} - defined))}"


def check_flags(program: str, words: Sequence[str]) -> None:
    """Raises UserError for torchrun's flags behind the recipe."""
    rest = list(words[1:])
    for at, word in enumerate(rest):
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if not word.startswith("--") or name not in TORCHRUN:
            continue
        value = [] if "=" in word or name == "standalone" else rest[at + 1 : at + 2]
        left = " ".join(quote(w) for w in (*rest[:at], *rest[at + 1 + len(value) :]))
        flags = " ".join((word, *value))
        raise UserError(
            f"'{flags}': torchrun's flags stand before the recipe; expected "
            f"{program} run {flags} {words[0]} {left}".rstrip()
        )
