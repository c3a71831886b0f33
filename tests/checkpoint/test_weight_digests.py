"""Damaged weights are noticed while they are loaded; a cache is written again."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qfsdp.checkpoint.lock import FolderLock
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.checkpoint.weights.qfsdp_layout import MANIFEST
from qfsdp.checkpoint.weights.quantize import open_weights, quantize_folder
from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.flips import flip
from tests.models import build_meta_model, cpu_world, load_model
from tests.ranks import run_ranks
from tests.tiny import ROOT, write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("eager")

NF4 = QuantizationConfig("nf4", ["all-linear", "lm_head"])
SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("digests") / "model")


def quantized(source: Path, folder: Path, max_file_bytes: int = 10**9) -> Path:
    quantize_folder(ModelWeights(source), NF4, folder, cpu_world(), max_file_bytes=max_file_bytes)
    return folder


def change(file: Path, at: float = 0.7) -> None:
    """Flips one bit."""
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 1
    file.write_bytes(data)


def from_cache(source: Path, cache: Path, format: str = "nf4") -> dict[str, torch.Tensor]:
    """The bytes of the base of a run with `quantize_cache`."""
    model = ModelConfig(str(source), quantize_cache=str(cache))
    weights = open_weights(model, NF4, cpu_world())
    decoder = build_meta_model(source)
    load_base(decoder, weights, torch.device("cpu"))
    return stored(decoder)


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: local_part(param) for name, param in base_parameters(model)}
    return {n: t.qdata if isinstance(t, QuantizedTensor) else t.data for n, t in found.items()}


# ---- folders that the user names -----------------------------------------------------------------


@pytest.mark.parametrize("at", [0.3, 0.99])
def test_a_changed_bit_of_a_quantized_folder_is_refused(
    source: Path, tmp_path: Path, at: float
) -> None:
    folder = quantized(source, tmp_path / "q")
    load_model(folder)
    change(folder / SINGLE, at)
    expected = rf"^{folder}: {SINGLE}: content changed \(XXH3\); expected it as recipes/quantize"
    with pytest.raises(UserError, match=expected):
        load_model(folder)
    quantized(source, folder)  # the command that made the folder repairs it
    load_model(folder)


def test_every_rank_says_so_for_a_file_that_one_of_them_compares(
    source: Path, tmp_path: Path
) -> None:
    folder = quantized(source, tmp_path / "q", max_file_bytes=100_000)
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(names) > 2
    assert run_ranks(2, message_of_loading, folder, "none") == [""] * 2
    for name, base in zip(names[:2], ("none", "disk"), strict=True):
        before = (folder / name).read_bytes()
        change(folder / name, 0.9)
        for message in run_ranks(2, message_of_loading, folder, base):
            assert f"{name}: content changed" in message
        (folder / name).write_bytes(before)


def message_of_loading(folder: Path, base: str) -> str:
    try:
        load_model(folder, sharding={"offload_base": base})
    except UserError as error:
        return str(error)
    return ""


def test_manifest_and_settings(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quantized(source, tmp_path / "q")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("1e-0", "1e-1"))
    assert (folder / "config.json").read_text() != text
    load_base(build_meta_model(folder), ModelWeights(folder), torch.device("cpu"), progress=True)
    assert f"{folder}: not as it was written or downloaded: config.json" in capsys.readouterr().err
    manifest = (folder / MANIFEST).read_text()
    fingerprint = json.loads(manifest)["source"]["fingerprint"]
    (folder / MANIFEST).write_text(manifest.replace(fingerprint, "0" * 64))
    with pytest.raises(UserError, match=f"{MANIFEST}: content changed"):
        ModelWeights(folder)
    values = json.loads(manifest)
    del values["sealed"], values["settings"]  # as earlier versions wrote it
    (folder / MANIFEST).write_text(json.dumps(values))
    load_model(folder)
    change(folder / SINGLE)
    with pytest.raises(UserError, match="content changed"):
        load_model(folder)


def test_other_commands_that_read_weights_notice_it(source: Path, tmp_path: Path) -> None:
    folder = quantized(source, tmp_path / "q")
    change(folder / SINGLE)
    again = tmp_path / "again"
    with pytest.raises(UserError, match="content changed"):
        quantize_folder(ModelWeights(folder), NF4, again, cpu_world())
    assert not list(again.glob("*.safetensors"))  # else the same command would keep them


def test_the_hubs_cache_names_its_files_by_their_digests(source: Path, tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "0"
    blobs.mkdir()
    folder.mkdir(parents=True)
    for file in source.iterdir():
        data = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        weights = file.suffix == ".safetensors"
        blob = blobs / (hashlib.sha256(data).hexdigest() if weights else git)
        blob.write_bytes(data)
        (folder / file.name).symlink_to(blob)
    load_model(folder)
    change(folder / SINGLE, 0.5)
    with pytest.raises(UserError, match=f"{SINGLE}: content changed .*next start downloads it"):
        load_model(folder)


# ---- caches --------------------------------------------------------------------------------------


DAMAGES = {
    "a bit": lambda f: change(f / SINGLE),
    "the header": lambda f: (f / SINGLE).write_bytes(b"\0" * 8 + (f / SINGLE).read_bytes()[8:]),
    "cut": lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-9]),
    "missing": lambda f: (f / SINGLE).unlink(),
    "the manifest": lambda f: change(f / MANIFEST),
    "no JSON": lambda f: (f / MANIFEST).write_text("{"),
    "config.json": lambda f: change(f / "config.json"),
    "both": lambda f: (change(f / MANIFEST), change(f / SINGLE)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_written_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    expected = from_cache(source, tmp_path)
    (folder,) = tmp_path.iterdir()
    whole = {name: value.clone() for name, value in load_file(folder / SINGLE).items()}
    capsys.readouterr()
    DAMAGES[damage](folder)
    found = from_cache(source, tmp_path)
    told = [line for line in capsys.readouterr().err.splitlines() if "is damaged" in line]
    assert len(told) == 1 and told[0].startswith(f"warning: model.quantize_cache: '{folder}'"), told
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(torch.equal(load_file(folder / SINGLE)[n], value) for n, value in whole.items())
    from_cache(source, tmp_path)
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "cache"])
def test_fifty_damages_and_none_is_silent(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Flips in every file that a run reads are noticed, or change nothing."""
    cache = tmp_path / "cache"
    expected = from_cache(source, cache)
    (good,) = cache.iterdir()
    copy, chance = tmp_path / "copy", random.Random(0)
    shutil.copytree(good, copy)
    noticed = 0
    for number in range(50):
        target = copy if kind == "folder" else good
        files = [f for f in sorted(target.iterdir()) if f.name != ".lock"]
        file = files[number % len(files)]
        how = f"{file.name}: {flip(chance, file)}"
        capsys.readouterr()
        if kind == "cache":
            found = from_cache(source, cache)
            noticed += "is damaged" in capsys.readouterr().err
        else:
            found, problem = expected, None
            try:
                weights, decoder = ModelWeights(target), build_meta_model(target)
                load_base(decoder, weights, torch.device("cpu"), progress=True)
                found = stored(decoder)
            except UserError as error:
                problem = str(error)
                assert "\n" not in problem
            noticed += problem is not None or "not as it was written" in capsys.readouterr().err
            shutil.rmtree(copy)
            shutil.copytree(good, copy)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), how
        assert noticed == number + 1, how


