"""The model card (`README.md`) of adapters and merged models, and their upload.

A card tells the base, method, data, steps, losses and how to load the result. It is made from what
the run has written: `config.yaml` and `metrics.jsonl`. Format of its head:
https://huggingface.co/docs/hub/model-cards. Paths of this machine are left out. The license of the
base is told; that of the result, which its owner has to choose, is not in the head.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from qfsdp.checkpoint.adapter_config_file import CONFIG_FILE, WEIGHTS_FILE
from qfsdp.common.errors import UserError
from qfsdp.common.files import not_written, write_text
from qfsdp.common.terminal import warn
from qfsdp.config.load import get_key, to_yaml
from qfsdp.distributed.world import World
from qfsdp.hub.download import hub_name, local_folder
from qfsdp.hub.upload import KEY, push_later
from qfsdp.modules.adapters.config import NAMES

CARD_FILE = "README.md"


def publish(cfg: Any, folder: Path, world: World) -> None:
    """Writes the card of a result on rank 0, and has `push_to_hub` upload it after the run.

    A card that cannot be written is a warning: the result is there.

    Args:
        cfg: the config of a training recipe.
        folder: of the adapter or model.
    """
    if world.rank != 0:
        return
    try:
        write_text(folder / CARD_FILE, model_card(cfg, folder))
    except OSError as error:
        warn(not_written(folder / CARD_FILE, error))
    push(cfg, folder, world)


def push(cfg: Any, folder: Path, world: World) -> None:
    """Has rank 0 upload a result after the run, if the config has `push_to_hub`."""
    if world.rank == 0 and (name := get_key(cfg, KEY)) is not None:
        push_later(name, folder)


def model_card(cfg: Any, folder: Path) -> str:
    """The text of the card.

    Args:
        cfg: the config of a training recipe, or of recipes/merge.
        folder: of the adapter or model; a model need not be there yet.
    """
    merged_from = get_key(cfg, "adapter")
    run = Path(get_key(cfg, "output_dir") or ".").expanduser()
    if isinstance(merged_from, str):  # recipes/merge
        run = local_folder(merged_from).parent
    trained = _run_config(run) or yaml.safe_load(to_yaml(cfg))
    is_adapter = (folder / CONFIG_FILE).is_file()
    base, name = hub_name(cfg.model.path), get_key(cfg, KEY) or folder.absolute().parent.name
    shown = cfg.model.path if base else local_folder(cfg.model.path).name
    head: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if base:
        head |= {"base_model": base[0]}
        head |= {"base_model_relation": "adapter" if is_adapter else "finetune"}
    method = get_key(trained, "adapter.method")
    tags = ["qfsdp", *([str(method)] if method else [])]
    head |= {"pipeline_tag": "text-generation", "tags": tags}
    lines = [
        f"# {_text(name)}",
        "",
        f"Finetuned from {_text(shown)} with [qfsdp](https://github.com/qfsdp/qfsdp).",
    ]
    lines += ["", "| | |", "|---|---|"]
    facts = [*_facts(trained, run, folder), *_license(local_folder(cfg.model.path) / CARD_FILE)]
    lines += [f"| {_text(key)} | {_text(value)} |" for key, value in facts]
    lines += ["", "## Load it", "", *_how_to_load(shown, is_adapter, _sees(cfg))]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n".join(lines) + "\n"


def _run_config(run: Path) -> dict[str, Any] | None:
    try:
        found = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def _text(value: str) -> str:
    """A text without HTML, ends of lines and of cells: file names may hold any."""
    return escape(" ".join(value.split()), quote=False).replace("|", "\\|").replace("`", "'")


def _word(value: str) -> str:
    """A word of a shell's line in a block of code, which it cannot end."""
    return quote(" ".join(value.split()).replace("`", "'"))


