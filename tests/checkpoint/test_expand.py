"""An expanded model computes the same as the old one, bit for bit, here and in transformers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qfsdp.checkpoint.lock import LOCK_FILE, FolderLock
from qfsdp.checkpoint.weights import convert
from qfsdp.checkpoint.weights.expand import (
    block_sources,
    blocks_of_rate,
    expand_folder,
    expanded_config,
    expanded_positions,
)
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.checkpoint.weights.output_folder import BEGUN
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.checkpoint.weights.safetensors_folder import INDEX, SINGLE
from qfsdp.common.errors import UserError
from qfsdp.common.files import PARTIAL
from qfsdp.config.load import load_config
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder
from tests import hub_models
from tests.models import cpu_world
from tests.modules import test_families as families
from tests.ranks import run_ranks
from tests.tiny import ROOT, TINY_CONFIG, load_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

TOKENS = torch.randint(0, 577, (2, 48), generator=torch.Generator().manual_seed(0))
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    # The last two of three old blocks have a window shorter than 48 tokens.
    "windows": QWEN2 | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    # Rules of the family say which layers have a window or a rotary embedding.
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
    },
    "granite4": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "shared_intermediate_size": 577,
        "layer_types": ["attention"] * 3,
        "mamba_n_heads": 6,
    },
}


def expanded(model: Path, output: Path, *words: str) -> Path:
    """The recipe's output with its shipped config and the overrides `words`."""
    recipe = load_recipe("block_expansion")
    argv = ["--config", str(ROOT / "configs/block_expansion.yaml")]
    argv += [f"model.path={model}", f"output_dir={output}", *words]
    cfg = load_config(recipe.Config, argv)
    recipe.check(cfg)
    recipe.main(cfg)
    return output


# ---- positions ---------------------------------------------------------------------------------


def test_new_blocks_are_spread_evenly_at_every_depth_and_rate() -> None:
    """Checked by their properties in integer arithmetic: rates are hundredths."""
    checked = 0
    for depth in range(2, 81):
        for hundredths in range(1, 101):
            count = blocks_of_rate(depth, hundredths / 100)
            assert count == (2 * hundredths * depth + 100) // 200, (depth, hundredths)
            if count == 0:
                continue
            places = expanded_positions(depth, count)
            assert len(places) == len(set(places)) == count
            assert places == sorted(places) and places[-1] == depth + count - 1
            assert all(b - a > 1 for a, b in pairwise(places)), "one new block after an old one"
            gaps = [b - a - 1 for a, b in pairwise([-1, *places])]
            assert sum(gaps) == depth and max(gaps) - min(gaps) <= 1
            old = [i for i in range(depth + count) if i not in set(places)]
            sources = block_sources(depth, count)
            assert [sources[i] for i in old] == list(range(depth)), "the old order, nothing dropped"
            assert all(sources[i] == sources[i - 1] for i in places)
            checked += 1
    assert checked == 7748


