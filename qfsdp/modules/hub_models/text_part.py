"""The text model of a model that takes pictures or sound too.

It alone is trained. Its modules keep the names that they have in the whole model, so adapters and
merged weights fit the whole one. All others are taken out before anything is loaded or counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.modules.hub_models.config import HubConfig


def text_model_name(hf: Any, config: HubConfig) -> tuple[str, str]:
    """Where the body of a whole model and the text model in it are ("model.language_model"). The
    body is "" if the text model is that of a causal language model inside (Llama 4). Raises
    UserError: the body has none."""
    named = {id(module): name for name, module in hf.named_modules()}
    body, name = named[id(hf.base_model)], named.get(id(hf.get_decoder()), "")
    embedding = named.get(id(hf.get_input_embeddings()), "")
    output = named.get(id(hf.get_output_embeddings()), "")
    if not body and name and output.startswith(f"{name}.") and embedding.startswith(f"{name}."):
        return body, embedding.rpartition(".")[0]
    if not body or not name.startswith(f"{body}.") or not embedding.startswith(f"{name}."):
        raise UserError(
            f"{config.source}: {config.architecture} has no text model in its body; such a model "
            "is not trained"
        )
    return body, name


def take_text_model(hf: Any, config: HubConfig) -> str:
    """Takes all modules beside the text model out of the body of `hf`; the text model's name."""
    body, name = text_model_name(hf, config)
    if not body:
        inside = name.rpartition(".")[0]
        for other in hf._modules.keys() - {inside}:
            hf._modules[other] = None
        return name
    module = hf.base_model
    for part in name.removeprefix(f"{body}.").split("."):
        for other in module._modules.keys() - {part}:
            module._modules[other] = None
        module._parameters.clear()
        module._buffers.clear()
        module = module.get_submodule(part)
    return name


def used_names(config: HubConfig) -> set[str]:
    """Names of the weights and buffers in files that a run loads."""
    return _of_text(config, config.meta.state_dict())


def used_classes(config: HubConfig) -> set[str]:
    """Names of the classes of the modules that a run has."""
    modules = dict(config.meta.named_modules())
    return {type(modules[name]).__name__ for name in _of_text(config, modules)}


def _of_text(config: HubConfig, names: Iterable[str]) -> set[str]:
    """`names` without those of what is beside the text model in the body."""
    if not config.takes_more_than_text:
        return set(names)
    body, text = text_model_name(config.meta, config)
    if not body:
        return {n for n in names if n.startswith(f"{text.rpartition('.')[0]}.")}
    return {n for n in names if not n.startswith(f"{body}.") or f"{n}.".startswith(f"{text}.")}
