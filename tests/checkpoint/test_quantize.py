"""A quantized folder holds the bytes that a training run would compute, on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.checkpoint.lock import LOCK_FILE, FolderLock
from qfsdp.checkpoint.weights import convert
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.output_folder import RESUMABLE_BEGUN
from qfsdp.checkpoint.weights.qfsdp_layout import MANIFEST
from qfsdp.checkpoint.weights.quantize import open_weights, quantize_folder
from qfsdp.checkpoint.weights.write import PlannedFile
from qfsdp.common.errors import UserError
from qfsdp.common.files import PARTIAL, sha256, xxh3
from qfsdp.config.load import load_config
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.models import cpu_world, load_model, loaded
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("eager")

NF4 = QuantizationConfig("nf4", ["all-linear", "lm_head"])


def assert_same(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for mine, theirs in zip(found[name], tensors, strict=True):
            assert torch.equal(mine, theirs), name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """577-row weights, 577 columns, three files."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "source", shards=3)


def quantize(source: Path, folder: Path, config: QuantizationConfig = NF4, **options: Any) -> None:
    quantize_folder(ModelWeights(source), config, folder, cpu_world(), **options)


@pytest.mark.parametrize("format", ["nf4", "nf4_fp32_absmax"])
def test_any_ranks_load_what_they_would_have_quantized(
    format: str, source: Path, tmp_path: Path
) -> None:
    config = QuantizationConfig(format, NF4.targets)
    run_ranks(2, quantize, source, tmp_path / "quantized", config)
    expected = loaded(source, format=format)
    assert_same(loaded(tmp_path / "quantized", format=format), expected)
    for found in run_ranks(3, loaded, tmp_path / "quantized"):
        assert_same(found, expected)
    weights = ModelWeights(tmp_path / "quantized")
    assert {w.format for w in weights.quantized.values()} == {format}
    assert len(weights.quantized) == 15
    assert weights.fingerprint == ModelWeights(source).fingerprint


@pytest.mark.long
def test_the_real_model(smollm2_dir: Path, tmp_path: Path) -> None:
    quantize(smollm2_dir, tmp_path / "quantized", QuantizationConfig())
    assert_same(loaded(tmp_path / "quantized"), loaded(smollm2_dir))
    tokenizer = (tmp_path / "quantized/tokenizer.json").read_bytes()
    assert tokenizer == (smollm2_dir / "tokenizer.json").read_bytes()