def test_places_that_are_known() -> None:
    """Llama-Pro's 8 new blocks for 32; two uneven cases; more new blocks than old ones."""
    assert expanded_positions(32, 8) == [4, 9, 14, 19, 24, 29, 34, 39]
    assert expanded_positions(7, 3) == [3, 6, 9]
    assert expanded_positions(2, 2) == [1, 3]
    assert expanded_positions(2, 5) == [1, 2, 4, 5, 6]
    assert block_sources(2, 5) == [0, 0, 0, 1, 1, 1, 1]
    assert blocks_of_rate(90, 0.35) == 32 and 0.35 * 90 < 31.5
    assert blocks_of_rate(32, 0.3) == 10 and blocks_of_rate(4, 2.0) == 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": True, "max_window_layers": 3}, {"max_window_layers": 6}),
        ({"use_sliding_window": True, "max_window_layers": 0}, {"max_window_layers": 0}),
        # As transformers saves them: the type of each layer, and the setting behind it.
        (
            {
                "use_sliding_window": True,
                "max_window_layers": 1,
                "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
            },
            {
                "max_window_layers": 2,
                "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 6,
            },
        ),
        ({"max_window_layers": 28}, {"max_window_layers": 8}),
    ],
)
def test_what_config_json_says_per_layer(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = TINY_CONFIG | QWEN2 | {"num_hidden_layers": 4, "sliding_window": 9} | changes
    found = expanded_config(config, 4)
    always = {"num_hidden_layers": 8, "expanded_layers": [1, 3, 5, 7]}
    assert found == config | always | expected
    ours, old = DecoderConfig.from_dict(found), DecoderConfig.from_dict(config)
    sources = block_sources(4, 4)
    assert ours.layers == tuple(old.layers[source] for source in sources)


@pytest.mark.parametrize(
    ("name", "changes", "dense"),
    [
        ("glm4-moe", {"first_k_dense_replace": 1}, [0, 1]),
        ("glm4-moe-plain", {}, []),
        ("qwen3-moe-dense-layers", {}, [0, 1, 4, 5, 6, 7]),
        ("qwen2-moe", {}, [0, 1]),
        ("qwen2-moe", {"mlp_only_layers": [0, 1], "num_hidden_layers": 2}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_copies_of_dense_layers_of_a_mixture_are_dense(
    name: str, changes: dict[str, Any], dense: list[int]
) -> None:
    config = families.tiny_config(name).to_dict() | changes
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    layers = DecoderConfig.from_dict(expanded_config(config, 4)).layers
    assert [at for at, kind in enumerate(layers) if not kind.mixture] == dense


# ---- bits --------------------------------------------------------------------------------------


def our_logits(folder: Path, dtype: torch.dtype) -> Tensor:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(folder)).to(dtype)
    load_base(model, ModelWeights(folder), torch.device("cpu"))
    with torch.no_grad():
        return model(TOKENS)


def their_logits(folder: Path, dtype: torch.dtype) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def assert_same_logits(old: Path, new: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for logits in (our_logits, their_logits):
            before, after = logits(old, dtype), logits(new, dtype)
            assert before.abs().max() > 1.0
            assert torch.equal(after, before), (dtype, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_to_the_last_bit(family: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "old", 2, num_hidden_layers=3, **FAMILIES[family])
    new = expanded(model, tmp_path / "new", "rate=0.67")
    assert json.loads((new / "config.json").read_text())["expanded_layers"] == [2, 4]
    assert_same_logits(model, new)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_recurrent_layers_are_copied(name: str, tmp_path: Path) -> None:
    """Every layer and a copy of it. In bf16 too: decays stay fp32."""
    hub_models.save_hub_model(name, tmp_path / "old")
    new = expanded(tmp_path / "old", tmp_path / "new", "rate=1.0")
    kinds = json.loads((new / "config.json").read_text())["layer_types"]
    assert kinds == ["linear_attention"] * 6 + ["full_attention"] * 2
    assert_same_logits(tmp_path / "old", new)


@pytest.mark.long
def test_the_real_model(smollm2_dir: Path, tmp_path: Path) -> None:
    """30 blocks and 3 more, the shipped rate; the tokenizer is copied."""
    from transformers import AutoTokenizer

    new = expanded(smollm2_dir, tmp_path / "new")
    assert json.loads((new / "config.json").read_text())["num_hidden_layers"] == 33
    assert_same_logits(smollm2_dir, new)
    assert AutoTokenizer.from_pretrained(new)("Hello")["input_ids"]


def test_what_new_blocks_hold(tmp_path: Path) -> None:
    """New blocks copy the block before, except the linears that write to the residual stream; all
    other tensors are unchanged; and every zero gets a gradient."""
    model = write_tiny_model(tmp_path / "old", **FAMILIES["biases"])
    new = load_file(expanded(model, tmp_path / "new", "rate=null", "new_blocks=3") / SINGLE)
    old = load_file(model / SINGLE)
    sources = block_sources(2, 3)
    assert expanded_positions(2, 3) == [1, 3, 4] and sources == [0, 0, 1, 1, 1]
    seen = zeros = 0
    for name, tensor in new.items():
        if "layers" not in name:
            assert torch.equal(tensor, old[name]), name
            continue
        _, _, index, *field = name.split(".")
        source = old[".".join(["model.layers", str(sources[int(index)]), *field])]
        zero = index in "134" and field[1] in ("o_proj", "down_proj")
        assert torch.equal(tensor, torch.zeros_like(source) if zero else source), name
        seen, zeros = seen + 1, zeros + zero
    assert seen == 5 * (2 * 7 + 2) and zeros == 3 * 4
    with torch.device("meta"):
        trained = Decoder(DecoderConfig.from_dir(tmp_path / "new"))
    load_base(trained, ModelWeights(tmp_path / "new"), torch.device("cpu"))
    trained(TOKENS).square().mean().backward()
    for layer in (1, 3, 4):
        block = trained.model.layers[layer]
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            assert linear.weight.grad is not None and linear.weight.grad.abs().max() > 0


# ---- files -------------------------------------------------------------------------------------


def expand_files(model: Path, output: Path) -> None:
    expand_folder(ModelWeights(model), 3, output, cpu_world(), max_file_bytes=400_000)


@pytest.mark.long
def test_ranks_share_the_files_out(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "old")
    (model / "tokenizer.json").write_text("{}")
    expand_files(model, tmp_path / "one")
    run_ranks(2, expand_files, model, tmp_path / "two")
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "two").iterdir())
    assert {INDEX, "tokenizer.json", "config.json"} <= set(files) and len(files) > 8
    for name in set(files) - {LOCK_FILE}:
        one, two = ((tmp_path / ranks / name).read_bytes() for ranks in ("one", "two"))
        assert one == two, name
    assert_same_logits(model, tmp_path / "two")


class Interrupted(Exception):
    pass


def test_an_interrupted_run_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops; a later expansion into the same folder writes everything anew."""
    model, folder = write_tiny_model(tmp_path / "old"), tmp_path / "new"
    words = ["max_file_bytes=400000"]

    def interrupt(*_: Any) -> None:
        raise Interrupted

    stops = ((convert, "check_finite"), (convert, "copy_companions"), (convert, "write_index"))
    for where, name in stops:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupt)
            with pytest.raises(Interrupted):
                expanded(model, folder, *words, "rate=2")
        # The first stops in the first file, which is removed.
        assert name == "check_finite" or list(folder.glob("*.safetensors"))
        assert not (folder / "config.json").exists() and (folder / BEGUN).exists()
    expanded(model, folder, *words, "rate=0.5")
    expected = expanded(model, tmp_path / "expected", *words, "rate=0.5")
    assert {f.name for f in folder.iterdir()} == {f.name for f in expected.iterdir()}
    assert_same_logits(model, folder)


def test_a_folder_that_a_kill_left_without_a_model_is_new(tmp_path: Path) -> None:
    """The kill came before the marker file had its name."""
    model, folder = write_tiny_model(tmp_path / "old"), tmp_path / "new"
    folder.mkdir()
    for name in (LOCK_FILE, f"{BEGUN}{PARTIAL}"):
        (folder / name).write_text("{")
    expanded(model, folder, "rate=0.5")
    assert (folder / "config.json").is_file() and not list(folder.glob(f"*{PARTIAL}"))


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new_blocks=4"], "rate, new_blocks: both are given; expected one of them, e.g. rate=nul"),
        (["rate=null"], "rate, new_blocks: neither is given; expected one of them"),
        (["rate=0"], "rate: 0.0 is not valid; expected a number above 0"),
        (["rate=.inf"], "rate: inf is not valid; expected a finite number"),
        (["rate=.nan"], "rate: nan is not valid; expected a finite number"),
        (["rate=1e9"], "rate: 1e+09 is too much for 2 blocks; expected at most 9998 new ones"),
        (["rate=null", "new_blocks=1000000000"], "new_blocks: 1000000000 is too much for 2 blocks"),
        (["rate=null", "new_blocks=0"], "new_blocks: 0 is not valid; expected an integer of at"),
        (["rate=0.2"], "rate: 0.2 of 2 blocks is no new block; expected at least 0.5"),
        (["max_file_bytes=0"], "max_file_bytes: 0 is not valid"),
        (["model.dtype=fp32"], "unknown key 'model.dtype'"),
        (["model.path=nowhere"], "model.path: 'nowhere' does not exist"),
        (
            ["model.path={quantized}"],
            "model.path: '{quantized}' holds quantized weights; expected plain ones: expand the "
            "model that it was quantized from, and quantize the result (recipes/quantize)",
        ),
        (["output_dir={model}"], "output_dir: '{model}' is not empty; expected a new folder"),
        (["model.path={nan}"], "model.layers.1.input_layernorm.weight: holds NaN or infinity"),
        (["model.path={deep}"], "tensor 'model.layers.2.self_attn.q_proj.weight' is missing"),
    ],
)
def test_mistakes_are_reported_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("model", "quantized", "nan", "deep")}
    for name in ("model", "nan", "deep"):
        write_tiny_model(places[name])
    tensors = load_file(places["nan"] / SINGLE)
    tensors["model.layers.1.input_layernorm.weight"][3] = float("nan")
    save_file(tensors, places["nan"] / SINGLE)
    (places["deep"] / "config.json").write_text(json.dumps(TINY_CONFIG | {"num_hidden_layers": 3}))
    if "{quantized}" in message:
        weights = ModelWeights(places["model"])
        quantize_folder(weights, QuantizationConfig(), places["quantized"], cpu_world())
    argv = ["rate=0.5", *(word.format(**places) for word in words)]
    with pytest.raises(UserError) as error:
        expanded(places["model"], tmp_path / "out", *argv)
    assert message.format(**places) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "old")
    with (
        FolderLock(tmp_path / "out", "output_dir"),
        pytest.raises(UserError, match="output_dir: .* is being written by process"),
    ):
        expanded(model, tmp_path / "out", "rate=0.5")
