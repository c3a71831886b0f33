"""Several adapters in one run: each as in a run of its own, resumed bit for bit, read by PEFT."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from qfsdp.checkpoint import adapter_base
from qfsdp.checkpoint.adapter_files import load_adapter, read_adapter_config
from qfsdp.checkpoint.state import Stager
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config, to_yaml
from qfsdp.modules.adapters.linears import init_adapters, parameter_groups
from qfsdp.modules.adapters.several import alone
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.planning.estimate import estimate
from qfsdp.training.several import Optimizers, texts_of_each
from tests import hub_models
from tests.json_lines import metric_lines
from tests.models import cpu_world, load_model
from tests.peft_oracle import dequantized_base, run_peft
from tests.ranks import run_ranks
from tests.tiny import (
    ROOT,
    load_recipe,
    run_recipe,
    write_tiny_model,
    write_tiny_model_with_tokenizer,
)
from tests.toy_data import TOY_CONFIG

SAMPLES = "tests.toy_data.Samples"
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"method": "lora", "rank": 4, "alpha": 8, "lr": 1e-3, "seed": 3},
    "wide": {"method": "lora", "rank": 8, "lr": 3e-4, "targets": ["q_proj", "down_proj"]},
    "dora": {"method": "dora", "rank": 16},
}
# "small" ends after 8 updates; the last of "wide" is one of its short ones.
ROWS = {"small": {"size": 13}, "wide": {"size": 18, "seed": 5}, "dora": {"size": 40, "seed": 9}}
MORE = """
output_dir: {folder}/run
global_batch_size: 4
epochs: 2
max_steps: 10
clip_grad_norm: 3.0
validation: {{eval_every: 4, sets: {{held: {{_component_: tests.toy_data.Samples, size: 5}}}}}}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
"""


def write_configs(folder: Path) -> None:
    """`several.yaml`, and one config of recipes/qdora_distributed for each adapter."""
    common = yaml.safe_load((TOY_CONFIG + MORE).format(folder=folder))
    data = {name: {"_component_": SAMPLES} | rows for name, rows in ROWS.items()}
    adapters = {name: own | {"dataset": data[name]} for name, own in ADAPTERS.items()}
    several = common | {"adapters": adapters}
    del several["dataset"]
    (folder / "several.yaml").write_text(yaml.safe_dump(several, sort_keys=False))
    for name, own in ADAPTERS.items():
        adapter = {key: value for key, value in own.items() if key not in ("lr", "seed")}
        one = common | {"adapter": adapter, "dataset": data[name], "seed": own.get("seed", 0)}
        one["optimizer"] = common["optimizer"] | {"lr": own.get("lr", 1e-3)}
        one["output_dir"] = str(folder / name)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(one, sort_keys=False))


def run_all(folder: Path, runs: list[list[str]]) -> None:
    """Runs recipes, each with its words, in turn; on every rank."""
    for name, *words in runs:
        recipe = load_recipe(name)
        recipe.main(load_config(recipe.Config, words))


def adapter(run: Path) -> Path:
    return run / "adapter_model.safetensors"


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)]
)
def test_each_trains_as_in_a_run_of_its_own(ranks: int, tmp_path: Path) -> None:
    """Losses, gradient norms, rates and adapters; from a checkpoint on the same bits; in PEFT the
    same logits."""
    model = write_tiny_model(tmp_path / "model")
    write_configs(tmp_path)
    batch = f"batch_size={2 // ranks}"
    config = ["several_adapters", "--config", f"{tmp_path}/several.yaml", batch]
    runs = [["qdora_distributed", "--config", f"{tmp_path}/{n}.yaml", batch] for n in ADAPTERS]
    runs.append([*config, "checkpoint.every_n_steps=5", "checkpoint.keep_last=9"])
    saved = tmp_path / "run/checkpoints/step_00000005"
    rest = [f"output_dir={tmp_path}/rest", f"resume={saved}", "sharding.wrap=linear"]
    runs.append([*config, *rest])
    run_ranks(ranks, run_all, tmp_path, runs)
    several = metric_lines(tmp_path / "run")
    for name in ADAPTERS:
        both = metric_lines(tmp_path / name)
        single = [line for line in both if "loss" in line]
        mine = [line for line in several if f"{name}/loss" in line]
        key = "validation/held/loss"
        held = [line[f"{name}/{key}"] for line in several if f"{name}/{key}" in line]
        assert held == pytest.approx([line[key] for line in both if key in line], abs=1e-5)
        assert len(held) == (2 if name == "small" else 3)
        assert len(mine) == len(single) == (8 if name == "small" else 10)
        for key in ("loss", "grad_norm", "lr"):
            found = [line[f"{name}/{key}"] for line in mine]
            assert found == pytest.approx([line[key] for line in single], abs=1e-5), (name, key)
        own, theirs = tmp_path / "run/adapters" / name, tmp_path / name / "adapter"
        tensors, expected = load_file(adapter(own)), load_file(adapter(theirs))
        assert tensors.keys() == expected.keys()
        off = max(float((tensors[key] - expected[key]).abs().max()) for key in tensors)
        assert off < 1e-4, name
        texts = [(f / "adapter_config.json").read_text() for f in (own, theirs)]
        assert texts[0] == texts[1]
        best = [json.loads((f / "best/best.json").read_text()) for f in (own, theirs.parent)]
        assert best[0]["step"] == best[1]["step"]
        assert adapter(tmp_path / "rest/adapters" / name).read_bytes() == adapter(own).read_bytes()
        assert adapter(saved / "adapters" / name).read_bytes() != adapter(own).read_bytes()
    if ranks == 2:
        check_peft(tmp_path, model)


PEFT = """
from peft import PeftModel

