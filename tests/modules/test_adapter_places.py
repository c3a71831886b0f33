"""Where adapters stand and how large they are: layers, patterns, exclusions, ranks by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.low_rank.linear import low_rank_linears
from qfsdp.modules.transformer import Decoder
from tests.tiny import TINY_CONFIG

ALL = [
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
]


def adapted(**fields: Any) -> nn.Module:
    config = AdapterConfig("lora", 4, 8.0, **fields)
    config.check()
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG | {"num_hidden_layers": 3}))
    add_adapters(model, config)
    return model


def of(layers: tuple[int, ...], *names: str) -> set[str]:
    return {f"model.layers.{layer}.{name}" for layer in layers for name in names}


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"layers": [2]}, of((2,), *ALL)),
        ({"layers": "1-2", "targets": ["q_proj"]}, of((1, 2), "self_attn.q_proj")),
        ({"layers": "1", "targets": r".*\.q_proj"}, of((1,), "self_attn.q_proj")),
        ({"targets": ["self_attn.q_proj", "up_proj"]}, of((0, 1, 2), ALL[0], ALL[5])),
        ({"targets": ["layers.0.mlp.up_proj"]}, of((0,), "mlp.up_proj")),
        ({"targets": r".*\.(0|2)\.mlp\.(up|down)_proj"}, of((0, 2), ALL[5], ALL[6])),
        ({"targets": r"lm_head|.*\.1\..*v_proj"}, {"lm_head", *of((1,), "self_attn.v_proj")}),
        ({"exclude": ["mlp.up_proj", "o_proj"]}, of((0, 1, 2), *ALL[:3], ALL[4], ALL[6])),
        ({"exclude": r".*\.[01]\..*"}, of((2,), *ALL)),
        ({"exclude": "q_proj", "layers": "0-0"}, of((0,), *ALL[1:])),
    ],
)
def test_which_linears_are_adapted(fields: dict[str, Any], expected: set[str]) -> None:
    assert {name for name, _ in low_rank_linears(adapted(**fields))} == expected


def test_ranks_and_scalings_are_of_the_first_pattern_that_matches() -> None:
    model = adapted(
        targets=["q_proj", "up_proj"],
        rank_pattern={r"layers\.[01]\.self_attn\.q_proj": 2, "q_proj": 8},
        alpha_pattern={"mlp.up_proj": 2.0},
    )
    found = {name: (m.lora_A.size(0), m.scaling) for name, m in low_rank_linears(model)}
    assert found == {
        **dict.fromkeys(of((0, 1), "self_attn.q_proj"), (2, 4.0)),
        **dict.fromkeys(of((2,), "self_attn.q_proj"), (8, 1.0)),
        **dict.fromkeys(of((0, 1, 2), "mlp.up_proj"), (4, 0.5)),
    }
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == (2 + 2 + 8) * (192 + 192) + 3 * 4 * (192 + 577)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"layers": "0-3"}, "adapter.layers: 3 is not a layer of this model; expected 0 to 2"),
        ({"layers": "2-0"}, "layers: '2-0' is not valid; expected a range such as"),
        ({"layers": "first"}, "layers: 'first' is not valid; expected a range such as"),
        ({"layers": []}, "layers: [] is not valid; expected a range such as"),
        ({"layers": [1, 1]}, "layers: [1, 1] is not valid; expected a range such as"),
        ({"layers": [-1]}, "layers: [-1] is not valid; expected a range such as"),
        ({"layers": [0], "targets": ["q_proj", "lm_head"]}, "adapter.targets: 'lm_head' with "
         "adapter.layers: [0] matches no linear of this model; expected names, or ends"),
        ({"targets": r".*\.x_proj"}, "adapter.targets: '.*\\\\.x_proj' matches no linear of this "
         "model; expected a pattern of whole names such as 'model.layers.0.self_attn.q_proj'"),
        ({"targets": "(q"}, "adapter.targets: '(q' is no pattern (missing ), unterminated"),
        ({"targets": ["mlp.q_proj"]}, "adapter.targets: 'mlp.q_proj' matches no linear"),
        ({"targets": [r".*\.q_proj"]}, "adapter.targets: '.*\\\\.q_proj' matches no linear of this "
         "model; expected names, or ends of names such as 'model.layers.0.self_attn.q_proj', or "
         "one pattern without a list"),
        ({"targets": "all-linear", "exclude": ".*"}, "adapter.exclude: '.*' leaves no linear; "
         "expected fewer"),
        ({"targets": ["q_proj"], "exclude": ["up_proj"]}, "adapter.exclude: 'up_proj' matches no "
         "linear that adapter.targets and adapter.layers select; expected some of them"),
        ({"exclude": "k_pro"}, "adapter.exclude: 'k_pro' is not a linear of the decoder; did you "
         "mean 'k_proj'?"),
        ({"exclude": []}, "adapter.exclude: [] names no linear; expected"),
        ({"exclude": "*"}, "adapter.exclude: '*' is no pattern (nothing to repeat"),
        ({"rank_pattern": {"lm_head": 2}}, "adapter.rank_pattern: 'lm_head' matches no adapted "
         "linear; expected the end of a name such as 'model.layers.0.self_attn.q_proj'"),
        ({"alpha_pattern": {"proj": 2.0}}, "adapter.alpha_pattern: 'proj' matches no adapted"),
        ({"rank_pattern": {"q_proj[": 2}}, "adapter.rank_pattern: 'q_proj[' is no pattern ("),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: {'q_proj': 0} is not valid; expected a"),
        ({"rank_pattern": {"q_proj": 193}}, "adapter.rank_pattern: 193; expected at most 192, the "
         "larger side of model.layers.0.self_attn.q_proj"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidField, UserError)) as error:
        adapted(**fields)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_ia3_has_places_and_no_ranks() -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    add_adapters(model, AdapterConfig("ia3", layers=[1], exclude=["k_proj"]))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {f"{name}.ia3_l" for name in of((1,), "self_attn.v_proj", "mlp.down_proj")}
    with pytest.raises(
        InvalidField, match="rank_pattern: .* as method ia3 has no low-rank product"
    ):
        AdapterConfig("ia3", rank_pattern={"k_proj": 2}).check()


def test_a_pattern_of_each_linear_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of PEFT may have a rank for each linear, more than the 512 that `re` remembers."""
    compiled, compile_one = list[str](), re._compiler.compile  # type: ignore[attr-defined]

    def counting(pattern: str, flags: int) -> Any:
        compiled.append(pattern)
        return compile_one(pattern, flags)

    names = [f"model.layers.{layer}.q_proj" for layer in range(600)]
    config = AdapterConfig(rank_pattern={name: 3 + at for at, name in enumerate(names)})
    monkeypatch.setattr("re._compiler.compile", counting)
    assert [config.of(name).rank for name in names] == list(range(3, 603))
    assert len(compiled) == 600
