"""Adapters against a model that multiplies everything out in fp64, gradient by gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.component import Component
from qfsdp.modules.adapters import linears as adapters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters, parameter_groups
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.low_rank import linear as low_rank_linear
from qfsdp.modules.low_rank.adapted import AdaptedLinear, adapted_linears
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.modules.targets import check_targets, target_modules
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses import dtensor as shards
from qfsdp.tensor_subclasses import frozen_weight, nf4
from qfsdp.tensor_subclasses.dtensor import whole_tensor
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.optimizer import build_optimizer
from tests.models import adapted_model, load_model, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import TINY_CONFIG, write_tiny_model

EVERYWHERE = ["all-linear", "lm_head"]
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}  # biases on q, k and v
METHODS = ("lora", "dora")
EVERY_METHOD = (*METHODS, "ia3")
FIELDS = {
    "lora": ("lora_A", "lora_B"),
    "dora": ("lora_A", "lora_B", "magnitude"),
    "ia3": ("ia3_l",),
}
FORMATS = ("nf4", "none")


pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": write_tiny_model(folder / "llama"),
        "qwen2": write_tiny_model(folder / "qwen2", **QWEN2),
    }


def adapter(method: str, targets: Any = EVERYWHERE, dropout: float = 0.0) -> AdapterConfig:
    return AdapterConfig(method, rank=5, alpha=7.0, dropout=dropout, targets=targets)


# ---- gradients ---------------------------------------------------------------------------------


def plain_weight(weight: Tensor) -> Tensor:
    """A frozen weight in fp64, dequantized if it is quantized."""
    plain = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    return plain.detach().double()


def multiplied_out(module: AdaptedLinear) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The adapted weight and bias in fp64, and the leaves of their graph."""
    leaves = {
        field: param.detach().double().requires_grad_()
        for field in ("lora_A", "lora_B", "magnitude", "ia3_l")
        if (param := getattr(module, field, None)) is not None
    }
    made = {"weight": plain_weight(module.weight)}
    if module.bias is not None:
        made["bias"] = plain_weight(module.bias)
    if "ia3_l" in leaves:
        made["weight"] = made["weight"] * leaves["ia3_l"]  # broadcast over rows, or over columns
        if "bias" in made and leaves["ia3_l"].size(1) == 1:
            made["bias"] = made["bias"] * leaves["ia3_l"][:, 0]
        return made, leaves
    weight = made["weight"] + 7.0 / 5 * leaves["lora_B"] @ leaves["lora_A"]
    if "magnitude" in leaves:
        norm = weight.detach().norm(dim=1, keepdim=True)  # a constant: section 4.3 of the paper
        weight = leaves["magnitude"][:, None] / norm * weight
    return made | {"weight": weight}, leaves