with torch.no_grad():
    found = [PeftModel.from_pretrained(base_model(), f).eval()(tokens).logits for f in arguments]
torch.save({"logits": found}, f"{folder}/result.pt")
"""


def check_peft(folder: Path, model: Path) -> None:
    """PEFT's logits with every adapter are ours."""
    tokens = torch.randint(0, 577, (2, 9), generator=torch.Generator().manual_seed(1))
    places, ours = [folder / "run/adapters" / name for name in ADAPTERS], []
    for place in places:
        config = read_adapter_config(place)
        mine = load_model(model, adapter=config)
        init_adapters(mine, 0)
        load_adapter(mine, place)
        refresh_dora_norms(mine)
        ours.append(mine.eval()(tokens).detach())
    theirs = run_peft(PEFT, model, dequantized_base(mine), tokens, folder / "peft", *places)
    for place, own, other in zip(places, ours, theirs["logits"], strict=True):
        assert (own - other).abs().max() < 1e-5, place


FIRST = "adapters.small."
MISTAKES = {
    ("adapters={}",): "adapters: {}; expected a section for each adapter",
    ("adapters.a/b={rank: 2}",): "adapters: 'a/b'; expected different names of letters, digits",
    ("adapters.Small={rank: 2}",): "adapters: 'Small'; expected different names of letters",
    (FIRST + "rnak=2",): "unknown key 'adapters.small.rnak'; did you mean 'adapters.small.rank'?",
    (FIRST + "rank=0",): "adapters.small.rank: 0 is not valid; expected an integer of at least 1",
    (FIRST + "rank=999",): "adapters.small.rank: 999; expected at most",
    (FIRST + "lr=-1",): "adapters.small.lr: -1.0 is not valid; expected a number above 0, or null",
    (FIRST + "method=miss",): "adapters.small.method: 'miss' is not valid; expected lora or dora",
    (FIRST + "dropout=0.1",): "adapters.small.dropout: 0.1 is not valid; expected 0.0 beside",
    (FIRST + "init=pissa",): "adapters.small.init: 'pissa' is not valid; expected default beside",
    (FIRST + "targets=[q_prj]",): "'q_prj' is not a linear of the decoder; did you mean 'q_proj'?",
    (FIRST + "targets=[lm_head]",): "adapters.small.targets: ['lm_head'] has lm_head; expected",
    (FIRST + "layers=[7]",): "adapters.small.layers: 7 is not a layer of this model; expected 0",
    (FIRST + "start_from=/nowhere",): "/nowhere",
    (FIRST + "dataset={_component_: tests.toy_data.Nothing}",): "adapters.small.dataset",
    ("~dataset",): "adapters.other.dataset: null, as is dataset; expected one of them",
    ("validation={patience: 1, sets: {a: {_component_: tests.toy_data.Samples}}}",): (
        "validation.patience: 1 is not valid; expected null with several adapters"
    ),
    ("compile=true",): "compile: True is not valid; expected false with several adapters",
    ("model.dtype=fp16",): "model.dtype: 'fp16' is not valid; expected bf16 or fp32 with several",
    ("sharding.context_parallel=2",): "sharding.context_parallel: 2 is not valid; expected 1 with",
    (
        "activation={checkpointing: full, tile_tokens: 64}",
    ): "activation.tile_tokens: 64 is not valid; expected null with several",
    ("model.path=MIXTURE",): "adapters: this model is a mixture of experts; expected one without",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    write_tiny_model(folder / "model", hidden_size=96)
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
    mixture |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 64}
    write_tiny_model(folder / "mixture", hidden_size=96, **mixture)
    text = TOY_CONFIG.format(folder=folder)
    (folder / "c.yaml").write_text(text + "adapters: {small: {rank: 4}, other: {rank: 2}}\n")
    return folder


