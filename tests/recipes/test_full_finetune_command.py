"""The full finetuning recipe: the files that it writes, resumed runs, and mistakes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.json_lines import metric_lines
from tests.models import load_model
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, run_in_turn, write_tiny_model, write_tiny_run
from tests.toy_data import TOY_CONFIG

pytestmark = pytest.mark.usefixtures("eager")
RECIPE = "full_finetune_distributed"
TOLERANCE = 1e-5  # of losses, on another number of ranks
TOKENS = torch.randint(0, 577, (2, 30), generator=torch.Generator().manual_seed(5))

CONFIG = (
    TOY_CONFIG
    + """\
output_dir: {folder}/run
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
batch_size: 12
epochs: 2
checkpoint: {{every_n_steps: 4, keep_last: 99}}
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    write_tiny_model(
        folder / "model", num_hidden_layers=3, expanded_layers=[1], hidden_size=96, shards=2
    )
    (folder / "model/vocab.txt").write_text("beside the weights")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


run_recipe = partial(run_in_turn, RECIPE)


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metric_lines(run)}


def saved(run: Path) -> dict[str, Tensor]:
    files = (run / "model").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


WAYS = {
    "full": ["trainable.layers=all"],
    "in backward": ["optimizer_in_backward=true", "clip_grad_norm=null", "model.dtype=bf16"],
    "pro": ["trainable.layers=expanded", "quantization.format=nf4"],
}


