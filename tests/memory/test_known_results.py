"""Results known from an earlier call are those that PyTorch would give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qfsdp.config.load import load_config
from qfsdp.planning import known_results, tracker
from qfsdp.planning.estimate import Estimate, estimate
from qfsdp.planning.known_results import known_result
from tests.tiny import ROOT, load_recipe, write_tiny_model

aten = torch.ops.aten


def call(func: Any, *args: Any) -> list[Any]:
    """What `func` gives: shapes, places, dtypes, and which argument's storage or object."""
    out = func(*args)
    storages = [t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)]
    return [
        (o.shape, o.stride(), o.storage_offset(), o.dtype, o.device)
        + (o.untyped_storage()._cdata in storages, o is args[0], o.untyped_storage().nbytes())
        for o in (out if isinstance(out, list | tuple) else [out])
    ]


@pytest.mark.parametrize(
    "func, more",
    [
        (aten.mm.default, ("other",)),
        (aten.t.default, ()),
        (aten.view.default, ([2, 12],)),
        (aten.split.Tensor, (2,)),
        (aten.slice.Tensor, (1, 1, 3)),
        (aten.add_.Tensor, (1,)),
        (aten.add.Tensor, (1,)),
        (aten.add.Tensor, (1.5,)),
        (aten.sum.dim_IntList, ([0], True)),
        (aten.topk.default, (2,)),
        (aten.detach.default, ()),
    ],
)
def test_as_pytorch(monkeypatch: pytest.MonkeyPatch, func: Any, more: tuple[Any, ...]) -> None:
    monkeypatch.setattr(known_results, "_known", {})
    with FakeTensorMode():

        def given(dtype: torch.dtype = torch.float32) -> list[Any]:
            other = torch.empty(6, 3, dtype=dtype)
            args = [other if word == "other" else word for word in more]
            return [torch.empty(4, 6, dtype=dtype), *args]

        asked: list[Any] = []

        def counted(*args: Any) -> Any:
            asked.append(args)
            return func(*args)

        counted.namespace, counted.tags = func.namespace, func.tags  # type: ignore[attr-defined]
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            found = call(lambda *args: known_result(counted, args, {}), *given(dtype))
            assert found == call(func, *given(dtype))
    assert len(asked) == 2  # the third call was known


def test_values_are_not_forgotten() -> None:
    """`item` of a number that the fake mode knows, and operations without tensors."""
    with FakeTensorMode():
        for value in (2.0, 3.0):
            known = known_result(aten.detach.default, (torch.tensor(value),), {})
            assert known.item() == value
        sizes = [known_result(aten.ones.default, ([size],), {}).numel() for size in (1, 2, 1)]
    assert sizes == [1, 2, 1]


@pytest.mark.long
def test_estimates_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is known and without it, at every point of the step."""
    recipe = load_recipe("qdora_distributed")
    cfg = load_config(recipe.Config, ["--config", str(ROOT / "configs/llama3_8b_qdora.yaml")])
    path = write_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    cfg = replace(cfg, model=replace(cfg.model, path=str(path)), max_seq_len=256)

    def run() -> Estimate:
        return estimate(recipe.build_model, recipe.train_step, cfg, 2)

    found = run()
    monkeypatch.setattr(tracker, "known_result", lambda func, args, more: func(*args, **more))
    assert found == run()
