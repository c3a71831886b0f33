"""MiSS and OFT: what they refuse, and what the reference of preference losses is.

`tests/checkpoint/test_peft_updates.py` compares their numbers with PEFT's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qfsdp.checkpoint.adapter_config_file import read_peft_config
from qfsdp.checkpoint.adapter_files import read_adapter_config, save_adapter
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.adapters.oft import rotations
from qfsdp.modules.adapters.reference import as_reference
from qfsdp.modules.low_rank.adapted import adapted_linears
from tests.models import cpu_world, randomize_adapters

KINDS = (AdapterConfig("miss", rank=7), AdapterConfig("oft", block_size=6))


def tiny(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(12, 10) for name in names or ("q_proj", "o_proj")})


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.method)
def test_the_start_is_the_base_and_the_reference_stays_it(config: AdapterConfig) -> None:
    model = tiny()
    x = torch.randn(3, 12)
    base = model["q_proj"](x)
    add_adapters(model, config)
    init_adapters(model, seed=0)
    assert torch.equal(model["q_proj"](x), base)
    randomize_adapters(model)
    assert (model["q_proj"](x) - base).abs().max() > 1e-3
    with as_reference(model):
        assert torch.equal(model["q_proj"](x), base)


def test_a_rotation_keeps_lengths() -> None:
    r = rotations(0.01 * torch.randn(3, 15), 6)
    torch.testing.assert_close(r @ r.mT, torch.eye(6).expand(3, 6, 6), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (AdapterConfig("miss", targets=["lm_head"]), ["lm_head"], "'miss' has no form of lm_head"),
        (
            AdapterConfig("miss", rank=13),
            [],
            "adapter.rank: 13; expected at most 12, the inputs of",
        ),
        (AdapterConfig("oft", block_size=5), [], "adapter.block_size: 5; expected a divisor of 12"),
    ],
)
def test_what_they_cannot_adapt_is_refused(
    config: AdapterConfig, names: list[str], message: str
) -> None:
    with pytest.raises(UserError) as error:
        add_adapters(tiny(*names), config)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (KINDS[0], {"init_weights": "bat"}, "init_weights 'bat': qfsdp has the default form alone"),
        (KINDS[0], {"r": "7"}, "r '7'; expected an integer of at least 1"),
        (KINDS[1], {"use_cayley_neumann": False}, "use_cayley_neumann False; expected True"),
        (KINDS[1], {"num_cayley_neumann_terms": 4}, "num_cayley_neumann_terms 4; expected 5"),
        (KINDS[1], {"oft_block_size": 0, "r": 2}, "oft_block_size 0; expected an integer"),
        (KINDS[1], {"block_share": True}, "block_share True: qfsdp does not have this option"),
        (KINDS[1], {"coft": True}, "coft True: qfsdp does not have this option"),
    ],
)
def test_files_of_other_forms_are_refused(
    config: AdapterConfig, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = tiny()
    add_adapters(model, config)
    init_adapters(model, seed=0)
    assert len(list(adapted_linears(model))) == 2
    save_adapter(model, config, "base", tmp_path, cpu_world())
    read = read_adapter_config(tmp_path)
    assert read.method == config.method and read.targets == ["o_proj", "q_proj"]
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError) as error:
        read_peft_config(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)
