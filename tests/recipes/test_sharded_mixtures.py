"""Mixtures of experts: losses and adapters are the same on 1 to 8 ranks.

Every rank gathers the experts of a layer, or they are divided into parts whose ranks exchange
tokens. Four experts, so that there are ranks with less than one expert each.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.models import adapted_model, build_meta_model, cpu_world
from tests.ranks import run_ranks
from tests.recipes.test_sharded_equals_unsharded import assert_same, train
from tests.tiny import needs_compiler, write_tiny_model

MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
# Ranks -> samples of a step, and their split on a rank: rows of a micro-batch, micro-batches.
SPLITS = {1: (24, 1), 2: (6, 2), 3: (8, 1), 4: (3, 2), 5: (5, 1), 8: (3, 1)}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mixture"), **MIXTURE)


def case(size: int, wrap: str = "decoder_layer", **changes: Any) -> dict[str, Any]:
    """A run with adapters on experts and attention, of a base with quantized experts."""
    targets = ["all-linear"]
    same = {"method": "dora", "wrap": wrap, "quantized": targets, "adapted": targets}
    return same | {"split": SPLITS[size]} | changes


def compare(size: int, cases: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """Asserts that every rank gets what one process gets without sharding; returns the results."""
    whole = (size * SPLITS[size][0] * SPLITS[size][1], 1)
    alone = [given | {"split": whole, "wrap": "decoder_layer", "sharding": {}} for given in cases]
    different: list[dict[str, Any]] = []
    for plain in alone:
        different += [] if plain in different else [plain]
    references = run_ranks(1, train, folder, different)[0]
    by_rank = run_ranks(size, train, folder, cases)
    for rank, results in enumerate(by_rank):
        for given, plain, result in zip(cases, alone, results, strict=True):
            reference = references[different.index(plain)]
            assert_same(result, reference, f"rank {rank} of {size}: {given}")
    return by_rank


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(4, 2, marks=SLOW),
        pytest.param(4, 4, marks=SLOW),
        pytest.param(8, 4, marks=SLOW),
    ],
)
def test_tokens_travel_to_experts(size: int, parts: int, model_dir: Path) -> None:
    sharding = {"expert_parallel": parts}
    ranks = {"expert_rank": 4} if size == 8 else {}  # 20 rows of A are not divided by 8
    wraps = ("decoder_layer", "linear") if size > 2 else ("decoder_layer",)
    cases = [case(size, wrap, sharding=sharding, **ranks) for wrap in wraps]
    cases += [case(size, method="lora", sharding=sharding, **ranks)]
    if size == 4:
        kept = sharding | {"strategy": "shard_grad_op"}
        cases += [case(size, sharding=sharding, checkpointing="full"), case(size, sharding=kept)]
    compare(size, cases, model_dir)


def train_traced(model_dir: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`train` whose compiled layers are only traced: inductor takes a minute more."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    (result,) = train(model_dir, cases)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return [result | {"built_again": result["recompiled"] - breaks}]


@pytest.mark.slow
@needs_compiler
def test_compiled_layers_exchange_tokens(model_dir: Path) -> None:
    """The same numbers, and nothing is built after the second step."""
    given = case(2, sharding={"expert_parallel": 2})
    references = run_ranks(2, train, model_dir, [given])
    compiled = run_ranks(2, train_traced, model_dir, [given | {"compile": True}])
    for (result,), (reference,) in zip(compiled, references, strict=True):
        assert_same(result, reference, "compiled")
        assert result["built_again"] == 0


@pytest.fixture(scope="module")
def quantized_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "model"
    config = QuantizationConfig("nf4", ["all-linear"])
    quantize_folder(ModelWeights(model_dir), config, folder, cpu_world())
    return folder


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.slow
def test_every_rank_gathers_the_experts(size: int, model_dir: Path) -> None:
    """Both adapters and both units, quantized and plain; and the bytes that every rank holds."""
    cases = [case(size, wrap) for wrap in ("decoder_layer", "linear")]
    cases += [case(size, method="lora"), case(size, format="none")]
    cases += [case(size, expert_sharing="outer", adapted=["all-linear", "gate"])]
    by_rank = compare(size, cases, model_dir)
    held = [results[0]["quantized_bytes"] for results in by_rank]
    weights = [
        param.data
        for name, param in build_meta_model(model_dir).named_parameters()
        if isinstance(param.data, QuantizedTensor) and not name.startswith("lm_head")
    ]
    assert sum(held) == sum(weight.qdata.numel() for weight in weights)
    for rank, size_held in enumerate(held):
        most = sum((-(-w.size(0) // size)) * w.qdata.size(1) for w in weights)
        print(f"rank {rank} of {size}: {size_held} bytes, at most {most}")
        assert size_held <= most  # a row more than an equal share of each weight


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_offloaded_experts(size: int, model_dir: Path, quantized_dir: Path) -> None:
    """In host memory and on disk, where the experts are divided too."""
    ways: list[dict[str, Any]] = [
        {"offload_base": "cpu"},
        {"offload_base": "disk"},
        {"cpu_offload": True},
    ]
    ways += [way | {"expert_parallel": 2} for way in ways] if size in (2, 4) else []
    kinds = [("decoder_layer", "dora"), ("linear", "dora"), ("decoder_layer", "lora")]
    cases = [
        case(size, wrap, method=method, sharding=way, folder=str(quantized_dir))
        for wrap, method in kinds
        for way in ways
    ]
    compare(size, cases, model_dir)


@pytest.mark.parametrize(
    ("ranks", "parts", "message"),
    [
        (4, 3, "3; expected a divisor of 4, the number of ranks"),
        (8, 8, "8; expected a divisor of 4, the number of experts"),
        (1, 2, "2; expected a divisor of 1, the number of ranks"),
        (10, 2, "rows of .*proj.weight on 10 ranks; expected a number of rows"),
    ],
)
def test_experts_that_cannot_be_divided(
    ranks: int, parts: int, message: str, model_dir: Path
) -> None:
    model = build_meta_model(model_dir)
    world = World(torch.device("cpu"), 0, ranks)
    with pytest.raises(UserError, match=message):
        shard_model(model, ShardingConfig(expert_parallel=parts), world)


@pytest.mark.long
def test_experts_that_share_factors_are_not_divided(model_dir: Path) -> None:
    adapter = AdapterConfig("lora", 4, 8.0, expert_sharing="outer")
    model = adapted_model(model_dir, adapter)
    with pytest.raises(UserError, match="expert_parallel: 2; expected 1 with adapter.expert_sha"):
        shard_model(model, ShardingConfig(expert_parallel=2), World(torch.device("cpu"), 0, 2))


def test_expert_parallel_needs_experts_and_sharding(tmp_path: Path) -> None:
    dense = build_meta_model(write_tiny_model(tmp_path))
    with pytest.raises(UserError, match="expert_parallel: 2; expected 1, as the model has no exp"):
        shard_model(dense, ShardingConfig(expert_parallel=2), World(torch.device("cpu"), 0, 2))
    with pytest.raises(InvalidField, match="expert_parallel: 0 is not valid; expected an integer"):
        ShardingConfig(expert_parallel=0).check()
    for strategy in ("ddp", "hybrid_full_shard", "hybrid_shard_grad_op"):
        wrong = ShardingConfig(strategy, expert_parallel=2)
        with pytest.raises(InvalidField) as refused:
            wrong.check()
        assert str(refused.value) == (
            f"strategy: '{strategy}' is not valid; expected full_shard or shard_grad_op with "
            "expert_parallel"
        )
