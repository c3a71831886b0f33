"""docs/check.py, which goes through all commands of the documents."""

from __future__ import annotations

import pytest

from docs.check import check_command

RUN = "tune run recipes/qdora_distributed --config configs/llama3_8b_qdora.yaml"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (f"{RUN} 'adapter.targets=[q_proj,v_proj]' '~optimizer.weight_decay' lr=~/x", "unknown"),
        (f"{RUN} 'adapter.targets=[q_proj,v_proj]' [key=value ...]", None),
        (f"{RUN} adapter.targets=[q_proj,v_proj]", "zsh takes adapter.targets="),
        (f"{RUN} ~optimizer.weight_decay", "zsh takes ~optimizer.weight_decay"),
        (f'{RUN} "dataset.source=rows/*.jsonl" output_dir=~/runs', None),
        (f"{RUN} dataset.source=rows/*.jsonl", "zsh takes dataset.source="),
        ("pip install qfsdp[serve]", "zsh takes qfsdp[serve]"),
        (f"{RUN} adapter.rnak=8", "unknown key 'adapter.rnak'"),
        ("tune run recipes/lora --config configs/x.yaml", "no recipe 'recipes/lora'"),
    ],
)
def test_commands_are_checked(command: str, problem: str | None) -> None:
    found = check_command(command, {})
    assert found is None if problem is None else (found or "").startswith(problem)
