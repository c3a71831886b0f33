"""The output layer of a model of transformers, with all that its class computes around it.

Classes scale logits, cap them, or have layers between the last hidden state and the output layer.
So logits are computed by the class's own `forward`, in which the body is replaced by one that
returns given hidden states. The loss runs it on some tokens at a time (`qfsdp.modules.loss`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn


class GivenBody(nn.Module):
    """Stands for the body: returns the same hidden states whatever it is asked. Its numbers are the
    body's."""

    def __init__(self, hidden: Tensor, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.output = _given_output()(last_hidden_state=hidden)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["body"], name, None)
        if isinstance(value, int | float):
            return value  # Falcon-H1 scales logits by one
        return self  # some classes call a part of their body, such as `model.decoder`


@cache
def _given_output() -> Any:
    """transformers' class of a body's output, where every field that a class asks for is None."""
    from transformers.modeling_outputs import BaseModelOutput

    class GivenOutput(BaseModelOutput):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    return GivenOutput


class Unhooked(nn.Module):
    """A module without its hooks: FSDP2 has gathered it already."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["inner"] = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class HubHead:
    """What follows the body, as `qfsdp.modules.loss.head_loss` takes it.

    Args:
        hf: transformers' module.
        body, output: names of its body and its output layer.
    """

    def __init__(self, hf: nn.Module, body: str, output: str) -> None:
        self.hf, self.body, self.output = hf, body, output

    @property
    def weight(self) -> Tensor:
        """Of the output layer; its rows are the vocabulary."""
        return cast(Tensor, self.hf.get_submodule(self.output).weight)

    def parameters(self) -> Iterator[nn.Parameter]:
        """All that are not the body's, and those of the output layer."""
        for name, child in self.hf.named_children():
            if name != self.body:
                yield from child.parameters()

    def logits(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """`[batch, seq, hidden]` -> `[batch, seq, vocab]`."""
        shell = object.__new__(type(self.hf))
        shell.__dict__ = dict(self.hf.__dict__)
        given = GivenBody(hidden, self.hf.get_submodule(self.body))
        shell._modules = dict(self.hf._modules) | {self.body: given}
        if "." not in self.output:
            shell._modules[self.output] = Unhooked(self.hf.get_submodule(self.output))
        logits: Tensor = type(self.hf).forward(shell, input_ids=tokens, use_cache=False).logits
        return logits

    def forward(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` -> `[n, vocab]`, which the caller may overwrite."""
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return self.logits(hidden.unsqueeze(0), tokens).squeeze(0).clone()
