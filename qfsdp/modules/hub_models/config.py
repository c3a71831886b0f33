"""Which implementation a model folder gets, and what a run asks of its config."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line
from qfsdp.modules.decoder_config import DecoderConfig, read_config
from qfsdp.modules.decoder_parts import positions_of_answer
from qfsdp.modules.families import FAMILIES, architecture_of
from qfsdp.modules.families.values import NotComputed

Implementation = Literal["auto", "native", "transformers"]
CHECKED = Path(__file__).with_name("checked.json")
"""Architectures that `benchmarks/any_model.py` found equal to transformers; it writes the file."""
DECODERS = ("GPTNeoXForCausalLM", "GPTNeoXJapaneseForCausalLM")  # `is_decoder` is not read
NOT_TRAINED = {
    "ProphetNetForCausalLM": "predicts several tokens at each position",
    "RwkvForCausalLM": "divides its weights in place before it answers",
}
SHARED = "tie_word_embeddings"
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
UNLIMITED = 1 << 30  # positions of a model whose config names no limit


@dataclass(frozen=True)
class HubConfig:
    """A model that transformers builds.

    Fields:
        hf: transformers' config; of a model that takes more than text, that of the whole model.
        source: names the file in errors.
        architecture: the class.
        vocab_size: rows of the embedding; the other sizes are named as in `config.json`.
        experts, predictors: as of `DecoderParts`; a run does not see them.
    """

    hf: Any
    source: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    experts: None = None
    predictors: int = 0

    @property
    def takes_more_than_text(self) -> bool:
        """Whether only a part of the model, its text model, is trained."""
        return self.hf.get_text_config() is not self.hf

    @property
    def experts_per_token(self) -> int | None:
        """As of `DecoderParts`."""
        text = self.hf.get_text_config()
        found = (getattr(text, key, None) for key in EXPERTS_PER_TOKEN)
        return next((count for count in found if isinstance(count, int)), None)

    @property
    def ropes(self) -> list[dict[str, Any]]:
        """The objects that describe rotary embeddings: one, or one for each kind of layer."""
        given = getattr(self.hf.get_text_config(), "rope_parameters", None) or {}
        return [given, *(part for part in given.values() if isinstance(part, dict))]

    def most_positions(self, prompt: int) -> int:
        """As of `DecoderConfig`: tokens of a prompt and its answer together."""
        longropes = (rope for rope in self.ropes if rope.get("rope_type") == "longrope")
        given = [rope.get("original_max_position_embeddings") for rope in longropes]
        contexts = [context for context in given if isinstance(context, int)]
        return positions_of_answer(self.max_position_embeddings, contexts, prompt)

    def build(self, dtype: torch.dtype) -> Any:
        """transformers' module on the meta device, with all its parts. Raises `UserError`."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        of_text = known_models()[0].get(self.hf.model_type) == self.architecture
        auto = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
        try:
            with torch.device("meta"):
                return auto.from_config(self.hf, dtype=dtype)
        except Exception as error:  # whatever transformers' classes raise for a config
            raise _refused(self.source, error) from None

    @cached_property
    def meta(self) -> Any:
        """transformers' module on the meta device, as files are compared with it."""
        return self.build(torch.float32)


AnyConfig = DecoderConfig | HubConfig


def model_config(folder: str | Path, implementation: Implementation = "auto") -> AnyConfig:
    """The model of a folder: native where `families` has its architecture and our decoder computes
    what the file says, unless `implementation` says otherwise. Reads `config.json` only.

    Raises:
        UserError: the file is missing or broken; or neither we nor the installed transformers have
            the architecture, or it is no causal language model.
    """
    return model_config_of(*read_config(folder), implementation)


def model_config_of(
    config: dict[str, Any], source: str, implementation: Implementation = "auto"
) -> AnyConfig:
    """`model_config` of the parsed `config.json` that `source` names."""
    architecture = _architecture(config)
    if implementation == "native" or (implementation == "auto" and architecture in FAMILIES):
        try:
            return DecoderConfig.from_dict(config, source)
        except NotComputed:
            if implementation == "native" or architecture not in checked()["equal"]:
                raise
    found = hub_config(config, source)
    if implementation == "auto" and (architecture := found.architecture) not in checked()["equal"]:
        from transformers import __version__

        raise UserError(
            f"{source}: {architecture} of transformers {__version__} was not found to train as "
            "transformers does; expected one of docs/reference/models.md, or "
            "model.implementation=transformers to train it unchecked"
        )
    return found


def as_stored(config: AnyConfig, stored: Callable[[], Collection[str]]) -> AnyConfig:
    """`config`, whose output layer is one of its own if files hold it.

    Mistral Small 3: the class for the whole model shares it with the embeddings unless its
    `config.json` says otherwise, and only the text model's default says so. transformers compares
    the tensors while it loads them.

    Args:
        stored: gives the names of the tensors in files; called only where they decide.
    """
    if isinstance(config, HubConfig) and config.takes_more_than_text:
        shared = [getattr(c, SHARED, False) for c in (config.hf, config.hf.get_text_config())]
        if shared == [True, False] and any(name.endswith("lm_head.weight") for name in stored()):
            setattr(config.hf, SHARED, False)
    return config


