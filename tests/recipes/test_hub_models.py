"""Models of transformers through the training recipe: on 1 and 2 ranks, resumed, against PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.checkpoint.adapter_files import WEIGHTS_FILE, read_adapter_config, save_adapter
from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data import step_loader
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from tests import hub_models, tiny
from tests.evaluation.test_hub_generation import PROMPTS, answers, theirs
from tests.hub_models import MIXTURES, NAMES, OTHERS
from tests.json_lines import metric_lines
from tests.models import cpu_world
from tests.peft_oracle import load_dequantized
from tests.ranks import run_ranks
from tests.toy_data import TOY_CONFIG, Samples

CONFIG = (
    TOY_CONFIG
    + """\
output_dir: {folder}/run
adapter: {{rank: 4, alpha: 8}}
max_steps: 4
epochs: 2
checkpoint: {{every_n_steps: 2, keep_last: 99}}
"""
)


# `make test-long` runs two models for four updates, `make test-slow` the others for ten, also on
# three ranks; tests/modules compares all of them.
SHORT, THEIRS = NAMES[:2], "transformers"
MORE = ["qwen3_next", "mistral3", "nemotron_h", "minimax_m2", "cohere2", "exaone4"]
WHOLE = [*NAMES, *MIXTURES, "gemma3", *MORE, *OTHERS, "bart"]
OURS = ["qwen3_5", "qwen3_5_moe_whole", "qwen3_next"]  # built by us too
RUN = [
    *(pytest.param((name, False, THEIRS), marks=pytest.mark.long, id=name) for name in SHORT),
    pytest.param(("qwen3_5_whole", False, "native"), marks=pytest.mark.long, id="ours"),
    *(
        pytest.param((name, True, "native"), marks=pytest.mark.slow, id=f"{name}-ours-whole")
        for name in OURS
    ),
    *(
        pytest.param((name, True, THEIRS), marks=pytest.mark.slow, id=f"{name}-whole")
        for name in WHOLE
    ),
]


def run_recipe(runs: list[tuple[str, list[str]]]) -> None:
    for config, words in runs:
        tiny.run_recipe("qdora_distributed", ["--config", config, *words])


def losses(run: Path) -> list[float]:
    lines = metric_lines(run)
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module", params=RUN)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The runs `run` (two ranks), all after its second step again (`rest`), and `alone` of a model;
    and `three` ranks."""
    folder = tmp_path_factory.mktemp("hub")
    name, whole, implementation = request.param
    hub_models.save_hub_model(name, folder / "model")
    config = str(folder / "config.yaml")
    Path(config).write_text(CONFIG.format(folder=folder))
    resume = f"resume={folder}/run/checkpoints/step_00000002"
    words = [f"model.implementation={implementation}"]
    adapter = hub_models.adapter_of(name)
    words += [f"adapter.method={adapter.method}"]
    if adapter.targets:
        words += [f"adapter.targets=[{','.join(adapter.targets)}]"]
    if whole:
        words += ["max_steps=10", "epochs=9"]
    together = [(config, ["batch_size=6", *words])]
    together.append((config, ["batch_size=6", *words, f"output_dir={folder}/rest", resume]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QFSDP_EAGER_KERNELS", "1")
        run_ranks(2, run_recipe, together)
        run_ranks(
            1, run_recipe, [(config, ["batch_size=12", *words, f"output_dir={folder}/alone"])]
        )
        if whole:
            three = ["batch_size=4", *words, f"output_dir={folder}/three"]
            run_ranks(3, run_recipe, [(config, three)])
        yield folder


def over_dequantized(folder: Path, scratch: Path) -> Any:
    """transformers' model of a folder with the dequantized base; writes the adapter that a run
    starts from to `scratch`."""
    from transformers import AutoConfig

    adapter = read_adapter_config(folder / "run/adapter")
    known = json.loads((folder / "run/adapter/qfsdp_base.json").read_text())["model"]
    config = ModelConfig(str(folder / "model"), **known)
    model = config.build()
    quantize_linears(model, QuantizationConfig())
    add_adapters(model, adapter)
    load_base(model, config.weights(), torch.device("cpu"))
    init_adapters(model, seed=0)
    save_adapter(model, adapter, str(folder / "model"), scratch, cpu_world())
    cls = hub_models.class_of(AutoConfig.from_pretrained(folder / "model"))
    reference: Any = cls.from_pretrained(folder / "model", dtype=torch.float32)
    load_dequantized(model, reference)
    return reference.eval()


def plain_losses(folder: Path, scratch: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a loop over transformers and PEFT with the dequantized base, and what it has
    trained."""
    from peft import PeftModel, get_peft_model_state_dict

    updates, reference = len(losses(folder / "run")), over_dequantized(folder, scratch)
    peft = PeftModel.from_pretrained(reference, str(scratch), is_trainable=True).eval()
    trained = [param for param in peft.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-6)
    loader = step_loader(
        Samples(None),
        batch_size=12,
        gradient_accumulation_steps=1,
        rank=0,
        world_size=1,
        seed=0,
        pad_id=0,
        max_seq_len=64,
    )
    found = []
    for step in range(updates):
        (batch,) = loader.step(step)
        logits = peft(batch.tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, get_peft_model_state_dict(peft)


def test_runs_equal_a_plain_loop_of_transformers_and_peft(
    folder: Path, tmp_path: Path, eager: None
) -> None:
    expected, trained = plain_losses(folder, tmp_path)
    together, alone = losses(folder / "run"), losses(folder / "alone")
    assert together == pytest.approx(expected, abs=1e-5)
    assert alone == pytest.approx(expected, abs=1e-5)
    if (folder / "three").exists():
        assert losses(folder / "three") == pytest.approx(expected, abs=1e-5)
    assert expected[-1] != expected[0]
    written = load_file(folder / "run/adapter" / WEIGHTS_FILE)
    assert written.keys() == trained.keys()
    for key, tensor in trained.items():
        torch.testing.assert_close(written[key], tensor, atol=1e-4, rtol=1e-4, msg=key)


def test_a_resumed_run_ends_with_the_same_bits(folder: Path) -> None:
    whole, rest = (load_file(folder / run / "adapter" / WEIGHTS_FILE) for run in ("run", "rest"))
    assert losses(folder / "rest") == losses(folder / "run")[2:]
    assert all(torch.equal(whole[key], rest[key]) for key in whole)
    known = json.loads((folder / "run/adapter/qfsdp_base.json").read_text())["model"]
    assert known.get("implementation") in (THEIRS, None)  # merge builds the same


def test_a_trained_adapter_merges_and_answers(folder: Path, tmp_path: Path, eager: None) -> None:
    from peft import PeftModel

    reference = over_dequantized(folder, tmp_path / "start")
    peft: Any = PeftModel.from_pretrained(reference, str(folder / "run/adapter")).eval()
    known = json.loads((folder / "run/adapter/qfsdp_base.json").read_text())["model"]
    by = known.get("implementation", "native")
    found = answers(folder / "model", folder / "run/adapter", "nf4", by)
    assert found == theirs(peft) and any(map(len, found))
    given = [f"model.path={folder}/model", f"model.implementation={by}", "dtype=fp32"]
    given += ["model.dtype=fp32", f"adapter={folder}/run/adapter", f"output_dir={tmp_path}/out"]
    tiny.run_recipe("merge", ["--config", str(tiny.ROOT / "configs/merge.yaml"), *given])
    merged = type(reference).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.tensor(PROMPTS[1:])
    with torch.no_grad():
        expected = peft(tokens, use_cache=False).logits
        logits = merged(tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sharding.offload_base=disk"], "sharding.offload_base: disk; expected none or cpu"),
        (["sharding.vocabulary=split"], "sharding.vocabulary: split; expected auto or gather"),
        (["cuda_graphs=true"], "cuda_graphs: true; expected false"),
        (["model.quantize_cache=/tmp/x"], "model.quantize_cache: /tmp/x; expected null"),
        (["adapter.init=loftq"], "adapter.init: loftq; expected default"),
        (["adapter.targets=[qkv_proj]"], "'qkv_proj' is not a linear of this model"),
        (["max_seq_len=300"], "max_seq_len: 300; expected at most 256"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(
    words: list[str], message: str, tmp_path: Path
) -> None:
    hub_models.save_hub_model("llama", tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    recipe = tiny.load_recipe()
    given = ["--config", str(tmp_path / "config.yaml"), "model.implementation=transformers"]
    with pytest.raises(UserError) as error:
        recipe.check(load_config(recipe.Config, [*given, *words]))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "by"), [("lora", THEIRS), ("ia3", THEIRS), ("lora", "native"), ("ia3", "native")]
)
def test_all_ways_to_shard_give_the_same_losses(
    method: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_models.save_hub_model("qwen3_5", tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    monkeypatch.setenv("QFSDP_EAGER_KERNELS", "1")
    words = [f"adapter.method={method}", "max_steps=2", "batch_size=6", "validation.eval_every=2"]
    words.append("validation.sets={held: {_component_: tests.toy_data.Samples, size: 5}}")
    ways = [
        "sharding.strategy=ddp",
        "sharding.wrap=linear",
        "sharding.strategy=shard_grad_op",
        "sharding.offload_base=cpu",
        "sharding.offload_base=cpu sharding.wrap=linear activation.offload=true",
        "sharding.cpu_offload=true activation.offload=true activation.checkpointing=full",
    ]
    if by == "native":
        ways.append("sharding.vocabulary=split sharding.wrap=linear")
        cache = f"{tmp_path}/cache"
        ways.append(f"sharding.offload_base=disk model.quantize_cache={cache}")
        ways.append("model.dtype=bf16")  # decays are fp32 beside it
    runs = [
        (
            str(tmp_path / "config.yaml"),
            [*words, f"model.implementation={by}", *way.split()] + [f"output_dir={tmp_path}/{at}"],
        )
        for at, way in enumerate(ways)
    ]
    run_ranks(2, run_recipe, runs)
    found = []
    for at in range(len(ways)):
        lines = metric_lines(tmp_path / str(at))
        found.append([line.get("loss", line.get("validation/held/loss")) for line in lines])
    assert len(found[0]) == 3 and found[0][1] != found[0][0]
    for way, losses_of_way in zip(ways, found, strict=True):
        bound = 2e-2 if "bf16" in way else 1e-5
        assert losses_of_way == pytest.approx(found[0], abs=bound), way


APART = ("gemma4_moe", "falcon", "bart")  # refuse `packed: true`


@pytest.mark.long
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("deepseek_v3", THEIRS),
        ("qwen3_5", THEIRS),
        *(
            pytest.param(name, THEIRS, marks=pytest.mark.slow)
            for name in WHOLE
            if name not in ("deepseek_v3", "qwen3_5", *APART)
        ),
        *(pytest.param(name, "native", marks=pytest.mark.slow) for name in OURS),
    ],
)
def test_packed_rows_have_the_loss_of_their_samples(name: str, by: str, tmp_path: Path) -> None:
    """Steps with every sample, on two ranks: packed, and each sample in a row of its own."""
    hub_models.save_hub_model(name, tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    words = ["batch_size=13", "max_steps=1", "epochs=1", "checkpoint.every_n_steps=null"]
    words.append(f"model.implementation={by}")
    runs = [
        (str(tmp_path / "config.yaml"), [*words, f"output_dir={tmp_path}/{packed}", more])
        for packed, more in (("false", "packed=false"), ("true", "packed=true"))
    ]
    run_ranks(2, run_recipe, runs)
    apart, packed = losses(tmp_path / "false"), losses(tmp_path / "true")
    assert packed == pytest.approx(apart, abs=1e-6) and len(packed) == 1
