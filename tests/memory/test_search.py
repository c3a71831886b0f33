"""The search: which candidates it tries and which batches it finds, with a simple memory model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.planning.changes import CHECKPOINTING, Changes, as_words, as_yaml, changed, micro_batches
from qfsdp.planning.hardware import Hardware, known_gpu
from qfsdp.planning.predict import Prediction
from qfsdp.planning.roofline import StepTime
from qfsdp.planning.search import Candidate, Trial, candidates, divisors, largest_batch, search
from tests.tiny import ROOT, load_recipe

GIB = 1 << 30
RANKS = 4


class MemoryModel:
    """`base` GiB of weights and `sample` GiB of activations per sample, on 4 ranks."""

    def __init__(self, base: float, sample: float, bend: float = 0) -> None:
        self.base, self.sample, self.bend = base, sample, bend
        self.requests: list[Changes] = []

    def __call__(self, changes: Changes) -> Prediction:
        self.requests.append(changes)
        strategy = changes["sharding.strategy"]
        checkpointing = changes["activation.checkpointing"]
        base = self.base / (RANKS if strategy == "full_shard" else 1)
        kept = {"none": 1, "selective": 0.5, "full": 0.1}[checkpointing]
        rows = changes["batch_size"] + self.bend * changes["batch_size"] ** 2
        acts = self.sample * kept * rows
        device, host = 1 + acts, 0.0
        if changes["sharding.cpu_offload"] or changes["sharding.offload_base"] == "cpu":
            host += self.base
        elif changes["sharding.offload_base"] == "none":
            device += base
        if changes["activation.offload"]:
            device, host = device - 0.9 * acts, host + 0.9 * acts * RANKS
        slow = 1 + list(changes).index("batch_size") + len(str(changes)) / 1000
        time = StepTime(slow, "compute", {})
        return Prediction(changes, int(device * GIB), int(host * GIB), {}, time, 1.0)


def card(device: float, host: float | None = None) -> Hardware:
    memory = None if host is None else int(host * GIB)
    return replace(known_gpu("rtx4090"), device_memory=int(device * GIB), host_memory=memory)


def names(found: list[Trial]) -> list[str]:
    return [f"{each.candidate.name}: {each.batch if each.fits else 'no'}" for each in found]


def test_order() -> None:
    ways = candidates(RANKS)
    assert [way.name for way in ways[:4]] == [
        "ddp, checkpointing none",
        "ddp, checkpointing selective",
        "ddp, checkpointing full",
        "full_shard, checkpointing none",
    ]
    assert ways[-1].name == (
        "full_shard, checkpointing full, offload_base disk, activation.offload"
    )
    assert len(set(ways)) == len(ways)
    for at, way in enumerate(ways):  # none is faster in all than one before it
        assert not any(way.is_faster_in_all(before) for before in ways[:at])
    assert {r.changes["sharding.strategy"] for r in candidates(1)} == {"full_shard"}


def test_long_rows_are_cut_into_tiles_before_anything_is_offloaded() -> None:
    for ranks in (1, RANKS):
        ways = candidates(ranks, tiles=True, shared=[2, 4] if ranks > 1 else [])
        whole = [way for way in ways if not way.tiles]
        assert whole == [way for way in candidates(ranks) if way in whole]
        assert all(way.offload == "none" and not way.offload_activations for way in whole)
        assert ways[len(CHECKPOINTING)].name.endswith("checkpointing full, tiles")
        assert ways[-1].changes["activation.tile_tokens"] == "auto"
        for at, way in enumerate(ways):
            assert not any(way.is_faster_in_all(before) for before in ways[:at])
    shared = [way for way in ways if way.context_parallel > 1]
    assert [way.context_parallel for way in shared] == [2, 2, 4, 4]
    offloaded = next(at for at, way in enumerate(ways) if way.offload_activations)
    assert offloaded < ways.index(shared[0])


def test_ranks_that_share_rows_have_the_samples_of_all_of_them() -> None:
    model = MemoryModel(base=4, sample=1)
    way = Candidate("full_shard", "full", context_parallel=4)
    (found,) = search([way], model, 2, card(24))
    assert found.batch == 8 and found.whole


def test_several_machines_also_shard_within_each() -> None:
    ways = candidates(RANKS, machines=2)
    without = [way for way in ways if way.strategy != "hybrid_full_shard"]
    assert without == candidates(RANKS)
    hybrid = [replace(way, strategy="full_shard") for way in ways if way not in without]
    assert hybrid == [way for way in without if way.strategy == "full_shard"]
    for at, way in enumerate(ways):
        assert not any(way.is_faster_in_all(before) for before in ways[:at])


def test_slower_ways_are_not_tried_if_a_whole_step_fits() -> None:
    model = MemoryModel(base=4, sample=1)
    found = list(search(candidates(RANKS), model, 8, card(24)))
    assert names(found) == ["ddp, checkpointing none: 8"]
    assert found[0].whole


def test_strongest_checkpointing_is_predicted_first() -> None:
    model = MemoryModel(base=40, sample=1)
    found = list(search(candidates(RANKS), model, 8, card(24)))
    assert names(found) == ["ddp, checkpointing full: no", "full_shard, checkpointing none: 8"]
    requested = [
        a["activation.checkpointing"] for a in model.requests if a["sharding.strategy"] == "ddp"
    ]
    assert requested == ["full"]


def test_weaker_checkpointing_is_still_tried_with_full_shard() -> None:
    """ddp holds all samples only with selective checkpointing, full_shard without any."""
    found = names(list(search(candidates(RANKS), MemoryModel(base=14, sample=2), 8, card(24))))
    assert found == [
        "ddp, checkpointing none: 4",
        "ddp, checkpointing selective: 8",
        "full_shard, checkpointing none: 8",
    ]


def test_batches_grow_with_saved_memory() -> None:
    found = list(search(candidates(RANKS), MemoryModel(base=40, sample=5), 16, card(24)))
    full_shard = [f for f in found if f.candidate.changes["sharding.strategy"] == "full_shard"]
    assert [f.batch for f in full_shard][:3] == [2, 4, 16]
    assert not any(f.candidate.changes["sharding.offload_base"] == "disk" for f in found)
    for each in found:
        if each.fits:
            assert each.prediction.fits(card(24))
            batch = each.prediction.changes
            assert batch["batch_size"] * batch["gradient_accumulation_steps"] == 16


def test_disk_is_tried_only_if_host_memory_is_too_small() -> None:
    found = names(
        list(search(candidates(RANKS), MemoryModel(base=100, sample=2), 4, card(24, host=64)))
    )
    assert "full_shard, checkpointing full, offload_base cpu: no" in found
    assert "full_shard, checkpointing full, offload_base disk: 4" in found
    found = names(
        list(search(candidates(RANKS), MemoryModel(base=100, sample=2), 4, card(24, host=128)))
    )
    assert not any("disk" in name for name in found)


def test_interpolation_alone_does_not_count() -> None:
    """8 samples fit by interpolation, but not by their own prediction."""
    bent = MemoryModel(base=0, sample=1, bend=0.4)
    way = Candidate("ddp", "none")
    found = largest_batch(way, bent, 8, card(24))
    assert (found.batch, found.fits, found.whole) == (4, True, False)


@pytest.mark.parametrize(("samples", "sizes"), [(1, {1}), (7, {1, 7}), (12, {1, 2, 3, 4, 6, 12})])
def test_micro_batches_divide_a_step(samples: int, sizes: set[int]) -> None:
    model = MemoryModel(base=0, sample=0)
    largest_batch(candidates(RANKS)[0], model, samples, card(24))
    assert {a["batch_size"] for a in model.requests} <= sizes


def test_divisors() -> None:
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert len(divisors(2**40)) == 41  # of 2**20 rows in 2**20 micro-batches, in milliseconds


def test_nothing_fits() -> None:
    found = list(search(candidates(RANKS), MemoryModel(base=40, sample=500), 4, card(4)))
    assert found and not any(each.fits for each in found)


def test_every_candidate_is_a_valid_config() -> None:
    words = ["sharding.strategy=hybrid_full_shard", "sharding.replicate=2", "sharding.shard=2"]
    recipe = load_recipe()
    argv = ["--config", str(ROOT / "configs/llama3_8b_lora.yaml"), *words]
    cfg = load_config(recipe.Config, argv)
    for way in candidates(RANKS):
        found = changed(cfg, way.changes | micro_batches(2, 16))
        assert found == load_config(
            recipe.Config, [*argv, *as_words(way.changes | micro_batches(2, 16)).split()]
        )
        written = OmegaConf.create(as_yaml(way.changes))
        assert written.sharding.strategy == way.strategy
        assert written.activation.offload is way.offload_activations


def test_changes_that_do_not_go_together() -> None:
    recipe = load_recipe()
    cfg = load_config(recipe.Config, ["--config", str(ROOT / "configs/llama3_8b_lora.yaml")])
    with pytest.raises(UserError, match="^with sharding.cpu_offload=true .*offload_base"):
        changed(cfg, {"sharding.cpu_offload": True, "sharding.offload_base": "cpu"})
