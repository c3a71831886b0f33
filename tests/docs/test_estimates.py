"""The estimates in configs, README and its picture are what docs/estimates.py writes today."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import estimates

HEADS = estimates.configs()
EXAMPLES = ("llama3_8b_qdora", "llama3_70b_qdora_2x24gb", "gemma3_27b_qlora")  # the rest: minutes


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            file,
            marks=pytest.mark.long if file.stem in EXAMPLES else pytest.mark.slow,
            id=file.stem,
        )
        for file in HEADS
    ],
)
def test_head_has_the_figures_of_its_machines(config: Path) -> None:
    assert config.read_text() == estimates.with_figures(config)


def test_large_configs_name_their_machines() -> None:
    configs = estimates.ROOT / "configs"
    large = {f for f in configs.glob("*_*b_*.yaml") if "135m" not in f.stem}
    large.add(configs / "glm4_7_flash_qlora.yaml")  # 30B, which its name does not say
    large -= {f for f in large if f.stem.startswith(("sweep_", "published_"))}
    assert len(large) >= 19 and large == set(HEADS)
    assert not any("not measured" in f.read_text() for f in large)


@pytest.mark.parametrize("document", estimates.WITH_TABLE, ids=lambda file: file.stem)
def test_tables_come_from_the_heads(document: Path) -> None:
    text = document.read_text()
    assert (
        text == estimates.with_table(document) and text.count("configs/llama3_8b_qdora.yaml)") == 1
    )


@pytest.mark.slow
def test_picture_shows_the_estimates() -> None:
    assert estimates.PICTURE.read_text() == estimates.picture()


@pytest.mark.long
def test_a_config_that_does_not_fit_its_machine_is_named() -> None:
    machine = estimates.MACHINE.fullmatch("#   1 x T4 with quantization.format=none: ?")
    assert machine is not None
    with pytest.raises(ValueError, match=r"llama3_8b_lora.yaml: T4: .* GiB; expected to fit"):
        estimates.figures("llama3_8b_lora", machine)
