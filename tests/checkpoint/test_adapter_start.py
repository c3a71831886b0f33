"""A run that starts from an adapter of PEFT has PEFT's logits and loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.adapter_config_file import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE
from qfsdp.checkpoint.adapter_files import (
    check_adapter,
    load_adapter,
    read_adapter_config,
    save_adapter,
)
from qfsdp.common.errors import UserError
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.training.steps import StepClock
from tests.models import adapted_model, build_meta_model, cpu_world, load_model, randomize_adapters
from tests.peft_oracle import dequantized_base, run_peft
from tests.ranks import run_ranks
from tests.tiny import load_recipe, recipe_config, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

# Creates adapters with PEFT, changes every number, and saves them with PEFT.
SCRIPT = """
import json
import peft

torch.manual_seed(0)
result = {}
for name, (settings, dtype) in json.loads(arguments[0]).items():
    config = getattr(peft, settings.pop("kind", "LoraConfig"))(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(base_model(), config).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "magnitude" in key:
                param.mul_(1 + 0.02 * torch.randn_like(param))
            elif "ia3_" in key:
                param.mul_(1 + 0.2 * torch.randn_like(param))
            elif "lora_" in key:
                param.add_(0.03 * torch.randn_like(param))
            if "lora_" in key:
                param.copy_(param.to(getattr(torch, dtype)))
        model.save_pretrained(f"{folder}/{name}")
        result[name] = model(tokens).logits
torch.save(result, f"{folder}/result.pt")
"""
HEAD_TOO = ["all-linear", "lm_head"]
TINY = {
    # PEFT's settings, the dtype of the file, and our section `adapter`
    "lora": (
        {"r": 5, "lora_alpha": 7, "target_modules": "all-linear"},
        "float32",
        AdapterConfig("lora", 5, 7.0),
    ),
    "dora, regex, bf16": (
        {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": r".*\.(q|down)_proj"},
        "bfloat16",
        AdapterConfig("dora", 4, 8.0, targets=["q_proj", "down_proj"]),
    ),
    "dora, rslora, lm_head": (
        {
            "r": 6,
            "lora_alpha": 4,
            "use_dora": True,
            "use_rslora": True,
            "target_modules": ["self_attn.v_proj", "lm_head"],
            "layers_to_transform": None,
        },
        "float32",
        AdapterConfig("dora", 6, 4.0, rslora=True, targets=["v_proj", "lm_head"]),
    ),
    # PEFT chooses the linears and the scaled inputs for this architecture.
    "ia3": ({"kind": "IA3Config"}, "float32", AdapterConfig("ia3")),
}
REAL = {
    "lora": (
        {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "float32",
        AdapterConfig("lora", 8, 16.0),
    ),
    "dora, rslora, fp16": (
        {
            "r": 8,
            "lora_alpha": 4,
            "use_dora": True,
            "use_rslora": True,
            "target_modules": "all-linear",
        },
        "float16",
        AdapterConfig("dora", 8, 4.0, rslora=True),
    ),
}


def started_runs(
    model_dir: Path, quantized: list[str], sections: dict[str, AdapterConfig], tokens: Tensor
) -> dict[str, tuple[Tensor, float]]:
    """Logits of the recipe's model at its start, in eval mode, and the first loss."""
    recipe = load_recipe()
    from qfsdp.data import Batch

    results = {}
    for name, section in sections.items():
        cfg = recipe_config(
            recipe,
            model_dir,
            quantization=recipe.QuantizationConfig("nf4", quantized),
            adapter=section,
        )
        world = cpu_world()
        model = recipe.load_model(cfg, world)
        with torch.no_grad():
            logits = model.eval()(tokens)
        optimizer = torch.optim.SGD(trainable_parameters(model), lr=0.1)
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        batches = [Batch(tokens, labels, tokens.numel())]
        step = recipe.train_step(
            model.train(), optimizer, None, batches, None, world, StepClock(world.device)
        )
        results[name] = logits, step["loss"]
    return results


def compare_with_peft(
    model_dir: Path,
    cases: dict[str, Any],
    quantized: list[str],
    folder: Path,
    ranks: dict[int, list[str]],
) -> None:
    """Compares the cases of `ranks`, each on its number of ranks. qfsdp's base is NF4; PEFT has its
    dequantized weights."""
    tokens = torch.randint(0, 577, (2, 48), generator=torch.Generator().manual_seed(0))
    base = load_model(model_dir)
    with torch.no_grad():
        base_logits = base(tokens)
    settings = {name: case[:2] for name, case in cases.items()}
    expected = run_peft(
        SCRIPT, model_dir, dequantized_base(base), tokens, folder, json.dumps(settings)
    )
    sections = {n: replace(case[2], start_from=str(folder / n)) for n, case in cases.items()}
    for name, section in sections.items():
        check_adapter(section, folder / name, build_meta_model(model_dir, adapter=section))
    for size, names in ranks.items():
        some = {name: sections[name] for name in names}
        found = run_ranks(size, started_runs, model_dir, quantized, some, tokens)
        for rank in range(size):
            for name, (logits, loss) in found[rank].items():
                theirs = expected[name]
                difference = (logits - theirs).abs().max().item()
                print(f"{name}, {size} ranks: differs by {difference:.1e} from PEFT")
                assert difference < 1e-5 * theirs.abs().max()  # fp32; found 0.5e-5
                assert (logits - base_logits).abs().max() > 0.3, "the adapter must matter"
                their_loss = F.cross_entropy(theirs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
                assert loss == pytest.approx(their_loss.item(), abs=1e-5)


@pytest.mark.long
def test_a_run_starts_where_peft_stopped(tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "model")
    compare_with_peft(tiny, TINY, HEAD_TOO, tmp_path / "adapters", {1: list(TINY), 3: list(TINY)})


@pytest.mark.slow
def test_a_run_of_the_real_model_starts_where_peft_stopped(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    ranks = {1: ["lora"], 3: ["dora, rslora, fp16"]}
    compare_with_peft(smollm2_dir, REAL, ["all-linear"], tmp_path, ranks)


# ---- refused adapters ------------------------------------------------------------------------

SECTION = AdapterConfig("dora", 5, 7.0)
A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
Spoil = Callable[[Path], Any]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def folder(tiny_dir: Path, tmp_path: Path) -> Path:
    """An adapter of SECTION."""
    model = adapted_model(tiny_dir, SECTION)
    randomize_adapters(model)
    save_adapter(model, SECTION, str(tiny_dir), tmp_path / "adapter", cpu_world())
    return tmp_path / "adapter"


def says(**settings: Any) -> Spoil:
    """The same with other settings in `adapter_config.json`."""

    def spoil(folder: Path) -> None:
        written = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(written | settings))

    return spoil


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    """The same with other tensors."""

    def spoil(folder: Path) -> None:
        found = load_file(folder / WEIGHTS_FILE)
        change(found)
        save_file(found, folder / WEIGHTS_FILE)

    return spoil


def truncated(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes((folder / WEIGHTS_FILE).read_bytes()[:-1])


def pickled(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / PICKLE_FILE)


def only(*linears: str) -> Spoil:
    return tensors(
        lambda found: [found.pop(key) for key in list(found) if key.split(".")[-3] not in linears]
    )


def rank_8(folder: Path) -> None:
    says(r=8)(folder)
    tensors(
        lambda found: found.update(
            {key: torch.zeros(8, a.size(1)) for key, a in found.items() if "lora_A" in key}
        )
    )(folder)


EMBEDDINGS = "base_model.model.model.embed_tokens"
REFUSED: dict[str, tuple[Spoil, str]] = {
    "config missing": (lambda f: (f / CONFIG_FILE).unlink(), f"{CONFIG_FILE} does not exist;"),
    "weights missing": (lambda f: (f / WEIGHTS_FILE).unlink(), f"{WEIGHTS_FILE} does not exist;"),
    "a pickle": (pickled, f"{PICKLE_FILE}: a pickle file, which can run code; expected an adapter"),
    "truncated": (truncated, f"{WEIGHTS_FILE}: truncated or not a safetensors file"),
    "not JSON": (
        lambda f: (f / CONFIG_FILE).write_text("{"),
        f"{CONFIG_FILE}: not an adapter's config (Expecting property name",
    ),
    "binary": (
        lambda f: (f / CONFIG_FILE).write_bytes(b"\xff\x80\x00"),
        f"{CONFIG_FILE}: not an adapter's config ('utf-8' codec",
    ),
    "nested": (
        lambda f: (f / CONFIG_FILE).write_text("[" * 100_000),
        f"{CONFIG_FILE}: not an adapter's config (maximum recursion",
    ),
    "a list": (lambda f: (f / CONFIG_FILE).write_text("[1]"), "[1] is no JSON object; expected"),
    "no rank": (says(r=None), f"{CONFIG_FILE}: r None; expected an integer of at least 1"),
    "negative rank": (says(r=-1), f"{CONFIG_FILE}: r -1; expected an integer of at least 1"),
    "NaN as rank": (says(r=math.nan), "r nan; expected an integer of at least 1"),
    "NaN as alpha": (says(lora_alpha=math.nan), "lora_alpha nan; expected a number above 0"),
    "infinite alpha": (says(lora_alpha=math.inf), "lora_alpha inf; expected a number above 0"),
    "alpha in words": (says(lora_alpha="7"), "lora_alpha '7'; expected a number above 0"),
    "DoRA in words": (says(use_dora="false"), "use_dora 'false'; expected true or false"),
    "another rank than the tensors": (
        says(r=2**40),
        f"has shape [5, 577]; expected [{2**40}, in]",
    ),
    "a list of types": (says(peft_type=["LORA"]), "peft_type ['LORA']; expected LORA, IA3"),
    "lists in a pattern": (says(rank_pattern={"a": [1]}), "{'a': [1]}: expected a number for each"),
    "NaN": (
        tensors(lambda found: found[A].view(-1)[7:8].fill_(math.nan)),
        f"{WEIGHTS_FILE}: tensor '{A}' holds NaN or infinity; expected finite numbers",
    ),
    "infinity in fp32": (
        tensors(lambda found: found.update({A: found[A].double().add(1e300)})),
        f"tensor '{A}' holds NaN or infinity",
    ),
    "no tensors": (tensors(lambda found: found.clear()), "no tensor of an adapter of"),
    "one number": (
        tensors(lambda found: found.update({A: torch.zeros(())})),
        f"r 5, but tensor '{A}' has shape []; expected [5, in]",
    ),
    "empty file": (
        lambda f: (f / WEIGHTS_FILE).write_bytes(b""),
        f"{WEIGHTS_FILE}: truncated or not a safetensors file",
    ),
    "a header that lies": (
        lambda f: (f / WEIGHTS_FILE).write_bytes(b"\xff" * 8 + b"{}"),
        f"{WEIGHTS_FILE}: truncated or not a safetensors file",
    ),
    "IA3": (
        says(peft_type="IA3"),
        "adapter.method: dora, but {folder} was trained with peft_type IA3; expected "
        "adapter.method=ia3",
    ),
    "LOHA": (
        says(peft_type="LOHA"),
        f"{CONFIG_FILE}: peft_type 'LOHA'; expected LORA, IA3, MISS, OFT",
    ),
    "rank": (
        rank_8,
        "adapter.rank: 5, but {folder} was trained with r 8; expected adapter.rank=8",
    ),
    "alpha": (
        says(lora_alpha=16),
        "adapter.alpha: 7, but {folder} was trained with lora_alpha 16; expected adapter.alpha=16",
    ),
    "method": (
        says(use_dora=False),
        "adapter.method: dora, but {folder} was trained with use_dora false; "
        "expected adapter.method=lora",
    ),
    "rslora and alpha": (
        says(use_rslora=True, lora_alpha=2.5),
        "adapter.alpha: 7, adapter.rslora: false, but {folder} was trained with lora_alpha 2.5, "
        "use_rslora true; expected adapter.alpha=2.5 adapter.rslora=true",
    ),
    "targets": (
        only("q_proj", "v_proj"),
        "adapter.targets: all-linear, but {folder} adapts [q_proj,v_proj]; "
        "expected adapter.targets=[q_proj,v_proj]",
    ),
    "modules_to_save": (
        says(modules_to_save=["lm_head"]),
        "modules_to_save ['lm_head'], but 'lm_head' is not in the folder",
    ),
    "bias": (says(bias="lora_only"), "bias 'lora_only': qfsdp trains no biases"),
    "rank_pattern": (
        says(rank_pattern={"q_proj": 3}),
        f"{CONFIG_FILE}: rank_pattern 3, but tensor 'base_model.model.model.layers.0.self_attn.q_",
    ),
    "a pattern that is none": (
        says(alpha_pattern={"q[": 3}),
        f"{CONFIG_FILE}: alpha_pattern {{'q[': 3}}: expected a number for each name",
    ),
    "alpha_pattern": (
        says(alpha_pattern={"q_proj": 1}),
        "adapter.alpha_pattern: model.layers.0.self_attn.q_proj gets a scaling of 1.4, but in "
        '{folder} it has 0.2; expected adapter.alpha_pattern={"q_proj": 1.0}',
    ),
    "PiSSA": (says(init_lora_weights="pissa_niter_4"), "this initialization changed the base that"),
    **{
        key: (says(**{key: value}), f"{key} {value!r}: qfsdp does not have this option")
        for key, value in {
            "lora_bias": True,
            "layer_replication": [[0, 2], [1, 2]],
            "alora_invocation_tokens": [7, 8],
            "use_qalora": True,
            "megatron_config": {"a": 1},
            "of_some_later_version": {"a": 1},
        }.items()
    },
    "a layer less": (
        tensors(lambda found: found.pop(A)),
        f"{WEIGHTS_FILE}: tensor '{A}' is missing",
    ),
    "a tensor more": (
        tensors(lambda found: found.update({"base_model.model.x": torch.zeros(1)})),
        "tensor 'base_model.model.x' is not among this model's adapters",
    ),
    "an embedding": (
        tensors(lambda found: found.update({"m.embed_tokens.lora_A.weight": torch.zeros(5, 9)})),
        "tensor 'm.embed_tokens.lora_A.weight' is not among this model's adapters",
    ),
    "an adapted embedding": (
        tensors(lambda found: found.update({f"{EMBEDDINGS}.lora_embedding_A": torch.zeros(5, 9)})),
        f"tensor '{EMBEDDINGS}.lora_embedding_A' adapts embeddings, which qfsdp does not",
    ),
    "a whole layer": (
        tensors(lambda found: found.update({f"{EMBEDDINGS}.weight": torch.zeros(9, 5)})),
        f"tensor '{EMBEDDINGS}.weight' is a whole layer, as PEFT writes with save_embedding_layers",
    ),
    "shape": (
        tensors(lambda found: found.update({A: torch.zeros(5, 191)})),
        f"tensor '{A}' has shape [5, 191]; expected [5, 192]",
    ),
    "integers": (
        tensors(lambda found: found.update({A: torch.zeros(5, 192, dtype=torch.int8)})),
        f"tensor '{A}' is of type I8; expected floats",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_qfsdp_would_load_wrongly_are_refused(
    case: str, folder: Path, tiny_dir: Path
) -> None:
    """By the preflight, in one line."""
    spoil, message = REFUSED[case]
    model = build_meta_model(tiny_dir, adapter=SECTION)
    check_adapter(SECTION, folder, model)  # it is valid so far
    spoil(folder)
    with pytest.raises(UserError) as error:
        check_adapter(SECTION, folder, model)
    assert message.replace("{folder}", str(folder)) in str(error.value)
    assert str(folder) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        says(inference_mode=False, revision="main", lora_dropout=0.1, task_type=None),
        says(qalora_group_size=16, megatron_core="megatron.core", peft_version="9.9.9"),
        says(
            rank_pattern={},
            alpha_pattern={"q_proj": 7, "q": 1},
            loftq_config={},
            layer_replication=[],
        ),
        says(target_modules=r".*_proj", exclude_modules=["lm_head"], layers_to_transform=[0, 1]),
        says(init_lora_weights="eva", eva_config={"rho": 2.0}),
        says(fan_in_fan_out=True),  # of GPT-2's linears; A and B are as of others
        tensors(lambda found: found.update({"m.lm_head.base_layer.weight": torch.zeros(577, 192)})),
    ],
)
def test_settings_without_effect_are_ignored(spoil: Spoil, folder: Path, tiny_dir: Path) -> None:
    spoil(folder)
    model = adapted_model(tiny_dir, SECTION)
    check_adapter(SECTION, folder, model)
    load_adapter(model, folder)
    found = read_adapter_config(folder)
    assert (found.method, found.rank, found.alpha, found.rslora) == ("dora", 5, 7.0, False)
    assert len({name.rpartition(".")[2] for name in found.linears}) == 7


def test_both_names_of_the_magnitude_load(folder: Path, tiny_dir: Path) -> None:
    """PEFT writes `lora_magnitude_vector`; its module's key ends in `.weight`."""
    model = adapted_model(tiny_dir, SECTION)
    load_adapter(model, folder)
    expected = {name: param.clone() for name, param in model.named_parameters()}
    found = load_file(folder / WEIGHTS_FILE)
    renamed = {k + ".weight" * k.endswith("magnitude_vector"): v for k, v in found.items()}
    assert renamed.keys() != found.keys()
    save_file(renamed, folder / WEIGHTS_FILE)
    model = adapted_model(tiny_dir, SECTION)
    check_adapter(SECTION, folder, model)
    load_adapter(model, folder)
    for name, param in model.named_parameters():
        if "weight_norm" not in name and param.is_floating_point() and param.requires_grad:
            assert torch.equal(param, expected[name]), name


def test_ia3_that_scales_other_inputs_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    """PEFT allows any `feedforward_modules`; qfsdp only down_proj."""
    section = AdapterConfig("ia3")
    model = adapted_model(tiny_dir, section)
    save_adapter(model, section, str(tiny_dir), tmp_path, cpu_world())
    check_adapter(section, tmp_path, model)
    key = "base_model.model.model.layers.0.mlp.down_proj.ia3_l"
    tensors(lambda found: found.update({key: torch.ones(192, 1)}))(tmp_path)
    with pytest.raises(UserError, match=r"has shape \[192, 1\]; expected \[1, 577\]"):
        check_adapter(section, tmp_path, model)
    with pytest.raises(UserError, match=r"method: lora, but .* expected adapter.method=ia3"):
        check_adapter(AdapterConfig("lora"), tmp_path, model)
    with pytest.raises(UserError, match=r"targets: .* expected adapter.targets=\[k_proj,v_proj"):
        every = AdapterConfig("ia3", targets="all-linear")
        check_adapter(every, tmp_path, adapted_model(tiny_dir, every))


def test_a_folder_without_an_adapter_is_refused(folder: Path, tiny_dir: Path) -> None:
    model = build_meta_model(tiny_dir, adapter=SECTION)
    with pytest.raises(UserError, match="nowhere does not exist; expected an adapter in PEFT's"):
        check_adapter(SECTION, "nowhere", model)
    with pytest.raises(UserError, match=r": not an adapter's folder; did you mean .*/adapter\?"):
        check_adapter(SECTION, folder.parent, model)
    with pytest.raises(UserError, match=r"expected adapter.targets=\[all-linear,lm_head\]"):
        more = replace(SECTION, targets=HEAD_TOO)
        other = adapted_model(tiny_dir, more)
        save_adapter(other, more, str(tiny_dir), folder, cpu_world())
        check_adapter(SECTION, folder, model)