def test_two_runs_with_one_new_cache(source: Path, tmp_path: Path) -> None:
    """The second waits, says so, and uses what the first has written."""
    first = open_weights(ModelConfig(str(source), quantize_cache=str(tmp_path)), NF4, cpu_world())
    folder = first.folder
    hidden = tmp_path / "hidden"
    program = f"""
import torch
from pathlib import Path
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.quantize import open_weights
from qfsdp.distributed.world import World
from qfsdp.modules.quantized_linear import QuantizationConfig
config = ModelConfig({str(source)!r}, quantize_cache={str(tmp_path)!r})
targets = QuantizationConfig("nf4", ["all-linear", "lm_head"])
print(open_weights(config, targets, World(torch.device("cpu"))).folder)
"""
    written = (folder / SINGLE).stat().st_mtime_ns
    with FolderLock(folder, "model.quantize_cache"):
        (folder / MANIFEST).rename(hidden)
        output = tmp_path / "output"
        with output.open("w") as stream:
            command = [sys.executable, "-c", program]
            second = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=ROOT)
        wait_until(lambda: "waiting for it" in output.read_text(), "the second run waits")
        hidden.rename(folder / MANIFEST)
    assert second.wait() == 0, output.read_text()
    lines = output.read_text().splitlines()
    assert lines[-1] == str(folder) and len(lines) == 2, lines
    assert (folder / SINGLE).stat().st_mtime_ns == written
