"""Ranks load the exact weights of a folder, read only their rows, and report errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.weights import safetensors_folder
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.checkpoint.weights.read import OpenFiles, StoredTensor
from qfsdp.checkpoint.weights.safetensors_folder import INDEX, SINGLE
from qfsdp.common.errors import UserError
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.models import build_meta_model, cpu_world, load_model, loaded
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
# Fewer rows than ranks: k_proj and v_proj have two rows, gate_proj and up_proj one.
FEW_ROWS = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "tied": {"tie_word_embeddings": True},
    "few rows": {**FEW_ROWS, "intermediate_size": 1},
}


pytestmark = pytest.mark.usefixtures("eager")


def checkpoint(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_loaded(found: dict[str, list[Tensor]], folder: Path, dtype: torch.dtype) -> None:
    """Plain parameters equal the file bit for bit; quantized ones equal the NF4 of the whole."""
    tensors = checkpoint(folder)
    assert found.keys() == tensors.keys()
    quantized = 0
    for name, (value, *metadata) in found.items():
        if value.dtype != torch.uint8:
            assert value.dtype == dtype
            assert torch.equal(value, tensors[name].to(dtype)), name
            continue
        whole = nf4.quantize(tensors[name])
        for mine, theirs in zip((value, *metadata), (whole.qdata, *whole.metadata), strict=True):
            assert torch.equal(mine, theirs), name
        quantized += 1
    assert quantized == sum(name.endswith(("_proj.weight", "lm_head.weight")) for name in tensors)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_tiny_model(tmp_path_factory.mktemp("model") / "m", shards=3, **changes)
        for name, changes in MODELS.items()
    }


# ---- what is loaded ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_one_process_loads_the_checkpoint(model: str, folders: dict[str, Path]) -> None:
    assert_loaded(loaded(folders[model]), folders[model], torch.float32)


def load_all(
    folders: dict[str, Path], builds: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    return [(name, loaded(folders[name], **b)) for name in folders for b in builds]


def test_three_ranks_load_the_checkpoint(folders: dict[str, Path]) -> None:
    """With and without adapters, for every sharding unit."""
    dora = AdapterConfig("dora", 2, targets=["all-linear", "lm_head"])
    builds = [{"wrap": "linear"}, {"wrap": "decoder_layer", "adapter": dora}]
    for rank in run_ranks(3, load_all, folders, builds):
        assert [name for name, _ in rank] == [name for name in MODELS for _ in builds]
        for name, found in rank:
            assert_loaded(found, folders[name], torch.float32)


def test_one_file_is_as_good_as_an_index(folders: dict[str, Path], tmp_path: Path) -> None:
    single = write_tiny_model(tmp_path / "single")
    assert (single / SINGLE).is_file()
    assert not (single / INDEX).exists()
    assert len(list(folders["llama"].glob("model-0000?-of-00003.safetensors"))) == 3
    assert checkpoint(single).keys() == checkpoint(folders["llama"]).keys()
    assert_loaded(loaded(single), folders["llama"], torch.float32)


STORED = COMPUTE_DTYPES | {"fp16": torch.float16}


@pytest.mark.parametrize("held", ["bf16", "fp32"])
@pytest.mark.parametrize("stored", ["bf16", "fp16", "fp32"])
def test_any_stored_dtype_serves_any_compute_dtype(
    stored: str, held: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = {k: v.to(STORED[stored]) for k, v in checkpoint(folders["qwen2"]).items()}
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text((folders["qwen2"] / "config.json").read_text())
    assert_loaded(loaded(tmp_path, dtype=held), tmp_path, COMPUTE_DTYPES[held])


@pytest.mark.parametrize("adapted", [False, True])
def test_tied_embeddings_stay_one_parameter(adapted: bool, folders: dict[str, Path]) -> None:
    """For a checkpoint with and without the output layer."""
    adapter = AdapterConfig("lora", 2, targets=["lm_head"]) if adapted else None
    model = load_model(folders["tied"], adapter=adapter)
    embeddings = model.model.embed_tokens.weight
    assert model.lm_head.weight is embeddings
    assert "lm_head.weight" not in checkpoint(folders["tied"])
    assert torch.equal(embeddings, checkpoint(folders["tied"])["model.embed_tokens.weight"])


def test_rotary_tables_and_a_tied_output_layer_are_ignored(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors = checkpoint(folders["tied"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    (tmp_path / "config.json").write_bytes((folders["tied"] / "config.json").read_bytes())
    save_file(tensors, tmp_path / SINGLE)
    ModelWeights(tmp_path).check(build_meta_model(folders["tied"]))
    tensors["lm_head.weight"][-1, -1] += 0.5
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(UserError, match="'lm_head.weight' differs .*expected tie_word_emb.*false"):
        ModelWeights(tmp_path).check(build_meta_model(folders["tied"]))


def load_plain(folder: Path) -> Decoder:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(folder))
    load_base(model, ModelWeights(folder), torch.device("cpu"))
    return model


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def at_the_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}


def in_fp64(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def with_predictors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"mtp.fc.weight": torch.zeros(2, 2), "model.mtp.norm.weight": torch.ones(3)}


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("llama", without_prefix),
        ("tied", without_prefix),
        ("tied", at_the_head),
        ("llama", in_fp64),
        ("llama", with_predictors),
    ],
)
def test_other_ways_to_write_a_model_are_read_as_transformers_does(
    model: str, change: Callable[..., dict[str, Tensor]], folders: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "config.json").write_bytes((folders[model] / "config.json").read_bytes())
    save_file(change(checkpoint(folders[model])), tmp_path / SINGLE, metadata={"format": "pt"})
    tokens = torch.arange(1, 9)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = load_plain(tmp_path)(tokens)
    assert (found - expected).abs().max() < 1e-4
    base = loaded(folders[model])
    for name, value in loaded(tmp_path).items():
        for part, same in zip(value, base[name], strict=True):
            assert torch.equal(part, same), name


def test_a_single_file_beside_an_index_is_read_as_transformers_does(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path, shards=2, seed=1)
    other = checkpoint(folders["llama"])
    save_file(other, tmp_path / SINGLE)
    assert {tensor.file.name for tensor in ModelWeights(tmp_path).files.tensors.values()} == {
        SINGLE
    }
    assert "is read, as transformers does" in capsys.readouterr().err


def test_a_tensor_is_read_from_the_file_that_the_index_names(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A file that was written again in part keeps older tensors."""
    write_tiny_model(tmp_path, shards=2)
    expected = {name: tensor.file for name, tensor in ModelWeights(tmp_path).plain.items()}
    for file in set(expected.values()):
        older = {name: torch.zeros(3) for name, of in expected.items() if of != file}
        save_file(load_file(file) | older, file)
    found = ModelWeights(tmp_path)
    assert {name: tensor.file for name, tensor in found.plain.items()} == expected
    found.check(build_meta_model(tmp_path))


