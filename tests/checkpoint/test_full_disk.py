"""Model folders on a full disk: one line on every rank, and nothing half written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qfsdp.checkpoint.weights.expand import expand_folder
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.checkpoint.weights.output_folder import BEGUN
from qfsdp.checkpoint.weights.quantize import open_weights, quantize_folder
from qfsdp.checkpoint.weights.save import save_model
from qfsdp.common.errors import UserError
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import init_world
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder
from tests.disk_limits import largest_file
from tests.models import cpu_world
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

LIMIT = 200_000  # bytes of a file that the disk takes; the embeddings have 443,136
FILE = 500_000  # bytes of a file of several


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model")


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_an_unfinished_quantized_cache_is_finished_by_the_next_run(
    model_dir: Path, tmp_path: Path
) -> None:
    """Its complete files stay, and count."""
    config = ModelConfig(str(model_dir), "fp32", quantize_cache=str(tmp_path / "cache"))
    quantization = QuantizationConfig()
    with largest_file(LIMIT), pytest.raises(UserError) as error:
        open_weights(config, quantization, cpu_world())
    (folder,) = (tmp_path / "cache").iterdir()
    assert str(error.value) == f"model.quantize_cache: '{folder}' cannot be written: File too large"
    assert not list(folder.glob("*.partial")) and not list(folder.glob("*.safetensors"))
    assert len(open_weights(config, quantization, cpu_world()).quantized) == 14


@pytest.mark.parametrize("step", ["weights", "config.json"])
def test_a_conversion_frees_the_disk(step: str, model_dir: Path, tmp_path: Path) -> None:
    """Then the same command works once there is space."""
    out, weights = tmp_path / "out", ModelWeights(model_dir)
    limit = LIMIT if step == "weights" else 10  # a copied file is written before config.json
    (model_dir / "tokenizer.json").write_text("{}" * 100)
    with largest_file(limit), pytest.raises(UserError) as error:
        expand_folder(weights, 1, out, cpu_world(), max_file_bytes=FILE)
    assert str(error.value) == f"output_dir: '{out}' cannot be written: File too large"
    assert names(out) <= {".lock", BEGUN}
    expand_folder(weights, 1, out, cpu_world(), max_file_bytes=FILE)
    assert {"config.json", "tokenizer.json"} < names(out) and BEGUN not in names(out)
    ModelWeights(out)


def trained(model_dir: Path, world: object) -> Decoder:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(model_dir))
    shard_model(model, ShardingConfig(), world)  # type: ignore[arg-type]
    load_base(model, ModelWeights(model_dir), torch.device("cpu"))
    return model


def save_on_a_rank_without_space(model_dir: Path, folder: Path, full: int) -> None:
    """The other rank's files need the weights that this one gathers with it."""
    world = init_world(ShardingConfig())
    model, weights, out = trained(model_dir, world), ModelWeights(model_dir), folder / "model"
    save_model(model, weights, torch.float32, out, world, FILE)
    kept = names(out)
    with torch.no_grad():
        next(iter(dict(base_parameters(model)).values())).add_(1)
    limit = LIMIT if world.rank == full else 10**12
    with largest_file(limit), pytest.raises(UserError) as error:
        save_model(model, weights, torch.float32, out, world, FILE)
    assert "model.partial' cannot be written: File too large" in str(error.value)
    world.sum(0)
    assert names(out) == kept and names(folder) == {"model"}


@pytest.mark.parametrize("full", [0, 1])
def test_a_trained_model_stays_as_it_was(model_dir: Path, tmp_path: Path, full: int) -> None:
    run_ranks(2, save_on_a_rank_without_space, model_dir, tmp_path, full)
    found = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        found |= load_file(file)
    expected = load_file(model_dir / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_damaged_manifest_is_one_line(model_dir: Path, tmp_path: Path) -> None:
    quantization = QuantizationConfig()
    quantize_folder(ModelWeights(model_dir), quantization, tmp_path / "out", cpu_world())
    manifest = tmp_path / "out" / "qfsdp_packed.json"
    for text in ("", "[]", '{"version": 1}', "[" * 100_000):
        manifest.write_text(text)
        with pytest.raises(UserError, match="qfsdp_packed.json' is damaged") as error:
            quantize_folder(ModelWeights(model_dir), quantization, tmp_path / "out", cpu_world())
        assert "\n" not in str(error.value)