@cache
def checked() -> dict[str, Any]:
    """The content of `CHECKED`."""
    found: dict[str, Any] = json.loads(CHECKED.read_text(encoding="utf-8"))
    return found


def _architecture(config: dict[str, Any]) -> str | None:
    name = architecture_of(config)
    return name if isinstance(name, str) else None


def hub_config(config: dict[str, Any], source: str) -> HubConfig:
    """The config of a model that transformers builds; raises as `model_config`."""
    architecture, kind = _architecture(config), config.get("model_type")
    if architecture is None:
        given = f"architectures is {config.get('architectures')!r:.50}"
        expected = 'a list with the class of the model, such as ["LlamaForCausalLM"]'
        raise UserError(f"{source}: {given}; expected {expected}")
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise UserError(
            f"{source}: architecture {architecture!r} comes from transformers, which is not "
            "installed; expected `pip install 'transformers>=5.23,<6'`, or one of "
            f"{', '.join(FAMILIES)}"
        ) from None
    causal, multimodal = known_models()
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        known = [*FAMILIES, *causal.values(), *multimodal.values()]
        return _unknown(architecture, source, config, known)
    of_kind = [known[kind] for known in (causal, multimodal) if kind in known]
    spelled = architecture.replace("_", "").casefold()  # "PhiMoEForCausalLM" is Phimoe...
    same = (name for name in of_kind if name.replace("_", "").casefold() == spelled)
    if (architecture := next(same, architecture)) not in of_kind:
        expected = (of_kind or ["a causal language model of text"])[0]
        raise UserError(
            f"{source}: architecture {architecture!r} is no causal language model; expected "
            f"{expected}"
        )
    try:
        cls = CONFIG_MAPPING[kind]
        hf = cls.from_dict(cls._decode_special_floats(dict(config)))  # infinity is no JSON
        text = hf if hf.is_encoder_decoder else hf.get_text_config()
    except Exception as error:  # whatever transformers' classes raise for a value
        raise _refused(source, error) from None
    _check_kind(hf, text, architecture, source)
    positions = getattr(text, "max_position_embeddings", None)
    keys = ("vocab_size", "hidden_size", "num_hidden_layers")
    sizes: list[Any] = [getattr(text, key, None) for key in keys]
    sizes[2] = getattr(text, "decoder_layers", sizes[2])  # BART's others are its encoder's
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UserError(
            f"{source}: {architecture} has no vocab_size, hidden_size or num_hidden_layers; "
            "expected integers above 0"
        )
    # What a loss of experts would need is not asked for.
    hf.output_router_logits = text.output_router_logits = False
    return HubConfig(hf, source, architecture, sizes[0], sizes[1], sizes[2], positions or UNLIMITED)


def _check_kind(hf: Any, of_text: Any, architecture: str, source: str) -> None:
    """Raises `UserError` for models that do not predict the next token of a text."""
    encoder = getattr(hf, "is_decoder", True) is False and architecture not in DECODERS
    encoder |= getattr(hf, "causal", True) is False  # XLM
    both = any(getattr(one, "is_encoder_decoder", False) for one in (hf, of_text))
    if both or encoder:
        what = "an encoder and a decoder" if both else "an encoder"
        raise UserError(f"{source}: {architecture} is {what}; expected a causal language model")
    if getattr(of_text, "use_bidirectional_attention", None) in (True, "all"):
        what = "tokens see those after them (use_bidirectional_attention)"
        raise UserError(f"{source}: in {architecture} {what}; expected a causal language model")
    known = known_models()[1].get(hf.model_type, "the text model alone")
    if of_text is not hf and known != architecture:
        raise UserError(f"{source}: {architecture} takes more than text; expected {known}")
    if (why := NOT_TRAINED.get(architecture)) is not None:
        raise UserError(f"{source}: {architecture} {why}; such a model is not trained")


def _unknown(architecture: str, source: str, config: dict[str, Any], known: list[str]) -> HubConfig:
    if architecture in known:  # such as the shapes that estimates know by name, and Kimi K2
        kinds = {kind for of in known_models() for kind in of if of[kind] == architecture}
        expected = f"expected {' or '.join(sorted(kinds))}, as transformers calls {architecture}"
        raise UserError(f"{source}: model_type {config.get('model_type')!r}; {expected}")
    near = difflib.get_close_matches(architecture, known, 1, cutoff=0.0)[0]
    with_code = "; its own code (auto_map) is not run" if "auto_map" in config else ""
    raise UserError(
        f"{source}: architecture {architecture!r} is unknown to qfsdp{_versions(config)}"
        f"{with_code}; the nearest that is known is {near}"
    )


def _versions(config: dict[str, Any]) -> str:
    try:
        from transformers import __version__
    except ImportError:
        return ""
    written = config.get("transformers_version")
    by = f" (the folder was written by {written})" if isinstance(written, str) else ""
    return f" and to transformers {__version__}{by}"


def _refused(source: str, error: Exception) -> UserError:
    what = f"{type(error).__name__}: {first_line(error):.200}"
    return UserError(f"{source}: transformers cannot build this model ({what})")


def known_models() -> tuple[dict[str, str], dict[str, str]]:
    """`model_type` -> class: causal language models that transformers has, and those that take
    pictures too."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    multimodal = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return dict(causal), dict(multimodal)