def loss_and_gradients(model: Decoder, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The reference: a plain decoder in fp64, without adapters or quantized weights."""
    weights: dict[str, Tensor] = {}
    leaves: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        weights[name] = plain_weight(param)
    for name, module in adapted_linears(model):
        made, parts = multiplied_out(module)
        weights |= {f"{name}.{field}": value for field, value in made.items()}
        leaves |= {f"{name}.{field}": leaf for field, leaf in parts.items()}
    plain = Decoder(model.config).double()
    logits = functional_call(plain, {k: weights[k] for k in plain.state_dict()}, (tokens,))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return loss.detach(), dict(
        zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)
    )


@pytest.mark.parametrize(
    "method, format, architecture",
    list(itertools.product(EVERY_METHOD, FORMATS, ("llama", "qwen2"))),
)
def test_every_gradient_is_that_of_the_model_multiplied_out(
    method: str, format: str, architecture: str, folders: dict[str, Path]
) -> None:
    model = adapted_model(folders[architecture], adapter(method), format=format)
    randomize_adapters(model)
    tokens = torch.randint(0, 577, (2, 40), generator=torch.Generator().manual_seed(1))

    logits = model(tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()

    expected_loss, expected = loss_and_gradients(model, tokens)
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    assert len(found) == (2 * 7 + 1) * len(FIELDS[method])
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    errors = {
        name: ((grad.double() - expected[name]).norm() / expected[name].norm()).item()
        for name, grad in found.items()
        if grad is not None
    }
    assert errors.keys() == expected.keys()
    assert min(grad.norm() for grad in expected.values()) > 1e-6, "nothing to compare"
    worst = max(errors, key=errors.__getitem__)
    print(f"{method}, {format}, {architecture}: largest error {errors[worst]:.1e} ({worst})")
    assert errors[worst] < 1e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bias", [False, True])
def test_finite_differences(method: str, bias: bool) -> None:
    """In fp64, for the input and every trained tensor; DoRA's norm is held constant."""
    torch.manual_seed(0)
    module = LowRankLinear(nn.Linear(6, 5, bias=bias), AdapterConfig(method, 2, 3.0)).double()
    fields = [name for name, param in module.named_parameters() if param.requires_grad]
    assert fields == ["lora_A", "lora_B", *(["magnitude"] if method == "dora" else [])]
    values = [torch.randn_like(module.get_parameter(f)).requires_grad_() for f in fields]
    if module.weight_norm is not None:
        module.weight_norm.data.uniform_(0.5, 2.0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(module, dict(zip(fields, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(forward, (x, *values))


# ---- DoRA --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, dtype, architecture",
    [
        ("nf4", "fp32", "qwen2"),
        ("nf4", "bf16", "qwen2"),
        ("none", "fp32", "qwen2"),
        ("none", "bf16", "llama"),  # nn.Linear adds a bias before it rounds, adapters after
    ],
)
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_the_adapted_model_starts_as_the_base_model(
    method: str, format: str, dtype: str, architecture: str, folders: dict[str, Path]
) -> None:
    """Bit for bit."""
    folder = folders[architecture]
    base = load_model(folder, format=format, dtype=dtype)
    adapted = adapted_model(folder, adapter(method), format=format, dtype=dtype)
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        assert torch.equal(adapted(tokens), base(tokens))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_zeros_start_and_train_as_numbers(format: str) -> None:
    """Unused vocabulary entries have such rows: their norm is 0, and 0 / 0 is NaN."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    base = nn.Linear(64, 9, bias=False)
    base.weight.data = weight
    module = LowRankLinear(
        QuantizedLinear(nf4.quantize(weight), None) if format == "nf4" else base, adapter("dora")
    )
    init_adapters(nn.ModuleDict({"lm_head": module}), seed=0)
    y = module(torch.ones(2, 64))
    assert torch.equal(y[:, 3], torch.zeros(2))
    y.square().sum().backward()
    for param in (module.lora_A, module.lora_B, module.magnitude):
        assert param is not None and param.grad is not None
        assert param.grad.isfinite().all()


def whole_norms(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: whole_tensor(norm).clone()
        for name, module in adapted_linears(model)
        if (norm := module.weight_norm) is not None
    }


def refreshed_norms(folder: Path, gather_numbers: int = 1 << 24) -> dict[str, dict[str, Tensor]]:
    """By format of the base."""
    shards.GATHER_NUMBERS = gather_numbers
    norms = {}
    for format in FORMATS:
        model = adapted_model(folder, adapter("dora"), format=format)
        randomize_adapters(model)
        norms[format] = whole_norms(model)
    return norms


@pytest.mark.parametrize("format", FORMATS)
def test_refreshed_norms_are_those_of_the_adapted_rows(
    format: str, folders: dict[str, Path]
) -> None:
    model = adapted_model(folders["llama"], adapter("dora"), format=format)
    at_start = whole_norms(model)
    randomize_adapters(model)
    found = whole_norms(model)
    assert len(found) == 2 * 7 + 1
    for name, module in adapted_linears(model):
        product = module.lora_B.detach().double() @ module.lora_A.detach().double()
        expected = (plain_weight(module.weight) + 7.0 / 5 * product).norm(dim=1)
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-6, atol=0)
        assert (at_start[name] - found[name]).abs().min() > 0


def test_norms_do_not_depend_on_chunks_and_ranks(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 rows of the widest weight at a time. On three ranks all A are gathered at once, on two a
    few at a time."""
    at_once = refreshed_norms(folders["llama"])
    monkeypatch.setattr(frozen_weight, "NORM_CHUNK_WEIGHTS", 7 * 577)
    in_chunks = refreshed_norms(folders["llama"])
    on_ranks = run_ranks(3, refreshed_norms, folders["llama"])
    on_ranks += run_ranks(2, refreshed_norms, folders["llama"], 3000)
    for format in FORMATS:
        for found in (in_chunks, *on_ranks):
            assert found[format].keys() == at_once[format].keys()
            for name, norm in at_once[format].items():
                torch.testing.assert_close(found[format][name], norm, rtol=1e-6, atol=0)


# ---- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_decoder_layer_compiles_as_one_graph(method: str, folders: dict[str, Path]) -> None:
    """Recipes compile `layer.block`; a quantized weight must not break its graph."""
    model = adapted_model(folders["llama"], adapter(method))
    randomize_adapters(model)
    layer = model.model.layers[0]
    x = torch.randn(2, 32, 192, generator=torch.Generator().manual_seed(0))
    rotary = model.config.layers[0].rope.tables(
        32, torch.arange(32)[None], torch.tensor([[32]]), x.dtype
    )
    torch._dynamo.reset()
    compiled = torch.compile(layer.block, fullgraph=True, backend="aot_eager")
    gradients = []
    for block in (layer.block, compiled):
        layer.zero_grad()
        block(x, *rotary, None).square().sum().backward()
        gradients.append([p.grad for p in layer.parameters() if p.requires_grad])
    assert len(gradients[0]) == 7 * len(FIELDS[method])
    for eager, traced in zip(*gradients, strict=True):
        assert (traced - eager).norm() < 1e-4 * eager.norm()
    with torch.no_grad():  # Dynamo has rules of its own for functions that need no gradient
        expected, found = (block(x, *rotary, None) for block in (layer.block, compiled))
    torch.testing.assert_close(found, expected)


# ---- dropout -----------------------------------------------------------------------------------


def test_dropout_scales_what_it_keeps_and_rests_in_eval() -> None:
    """With identities as A and B and no base, the output shows the dropped inputs."""
    base = nn.Linear(8, 8, bias=False)
    base.weight.data.zero_()
    module = LowRankLinear(base, AdapterConfig("lora", rank=8, alpha=8.0, dropout=0.25))
    module.lora_A.data.copy_(torch.eye(8))
    module.lora_B.data.copy_(torch.eye(8))
    torch.manual_seed(0)
    x = torch.rand(5000, 8) + 1.0

    y = module.train()(x)
    kept = y != 0
    # 40,000 draws: the standard deviation of the share is 0.0022.
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    assert not torch.equal(module(x), y)
    assert torch.equal(module.eval()(x), x)


def test_dropout_leaves_the_base_alone() -> None:
    base = nn.Linear(8, 8)
    module = LowRankLinear(base, AdapterConfig("lora", rank=2, alpha=8.0, dropout=0.9)).train()
    nn.init.ones_(module.lora_A)
    nn.init.zeros_(module.lora_B)
    x = torch.randn(50, 8)
    torch.testing.assert_close(module(x), base(x))


# ---- the start ---------------------------------------------------------------------------------


def test_lora_plus_has_every_b_in_a_group_of_its_own(folders: dict[str, Path]) -> None:
    """A and magnitudes keep the learning rate, and any schedule scales both."""
    config = replace(adapter("dora"), lora_plus_ratio=4.0)
    model = adapted_model(folders["llama"], config)
    adamw = Component("torch.optim.AdamW", {"lr": 0.25})
    optimizer = build_optimizer(adamw, parameter_groups(model, config))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    named = {id(param): name for name, param in model.named_parameters()}
    fields = [
        {named[id(param)].rpartition(".")[2] for param in group["params"]}
        for group in optimizer.param_groups
    ]
    assert fields == [{"lora_A", "magnitude"}, {"lora_B"}]
    assert [len(group["params"]) for group in optimizer.param_groups] == [30, 15]
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1.0]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]
    without = build_optimizer(adamw, parameter_groups(model, adapter("dora")))
    assert [len(group["params"]) for group in without.param_groups] == [45]


def initial_adapters(folder: Path) -> dict[str, Tensor]:
    model = adapted_model(folder, adapter("dora"))
    return {key: whole_tensor(param) for key, param in adapter_parameters(model).items()}


@pytest.mark.parametrize("format", FORMATS)
def test_the_start_reads_a_weight_once_and_has_the_norms_of_a_refresh(
    format: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, read = low_rank_linear.row_chunks, list[Tensor]()
    monkeypatch.setattr(low_rank_linear, "row_chunks", lambda w: read.append(w) or chunks(w))
    model = adapted_model(folders["llama"], adapter("dora"), format=format)
    modules = [module for _, module in adapters.low_rank_linears(model)]
    assert modules and len(read) == len(modules)
    start = [module.weight_norm.clone() for module in modules]
    adapters.refresh_dora_norms(model)
    assert len(read) == 2 * len(modules)
    assert all(map(torch.equal, start, [module.weight_norm for module in modules]))


def test_the_start_does_not_depend_on_ranks(folders: dict[str, Path]) -> None:
    alone = initial_adapters(folders["llama"])
    assert len(alone) == 3 * (2 * 7 + 1)
    for on_rank in run_ranks(3, initial_adapters, folders["llama"]):
        assert on_rank.keys() == alone.keys()
        for key, value in alone.items():
            if "magnitude" in key:  # a norm: other rows are summed beside it
                torch.testing.assert_close(on_rank[key], value, rtol=1e-6, atol=0)
            else:
                assert torch.equal(on_rank[key], value), key


def test_a_is_uniform_by_seed_and_name_and_b_is_zero(folders: dict[str, Path]) -> None:
    model = adapted_model(folders["llama"], adapter("lora"))
    first = {name: module.lora_A.clone() for name, module in adapted_linears(model)}
    for name, module in adapted_linears(model):
        bound = module.lora_A.size(1) ** -0.5
        assert 0.98 * bound < module.lora_A.abs().max() <= bound
        assert module.lora_A.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert torch.count_nonzero(module.lora_B) == 0
        others = [a for other, a in first.items() if other != name]
        assert not any(torch.equal(first[name], a) for a in others), name
    init_adapters(model, seed=1)
    for name, module in adapted_linears(model):
        assert not torch.equal(module.lora_A, first[name]), name
    init_adapters(model, seed=0)
    for name, module in adapted_linears(model):
        assert torch.equal(module.lora_A, first[name]), name


# ---- targets -----------------------------------------------------------------------------------

ALL_LINEAR = {
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize(
    "targets, in_layers, head",
    [
        ("all-linear", ALL_LINEAR, False),
        (["all-linear"], ALL_LINEAR, False),
        (["all-linear", "lm_head"], ALL_LINEAR, True),
        ([name.rpartition(".")[2] for name in ALL_LINEAR] + ["lm_head"], ALL_LINEAR, True),
        (["q_proj", "down_proj"], {"self_attn.q_proj", "mlp.down_proj"}, False),
        ("v_proj", {"self_attn.v_proj"}, False),
        (["lm_head"], set(), True),
    ],
)
def test_targets_mean_these_linears(
    targets: str | list[str], in_layers: set[str], head: bool
) -> None:
    check_targets("adapter.targets", targets)
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    expected = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in in_layers}
    expected |= {"lm_head"} if head else set()
    assert {name for name, _ in target_modules(model, targets, nn.Linear)} == expected
    adapters.add_adapters(model, adapter("dora", targets))
    assert {name for name, _ in adapted_linears(model)} == expected
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    fields = ("lora_A", "lora_B", "magnitude")
    assert trained == {f"{name}.{field}" for name in expected for field in fields}


def test_what_ia3_takes_without_targets_and_with_them() -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    adapters.add_adapters(model, AdapterConfig("ia3"))
    shapes = {name: tuple(module.ia3_l.shape) for name, module in adapted_linears(model)}
    assert shapes == {
        f"model.layers.{layer}.{name}": shape
        for layer in (0, 1)
        for name, shape in (
            ("self_attn.k_proj", (64, 1)),
            ("self_attn.v_proj", (64, 1)),
            ("mlp.down_proj", (1, 577)),
        )
    }
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    adapters.add_adapters(model, AdapterConfig("ia3", targets="all-linear"))
    assert len(list(adapted_linears(model))) == 14
    assert AdapterConfig("lora").linears == AdapterConfig("dora").linears == "all-linear"


@pytest.mark.parametrize(
    "config, message",
    [
        (AdapterConfig("ia3", dropout=0.1), "dropout: 0.1 is not valid; expected 0.0, as method"),
        (AdapterConfig("ia3", rslora=True), "rslora: True is not valid; expected false, as method"),
        (AdapterConfig("miss", init="pissa"), "init: 'pissa' is not valid; expected default, as m"),
        (AdapterConfig("oft", dropout=0.1), "dropout: 0.1 is not valid; expected 0.0, as method"),
        (AdapterConfig("oft", block_size=1), "block_size: 1 is not valid; expected an integer of"),
        (AdapterConfig("ia3", init="loftq"), "init: 'loftq' is not valid; expected default, as me"),
        (AdapterConfig("ia3", lora_plus_ratio=2.0), "lora_plus_ratio: 2.0 is not valid; expected "
         "null, as method ia3 has no low-rank product"),
        (AdapterConfig(lora_plus_ratio=0.0), "lora_plus_ratio: 0.0 is not valid; expected a"),
        (AdapterConfig(init="loftq", start_from="x"), "init: 'loftq' is not valid; expected "
         "default, as start_from gives the start"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told(config: AdapterConfig, message: str) -> None:
    with pytest.raises(InvalidField) as error:
        config.check()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "targets, message",
    [
        ("all_linear", "adapter.targets: 'all_linear' is not a linear of the decoder; did you mean "
         "'all-linear'? "),
        (["q_proj", "q"], "adapter.targets: 'q' is not a linear of the decoder; did you mean "),
        (["gate_pro"], "adapter.targets: 'gate_pro' is not a linear of the decoder; did you mean "
         "'gate_proj'? "),
        ([], "adapter.targets: [] names no linear; expected 'all-linear' or some of "),
    ],
)  # fmt: skip
def test_unknown_targets_are_errors(targets: str | list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        adapter("lora", targets).check()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "config",
    [AdapterConfig(targets=["o_proj", "q_proj"]), AdapterConfig("ia3"), AdapterConfig("lora")],
)
def test_targets_of_a_model_with_fused_linears(config: AdapterConfig) -> None:
    with torch.device("meta"):
        phi3 = {"architectures": ["Phi3ForCausalLM"]}
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG | phi3))
    if config.targets is None and config.method == "lora":
        adapters.add_adapters(model, config)
        adapted = {name.rpartition(".")[2] for name, _ in adapted_linears(model)}
        assert adapted == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        return
    with pytest.raises(UserError) as error:
        adapters.add_adapters(model, config)
    missing = "k_proj" if config.method == "ia3" else "q_proj"
    assert str(error.value) == (
        f"adapter.targets: '{missing}' is not a linear of this model; expected some of "
        "all-linear, qkv_proj, o_proj, gate_up_proj, down_proj, lm_head"
    )
