"""A causal language model of transformers with the interface of `Decoder`."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line
from qfsdp.data.batch import cut_rows
from qfsdp.modules.activations import ActivationConfig, Checkpointing, Offload, checkpointed
from qfsdp.modules.adapters.linears import AdaptedLinear
from qfsdp.modules.adapters.whole import KEY, whole_parameters
from qfsdp.modules.collectives import over_parts
from qfsdp.modules.decoder_base import ModelParts, base_parameters
from qfsdp.modules.experts.routing import Routing
from qfsdp.modules.hub_models.buffers import (
    check_buffers,
    compute_buffers,
    stored_buffers_as_parameters,
)
from qfsdp.modules.hub_models.config import AnyConfig, HubConfig
from qfsdp.modules.hub_models.documents import calls_ours, keep_samples_apart, numbers_of_samples
from qfsdp.modules.hub_models.experts import take_experts
from qfsdp.modules.hub_models.head import HubHead
from qfsdp.modules.hub_models.linears import linears_of_layers, take_linears
from qfsdp.modules.hub_models.names import names_of_experts, renamed_modules, shared_names
from qfsdp.modules.hub_models.packing import packed_modules
from qfsdp.modules.hub_models.refused import unsupported
from qfsdp.modules.hub_models.shared_rows import share_attention
from qfsdp.modules.hub_models.text_part import take_text_model
from qfsdp.modules.loss import head_loss
from qfsdp.modules.low_rank.copies import copies_in
from qfsdp.modules.shared_rows import SharedRows
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.kernels.ability import import_dynamo

ADAPTED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # as adapter files name them


class HubDecoder(nn.Module):
    """A model of transformers; build it on the meta device.

    It shares the tables of children with transformers' module, so parameters have transformers'
    names, and what replaces a linear replaces it there. The base computes as in evaluation: no
    dropout of its own, so a run does not depend on the number of ranks.

    Fields:
        hf: transformers' module; not a child.
        linears: names of the linears of its layers that are quantized and adapted.
        plain_linears: names of those that are not, see `linears_of_layers`.
        few_rows: those of `plain_linears` that are adapted if `adapter.targets` names them.
        expert_linears: names of `linears` that are stacked experts. They are adapted only if
            `adapter.targets` names them: for PEFT too they are none of "all-linear".
        not_adapted: names of `linears` that are quantized only: PEFT could not load their adapters.
        never_trained: names of parameters that are buffers in transformers, or frozen there.
        recomputes: every layer is computed again in backward.
        compute_dtype: as of `Decoder`.
        split, routing: as of `Decoder`; never used.
        group: as of `Decoder`.
    """

    hf: Any

    def __init__(self, config: HubConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hf = config.build(dtype)
        text_model = take_text_model(hf, config) if config.takes_more_than_text else None
        self.__dict__["hf"] = hf
        self._modules, self._parameters, self._buffers = hf._modules, hf._parameters, hf._buffers
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.split: Any = None
        self.routing = Routing(0.0)
        self.group = ""
        take_linears(hf)
        experts = take_experts(hf)
        check_buffers(hf, config.source)
        stored_buffers_as_parameters(hf)
        _keep_fp32(hf, dtype)
        self.never_trained = {n for n, p in hf.named_parameters() if not p.requires_grad}
        self._carries = keep_samples_apart(hf)
        self._shared = list(shared_names(hf))
        self._find_parts(text_model)
        self.recomputes = False
        found = linears_of_layers(self.parts.layers, self._layers_name)
        self.linears, self.plain_linears, few_rows = found
        renamed = renamed_modules(hf, [*self.linears, *experts])
        taken = names_of_experts(hf) | self._names_beside_layers()
        taken |= {name.rpartition(".")[2] for name in renamed}
        self.not_adapted = [n for n in self.linears if n.rpartition(".")[2] in taken]
        self.few_rows = [n for n in few_rows if n.rpartition(".")[2] not in taken]
        if not self.linears:
            raise UserError(f"{config.source}: the layers of {config.architecture} have no linears")
        self.linears += experts
        usual = (name for name in experts if name.endswith(ADAPTED_EXPERTS))
        self.expert_linears = [name for name in usual if name not in renamed]
        self.not_adapted += [name for name in experts if name not in self.expert_linears]
        self.eval()

    def _find_parts(self, text_model: str | None) -> None:
        hf, source, name = self.hf, self.config.source, self.config.architecture
        depths = {self.config.num_hidden_layers, getattr(hf.config, "num_layers", None)}
        lists = [
            where
            for where, module in hf.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) in depths
        ]
        body, output = hf.base_model, hf.get_output_embeddings()
        if body is hf:  # Llama 4's prefix is that of its multimodal class
            body = hf.get_submodule(text_model) if text_model else getattr(hf, "model", hf)
        if body is hf or not lists or output is None:
            raise UserError(f"{source}: {name} has no layers or output layer that could be found")
        named = {id(module): where for where, module in hf.named_modules()}
        self._layers_name, self._body_name = lists[0], text_model or named[id(body)]
        self._replaced_name = named[id(body)]  # in the class's `forward`, see `HubHead`
        self._head_name = self._replaced_name.rpartition(".")[0]  # that class's module
        self._embedding_name = named[id(hf.get_input_embeddings())]
        self._output_name = named[id(output)]
        inside = f"{self._layers_name}."
        for module, field, first in self._shared:
            if f"{module}.{field}".startswith(inside) and first.startswith(inside):
                raise UserError(
                    f"{source}: {name} has layers that share weights ({first}); such a model is "
                    "not trained"
                )

    def _names_beside_layers(self) -> set[str]:
        """Last names of linears that stand beside the layers, where these are no deeper than
        "model.layers": an adapter's file does not exclude them there, see `excluded_modules`."""
        if self._layers_name.count(".") > 1:
            return set()
        inside = f"{self._layers_name}."
        return {
            name.rpartition(".")[2]
            for name, module in self.hf.named_modules()
            if isinstance(module, nn.Linear)
            and not name.startswith(inside)
            and name != self._output_name
        }

    @property
    def parts(self) -> ModelParts:
        """Its modules by what they are."""
        return ModelParts(
            self.get_submodule(self._body_name),
            cast(nn.ModuleList, self.get_submodule(self._layers_name)),
            self.get_submodule(self._embedding_name),
            self.get_submodule(self._output_name),
        )

    @property
    def linears_in_words(self) -> str:
        """Which linears were taken, for the log."""
        kept = {*self.not_adapted, *self.expert_linears}
        kinds = {
            "adapted": [name for name in self.linears if name not in kept],
            "adapted if named": self.expert_linears,
            "not adapted": self.not_adapted,
            "not quantized, adapted if named": self.few_rows,
            "neither quantized nor adapted": sorted({*self.plain_linears} - {*self.few_rows}),
        }
        return "; ".join(
            f"{kind}: {', '.join(sorted({_short(name) for name in names}))}"
            for kind, names in kinds.items()
            if names
        )

    @property
    def other_names(self) -> dict[str, str]:
        """Further names of parameters that transformers shares -> the name that they have here."""
        return {f"{module}.{field}": first for module, field, first in self._shared}

    # ---- storage -----------------------------------------------------------------------------

    def tie_weights(self) -> None:
        """Makes the weights one that transformers shares."""
        for module, field, first in self._shared:
            setattr(self.get_submodule(module), field, self.get_parameter(first))

    def to_empty(self, *, device: Any, recurse: bool = True) -> HubDecoder:
        """Gives parameters unset storage, and computes the buffers there."""
        super().to_empty(device=device, recurse=recurse)
        self.tie_weights()
        compute_buffers(self.hf, self.config.source)
        return self

    def train(self, mode: bool = True) -> HubDecoder:
        """Sets the mode of the adapters. transformers' modules stay in evaluation."""
        super().train(False)
        self.training = mode
        for module in self.modules():
            if isinstance(module, AdaptedLinear):
                module.train(mode)
        return self

    # ---- what a run chooses --------------------------------------------------------------------

    def set_activations(self, config: ActivationConfig) -> None:
        """As `Decoder.set_activations`."""
        if config.tile_tokens is not None:
            setting = f"activation.tile_tokens: {config.tile_tokens}"
            raise unsupported(setting, "null", self.config)
        offload = Offload() if config.offload else None
        self.recomputes = config.checkpointing == "full" and config.every_n_layers == 1
        for index, layer in enumerate(self.parts.layers):
            chosen = index % config.every_n_layers == 0
            mode: Checkpointing = config.checkpointing if chosen else "none"
            if mode != "none" or offload is not None:
                inner = type(layer).forward.__get__(layer)
                layer.forward = partial(_run_layer, layer, inner, mode, offload)

    def share_rows(self, group: str) -> None:
        """Has the ranks of `group`, in `GROUPS`, share the rows that it gets."""
        self.group = group
        share_attention(self.hf)
        keep_samples_apart(self.hf, shared=True)

    def compile_layers(self) -> None:
        """Compiles the computation of every layer; FSDP2's hooks and checkpointing stay outside of
        it, and "selective" is "none" as in `Decoder`. Layers with functions of `documents.py` run
        uncompiled: Dynamo looks up what a function calls in its module, which has transformers'
        functions."""
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 8 * len(self.parts.layers))
        for layer in self.parts.layers:
            if not any(map(calls_ours, layer.modules())):
                run = layer.forward
                if isinstance(run, partial):  # see `set_activations`
                    of_layer, inner, mode, offload = run.args
                    mode = "none" if mode == "selective" else mode  # its mode ends compiling
                    inner = torch.compile(inner)
                    layer.forward = partial(run.func, of_layer, inner, mode, offload)
                else:
                    layer.forward = torch.compile(run)

    # ---- computation ---------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Any = None,
        cache: Any = None,
        sample_ids: Tensor | None = None,
        num_samples: int = 0,
        num_targets: int | None = None,
        taught: Any = None,
    ) -> Tensor:
        """As `Decoder.forward`, without `mask`: attention is causal, so rows may be padded on the
        right. `cu_seqlens` need `positions`, which begin again with each sample of a row: by them
        transformers finds the samples (see `packing.py`). `cache`: a `HubCache`."""
        if mask is not None or (cu_seqlens is not None and positions is None):
            raise ValueError("models of transformers take no mask, and positions with cu_seqlens")
        if cache is not None:
            return torch.cat(cache.next_tokens(tokens, self._next_logits))
        more: dict[str, Any] = {"use_cache": False}
        cut = cut_rows(cu_seqlens, self.group, labels)
        if cut is not None:
            more["shared_rows"] = SharedRows(cut, self.group)
        elif self._carries and cu_seqlens is not None:
            assert positions is not None
            more |= {"seq_idx": numbers_of_samples(positions), "cu_seq_lens_q": cu_seqlens}
        hidden: Tensor = self._run_body(tokens, positions, **more).last_hidden_state
        head = self._head()
        output = self.parts.output
        if isinstance(output, FSDPModule):
            output.unshard()
        if labels is None:
            return head.logits(hidden, tokens)
        samples = (sample_ids, num_samples, num_targets)
        loss = head_loss(cast(Any, head), hidden, labels, *samples, taught)
        if isinstance(output, FSDPModule) and not any(p.requires_grad for p in head.parameters()):
            output.reshard()
        return loss if cut is None or sample_ids is None else over_parts(loss, self.group)

    def _head(self) -> HubHead:
        module, prefix = self.hf.get_submodule(self._head_name), f"{self._head_name}."
        names = (self._replaced_name, self._output_name)
        return HubHead(module, *(name.removeprefix(prefix) for name in names))

    def _next_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """`[1, vocab]`, the logits of the token after these, and the cache with them: the number
        of its tokens, and what transformers keeps."""
        seen, kept = cache or (0, None)
        name, source = self.config.architecture, self.config.source
        positions, total = None, seen + tokens.size(1)
        if name in packed_modules():  # given positions were compared; Bamba takes 0 without them
            positions = torch.arange(seen, total, device=tokens.device).unsqueeze(0)
        try:
            output = self._run_body(tokens, positions, use_cache=True, past_key_values=kept)
        except ValueError as error:  # Jamba's cache, where no layer attends
            why = f"transformers' cache: {first_line(error)}"
            raise UserError(f"{source}: {name} is not generated from ({why})") from None
        if (kept := getattr(output, "past_key_values", None)) is None:
            raise UserError(f"{source}: {name} keeps no keys and values; it is not generated from")
        logits = self._head().logits(output.last_hidden_state[:, -1:], tokens[:, -1:])
        return logits[:, 0], (total, kept)

    def _run_body(self, tokens: Tensor, positions: Tensor | None, **more: Any) -> Any:
        """The output of transformers' body, which is given what it takes of `more`."""
        given = {"input_ids": tokens, "return_dict": True} | more
        if positions is not None:
            given["position_ids"] = positions
        body = self.parts.body
        taken = inspect.signature(body.forward).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
            given = {key: value for key, value in given.items() if key in taken}
        return body(**given)


