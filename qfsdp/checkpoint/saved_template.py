"""The chat template beside an adapter or a model, so that it answers with the one of its training.

A run that does not use the model's own template writes `chat_template.jinja`, the name that
transformers reads, into the adapter's folder. `recipes/generate` and `recipes/evaluate` take it
from there, and `recipes/merge` puts it into the merged model.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.common.files import to_json
from qfsdp.config.component import Component
from qfsdp.data import HFTokenizer, hf_tokenizer
from qfsdp.data.chat.choose_template import say_once
from qfsdp.data.components import parts_of
from qfsdp.data.tokenizer_folder import eos_ids, read_json, read_text, texts_in
from qfsdp.hub.download import local_folder

TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "added_tokens.json",
)


def adapter_template(tokenizer: Component, dataset: Component) -> dict[str, str]:
    """The files that a run writes beside its adapter: name -> text.

    Args:
        tokenizer, dataset: of the run's config.

    Returns:
        `chat_template.jinja`; or nothing if the template is the model's own, or `plain` because the
        model has none and the run has no conversations.
    """
    built = tokenizer.build()
    if not isinstance(built, HFTokenizer) or built.chat_template.of_model:
        return {}
    if built.chat_template.by_default and not _has_chats(dataset):
        return {}
    return {TEMPLATE_FILE: built.chat_template.template.text}


def model_template(
    template: dict[str, str], folder: Path, tokenizer_folder: Path | None = None
) -> dict[str, str]:
    """The files for a model that was trained with a template: name -> text.

    `generation_config.json` gets the token that ends an answer, so that generation ends there.

    Args:
        template: as `adapter_template` returns it; empty: the model's own.
        folder: the base model.
        tokenizer_folder: of the tokenizer; None: the base model's.
    """
    tokenizer = chat_tokenizer(template, tokenizer_folder or folder)
    if tokenizer is None:
        return template
    file = folder / GENERATION_FILE
    settings = read_json(file) if file.is_file() else {}
    eos = settings.get("eos_token_id", sorted(eos_ids(folder)) or tokenizer.eos_id)
    ends, end = eos if isinstance(eos, list) else [eos], tokenizer.end_of_turn_id
    if end is None or end in ends:
        return template
    settings["eos_token_id"] = [end, *ends]
    return template | {GENERATION_FILE: to_json(settings, indent=2) + "\n"}


def chat_tokenizer(template: dict[str, str], folder: Path) -> HFTokenizer | None:
    """The model's tokenizer; None if it has none, or none with a chat template.

    Args:
        template: as in `model_template`.
        folder: of the tokenizer.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        tokenizer = hf_tokenizer(str(folder), template.get(TEMPLATE_FILE))
    except UserError:
        if template:
            raise
        return None  # the tokenizer is copied as it is
    return None if tokenizer.chat_template.by_default else tokenizer


def read_template(adapter: Path | None, tokenizer: bool = False) -> dict[str, str]:
    """The template in an adapter's folder, as `adapter_template` returns it; empty without one.

    Args:
        tokenizer: the files of the tokenizer too.
    """
    if adapter is None:
        return {}
    return texts_in(adapter, (TEMPLATE_FILE, *(TOKENIZER_FILES if tokenizer else ())))


def build_tokenizer(tokenizer: Component, adapter: str | None) -> Any:
    """Builds the tokenizer for a model with an adapter: with the adapter's chat template.

    A `tokenizer.chat_template` other than `auto` in the config wins; one line says so.

    Args:
        tokenizer: of the config.
        adapter: a folder in PEFT's format, or None.
    """
    takes_template = "chat_template" in inspect.signature(tokenizer.resolve()).parameters
    if adapter is None or not takes_template:
        return tokenizer.build()
    folder, given = local_folder(adapter), tokenizer.kwargs.get("chat_template")
    file = folder / TEMPLATE_FILE
    if given in (None, "auto"):
        return tokenizer.build(chat_template=str(file)) if file.is_file() else tokenizer.build()
    built, trained = tokenizer.build(), read_text(file) if file.is_file() else None
    if trained is None and (folder / "tokenizer.json").is_file():  # saved with the adapter
        file, trained = folder, hf_tokenizer(str(folder)).chat_template.template.text
    used = built.chat_template.template.text if isinstance(built, HFTokenizer) else None
    if trained not in (None, used):
        given = str(given)[:60]
        say_once(f"tokenizer.chat_template: {given}; the adapter was trained with that of {file}")
    return built


def _has_chats(dataset: Component) -> bool:
    """Whether a dataset may have conversations: all but documents and random tokens have."""
    parts = parts_of("dataset", dataset.kwargs.get("sets"))
    if parts:
        return any(map(_has_chats, parts.values()))
    return not dataset.path.endswith((".text_dataset", ".dummy_dataset"))
