"""Saved adapters: PEFT on a plain model computes the same from them."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qfsdp.checkpoint.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_parameters,
    load_adapter,
    save_adapter,
)
from qfsdp.checkpoint.adapter_start import start_adapters
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.common import files
from qfsdp.common.errors import UserError
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import init_world
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from tests.disk_limits import largest_file
from tests.models import adapted_model, build_meta_model, cpu_world, load_model, randomize_adapters
from tests.peft_oracle import dequantized_base, run_peft
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

METHODS = ("lora", "dora", "ia3")


pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def config(method: str, *targets: str) -> AdapterConfig:
    return AdapterConfig(method, rank=5, alpha=7.0, targets=list(targets or ("all-linear",)))


def trained_model(folder: Path, adapter: AdapterConfig) -> nn.Module:
    """An NF4 model with randomized adapters."""
    model = adapted_model(folder, adapter).eval()
    randomize_adapters(model)
    return model


def save(folder: Path, adapter: AdapterConfig, to: Path) -> None:
    save_adapter(trained_model(folder, adapter), adapter, str(folder), to, cpu_world())


# ---- PEFT --------------------------------------------------------------------------------------

PEFT_SCRIPT = """
from peft import PeftModel, get_peft_model_state_dict

with torch.no_grad():
    result = {"base": base_model()(tokens).logits}
    for adapter in arguments:
        model = PeftModel.from_pretrained(base_model(), adapter).eval()
        state = get_peft_model_state_dict(model, save_embedding_layers=False)
        keys = {key: tuple(value.shape) for key, value in state.items()}
        result[adapter] = {"keys": keys, "logits": model(tokens).logits}
