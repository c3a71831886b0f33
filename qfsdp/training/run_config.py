"""Checks of the keys that training recipes have in common."""

from __future__ import annotations

from typing import Any

from qfsdp.checkpoint.weights.add_tokens import rows_for
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.mean_rows import MULTIPLE
from qfsdp.checkpoint.weights.quantize import check_weights
from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.config.load import get_key
from qfsdp.modules.hub_models.config import HubConfig
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.modules.hub_models.refused import check_hub_run
from qfsdp.tensor_subclasses.kernels.ability import check_compile
from qfsdp.tensor_subclasses.kernels.ability import use_cache_dir as use_cache_dir
from qfsdp.training.distillation import check_place, check_sharding
from qfsdp.training.preference import step_options


def check_run_config(cfg: Any) -> None:
    """Checks the counts and limits of a training recipe's `Config`.

    Raises:
        InvalidField: a number is out of its bounds.
        UserError: a run without adapters is to publish some, or sharding is not for two models.
        InvalidField: a start of adapters changes weights that stay on disk.
        UserError: a loss of preference tuning cannot be used (`Objective.check`), or new tokens get
            no rows here.
    """
    for objective in step_options(cfg).values():
        objective.check()
        if cfg.model.router_aux_loss is not None:
            expected = "null, as preference tuning has no such loss"
            raise InvalidField("model.router_aux_loss", cfg.model.router_aux_loss, expected)
    tokens = new_tokens_of(cfg)
    fits = hasattr(cfg, "adapter") and not hasattr(cfg, "head") and not hasattr(cfg, "teacher")
    if tokens is not None and not fits:
        expected = "expected null in this recipe; recipes/add_tokens writes a model that has them"
        raise UserError(f"tokenizer.new_tokens: {tokens}; {expected}")
    if hasattr(cfg, "teacher"):
        check_sharding(cfg.sharding)
    if hasattr(cfg, "head"):
        if cfg.sharding.context_parallel > 1:
            expected = "1 with a score head, which reads whole rows"
            raise InvalidField("sharding.context_parallel", cfg.sharding.context_parallel, expected)
        if "lm_head" in str(cfg.adapter.targets) + str(cfg.quantization.targets):
            found = f"adapter.targets: {cfg.adapter.targets}; quantization.targets: "
            raise UserError(
                f"{found}{cfg.quantization.targets}; expected none with lm_head: a score head "
                "stands in its place"
            )
    check_place("reference_logprobs", getattr(cfg, "reference_logprobs", "live"))
    check_bounds(cfg, "batch_size", "gradient_accumulation_steps", least=1, most=2**20)
    check_bounds(cfg, "epochs", "log_every_n_steps", "max_steps", least=1)
    check_bounds(cfg, "max_seq_len", least=2)
    check_bounds(cfg, "seed", least=0)
    if cfg.max_steps is None and cfg.dataset.kwargs.get("streaming") is True:
        expected = "an integer: the number of rows of dataset.streaming=true is not known"
        raise InvalidField("max_steps", None, expected)
    if cfg.activation.tile_tokens is not None and (others := not_with_tiles(cfg)):
        expected = f"null with {others[0]}"
        raise InvalidField("activation.tile_tokens", cfg.activation.tile_tokens, expected)
    if cfg.checkpoint.publish is not None and not hasattr(cfg, "adapter"):
        raise UserError(
            f"checkpoint.publish: {cfg.checkpoint.publish}; expected null: no adapters are trained"
        )
    adapter = getattr(cfg, "adapter", None)
    if adapter is not None and adapter.changes_base and cfg.sharding.offload_base == "disk":
        expected = f"none or cpu, as adapter.init={adapter.init} changes the base"
        raise InvalidField("sharding.offload_base", "disk", expected)
    if cfg.clip_grad_norm is not None and not cfg.clip_grad_norm > 0:
        raise InvalidField("clip_grad_norm", cfg.clip_grad_norm, "a number above 0, or null")


def not_with_tiles(cfg: Any) -> list[str]:
    """The settings that do not go with `activation.tile_tokens`."""
    others = {
        "compile: true": get_key(cfg, "compile"),
        "sharding.wrap: linear, which would gather weights for every tile": (
            get_key(cfg, "sharding.wrap") == "linear"
        ),
        "adapter.dropout above 0": get_key(cfg, "adapter.dropout"),
        "several adapters": get_key(cfg, "adapters"),
    }
    return [other for other, given in others.items() if given]


def check_model(cfg: Any, model: AnyDecoder, weights: ModelWeights) -> None:
    """Checks a run's config against the model that is built, and the model against its weights.

    Raises UserError: see `check_with_model` and `check_weights`.
    """
    check_with_model(cfg, model.config)
    check_weights(model, weights, cfg.model, cfg.quantization, cfg.sharding)


def check_with_model(cfg: Any, model: Any) -> None:
    """Checks what depends on the machine and on the model.

    Args:
        model: the config of the model that is built.

    Raises:
        UserError: `compile: true` and nothing can be compiled; samples longer than the model's
            positions; or a setting that models of transformers do not have.
    """
    if isinstance(model, HubConfig):
        check_hub_run(cfg, model)
    passes = getattr(model, "recurrent", None) and get_key(cfg, "sharding.context_parallel") > 1
    if passes and cfg.compile:
        raise UserError("compile: true; expected false, as ranks pass states on to each other")
    check_compile(cfg.compile, get_key(cfg, "compile_cache_dir"))
    cfg.model.check_length(cfg.max_seq_len, model.max_position_embeddings)


# ---- `tokenizer.new_tokens`: a run gives them rows, and trains these -----------------------------


def new_tokens_of(cfg: Any) -> Any:
    """`tokenizer.new_tokens`; None if a config has no tokenizer, which rows of ids do not need."""
    tokenizer = getattr(cfg, "tokenizer", None)
    return None if tokenizer is None else tokenizer.kwargs.get("new_tokens")


def add_new_tokens(cfg: Any) -> None:
    """Sets what new tokens need in a run's config: `model.mean_rows`, and
    `adapter.trainable_token_indices` if neither that nor whole modules are given.

    `config.yaml` of the run and its checkpoints have the numbers. Raises UserError: a token is
    there already, named twice or empty; or the model cannot have more rows."""
    if (tokens := new_tokens_of(cfg)) is None:
        return
    if cfg.model.quantize_cache is not None:
        given = f"model.quantize_cache: '{cfg.model.quantize_cache}'"
        raise UserError(f"{given}; expected null with tokenizer.new_tokens")
    ids = cfg.tokenizer.build().new_tokens
    model, adapter, cfg.model.mean_rows = cfg.model, cfg.adapter, None
    config = model.any_config()
    first = min(*ids.values(), config.vocab_size)  # tokens before may have no rows
    model.mean_rows = [first, rows_for(ids, config.vocab_size, MULTIPLE)]
    model.any_config()  # finds what it cannot be
    if adapter.modules_to_save is None and adapter.trainable_token_indices is None:
        if not adapter.is_low_rank:
            given = f"tokenizer.new_tokens: {tokens}, and adapter.method is {adapter.method}"
            expected = "expected lora, dora or adapter.modules_to_save=[embed_tokens,lm_head]"
            raise UserError(f"{given}; {expected}")
        of_each = {"embed_tokens": [*ids.values()], "lm_head": [*ids.values()]}
        tied = config.tie_word_embeddings
        adapter.trainable_token_indices = of_each["embed_tokens"] if tied else of_each