@pytest.mark.parametrize("words", MISTAKES)
@pytest.mark.usefixtures("eager")
def test_a_mistake_is_one_line(words: tuple[str], folder: Path) -> None:
    recipe = load_recipe("several_adapters")
    given = [word.replace("MIXTURE", str(folder / "mixture")) for word in words]
    argv = ["--config", f"{folder}/c.yaml", f"output_dir={folder}/run", *given]
    with pytest.raises(UserError) as error:
        recipe.check(load_config(recipe.Config, argv))
    assert MISTAKES[words] in str(error.value) and "\n" not in str(error.value)


def test_the_order_of_adapters_does_not_count(folder: Path) -> None:
    """A resumed run restores learning rates by their place."""
    recipe, orders = load_recipe("several_adapters"), ("{b: {lr: 1}, a: {}}", "{a: {}, b: {lr: 1}}")
    argv = ["--config", f"{folder}/c.yaml", "output_dir=x"]
    found = [load_config(recipe.Config, [*argv, f"adapters={order}"]) for order in orders]
    assert [list(cfg.adapters) for cfg in found] == [["a", "b"], ["a", "b"]]


def test_a_name_twice_is_one_line(tmp_path: Path) -> None:
    text = TOY_CONFIG.format(folder=tmp_path) + "output_dir: x\nadapters: {a: {}, a: {rank: 2}}\n"
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match="c.yaml.*duplicate key a"):
        load_config(load_recipe("several_adapters").Config, ["--config", f"{tmp_path}/c.yaml"])


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_nan_of_one_adapter_is_its_own(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others go on with the bits of a run without it; a state between steps is not saved."""
    argv = ["--config", f"{folder}/c.yaml", "batch_size=4", "max_steps=4"]
    far = "adapters.small.lr=1e30"
    whole = ["adapters={other: {rank: 2}}", f"output_dir={tmp_path}/one"]
    run_recipe("several_adapters", [*argv, *whole])
    run_recipe("several_adapters", [*argv, far, "on_nonfinite=skip", f"output_dir={tmp_path}/two"])
    one, two = ([line["other/loss"] for line in metric_lines(tmp_path / n)] for n in ("one", "two"))
    assert one == two and len(one) == 4
    assert "warning: adapters small: a loss or gradient is not finite" in capfd.readouterr().err
    with pytest.raises(UserError, match="step 2: loss nan.*there is no checkpoint yet; expected"):
        run_recipe("several_adapters", [*argv, far, f"output_dir={tmp_path}/stopped"])


@pytest.mark.long
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("by", ["transformers", "native"])
def test_a_model_with_recurrent_layers(by: str, tmp_path: Path) -> None:
    hub_models.save_hub_model("qwen3_5", tmp_path / "model")
    text = TOY_CONFIG.format(folder=tmp_path) + "batch_size: 4\nmax_steps: 3\n"
    several = "adapters: {a: {rank: 4, method: lora}, b: {rank: 2, seed: 3}}\n"
    more = {"run": several, "a": "adapter: {rank: 4, method: lora}\n"}
    more["b"] = "seed: 3\nadapter: {rank: 2}\n"
    for run, own in more.items():
        (tmp_path / "c.yaml").write_text(f"{text}{own}output_dir: {tmp_path}/{run}\n")
        recipe = "several_adapters" if run == "run" else "qdora_distributed"
        run_recipe(recipe, ["--config", f"{tmp_path}/c.yaml", f"model.implementation={by}"])
    for run in "ab":
        mine = [line[f"{run}/loss"] for line in metric_lines(tmp_path / "run")]
        assert mine == pytest.approx(
            [line["loss"] for line in metric_lines(tmp_path / run)], abs=1e-5
        )


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_two_updates_of_the_config(smollm2_dir: Path, tmp_path: Path) -> None:
    model = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, hidden_size=96)
    row = {"question": "2 + 3?", "answer": "5"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 32)
    argv = ["--config", str(ROOT / "configs/smollm2_135m_several.yaml"), "max_steps=2"]
    argv += [f"output_dir={tmp_path}/run", f"model.path={model}", "lr_scheduler=null"]
    run_recipe("several_adapters", [*argv, f"dataset.source={tmp_path}/rows.jsonl"])
    first, second = metric_lines(tmp_path / "run")
    for name in ("small", "large", "dora"):
        assert second[f"{name}/loss"] < first[f"{name}/loss"]
        assert (tmp_path / "run/adapters" / name / "tokenizer.json").is_file()
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.long
@pytest.mark.parametrize("packed", ["packed=false", "packed=true"])
def test_the_base_is_gathered_once_for_all(packed: str, tmp_path: Path) -> None:
    """Bytes that a rank sends in a step, by dry runs on two ranks: further adapters send their own
    numbers, in forward and in backward, and nothing of the base."""
    write_tiny_model(tmp_path / "model", hidden_size=96)
    text = TOY_CONFIG.format(folder=tmp_path) + "output_dir: x\nadapters: {}\n"
    (tmp_path / "c.yaml").write_text(text)
    recipe, sent, own = load_recipe("several_adapters"), [], []
    for names in ("a", "abc"):
        words = [f"adapters.{name}={{method: lora, rank: 4}}" for name in names]
        cfg = load_config(recipe.Config, ["--config", f"{tmp_path}/c.yaml", packed, *words])
        found = estimate(recipe.build_model, recipe.train_step, cfg, 2, target="cpu")
        sent.append(found.wire["all_gather"])
        params = recipe.build_model(cfg, cfg.model.weights()).parameters()
        rows = (-(-p.size(0) // 2) * p[0].numel() for p in params if p.requires_grad)
        own.append(2 * 4 * sum(rows))
    assert sent[1] - sent[0] == pytest.approx(own[1] - own[0], rel=0.01)


def test_what_one_adapter_costs_does_not_grow_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 60 spent 40 of its 47 seconds on looking at all of them for each."""
    write_tiny_model(tmp_path / "model")
    recipe, asked, walk = load_recipe("several_adapters"), Counter[str](), nn.Module.named_modules

    def shown(cfg: Any) -> str:
        text = to_yaml(cfg)
        asked["characters"] += len(text)
        return text

    class Counting(Optimizers):
        @property
        def state(self) -> Any:
            asked["states"] += 1
            return super().state

    def named_modules(self: nn.Module, *given: Any, **more: Any) -> Any:
        for found in walk(self, *given, **more):
            asked["modules"] += 1
            yield found

    def costs(count: int) -> dict[str, float]:
        several = yaml.safe_load((TOY_CONFIG + MORE).format(folder=tmp_path))
        del several["validation"]
        several["adapters"] = {f"a{at}": {"method": "lora", "rank": 2} for at in range(count)}
        (tmp_path / "several.yaml").write_text(yaml.safe_dump(several))
        cfg = load_config(recipe.Config, ["--config", str(tmp_path / "several.yaml")])
        model = recipe.build_model(cfg, cfg.model.weights())
        asked.clear()
        texts_of_each(cfg)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "named_modules", named_modules)
            trees = [alone(model, name) for name in cfg.adapters]
        trained = [parameter_groups(tree, cfg.adapters["a0"]) for tree in trees]
        parameters = [[nn.Parameter(torch.zeros(p.shape)) for p in own] for own in trained]
        Stager(cpu_world()).copy_tensors(
            {str(at): param for at, param in enumerate(sum(parameters, []))},
            Counting([torch.optim.AdamW(own) for own in parameters]),
        )
        return {name: number / count for name, number in asked.items()}

    monkeypatch.setattr(adapter_base, "to_yaml", shown)
    few, many = costs(2), costs(16)
    assert many["characters"] < 1.1 * few["characters"]
    assert many["states"] < few["states"] and "modules" not in many
