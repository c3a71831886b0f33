"""The micro-batches that follow from a config's global batch, and from the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.distributed.global_batch import check_global_batch, split_batch
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import init_world
from qfsdp.launch.ranks import torchrun_flags


@dataclass
class Config:
    global_batch_size: int | None
    batch_size: int = 4
    gradient_accumulation_steps: int = 7
    in_backward: bool = False
    sharding: ShardingConfig = field(default_factory=ShardingConfig)

    def check(self) -> None:
        if self.in_backward and self.gradient_accumulation_steps > 1:
            raise InvalidField("gradient_accumulation_steps", "2", "1")


def test_the_micro_batches_follow_from_the_ranks() -> None:
    for ranks, steps in ((1, 6), (2, 3), (3, 2), (6, 1)):
        config = Config(24)
        assert split_batch(config, ranks) == config.gradient_accumulation_steps == steps
    assert split_batch(Config(None), 5) == 7


def test_ranks_that_share_rows_count_as_one() -> None:
    shared = ShardingConfig(context_parallel=2)
    assert split_batch(Config(24, sharding=shared), 6) == 2
    with pytest.raises(UserError) as error:
        split_batch(Config(24, sharding=shared), 5)
    expected = "2; expected a divisor of 5, the number of ranks"
    assert str(error.value) == f"sharding.context_parallel: {expected}"
    with pytest.raises(UserError, match="8 is no multiple of batch_size 4 x 3 groups of 2 ranks;"):
        split_batch(Config(8, sharding=shared), 6)
    with pytest.raises(InvalidField, match="context_parallel: 0"):
        ShardingConfig(context_parallel=0).check()


@pytest.mark.parametrize(
    ("size", "batch", "ranks", "message"),
    [
        (
            24,
            5,
            2,
            "24 is no multiple of batch_size 5 x 2 ranks; expected batch_size=2, 3, 4 or 6, or "
            "global_batch_size=20",
        ),
        (
            24,
            4,
            4,
            "24 is no multiple of batch_size 4 x 4 ranks; expected batch_size=1, 2, 3 or 6, or "
            "1, 2, 3 or 6 ranks, or global_batch_size=32",
        ),
        (7, 2, 2, "7 is no multiple of batch_size 2 x 2 ranks; expected global_batch_size=8"),
        (0, 2, 2, "0 is not valid; expected an integer of at least 1"),
    ],
)
def test_what_does_not_divide(size: int, batch: int, ranks: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        split_batch(Config(size, batch), ranks)
    assert str(error.value) == f"global_batch_size: {message}"


def test_a_result_that_another_key_forbids() -> None:
    with pytest.raises(UserError, match="global_batch_size: 8 on 1 ranks gives gradient_accumul"):
        split_batch(Config(8, in_backward=True), 1)


def test_every_number_of_machines_is_checked() -> None:
    config = Config(8, batch_size=1)
    with torchrun_flags("1:2", "2"):
        check_global_batch(config)
        assert config.gradient_accumulation_steps == 4
    with torchrun_flags("1:4", "2"), pytest.raises(UserError, match="batch_size 1 x 6 ranks"):
        check_global_batch(config)


def test_half_of_torchruns_environment_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    expected = "WORLD_SIZE: 4 in the environment, without RANK, MASTER_ADDR, MASTER_PORT; expected"
    with pytest.raises(UserError, match=expected):
        init_world()
