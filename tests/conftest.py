"""One thread per process, the order of files, the real model, and eager kernels."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model

# Test processes share the cores. Threads of one process that wait for each other are slow then:
# 4096 short documents took 3 s alone, and 75 s while another test ran on the same two cores.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
# Inductor starts a pool of processes in every process that compiles, and each process of a pool
# imports torch: two ranks took 94 s with pools and 77 s without.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


# The files that take longest start first, so that both processes of `make test` end together.
LONGEST_FILES = (
    "tests/test_fault_slice.py",
    "recipes/test_qdora_distributed.py",
    "recipes/test_sharded_equals_unsharded.py",
    "recipes/test_strategies.py",
    "modules/test_activations.py",
    "recipes/test_resume.py",
    "recipes/test_full_finetune.py",
    "recipes/test_adapter_variants.py",
    "recipes/test_configs.py",
    "cli/test_launch.py",
    "cli/test_command.py",
    "cli/test_signals.py",
    "recipes/test_generate.py",
    "recipes/test_full_finetune_command.py",
)


# Mark -> further tests that get it, besides those that their files mark. A slow test repeats with
# other values what a test of .ci/run shows. Long tests do not fit into ten minutes of `make test`.
LISTED = {
    mark: re.findall("^[^#\n].*", Path(__file__).with_name(file).read_text(), re.MULTILINE)
    for mark, file in (("slow", "too_long_for_ci.txt"), ("long", "too_long_for_make_test.txt"))
}


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {item.nodeid.removeprefix("tests/"): item for item in items}
    files = {name.partition("::")[0] for name in names}
    everything = len(items) > 4000  # a file may be missing: its package is not installed
    for mark, name in ((mark, name) for mark, listed in LISTED.items() for name in listed):
        if name in names:
            names[name].add_marker(mark)
        elif everything and name.partition("::")[0] in files:
            raise pytest.UsageError(f"listed as {mark} in tests/*.txt: no test {name}")
    places = {name: place for place, name in enumerate(LONGEST_FILES)}

    def place(item: pytest.Item) -> int:
        return places.get("/".join(item.path.parts[-2:]), len(places))

    items.sort(key=place)


BEFORE = os.environ.get("QFSDP_EAGER_KERNELS")


def pytest_collection_finish() -> None:
    """No file may set a variable of all others when it is imported, as `tests.faults` would."""
    assert os.environ.get("QFSDP_EAGER_KERNELS") == BEFORE, "a test file made kernels uncompiled"


@pytest.fixture(scope="module", autouse=True)
def environment_of_a_file() -> Iterator[None]:
    """A file of tests leaves the environment as it was: with `QFSDP_EAGER_KERNELS` left behind, the
    estimates of a later file were 0.5 GiB higher. `torch.compile` compiles again, also where ranks
    that ran in this process had forced it to be eager."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("default")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once per machine."""
    return prepare_model(cache_dir())


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run uncompiled, here and on ranks: each shape and each process would compile.

    test_nf4.py tests that compiled kernels give the same bits.
    """
    monkeypatch.setenv("QFSDP_EAGER_KERNELS", "1")


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """Ends the group that a run of one rank joins where FSDP2 casts, as full finetuning does on a
    CPU with bf16 products: a dry run in the next test wants none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