torch.save(result, f"{folder}/result.pt")
"""


def compare_with_peft(
    model_dir: Path, targets: list[str], folder: Path, rslora: bool = False, loftq: bool = False
) -> None:
    """For every method, PEFT's keys, shapes and logits equal ours; with `loftq` also for its start,
    before any step."""
    tokens = torch.randint(0, 577, (2, 48), generator=torch.Generator().manual_seed(0))
    ours: dict[str, tuple[Tensor, dict[str, tuple[int, ...]]]] = {}
    cases = [*METHODS, *(["lora loftq", "dora loftq"] if loftq else [])]
    for method in cases:
        name = method.partition(" ")[0]
        adapter = replace(config(name, *targets), rslora=rslora and name != "ia3")
        model = trained_model(model_dir, adapter)
        if method != name:
            start_adapters(model, replace(adapter, init="loftq"), str(model_dir), seed=0)
        save_adapter(model, adapter, str(model_dir), folder / method, cpu_world())
        keys = {key: tuple(param.shape) for key, param in adapter_parameters(model).items()}
        with torch.no_grad():
            ours[method] = model(tokens), keys
    with torch.no_grad():
        base_logits = load_model(model_dir)(tokens)
    adapters = [folder / method for method in cases]
    base = dequantized_base(model)
    theirs = run_peft(PEFT_SCRIPT, model_dir, base, tokens, folder, *adapters)
    assert (theirs["base"] - base_logits).abs().max() < 1e-4
    for method, (logits, keys) in ours.items():
        found = theirs[str(folder / method)]
        assert found["keys"] == keys
        difference = (found["logits"] - logits).abs().max().item()
        moved = (logits - base_logits).abs().max().item()
        print(f"{method}: differs by {difference:.1e} from PEFT; moves logits by {moved:.1f}")
        assert difference < 1e-4
        assert moved > (0.1 if "loftq" in method else 0.5), "the adapter must matter"
    moved = (ours["lora"][0] - ours["dora"][0]).abs().max()
    assert moved > 0.5, "magnitudes must matter"


@pytest.mark.long
def test_peft_computes_the_same_on_a_real_model(smollm2_dir: Path, tmp_path: Path) -> None:
    compare_with_peft(smollm2_dir, ["all-linear"], tmp_path)


@pytest.mark.long
def test_peft_computes_the_same_with_an_adapted_output_layer(
    tiny_dir: Path, tmp_path: Path
) -> None:
    compare_with_peft(tiny_dir, ["all-linear", "lm_head"], tmp_path, loftq=True)


@pytest.mark.long
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_computes_the_same_with_biases(rslora: bool, tmp_path: Path) -> None:
    qwen2 = write_tiny_model(
        tmp_path / "model", architectures=["Qwen2ForCausalLM"], model_type="qwen2"
    )
    compare_with_peft(qwen2, ["q_proj", "v_proj", "down_proj"], tmp_path, rslora)


# ---- saving ------------------------------------------------------------------------------------


def test_the_folder_is_what_peft_documents(tiny_dir: Path, tmp_path: Path) -> None:
    save(tiny_dir, config("dora", "q_proj", "lm_head"), tmp_path / "adapter")
    files = sorted(file.name for file in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    written = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(tiny_dir),
        "r": 5,
        "lora_alpha": 7.0,
        "use_dora": True,
        "use_rslora": False,
        "target_modules": ["lm_head", "q_proj"],
        "bias": "none",
    }.items() <= written.items()
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    linears = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)] + ["lm_head"]
    fields = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    assert tensors.keys() == {f"base_model.model.{n}.{field}" for n in linears for field in fields}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def save_all(folder: Path, to: Path) -> None:
    for method in METHODS:
        save(folder, config(method, "all-linear", "lm_head"), to / method)


def test_three_ranks_write_what_one_process_writes(tiny_dir: Path, tmp_path: Path) -> None:
    """Only rank 0 writes; every adapter tensor is whole. Norms differ in the last bit."""
    save_all(tiny_dir, tmp_path / "one")
    run_ranks(3, save_all, tiny_dir, tmp_path / "three")
    for method in METHODS:
        folders = [tmp_path / ranks / method for ranks in ("one", "three")]
        one, three = (load_file(folder / WEIGHTS_FILE) for folder in folders)
        assert one.keys() == three.keys()
        assert len(one) == (2 * 7 + 1) * {"lora": 2, "dora": 3, "ia3": 1}[method]
        for key, value in one.items():
            if "magnitude" in key:
                torch.testing.assert_close(three[key], value, rtol=1e-6, atol=0)
            else:
                assert torch.equal(three[key], value), key
        texts = [(folder / CONFIG_FILE).read_text() for folder in folders]
        assert texts[0] == texts[1]


# ---- loading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_adapter_gives_the_same_logits_when_loaded(
    method: str, tiny_dir: Path, tmp_path: Path
) -> None:
    """Bit for bit, into a model with newly initialized adapters."""
    adapter = config(method, "all-linear", "lm_head")
    saved = trained_model(tiny_dir, adapter)
    save_adapter(saved, adapter, str(tiny_dir), tmp_path, cpu_world())
    loaded = adapted_model(tiny_dir, adapter).eval()
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        expected = saved(tokens)
        assert (loaded(tokens) - expected).abs().max() > 0.5
        load_adapter(loaded, tmp_path)
        refresh_dora_norms(loaded)
        assert torch.equal(loaded(tokens), expected)


def load_and_save(folder: Path, adapter: AdapterConfig, source: Path, to: Path) -> None:
    model = adapted_model(folder, adapter)
    load_adapter(model, source)
    save_adapter(model, adapter, str(folder), to, cpu_world())


def test_ranks_load_their_rows(tiny_dir: Path, tmp_path: Path) -> None:
    adapter = config("dora", "all-linear", "lm_head")
    save(tiny_dir, adapter, tmp_path / "saved")
    run_ranks(3, load_and_save, tiny_dir, adapter, tmp_path / "saved", tmp_path / "again")
    saved, again = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("saved", "again"))
    assert saved.keys() == again.keys()
    for key, value in saved.items():
        assert torch.equal(again[key], value), key


KEY = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    del tensors[KEY]
    save_file(tensors, folder / WEIGHTS_FILE)


def with_another_shape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE) | {KEY: torch.zeros(577, 4)}
    save_file(tensors, folder / WEIGHTS_FILE)


def with_a_tensor_more(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS_FILE) | {"base_model.model.x": torch.zeros(1)}
    save_file(tensors, folder / WEIGHTS_FILE)


def truncated(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes()[:-1])


@pytest.mark.parametrize(
    "spoil, message",
    [
        (without_a_tensor, f"tensor '{KEY}' is missing"),
        (with_another_shape, f"tensor '{KEY}' has shape [577, 4]; expected [577, 5]"),
        (with_a_tensor_more, "tensor 'base_model.model.x' is not among this model's adapters"),
        (truncated, "truncated or not a safetensors file"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), "does not exist"),
    ],
)
def test_an_adapter_that_does_not_fit_is_an_error(
    spoil: Any, message: str, tiny_dir: Path, tmp_path: Path
) -> None:
    adapter = config("dora")
    save(tiny_dir, adapter, tmp_path)
    model = adapted_model(tiny_dir, adapter)
    spoil(tmp_path)
    with pytest.raises(UserError) as error:
        load_adapter(model, tmp_path)
    assert str(tmp_path / WEIGHTS_FILE) in str(error.value)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_adapter_of_another_method_or_scale_is_an_error(tiny_dir: Path, tmp_path: Path) -> None:
    """Other alpha, same tensors: loading it silently would scale every product wrongly."""
    save(tiny_dir, config("dora"), tmp_path)
    with pytest.raises(UserError, match="lora_magnitude_vector' is not among"):
        load_adapter(adapted_model(tiny_dir, config("lora")), tmp_path)
    with pytest.raises(UserError, match="lora_alpha"):
        other = AdapterConfig("dora", rank=5, alpha=14.0, targets=["all-linear"])
        load_adapter(adapted_model(tiny_dir, other), tmp_path)
    with pytest.raises(UserError, match="lora_alpha and r make a scaling of 1.4; expected "):
        load_adapter(adapted_model(tiny_dir, replace(config("dora"), rslora=True)), tmp_path)


# ---- full disks and numbers that are not finite --------------------------------------------------


def written(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("before", ["nothing", "an adapter"])
def test_a_failed_save_changes_nothing(before: str, tiny_dir: Path, tmp_path: Path) -> None:
    """The kernel refuses a write in the middle of a file, or the adapter has a NaN."""
    folder, config = tmp_path / "run" / "adapter", AdapterConfig("lora", rank=4)
    folder.parent.mkdir()
    model = adapted_model(tiny_dir, config)
    if before == "an adapter":
        save_adapter(model, config, "base", folder, cpu_world())
    kept = written(folder) if folder.exists() else None
    with largest_file(10_000), pytest.raises(UserError, match=r"adapter' cannot be .*: File too"):
        save_adapter(model, config, "base", folder, cpu_world())
    assert kept == (written(folder) if folder.exists() else None)

    name, param = list(adapter_parameters(model).items())[3]
    param.data.view(-1)[5] = math.nan
    with pytest.raises(UserError, match=f"'{folder}': tensor '{name}' holds NaN or infinity"):
        save_adapter(model, config, "base", folder, cpu_world())
    assert kept == (written(folder) if folder.exists() else None)
    assert list(tmp_path.iterdir()) == [folder.parent]


def test_every_rank_gets_the_error(tiny_dir: Path, tmp_path: Path) -> None:
    """So that all of them can wait for the checkpoint that is being written."""
    run_ranks(2, fail_to_save, tiny_dir, tmp_path)
    for rank in range(2):
        assert "cannot be written: File too large" in (tmp_path / f"rank_{rank}").read_text()


def fail_to_save(model_dir: Path, folder: Path) -> None:
    world, config = init_world(ShardingConfig()), AdapterConfig("lora", rank=4)
    model = build_meta_model(model_dir, adapter=config)
    shard_model(model, ShardingConfig(), world)
    load_base(model, ModelWeights(model_dir), world.device)
    init_adapters(model, 0)
    with largest_file(10_000), pytest.raises(UserError) as error:
        save_adapter(model, config, "base", folder / "adapter", world)
    (folder / f"rank_{world.rank}").write_text(str(error.value))


def test_full_disks_are_told_with_the_free_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 1024)
    text = files.not_written(Path("/x"), OSError(errno.ENOSPC, "No space left on device"), 2**21)
    assert text == (
        "'/x' cannot be written: No space left on device; expected 2.00 MiB of free space, found "
        "1.00 KiB"
    )