PRO_OVER_PACKED = [*WAYS["pro"], "save_dtype=fp32", "max_steps=3"]


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Each way on 1 and 2 ranks: a whole run, and one resumed after step 4 of 6.

    Also runs of 2 ranks resumed by 1, and a run of 2 ranks over a quantized folder.
    """
    quantize(folder / "model", folder / "packed")
    lines: dict[int, list[list[str]]] = {1: [], 2: []}
    pairs = {}
    for ranks in (2, 1):
        for way, words in WAYS.items():
            whole, rest = (folder / f"{part}_{ranks}_{way}" for part in ("whole", "rest"))
            here = [*words, f"batch_size={12 // ranks}"]
            resume = f"resume={whole}/checkpoints/step_00000004"
            lines[ranks] += [[*here, f"output_dir={whole}"], [*here, f"output_dir={rest}", resume]]
            pairs[f"{ranks} {way}"] = whole, rest
            if ranks == 2:
                lines[1].append([*words, f"output_dir={folder}/moved_{way}", resume])
    packed = [f"model.path={folder}/packed", f"output_dir={folder}/over_packed"]
    lines[2].append([*PRO_OVER_PACKED, *packed])
    for ranks in (2, 1):
        run_ranks(ranks, run_recipe, folder, *lines[ranks])
    return pairs


@pytest.mark.long
def test_answers_come_from_the_weights_as_they_are(runs: dict[str, tuple[Path, Path]]) -> None:
    model = runs["1 full"][0] / "model"
    argv = ["--config", str(ROOT / "configs/generate.yaml"), f"model.path={model}", "adapter=null"]
    cfg = load_config(load_recipe("generate").Config, [*argv, "prompt=Why?"])
    assert (cfg.model.dtype, cfg.quantization.format) == ("fp32", "none")


@pytest.mark.long
def test_a_run_goes_on_with_the_same_bits(runs: dict[str, tuple[Path, Path]]) -> None:
    for way, (whole, rest) in runs.items():
        expected = losses(whole)
        assert list(expected) == [1, 2, 3, 4, 5, 6]
        assert losses(rest) == {step: expected[step] for step in (5, 6)}, way
        assert all(torch.equal(saved(rest)[n], t) for n, t in saved(whole).items()), way
        checkpoint = whole / "checkpoints/step_00000004"
        assert sorted(path.name for path in checkpoint.iterdir()) == ["facts.json", "state"]


@pytest.mark.long
def test_another_number_of_ranks_goes_on(folder: Path, runs: dict[str, tuple[Path, Path]]) -> None:
    for way, words in WAYS.items():
        expected = {step: losses(runs[f"2 {way}"][0])[step] for step in (5, 6)}
        bound = 0.02 if "model.dtype=bf16" in words else TOLERANCE
        assert losses(folder / f"moved_{way}") == pytest.approx(expected, abs=bound)


@pytest.mark.long
def test_what_is_trained_may_not_change(folder: Path, runs: dict[str, tuple[Path, Path]]) -> None:
    words = [f"output_dir={runs['1 full'][0]}", "resume=auto", "batch_size=12"]
    for change, told in (
        ("trainable.layers=[0]", "trainable.layers: was all, is [0]"),
        ("trainable.embeddings=false", "trainable.embeddings: was null, is False"),
    ):
        test_mistakes(folder, [*words, change], told)


def transformers_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)  # in the dtype that config.json says
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.long
def test_the_model_that_comes_out(folder: Path, runs: dict[str, tuple[Path, Path]]) -> None:
    """Trained weights equal those of the last checkpoint, all others the base model's.

    transformers computes the same logits from the folder as our decoder from these weights.
    """
    from qfsdp.checkpoint.state_files import read_trained
    from qfsdp.modules.decoder_config import DecoderConfig
    from qfsdp.modules.transformer import Decoder

    base = saved(folder)
    for key, (whole, _) in runs.items():
        way = key.partition(" ")[2]
        dtype = torch.bfloat16 if "model.dtype=bf16" in WAYS[way] else torch.float32
        trained = read_trained(whole / "checkpoints/step_00000006/state")
        assert len(trained) == (9 if way == "pro" else len(base))
        expected = {name: tensor.to(dtype) for name, tensor in (base | trained).items()}
        found = saved(whole)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), way
        assert all(not torch.equal(found[name], base[name].to(dtype)) for name in trained), way
        decoder = Decoder(DecoderConfig.from_dir(folder / "model")).to(dtype)
        decoder.load_state_dict(expected)
        with torch.no_grad():
            ours = decoder(TOKENS)
        theirs = transformers_logits(whole / "model")
        assert theirs.dtype == dtype
        bound = 0.05 if dtype == torch.bfloat16 else 1e-4
        assert (theirs - ours).abs().max() < bound, way
        assert (whole / "model/vocab.txt").read_text() == "beside the weights"
        assert not list(whole.glob("*.partial"))


def quantize(model: Path, output: Path) -> Path:
    recipe = load_recipe("quantize")
    argv = ["--config", str(ROOT / "configs/quantize.yaml"), f"model.path={model}"]
    cfg = load_config(recipe.Config, [*argv, f"output_dir={output}"])
    recipe.check(cfg)
    recipe.main(cfg)
    return output


@pytest.mark.long
def test_packed_folders_before_and_after(
    folder: Path, runs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """A quantized folder is trained: its frozen layers stay quantized, its trained ones are plain.

    The written model is plain, and can be quantized again.
    """
    packed, run = folder / "packed", folder / "over_packed"
    before, out = load_model(packed), run / "model"  # quantizes lm_head while loading
    found = {name: local_part(param) for name, param in before.named_parameters()}
    changed = set()
    for name, tensor in saved(run).items():
        was = found[name]
        was = was.dequantize(torch.float32) if isinstance(was, QuantizedTensor) else was
        if not torch.equal(tensor, was):
            changed.add(name)
    trained = {name for name in found if name.startswith("model.layers.1.")}
    assert changed == trained | {"lm_head.weight"}
    assert torch.equal(saved(run)["lm_head.weight"], saved(folder)["lm_head.weight"])
    logits = transformers_logits(out)
    with torch.no_grad():
        again = load_model(quantize(out, tmp_path / "again"))(TOKENS)
    assert ModelWeights(tmp_path / "again").formats.keys() == ModelWeights(packed).formats.keys()
    error = (again - logits).norm() / logits.norm()
    assert 0 < error < 0.3, error
    # NF4 values are rounded to themselves: only trained layers get an error.
    assert error < (load_model(packed)(TOKENS) - transformers_logits(folder / "model")).norm() / (
        logits.norm()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trainable.layers=[3]"],
            "trainable.layers: 3 is not a layer of this model; expected 0 to ",
        ),
        (["trainable.layers=[1,1]"], "trainable.layers: [1, 1] is not valid; expected all, expand"),
        (["trainable.layers=[]"], "trainable.layers: [] is not valid; expected all, expanded, or"),
        (["trainable.layers=al"], "trainable.layers: 'al' is not valid"),
        (["trainable.dtype=bf16"], "trainable.dtype: 'bf16' is coarser than model.dtype, fp32"),
        (
            ["quantization.format=nf4"],
            "weights cannot be quantized; expected none, or set trainable.",
        ),
        (["sharding.offload_base=cpu"], "no layer is frozen; expected none, or set sharding.cpu_o"),
        (["optimizer_in_backward=true"], "clip_grad_norm: 1.0 is not valid; expected null, as opt"),
        (
            ["optimizer_in_backward=true", "gradient_accumulation_steps=2"],
            "gradient_accumulation_steps: 2 is not valid; expected 1, as optimizer_in_backward",
        ),
        (
            ["trainable.layers=[1]", "quantization.format=nf4", "model.quantize_cache=x"],
            "model.quantize_cache: 'x' would hold all layers quantized, also the trained ones",
        ),
        (
            [
                "trainable.layers=[1]",
                "trainable.embeddings=true",
                "quantization.format=nf4",
                "quantization.targets=[lm_head]",
            ],
            "quantization.targets: ['lm_head'] has lm_head, which is trained",
        ),
        (["adapter.rank=3"], "unknown key 'adapter"),
    ],
)
def test_mistakes(folder: Path, words: list[str], message: str) -> None:
    recipe = load_recipe(RECIPE)
    argv = ["--config", f"{folder}/config.yaml"]
    recipe.check(load_config(recipe.Config, argv))  # nothing else is wrong
    with pytest.raises(UserError) as error:
        recipe.check(load_config(recipe.Config, [*argv, *words]))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_model_that_was_not_expanded(tmp_path: Path) -> None:
    write_tiny_run(tmp_path, CONFIG)
    told = f"expanded_layers in {tmp_path}/model/config.json is None; expected a model that reci"
    test_mistakes(tmp_path, ["trainable.layers=expanded"], told)
