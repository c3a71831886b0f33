"""Weights trained themselves: as a plain loop of PyTorch trains transformers' model, however the
work is spread; and where some layers are trained, nothing else changes by a bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.checkpoint.sources import ModelWeights
from qfsdp.config import load_config
from qfsdp.errors import UserError
from qfsdp.modules.shards import local_part
from qfsdp.tensor_subclasses.packed import PackedTensor
from tests.models import load_model
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, write_tiny_model
from tests.toy_data import Samples

pytestmark = pytest.mark.usefixtures("eager")
RECIPE = "full_finetune_distributed"
STEPS = 4
ADAMW = {"lr": 1e-3, "eps": 1e-6, "fused": True}
# Absolute, on losses and on every number of every weight; an update moves these by 1e-3.
TOLERANCE = 1e-5
FAMILIES: dict[str, dict[str, Any]] = {
    "untied": {},
    "biases": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "tied, biases, q/k norms": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 40,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}


def loader(world_rank: int, world_size: int, split: tuple[int, int], fill: bool = False) -> Any:
    from qfsdp.data import StepLoader

    return StepLoader(
        Samples(None),
        batch_size=split[0],
        gradient_accumulation_steps=split[1],
        rank=world_rank,
        world_size=world_size,
        seed=3,
        pad_id=0,
        max_seq_len=64,
        fill_rows=fill,
    )


def make_config(recipe: Any, case: dict[str, Any]) -> Any:
    from qfsdp.modules.packed_linear import QuantizationConfig
    from qfsdp.modules.trainable import TrainableConfig
    from qfsdp.modules.transformer import ActivationConfig

    cfg = recipe.Config(
        output_dir="unused",
        model=recipe.ModelConfig(str(case["folder"]), dtype=case.get("compute", "fp32")),
        tokenizer=None,
        dataset=None,
        optimizer=recipe.Component(
            case.get("optimizer", "torch.optim.AdamW"), case.get("arguments", ADAMW)
        ),
        optimizer_in_backward=case.get("in_backward", False),
        clip_grad_norm=case.get("clip", 1.0),
        trainable=TrainableConfig(**case.get("trainable", {})),
        quantization=QuantizationConfig(case.get("format", "none")),
        sharding=recipe.ShardingConfig(**case.get("sharding", {})),
        activation=ActivationConfig(case.get("checkpointing", "none")),
        compile=case.get("compile", False),
    )
    cfg.check()
    return cfg


def train(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some updates for each case, by the recipe's own functions; runs on every rank."""
    recipe = load_recipe(RECIPE)
    return [train_one(recipe, case) for case in cases]


def train_one(recipe: Any, case: dict[str, Any]) -> dict[str, Any]:
    from qfsdp.memory.usage import bytes_by_kind
    from qfsdp.modules.shards import whole_tensor

    cfg = make_config(recipe, case)
    world = recipe.init_world(cfg.sharding, casts=cfg.trainable.dtype != cfg.model.dtype)
    model = recipe.load_model(cfg, world)
    before = held_bytes(model)
    parameters = recipe.trainable_parameters(model)
    optimizer = recipe.build_optimizer(cfg.optimizer, parameters, cfg.optimizer_in_backward)
    grads: dict[str, Tensor] = {}

    def note_gradients(*_: Any) -> None:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if not grads:
            grads.update({n: whole_tensor(grad).clone() for n, grad in found.items()})

    if not cfg.optimizer_in_backward:
        optimizer.register_step_pre_hook(note_gradients)
    alive: list[int] = []
    for param in parameters:
        param.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    data = loader(world.rank, world.size, case["split"], cfg.compile)
    clock = recipe.StepClock(world.device)
    history = [
        recipe.train_step(
            model, optimizer, None, data.step(step), cfg.clip_grad_norm, world, clock
        )
        for step in range(STEPS)
    ]
    after = held_bytes(model)
    return {
        "losses": [h["loss"] for h in history],
        "grad_norms": [h["grad_norm"] for h in history],
        "grads": grads,
        "alive": max(alive),
        "weights": {
            n: whole_tensor(p).clone() for n, p in model.named_parameters() if p.requires_grad
        },
        "changed": {n for n in before if not same_bits(before[n], after[n])},
        "dtypes": {p.dtype for p in parameters},
        "bytes": bytes_by_kind(model, optimizer, world.device),
    }