def _facts(trained: dict[str, Any], run: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """What the run was, as rows of a table; what is not known is left out."""
    method = get_key(trained, "adapter.method")
    if method is None:
        yield "method", "full finetuning" if "trainable" in trained else "merged adapter"
    elif method in ("ia3", "oft"):
        yield "method", NAMES[method]
    elif method == "miss":
        yield "method", f"{NAMES[method]}, rank {get_key(trained, 'adapter.rank')}"
    else:
        rank, alpha = get_key(trained, "adapter.rank"), get_key(trained, "adapter.alpha")
        alpha = f"{alpha:g}" if isinstance(alpha, int | float) else alpha  # an interpolation stays
        yield "method", f"{'DoRA' if method == 'dora' else 'LoRA'}, rank {rank}, alpha {alpha}"
    if (targets := get_key(trained, "adapter.targets")) is not None:
        yield "trained linears", targets if isinstance(targets, str) else ", ".join(targets)
    if (format := get_key(trained, "quantization.format")) is not None:
        yield "base weights", "not quantized" if format == "none" else str(format)
    if data := ", ".join(dict.fromkeys(_sources(get_key(trained, "dataset")))):
        yield "data", data
    titles = {"optimizer.lr": "learning rate", "max_seq_len": "tokens per sample, at most"}
    for key, title in (titles | {"seed": "seed"}).items():
        if (value := get_key(trained, key)) is not None:
            yield title, str(value)
    yield from _figures(run)
    with suppress(OSError):
        size = (folder / WEIGHTS_FILE).stat().st_size
        yield "adapter", f"{size / 1e6:,.1f} MB"
    with suppress(OSError, ValueError, KeyError, TypeError):
        best = json.loads((folder / "best.json").read_bytes())
        yield "kept", f"update {best['step']:d}, the best by {best['metric']}"


def _license(card: Path) -> Iterator[tuple[str, str]]:
    """The license of the base, if its own card has one."""
    with suppress(OSError, ValueError, IndexError, AttributeError, yaml.YAMLError):
        head = yaml.safe_load(card.read_text(encoding="utf-8").split("---\n")[1])
        # "other" is a name of the hub's list; the license's own stands beside it.
        told = (head.get(key) for key in ("license_name", "license"))
        if name := next((one for one in told if isinstance(one, str)), None):
            yield "license of the base", name


def _sources(dataset: Any) -> Iterator[str]:
    """The data of a dataset or of the parts of a mixture: hub names, and files without folders."""
    if not isinstance(dataset, dict):
        return
    if isinstance(source := dataset.get("source"), str):
        local = Path(source).expanduser().exists() or source.startswith(("/", "~", "."))
        yield Path(source).name if local else source
    for part in (dataset.get("sets") or {}).values():
        yield from _sources(part)


def _figures(run: Path) -> Iterator[tuple[str, str]]:
    """Steps, what is trained, the last loss, and the last value of each held-out loss."""
    last: dict[str, tuple[int, float]] = {}
    try:
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            # NaN is written as null, e.g. of an update that was left out.
            known = ((key, value) for key, value in entry.items() if value is not None)
            last |= {key: (entry["step"], value) for key, value in known}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    with suppress(KeyError):
        size, percent, mb = (last[f"trained/{of}"][1] for of in ("parameters", "percent", "mb"))
        yield "trained", f"{size:,.0f} parameters, {percent:.3g} % of all, {mb:,.4g} MB"
    if "loss" in last:
        step, loss = last["loss"]
        yield "updates", str(step)
        yield "training loss, last", f"{loss:.4g}"
    for key, (step, value) in last.items():
        if key.endswith("/loss"):
            name = key.removeprefix("validation/").removesuffix("/loss")
            yield f"held-out loss, {name}", f"{value:.4g} (update {step})"


def _sees(cfg: Any) -> bool:
    """Whether the result belongs to a model that takes more than text."""
    with suppress(UserError):
        return bool(cfg.model.any_config().takes_more_than_text)
    return False


def _how_to_load(base: str, is_adapter: bool, sees: bool) -> list[str]:
    where = "FOLDER"
    library, kind = "transformers", "AutoModelForCausalLM"
    if sees:
        kind = "AutoModelForImageTextToText"
    elif is_adapter:
        library, kind = "peft", "AutoPeftModelForCausalLM"
    code = [f"from {library} import {kind}", "", f'model = {kind}.from_pretrained("{where}")']
    if is_adapter and sees:  # PEFT has no Auto class for it
        code[:1] = ["from peft import PeftModel", code[0]]
        code[-1:] = [
            f"base = {kind}.from_pretrained({json.dumps(base)})",
            f'model = PeftModel.from_pretrained(base, "{where}")',
        ]
    lines = [
        f"`{where}` is this folder, or its name on the hub.",
        "",
        "```python",
        *code,
        "```",
        "",
        "```sh",
        "# qfsdp: one answer",
        "qfsdp run recipes/generate --config configs/generate.yaml \\",
    ]
    if not is_adapter:
        return [*lines, f'    model.path={where} quantization.format=none prompt="..."', "```"]
    common = f"{_word(f'model.path={base}')} adapter={where}"
    return [
        *lines,
        f'    {common} prompt="..."',
        "# qfsdp: one model folder that needs no adapter",
        "qfsdp run recipes/merge --config configs/merge.yaml \\",
        f"    {common} output_dir=merged",
        "```",
    ]