def test_a_tied_output_layer_cannot_be_quantized(folders: dict[str, Path]) -> None:
    model = Decoder(DecoderConfig.from_dir(folders["tied"]))
    with pytest.raises(UserError, match=r"^quantization.targets: 'lm_head' is tied "):
        quantize_linears(model, QuantizationConfig("nf4", ["lm_head"]))


# ---- what a rank reads -------------------------------------------------------------------------


def rows_read(folder: Path) -> list[tuple[str, list[int]]]:
    """The rows of every tensor that this rank reads from files."""
    reads: list[tuple[str, list[int]]] = []
    read_rows = OpenFiles.read_rows

    def recorded(files: OpenFiles, tensor: StoredTensor, row: int, into: Tensor) -> None:
        read_rows(files, tensor, row, into)
        assert into.numel() * into.element_size() == len(into) * tensor.row_bytes
        reads.append((tensor.name, list(range(row, row + len(into)))))

    OpenFiles.read_rows = recorded  # type: ignore[method-assign]  # each rank is a process
    load_model(folder)
    return reads


@pytest.mark.parametrize("model", ["llama", "few rows"])
def test_ranks_read_every_row_once(model: str, folders: dict[str, Path]) -> None:
    by_rank = run_ranks(3, rows_read, folders[model])
    tensors = ModelWeights(folders[model]).files.tensors
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for reads in by_rank:
        assert sorted(name for name, _ in reads) == sorted(shapes), "one read per tensor"
    for name, shape in shapes.items():
        parts = [dict(reads)[name] for reads in by_rank]
        assert sum(parts, []) == list(range(shape[0])), f"{name}: {parts}"
        assert max(map(len, parts)) == -(-shape[0] // 3)


# ---- broken checkpoints ------------------------------------------------------------------------


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def test_a_long_index_is_checked_by_file_not_by_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path for each of a million entries took half a minute, without a word."""
    write_tiny_model(tmp_path / "model")
    entries = {f"x.{i}": f"{'missing' if i % 2 else 'model-00001'}.safetensors" for i in range(999)}
    edit_index(tmp_path / "model", json.dumps({"weight_map": entries}))
    joined, join = [], Path.__truediv__
    monkeypatch.setattr(Path, "__truediv__", lambda *args: joined.append(args) or join(*args))
    with pytest.raises(UserError, match="missing.safetensors does not exist"):
        ModelWeights(tmp_path / "model")
    assert len(joined) < 20


def edit_index(folder: Path, text: str) -> None:
    (folder / SINGLE).rename(folder / "model-00001.safetensors")  # else the index is not read
    (folder / INDEX).write_text(text)


def truncate(folder: Path, size: int) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:size])


def set_value(tensors: dict[str, Tensor], value: float) -> None:
    tensors[Q_PROJ][100, 3] = value


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no such folder": (
        lambda f: f.rename(f.with_name("other")),
        "model.path: '{folder}' does not exist; expected a Hugging Face model folder",
    ),
    "no weights": (
        lambda f: (f / SINGLE).unlink(),
        "{folder}/model.safetensors does not exist; the model's weights are read from it",
    ),
    "weights under another name": (
        lambda f: (f / SINGLE).rename(f / "model-00001-of-00001.safetensors"),
        "{folder}/model.safetensors does not exist; the model's weights are read from it; "
        "model-00001-of-00001.safetensors would be read if model.safetensors.index.json named its",
    ),
    "a file that the index names is missing": (
        lambda f: edit_index(f, json.dumps({"weight_map": {Q_PROJ: "model-00002.safetensors"}})),
        "{folder}/model-00002.safetensors does not exist; the model's weights are read from it",
    ),
    "a tensor that the index names is missing": (
        lambda f: edit_index(f, json.dumps({"weight_map": {"model.w": "model-00001.safetensors"}})),
        "{folder}/model.safetensors.index.json: tensor 'model.w' is not in model-00001.safetensors",
    ),
    "the index is no JSON": (
        lambda f: edit_index(f, '{"weight_map": {'),
        "{folder}/model.safetensors.index.json: not a safetensors index (",
    ),
    "the index has no weight_map": (
        lambda f: edit_index(f, "{}"),
        "{folder}/model.safetensors.index.json: not a safetensors index (",
    ),
    "the index is a list": (
        lambda f: edit_index(f, "[]"),
        "{folder}/model.safetensors.index.json: not a safetensors index (",
    ),
    "the index maps to no file names": (
        lambda f: edit_index(f, json.dumps({"weight_map": {Q_PROJ: 1}})),
        "{folder}/model.safetensors.index.json: not a safetensors index (",
    ),
    "the index maps nothing": (
        lambda f: edit_index(f, json.dumps({"weight_map": [Q_PROJ]})),
        "{folder}/model.safetensors.index.json: not a safetensors index (",
    ),
    "the data is truncated": (
        lambda f: truncate(f, (f / SINGLE).stat().st_size - 1),
        "{folder}/model.safetensors: truncated or not a safetensors file (",
    ),
    "the header is truncated": (
        lambda f: truncate(f, 100),
        "{folder}/model.safetensors: truncated or not a safetensors file (",
    ),
    "the file is empty": (
        lambda f: truncate(f, 0),
        "{folder}/model.safetensors: truncated or not a safetensors file (",
    ),
    "a tensor is missing": (
        lambda f: edit_tensors(f, lambda t: t.pop(Q_PROJ)),
        "{folder}: tensor 'model.layers.0.self_attn.q_proj.weight' is missing; "
        "the nearest name there is 'model.layers.1.self_attn.q_proj.weight'",
    ),
    "a tensor has another shape": (
        lambda f: edit_tensors(f, lambda t: t.update({Q_PROJ: torch.zeros(192, 193)})),
        "{folder}/model.safetensors: tensor 'model.layers.0.self_attn.q_proj.weight' has shape "
        "[192, 193]; expected [192, 192], as config.json says",
    ),
    "a tensor is one too many": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.layers.2.w": torch.zeros(1)})),
        "{folder}/model.safetensors: tensor 'model.layers.2.w' is not part of this architecture",
    ),
    "the folder is a file": (
        lambda f: (f.rename(f.with_name("other")), f.write_text("")),
        "model.path: '{folder}' is a file; expected a Hugging Face model folder",
    ),
    "a tensor is of integers": (
        lambda f: edit_tensors(f, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.int8)})),
        "{folder}/model.safetensors: tensor 'model.layers.0.self_attn.q_proj.weight' is I8; "
        "expected F64, F32, F16, BF16",
    ),
    "a tensor is in fp8": (
        lambda f: edit_tensors(f, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        "{folder}/model.safetensors: tensor 'model.norm.weight' is F8_E4M3; expected F64, "
        "F32, F16, BF16",
    ),
    "a plain weight holds NaN": (
        lambda f: edit_tensors(f, lambda t: t[NORM][3:4].fill_(float("nan"))),
        "{folder}: model.norm.weight: holds NaN or infinity",
    ),
    "a plain weight holds infinity": (
        lambda f: edit_tensors(f, lambda t: t[NORM][3:4].fill_(float("inf"))),
        "{folder}: model.norm.weight: holds NaN or infinity",
    ),
    "a quantized weight holds NaN": (
        lambda f: edit_tensors(f, lambda t: set_value(t, float("nan"))),
        "{folder}: model.layers.0.self_attn.q_proj.weight: row 100 holds NaN or infinity; "
        "it cannot be quantized",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_in_one_line(mistake: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    model = build_meta_model(folder)
    break_it, expected = MISTAKES[mistake]
    break_it(folder)
    with pytest.raises(UserError) as error:
        source = ModelWeights(folder)
        source.check(model)
        load_base(model, source, torch.device("cpu"))
    message = str(error.value)
    assert message.startswith(expected.format(folder=folder)), message
    assert len(message.splitlines()) == 1


def test_nan_on_one_rank_is_reported_with_the_row_of_the_whole(tmp_path: Path) -> None:
    """Row 100 of 192 is on the second rank of three; all ranks raise, none waits forever."""
    folder = write_tiny_model(tmp_path / "model")
    edit_tensors(folder, lambda tensors: set_value(tensors, float("nan")))
    expected = f"{folder}: {Q_PROJ}: row 100 holds NaN or infinity; it cannot be quantized"
    assert run_ranks(3, loading_error, folder) == [expected] * 3


def loading_error(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        load_model(folder)
    return str(error.value)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    source, model = ModelWeights(folder), build_meta_model(folder)
    truncate(folder, (folder / SINGLE).stat().st_size // 2)
    with pytest.raises(UserError, match="model.safetensors: truncated: it ends within tensor"):
        load_base(model, source, torch.device("cpu"))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "model")

    def refused(file: Path, *_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(
        safetensors_folder, "open", refused, raising=False
    )  # root may read anything
    with pytest.raises(UserError) as error:
        ModelWeights(folder)
    assert str(error.value) == f"{folder / SINGLE}: cannot be read: Permission denied"


# ---- memory ------------------------------------------------------------------------------------


def peak_of_loading(folder: Path) -> dict[str, int]:
    """Peak of anonymous memory while loading, in bytes above the memory before and the shard."""
    from benchmarks.load_base import held_bytes
    from benchmarks.memory import PeakMemory

    model = build_meta_model(folder, dtype="bf16")
    shard_model(model, ShardingConfig(), cpu_world())
    nf4.quantize(torch.zeros(64, 4096)).dequantize()
    memory = PeakMemory()
    load_base(model, ModelWeights(folder), torch.device("cpu"))
    held = sum(held_bytes(param) for _, param in base_parameters(model))
    return {"above": memory.stop() - held, "held": held}


@pytest.mark.long
@pytest.mark.parametrize("stored", ["fp32", "fp8"])
def test_memory_above_the_shard_does_not_grow_with_the_tensor(stored: str, tmp_path: Path) -> None:
    """Two tensors of 604 MB, one to be quantized and one in another dtype. Besides the shard there
    are three pieces of 16 MB and one chunk's temporaries: 97 MB, or 226 MB with uncompiled kernels,
    as here. In FP8 they take a quarter in files."""
    sizes = {"vocab_size": 1024, "num_hidden_layers": 1, "intermediate_size": 1024}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    folder = write_tiny_model(tmp_path / "m", hidden_size=64, **sizes | heads)
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": 64}
    tensors = load_file(folder / SINGLE)
    big = config["vocab_size"] = 2_359_296  # rows of 64: 604 MB
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(1 << 14, 64).repeat(big >> 14, 1)
        if stored == "fp8":
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(big // 128, 1)
    if stored == "fp8":
        section = {"quant_method": "fp8", "weight_block_size": [128, 64]}
        config["quantization_config"] = section
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(config))
    for size in (1, 2):
        for result in run_ranks(size, peak_of_loading, folder):
            print(f"{size} ranks: {result['above'] / 1e6:.0f} MB above {result['held'] / 1e6:.0f}")
            assert result["above"] < 300e6
            assert result["held"] > big * 64 * 2 / size


def test_shards_can_be_held_elsewhere_than_where_they_are_quantized(
    folders: dict[str, Path],
) -> None:
    """The bytes are the same. Both devices are the CPU here; `make test-gpu` has two devices."""
    cpu = torch.device("cpu")
    model = build_meta_model(folders["llama"])
    load_base(model, ModelWeights(folders["llama"]), cpu, ShardingConfig(cpu_offload=True))
    for name, param in base_parameters(model):
        if isinstance(param.data, QuantizedTensor):
            whole = nf4.quantize(checkpoint(folders["llama"])[name])
            assert torch.equal(param.data.qdata, whole.qdata)