def held_bytes(model: torch.nn.Module) -> dict[str, list[Tensor]]:
    """Copies of the tensors that this rank's part of every parameter is made of."""
    from qfsdp.memory.usage import plain_tensors

    params = model.named_parameters()
    return {n: [t.detach().clone() for t in plain_tensors(p)] for n, p in params}


def same_bits(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- a reference that no one here wrote ------------------------------------------------------


def plain_loop(folder: Path, compute: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same updates of transformers' model, in one process and one batch: weights in fp32,
    computation in `compute`."""
    from transformers import AutoModelForCausalLM

    master = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    low = AutoModelForCausalLM.from_pretrained(folder, dtype=compute)
    params = dict(master.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), **ADAMW)
    data, found = loader(0, 1, (12, 1)), dict[str, Any](losses=[], grad_norms=[])
    for step in range(STEPS):
        (batch,) = data.step(step)
        with torch.no_grad():
            for name, param in low.named_parameters():
                param.copy_(params[name])
        logits = low(batch.tokens).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        for name, param in low.named_parameters():
            assert param.grad is not None
            params[name].grad, param.grad = param.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        if step == 0:
            found["grads"] = {n: p.grad.clone() for n, p in params.items()}  # type: ignore
        optimizer.step()
        found["losses"].append(loss.item())
        found["grad_norms"].append(norm.item())
    return found | {"weights": {n: p.detach().clone() for n, p in params.items()}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: write_tiny_model(root / str(at), **changes)
        for at, (name, changes) in enumerate(FAMILIES.items())
    }


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: plain_loop(folder) for name, folder in folders.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    losses = torch.tensor([found["losses"], expected["losses"]])
    assert (losses[0] - losses[1]).abs().max() < TOLERANCE, f"{what}: {losses}"
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4), what
    for kind in ("grads", "weights"):
        assert found[kind].keys() == expected[kind].keys(), f"{what}: {kind}"
        for name, value in found[kind].items():
            difference = (value - expected[kind][name]).abs().max()
            bound = TOLERANCE * (expected[kind][name].abs().max() if kind == "grads" else 1)
            assert difference < bound, f"{what}: {kind} {name} differ by {difference:.2e}"


SPLITS = {1: [(12, 1), (3, 4)], 2: [(6, 1), (2, 3)], 3: [(4, 1), (1, 4)]}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_transformers_in_a_plain_loop(
    size: int, folders: dict[str, Path], references: dict[str, dict[str, Any]]
) -> None:
    """Losses, gradients of the first step, and weights after the last; embeddings tied and not."""
    cases = [
        {"family": family, "folder": folder, "split": split}
        for family, folder in folders.items()
        for split in SPLITS[size]
    ]
    cases[-1] |= {"checkpointing": "full", "sharding": {"wrap": "linear"}}
    by_rank = run_ranks(size, train, cases)
    for at, case in enumerate(cases):
        for rank in range(size):
            assert_same(by_rank[rank][at], references[case["family"]], f"{rank}: {case}")
        numbers = sum(w.numel() for w in by_rank[0][at]["weights"].values())
        held = [results[at]["bytes"] for results in by_rank]
        for kind, copies in (("parameters_trained", 1), ("optimizer_state", 2)):
            # Uneven rows: at most one row more than a share; a step count for each tensor.
            mine = [of_rank[kind] for of_rank in held]
            assert 4 * copies * numbers <= sum(mine) < 1.02 * 4 * copies * numbers + 4096, held
            assert max(mine) <= 1.05 * sum(mine) / size, held
        assert "parameters_plain" not in held[0]


# ---- strategies, precision, chosen layers ----------------------------------------------------


def assert_close(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """bf16 arithmetic: batches of another shape are rounded otherwise."""
    assert found["losses"] == pytest.approx(expected["losses"], abs=0.02), what
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=0.02), what
    for name, grad in found["grads"].items():
        difference = (grad - expected["grads"][name]).norm()
        assert difference < 0.05 * expected["grads"][name].norm(), f"{what}: {name}"


STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "shard_grad_op", "prefetch": 2},
    {"strategy": "ddp"},
    {"strategy": "hybrid_full_shard", "replicate": 2, "shard": 1},
    {"strategy": "hybrid_shard_grad_op", "replicate": 1, "shard": 2},
    {"cpu_offload": True},
]


def test_strategies_on_two_ranks(
    folders: dict[str, Path], references: dict[str, dict[str, Any]]
) -> None:
    families = ["untied", "tied, biases, q/k norms"]
    cases = [
        {"family": family, "folder": folders[family], "split": (3, 2), "sharding": sharding}
        for family in families
        for sharding in STRATEGIES
    ]
    for rank, results in enumerate(run_ranks(2, train, cases)):
        for case, found in zip(cases, results, strict=True):
            assert_same(found, references[case["family"]], f"{rank}: {case}")


@pytest.mark.parametrize("size", [1, 2])
def test_weights_in_fp32_and_computation_in_bf16(size: int, folders: dict[str, Path]) -> None:
    """As transformers' model in bf16 whose gradients go to weights in fp32; on one rank too."""
    families = ["untied", "tied, biases, q/k norms"]
    base = {"compute": "bf16", "split": (12 // size, 1)}
    cases = [base | {"folder": folders[family]} for family in families]
    by_rank = run_ranks(size, train, cases)
    for at, family in enumerate(families):
        expected = plain_loop(folders[family], torch.bfloat16)
        found = by_rank[0][at]
        assert_close(found, expected, family)
        assert found["dtypes"] == {torch.float32}
        numbers = sum(w.numel() for w in found["weights"].values())
        held = sum(results[at]["bytes"]["parameters_trained"] for results in by_rank)
        assert 4 * numbers <= held < 4.1 * numbers, "a bf16 copy is held between steps"
        for name, weight in found["weights"].items():
            # An update is finer than bf16, and what is added up is not lost.
            assert (weight != weight.bfloat16().float()).float().mean() > 0.5, name
            assert (weight - expected["weights"][name]).abs().mean() < 2e-4, name


CHOSEN: list[dict[str, Any]] = [
    {"trainable": {"layers": [1, 3]}, "format": "nf4"},
    {"trainable": {"layers": [0], "embeddings": True}, "format": "nf4"},
    {"trainable": {"layers": "expanded"}, "format": "nf4", "compute": "bf16"},
    {"trainable": {"layers": "expanded"}, "compute": "bf16", "sharding": {"wrap": "linear"}},
    {"trainable": {"layers": [2]}, "format": "nf4", "sharding": {"strategy": "ddp"}},
    {"trainable": {"layers": [2]}, "format": "nf4", "sharding": {"offload_base": "cpu"}},
]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven and more layers make `layers.1` a part of other names."""
    changes = {"num_hidden_layers": 12, "expanded_layers": [1, 10], "hidden_size": 96}
    return write_tiny_model(tmp_path_factory.mktemp("deep"), **changes)


def chosen_names(case: dict[str, Any], names: set[str]) -> set[str]:
    layers = case["trainable"]["layers"]
    layers = [1, 10] if layers == "expanded" else layers
    of_layers = {n for n in names if n.split(".")[1] == "layers" and int(n.split(".")[2]) in layers}
    others = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    return of_layers | (others if case["trainable"].get("embeddings") else set())


def test_chosen_layers_train_and_nothing_else(deep: Path) -> None:
    """Over plain and packed frozen layers: one rank and three do the same."""
    from qfsdp.checkpoint.sources import ModelWeights

    names = set(ModelWeights(deep).plain)
    cases = [case | {"folder": deep} for case in CHOSEN]
    (one,) = run_ranks(1, train, [case | {"split": (12, 1)} for case in cases])
    three = run_ranks(3, train, [case | {"split": (2, 2)} for case in cases])
    for at, case in enumerate(cases):
        expected = chosen_names(case, names)
        assert one[at]["weights"].keys() == expected and one[at]["changed"] == expected, case
        assert one[at]["losses"][-1] < one[at]["losses"][0]
        same = assert_close if case.get("compute") == "bf16" else assert_same
        for results in three:
            assert results[at]["changed"] <= expected  # a rank may have no row of a norm
            same(results[at], one[at], str(case))
        whole, *parts = (packed_bytes(results[at]) for results in (one, *three))
        assert (whole > 0) == ("format" in case)
        if case.get("sharding", {}).get("strategy") == "ddp":
            assert parts == [whole] * 3
        else:  # every rank has the second-level scales of NF4
            assert whole <= sum(parts) <= 1.02 * whole and max(parts) <= 0.35 * whole


def packed_bytes(found: dict[str, Any]) -> int:
    return sum(size for kind, size in found["bytes"].items() if "packed" in kind)


# ---- the update within backward --------------------------------------------------------------


def test_updates_within_backward_are_the_ordinary_ones(folders: dict[str, Path]) -> None:
    """The same bits; and no two gradients are there at a time."""
    case = {"clip": None, "folder": folders["tied, biases, q/k norms"]}
    cases = [case | {"compute": compute} for compute in ("fp32", "bf16")]
    cases += [case | {"optimizer": "torch.optim.NAdam", "arguments": {"lr": 1e-3}}]
    both = [{"in_backward": False}, {"in_backward": True}]
    for size in (1, 2):
        split = {"split": (12 // size, 1)}
        run = [c | split | way for c in cases for way in both]
        for results in run_ranks(size, train, run):
            for usual, early in zip(results[::2], results[1::2], strict=True):
                assert early["losses"] == usual["losses"]
                assert early["grad_norms"] == pytest.approx(usual["grad_norms"], rel=1e-6)
                for name, weight in usual["weights"].items():
                    assert torch.equal(early["weights"][name], weight), name
                assert early["alive"] == 0 and usual["alive"] > 20


# ---- the command: a model comes out, and runs go on ------------------------------------------

CONFIG = """
output_dir: {folder}/run
model: {{path: {folder}/model, dtype: fp32}}
tokenizer: {{_component_: tests.toy_data.tokenizer}}
dataset: {{_component_: tests.toy_data.Samples}}
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-3, eps: 1e-6, fused: true}}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
batch_size: 12
max_seq_len: 64
epochs: 2
preflight: false
checkpoint: {{every_n_steps: 4, keep_last: 99}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    write_tiny_model(
        folder / "model", num_hidden_layers=3, expanded_layers=[1], hidden_size=96, shards=2
    )
    (folder / "model/vocab.txt").write_text("beside the weights")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


def run_recipe(folder: Path, runs: list[list[str]]) -> None:
    """The recipe with each of the command lines, one after another; runs on every rank."""
    recipe = load_recipe(RECIPE)
    for words in runs:
        cfg = load_config(recipe.Config, ["--config", f"{folder}/config.yaml", *words])
        if os.environ["RANK"] == "0":
            recipe.check(cfg)
        recipe.main(cfg)


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def saved(run: Path) -> dict[str, Tensor]:
    files = (run / "model").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


WAYS = {
    "full": ["trainable.layers=all"],
    "in backward": ["optimizer_in_backward=true", "clip_grad_norm=null", "model.dtype=bf16"],
    "pro": ["trainable.layers=expanded", "quantization.format=nf4"],
}


@pytest.fixture(scope="module", params=[1, 2])
def runs(request: pytest.FixtureRequest, folder: Path) -> dict[str, tuple[Path, Path]]:
    """Each way: a whole run, and one that goes on after step 4 of 6 of that."""
    ranks, lines, pairs = request.param, [], {}
    for way, words in WAYS.items():
        whole, rest = (folder / f"{part}_{ranks}_{way}" for part in ("whole", "rest"))
        here = [*words, f"batch_size={12 // ranks}"]
        resume = f"resume={whole}/checkpoints/step_00000004"
        lines += [[*here, f"output_dir={whole}"], [*here, f"output_dir={rest}", resume]]
        pairs[way] = whole, rest
    run_ranks(ranks, run_recipe, folder, lines)
    return pairs


def test_a_run_goes_on_with_the_same_bits(runs: dict[str, tuple[Path, Path]]) -> None:
    for way, (whole, rest) in runs.items():
        expected = losses(whole)
        assert list(expected) == [1, 2, 3, 4, 5, 6]
        assert losses(rest) == {step: expected[step] for step in (5, 6)}, way
        assert all(torch.equal(saved(rest)[n], t) for n, t in saved(whole).items()), way
        checkpoint = whole / "checkpoints/step_00000004"
        assert sorted(path.name for path in checkpoint.iterdir()) == ["facts.json", "state"]


def test_another_number_of_ranks_goes_on(
    folder: Path, runs: dict[str, tuple[Path, Path]], request: pytest.FixtureRequest
) -> None:
    if (before := request.node.callspec.params["runs"]) == 1:
        pytest.skip("three ranks go on where two stopped; once is enough")
    lines = []
    for way, (whole, _) in runs.items():
        resume = f"resume={whole}/checkpoints/step_00000004"
        lines.append([*WAYS[way], "batch_size=4", f"output_dir={folder}/moved_{way}", resume])
    run_ranks(before + 1, run_recipe, folder, lines)
    for way, (whole, _) in runs.items():
        expected = {step: losses(whole)[step] for step in (5, 6)}
        bound = 0.02 if "model.dtype=bf16" in WAYS[way] else TOLERANCE
        assert losses(folder / f"moved_{way}") == pytest.approx(expected, abs=bound)


def transformers_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)  # in the dtype that config.json says
    with torch.no_grad():
        return model(TOKENS).logits


TOKENS = torch.randint(0, 577, (2, 30), generator=torch.Generator().manual_seed(5))


def test_the_model_that_comes_out(folder: Path, runs: dict[str, tuple[Path, Path]]) -> None:
    """The trained weights as the last checkpoint has them, the others as they were; transformers
    computes with it what our decoder does with these."""
    from qfsdp.checkpoint.state import read_trained
    from qfsdp.modules.transformer import Decoder, DecoderConfig

    base = saved(folder)
    for way, (whole, _) in runs.items():
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


def test_packed_folders_before_and_after(folder: Path, tmp_path: Path) -> None:
    """A packed folder is trained (its frozen layers stay packed, its trained ones are numbers),
    comes out plain, and is packed once more: quantization after training."""
    packed = quantize(folder / "model", tmp_path / "packed")
    words = ["trainable.layers=expanded", "quantization.format=nf4", "save_dtype=fp32"]
    words += [f"model.path={packed}", f"output_dir={tmp_path}/run", "max_steps=3"]
    run_ranks(2, run_recipe, folder, [words])
    before, out = load_model(packed), tmp_path / "run/model"  # its lm_head is packed on the fly
    found = {name: local_part(param) for name, param in before.named_parameters()}
    changed = set()
    for name, tensor in saved(tmp_path / "run").items():
        was = found[name]
        was = was.dequantize(torch.float32) if isinstance(was, PackedTensor) else was
        if not torch.equal(tensor, was):
            changed.add(name)
    trained = {name for name in found if name.startswith("model.layers.1.")}
    assert changed == trained | {"lm_head.weight"}
    assert torch.equal(saved(tmp_path / "run")["lm_head.weight"], saved(folder)["lm_head.weight"])
    logits = transformers_logits(out)
    with torch.no_grad():
        again = load_model(quantize(out, tmp_path / "again"))(TOKENS)
    assert ModelWeights(tmp_path / "again").formats.keys() == ModelWeights(packed).formats.keys()
    error = (again - logits).norm() / logits.norm()
    assert 0 < error < 0.3, error
    # What was NF4 already is rounded to itself: only trained layers take on an error.
    assert error < (load_model(packed)(TOKENS) - transformers_logits(folder / "model")).norm() / (
        logits.norm()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainable.layers=[3]"], "trainable.layers: 3 is not among this model's layers, which a"),
        (["trainable.layers=[1,1]"], "trainable.layers: [1, 1] is not valid; expected all, expand"),
        (["trainable.layers=[]"], "trainable.layers: [] is not valid; expected all, expanded, or"),
        (["trainable.layers=al"], "trainable.layers: 'al' is not valid"),
        (["trainable.dtype=bf16"], "trainable.dtype: 'bf16' is coarser than model.dtype, fp32"),
        (["quantization.format=nf4"], "set quantization.format=none, or trainable.layers to some"),
        (["sharding.offload_base=cpu"], "there is no frozen layer to offload; set none, or shardi"),
        (["optimizer_in_backward=true"], "clip_grad_norm: 1.0 is not valid; expected null, as opt"),
        (
            ["optimizer_in_backward=true", "gradient_accumulation_steps=2"],
            "gradient_accumulation_steps: 2 is not valid; expected 1, as optimizer_in_backward",
        ),
        (
            ["trainable.layers=[1]", "quantization.format=nf4", "model.quantize_cache=x"],
            "model.quantize_cache: 'x' would hold all layers packed, also those that are trained",
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
    write_tiny_model(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    told = f"expanded_layers in {tmp_path}/model/config.json is None; expected a model that reci"
    test_mistakes(tmp_path, ["trainable.layers=expanded"], told)