def test_the_files_are_what_the_documentation_says(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "quantized", max_file_bytes=200_000)
    folder = tmp_path / "quantized"
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    tensors = {}
    for file in files:
        tensors |= load_file(folder / file)
    name = "model.layers.1.mlp.down_proj.weight"  # [192, 577]: 10 blocks a row, the last of one
    assert tensors[name].shape == (192, 289 + 10) and tensors[name].dtype == torch.uint8
    assert tensors[f"{name}.scales"].shape == (-(-192 * 10 // 256),)
    assert tensors[f"{name}.offset"].shape == ()
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["weights"][name] == {"format": "nf4", "shape": [192, 577]}
    assert manifest["files"] == {file: sha256(folder / file) for file in files}
    assert manifest["xxh3"] == {file: xxh3(folder / file) for file in files}
    assert manifest["source"]["path"] == str(source)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "qfsdp"
    assert config == json.loads((source / "config.json").read_text())
    left = {file.name for file in folder.iterdir()} - {*files, MANIFEST, "config.json", ".lock"}
    assert left == {"model.safetensors.index.json"}


# ---- interrupted and repeated conversions ------------------------------------------------------


class Stop(Exception):
    pass


def test_an_interrupted_run_is_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete files are kept, incomplete ones are written again, and the result is the same."""
    quantize(source, tmp_path / "whole", max_file_bytes=200_000)
    folder, write_file = tmp_path / "quantized", convert.write_file

    def two_files(folder: Path, planned: PlannedFile, write: Any) -> None:
        write_file(folder, planned, write)
        if planned.name.startswith("model-00002"):
            (folder / "model-00003-of-00099.safetensors.partial").write_bytes(b"half")
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(convert, "write_file", two_files)
        with pytest.raises(Stop):
            quantize(source, folder, max_file_bytes=200_000)
    assert (folder / RESUMABLE_BEGUN).is_file() and not (folder / MANIFEST).exists()
    with pytest.raises(UserError):  # the folder is no model yet
        load_model(folder)
    complete = sorted(folder.glob("*.safetensors"))
    assert len(complete) == 2
    written = [file.stat().st_mtime_ns for file in complete]
    quantize(source, folder, max_file_bytes=200_000)
    assert [file.stat().st_mtime_ns for file in complete] == written
    assert_same(loaded(folder), loaded(tmp_path / "whole"))
    whole = json.loads((tmp_path / "whole" / MANIFEST).read_text())
    assert json.loads((folder / MANIFEST).read_text()) == whole
    assert not (folder / RESUMABLE_BEGUN).exists()


def test_a_folder_that_a_kill_left_without_a_model_is_new(source: Path, tmp_path: Path) -> None:
    """The kill came before the marker file had its name."""
    folder = tmp_path / "quantized"
    folder.mkdir()
    for name in (LOCK_FILE, f"{RESUMABLE_BEGUN}{PARTIAL}"):
        (folder / name).write_text("{")
    quantize(source, folder)
    assert (folder / MANIFEST).is_file() and not list(folder.glob(f"*{PARTIAL}"))


@pytest.mark.long
def test_a_killed_command_is_finished_by_the_same_command(source: Path, tmp_path: Path) -> None:
    words = ["recipes/quantize.py", "--config", "configs/quantize.yaml", "max_file_bytes=100000"]
    words += [f"model.path={source}", f"output_dir={tmp_path}/quantized"]
    words += ["quantization.targets=[all-linear, lm_head]"]
    slow = tmp_path / "slow.py"  # the recipe, which waits after the third file
    slow.write_text(
        "import sys, time, runpy\nfrom qfsdp.checkpoint.weights import convert\n"
        "write_file = convert.write_file\n"
        "def paused(folder, planned, write):\n    write_file(folder, planned, write)\n"
        "    time.sleep(600 if planned.name.startswith('model-00003') else 0)\n"
        "convert.write_file = paused\nsys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, slow, *words], cwd=ROOT, env=environment, text=True)
    written = lambda: len(list(tmp_path.glob("quantized/*.safetensors"))) == 3  # noqa: E731
    wait_until(written, "three files are written", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "quantized" / MANIFEST).exists()
    subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=True)
    assert_same(loaded(tmp_path / "quantized"), loaded(source))


def test_a_damaged_file_is_written_again(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    quantize(source, folder, max_file_bytes=200_000)
    files = sorted(folder.glob("*.safetensors"))
    times = [file.stat().st_mtime_ns for file in files]
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    quantize(source, folder, max_file_bytes=200_000)
    assert_same(loaded(folder), loaded(source))
    changed = [f.stat().st_mtime_ns != t for f, t in zip(files, times, strict=True)]
    assert changed == [at == 1 for at in range(len(files))]


def test_a_folder_with_something_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    quantize(source, folder)
    with pytest.raises(UserError, match="made with format 'nf4'; expected 'nf4_fp32_absm"):
        quantize(source, folder, QuantizationConfig("nf4_fp32_absmax", NF4.targets))
    other = write_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="output_dir: .* was made with source"):
        quantize(other, folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("!")
    with pytest.raises(UserError, match="output_dir: .*mine' is not empty; expected a new folder"):
        quantize(source, tmp_path / "mine")
    assert [f.name for f in (tmp_path / "mine").iterdir() if f.name != ".lock"] == ["thesis.tex"]


def test_two_writers(source: Path, tmp_path: Path) -> None:
    folder, message = tmp_path / "quantized", "output_dir: .*quantized' is being written by"
    with FolderLock(folder, "output_dir"), pytest.raises(UserError, match=message):
        quantize(source, folder)


def test_without_its_manifest_a_folder_is_not_complete(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "quantized")
    (tmp_path / "quantized" / MANIFEST).unlink()
    with pytest.raises(UserError, match="not complete: run recipes/quantize again"):
        load_model(tmp_path / "quantized")


def test_a_manifest_that_is_not_ours(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path)
    file = tmp_path / MANIFEST
    good = json.loads(file.read_text())
    del good["sealed"]  # as earlier versions wrote it
    name = next(iter(good["weights"]))
    for text in (
        "[" * 100_000,
        "[]",
        json.dumps({"version": 1}),
        json.dumps(good | {"weights": [name]}),
        json.dumps(good | {"source": "model"}),
        *(json.dumps(good | {"weights": {name: weight}}) for weight in (5, {"format": ["nf4"]})),
        *(
            json.dumps(good | {"weights": {name: {"format": "nf4", "shape": shape}}})
            for shape in (None, 5, [1], [1, 2, 3], [-1, 64], [1.5, 64], "ab")
        ),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=f"{MANIFEST}: ") as error:
            ModelWeights(tmp_path)
        assert "\n" not in str(error.value)


def test_a_pipe_in_place_of_a_config(source: Path, tmp_path: Path) -> None:
    for file in source.glob("*.safetensors*"):
        (tmp_path / file.name).symlink_to(file)
    os.mkfifo(tmp_path / "config.json")  # reading it would never end
    assert ModelWeights(tmp_path).formats == {}
    with pytest.raises(UserError, match=r"config.json: no regular file; expected a Hugging Face"):
        DecoderConfig.from_dir(tmp_path)


# ---- model.quantize_cache ----------------------------------------------------------------------


def cached(source: Path, cache: Path, config: QuantizationConfig) -> tuple[Path, list[str]]:
    model = ModelConfig(str(source), quantize_cache=str(cache))
    weights = open_weights(model, config, cpu_world())
    return weights.folder, sorted({weight.format for weight in weights.quantized.values()})


def test_the_first_run_fills_the_cache_and_later_ones_load_it(source: Path, tmp_path: Path) -> None:
    results = run_ranks(2, cached, source, tmp_path, NF4)
    assert results[0] == results[1]
    folder, formats = results[0]
    assert folder.parent == tmp_path and formats == ["nf4"]
    written = (folder / MANIFEST).stat().st_mtime_ns
    assert cached(source, tmp_path, NF4) == (folder, formats)
    assert (folder / MANIFEST).stat().st_mtime_ns == written
    assert_same(loaded(folder), loaded(source))
    other, _ = cached(source, tmp_path, QuantizationConfig())  # other targets, another folder
    assert other != folder
    plain, _ = cached(source, tmp_path, QuantizationConfig("none"))
    assert plain == source


@pytest.mark.long
def test_training_from_the_cache_is_the_same(smollm2_dir: Path, tmp_path: Path) -> None:
    """The recipe's first logits are the same from source, cache and quantized folder."""
    recipe = load_recipe()
    argv = ["--config", str(ROOT / "configs/smollm2_135m_qdora.yaml")]
    logits = []
    for words in (
        [f"model.path={smollm2_dir}"],
        [f"model.path={smollm2_dir}", f"model.quantize_cache={tmp_path}"],
        [f"model.path={smollm2_dir}", f"model.quantize_cache={tmp_path}"],
    ):
        cfg = load_config(recipe.Config, [*argv, *words])
        model = recipe.load_model(cfg, cpu_world()).eval()
        with torch.no_grad():
            logits.append(model(torch.arange(64).view(2, 32)))
    (folder,) = tmp_path.iterdir()
    cfg = load_config(recipe.Config, [*argv, f"model.path={folder}", f"tokenizer.path={folder}"])
    with torch.no_grad():
        logits.append(recipe.load_model(cfg, cpu_world()).eval()(torch.arange(64).view(2, 32)))
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["quantization.format=none"],
            "quantization.format: 'none' quantizes nothing; expected nf4",
        ),
        (["model.path=nowhere"], "model.path: 'nowhere' does not exist"),
        (["output_dir=${model.path}"], "is model.path; expected another folder"),
        (["layout=gguf"], "expected one of 'qfsdp', 'bnb'"),
        (["max_file_bytes=0"], "max_file_bytes: 0 is not valid"),
        (["quantization.compute=fp8"], "compute: 'fp8' changes nothing of a quantized folder; exp"),
        (["quantization.expert_chunk=1MiB"], "expert_chunk: '1MiB' changes nothing"),
        (["model.dtype=fp32"], "model.dtype: 'fp32' changes nothing"),
        (["model.quantize_cache=x"], "model.quantize_cache: 'x' changes nothing"),
        (["model.router_aux_loss=0.1"], "model.router_aux_loss: 0.1 changes nothing"),
    ],
)
def test_mistakes_are_reported_before_anything_is_read(
    words: list[str], message: str, source: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("quantize")
    argv = ["--config", str(ROOT / "configs/quantize.yaml"), f"model.path={source}"]
    with pytest.raises(UserError) as error:
        recipe.check(load_config(recipe.Config, [*argv, f"output_dir={tmp_path}/x", *words]))
    assert message in str(error.value)


def test_what_stays_on_disk_is_what_a_cache_will_hold_or_the_folder_holds(tmp_path: Path) -> None:
    recipe, model = load_recipe(), write_tiny_model(tmp_path / "model")
    yaml = ROOT / "configs/smollm2_135m_qdora.yaml"

    def checked(*words: str) -> None:
        given = (f"model.path={model}", "sharding.offload_base=disk", *words)
        cfg = load_config(recipe.Config, ["--config", str(yaml), *given])
        weights = cfg.model.weights()
        recipe.check_model(cfg, recipe.build_model(cfg, weights), weights)

    cache = f"model.quantize_cache={tmp_path / 'cache'}"
    checked(cache)
    checked("quantization.format=none", "model.dtype=fp32")  # as the folder holds them
    with pytest.raises(UserError, match=r"does not have them for .*model\.quantize_cache"):
        checked()
    # A cache holds nothing of a run that quantizes nothing.
    with pytest.raises(UserError, match=r"expected the stored dtype as model\.dtype"):
        checked(cache, "quantization.format=none", "model.dtype=bf16")