def share_base(model: AnyDecoder, base: AnyDecoder) -> None:
    """Gives `model`, on the meta device, the base parameters and the buffers of `base`, but for
    modules of its own that were trained as a whole."""
    own = whole_parameters(model)
    for name, param in base_parameters(base):
        owner, _, field = name.rpartition(".")
        if f"{KEY}{name}" not in own:
            setattr(model.get_submodule(owner), field, param)
    for name, buffer in base.named_buffers(remove_duplicate=False):  # none of our own decoder
        owner, _, field = name.rpartition(".")
        setattr(model.get_submodule(owner), field, buffer)
    model.tie_weights()


AnyDecoder = Decoder | HubDecoder


def _short(name: str) -> str:
    """The end of a linear's name that tells its kind."""
    return ".".join(name.split(".")[-2 if name.endswith(ADAPTED_EXPERTS) else -1 :])


def build_decoder(config: AnyConfig, dtype: torch.dtype) -> Any:
    """The model of a config on the meta device, without storage."""
    import_dynamo()  # what compiles or is not compiled asks it
    with torch.device("meta"):
        if isinstance(config, HubConfig):
            return HubDecoder(config, dtype)
        return Decoder(config).to(dtype)


def _run_layer(
    layer: nn.Module,
    inner: Any,
    mode: Checkpointing,
    offload: Offload | None,
    *args: Any,
    **more: Any,
) -> Any:
    """A layer whose activations are kept as a run chooses."""
    block = partial(inner, **more)
    if not torch.is_grad_enabled():
        return block(*args)
    if offload is None:
        return checkpointed(block, mode, *args)
    tables = [value for value in tree_leaves(more) if isinstance(value, Tensor)]
    with offload.layer((*layer.parameters(), *copies_in(layer), *tables)):
        return checkpointed(block, mode, *args)


def _keep_fp32(hf: Any, dtype: torch.dtype) -> None:
    """Gives the parameters fp32 that transformers keeps in it."""
    from transformers.core_model_loading import build_glob_alternation

    plan = hf._get_dtype_plan(dtype)
    if not plan:
        return
    pattern = build_glob_alternation(list(plan))[0]
    for name, param in hf.named_parameters():
        if pattern.search(name):
            param.data = param.data.float()
