"""Models of transformers that answer: the tokens of transformers' own `generate`."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.inference_model import load_adapters_of_one_base, load_for_inference
from qfsdp.evaluation.serving.engine import Engine, Model, Request
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.hub_models.cache import HubCache
from qfsdp.modules.hub_models.config import Implementation
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests import hub_models
from tests.hub_models import NAMES, built
from tests.models import cpu_world
from tests.peft_oracle import dequantized_base
from tests.tiny import ROOT, load_recipe
from tests.toy_data import Samples, Tokenizer

pytestmark = pytest.mark.usefixtures("eager")

PROMPTS = [[33], list(range(40, 63))]
NEW = 6
# One model with recurrent layers in the short suite.
MORE = [*NAMES[1:], "qwen3_5_whole"]
MODELS = [NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]


def answers(
    folder: Path, adapter: Path | None, quantization: str, by: Implementation = "transformers"
) -> list[list[int]]:
    config = ModelConfig(str(folder), dtype="fp32", implementation=by)
    given = (QuantizationConfig(quantization), adapter and str(adapter), ShardingConfig("ddp"))
    model = load_for_inference(config, *given, cpu_world())
    return generate(model, PROMPTS, SamplingConfig(max_new_tokens=NEW), {2}, cpu_world())


def theirs(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        asked = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(asked), "eos_token_id": 2, "pad_token_id": 0}
        out = model.generate(asked, max_new_tokens=NEW, do_sample=False, **given)
        # One row is not padded: a 0 is an answer's.
        found.append([token for token in out[0, len(prompt) :].tolist() if token != 2])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_equal_transformers(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    reference: Any = hub_models.save_hub_model(name, tmp_path / "model")
    assert answers(tmp_path / "model", None, "none") == theirs(reference)
    adapter = AdapterConfig("dora", rank=4, alpha=8)
    model = built(tmp_path / "model", adapter)
    save_adapter(model, adapter, str(tmp_path / "model"), tmp_path / "adapter", cpu_world())
    reference.load_state_dict(dequantized_base(model), strict=False)
    peft = PeftModel.from_pretrained(reference, str(tmp_path / "adapter")).eval()
    found = answers(tmp_path / "model", tmp_path / "adapter", "nf4")
    assert found == theirs(peft) and any(map(len, found))


def test_an_answer_does_not_cross_the_original_context_of_longrope(tmp_path: Path) -> None:
    """Its cached keys would be turned as those of a short text."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    hub_models.save_hub_model("llama", tmp_path / "model", rope_parameters=rope | factors)
    model = built(tmp_path / "model")
    with pytest.raises(UserError, match="16 tokens together, the original context of LongRoPE"):
        generate(model, [[5] * 10], SamplingConfig(7), set(), cpu_world())
    for length, new in ((10, 6), (17, 7)):
        tokens = generate(model, [[5] * length], SamplingConfig(new), set(), cpu_world())[0]
        with torch.no_grad():
            anew = model(torch.tensor([[5] * length + tokens])).argmax(-1)
        assert anew[0, length - 1 : -1].tolist() == tokens


def test_evaluate_measures_the_loss_of_transformers(tmp_path: Path) -> None:
    reference: Any = hub_models.save_hub_model("lfm2", tmp_path / "model")
    recipe = load_recipe("evaluate")
    words = [f"model.path={tmp_path}/model", "adapter=null", f"output={tmp_path}/found.json"]
    words += ["model.dtype=fp32", "model.implementation=transformers", "quantization.format=none"]
    cfg = load_config(recipe.Config, ["--config", str(ROOT / "configs/evaluate.yaml"), *words])
    held = Samples(None, 7)
    sets = recipe.Sets(Tokenizer(), set(), {"held": held}, {}, {}, {})
    model = load_for_inference(cfg.model, cfg.quantization, None, cfg.sharding, cpu_world())
    found = {row.metric: row.value for row in recipe.evaluate(cfg, model, sets, cpu_world())}
    total, targets = 0.0, 0
    for sample in (held[at] for at in range(7)):
        labels = sample["labels"][1:]
        with torch.no_grad():
            logits = reference(sample["tokens"].unsqueeze(0)).logits[0, :-1]
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        targets += int((labels != -100).sum())
    assert found["loss"] == pytest.approx(total / targets, abs=1e-5)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("generate", ["sharding.strategy=full_shard"], "sharding.strategy: full_shard; expected"),
        ("generate", ["compile=true"], "compile: true; expected false"),
        ("generate", ["model.quantize_cache=/tmp/x"], "model.quantize_cache: /tmp/x; expected"),
        ("serve", ["compile=true"], "compile: true; expected false"),
    ],
)
def test_what_answers_do_not_have_is_one_line(
    recipe: str, words: list[str], message: str, tmp_path: Path
) -> None:
    hub_models.save_hub_model("llama", tmp_path / "model")
    module = load_recipe(recipe)
    given = ["--config", str(ROOT / f"configs/{recipe}.yaml"), f"model.path={tmp_path}/model"]
    given += ["model.implementation=transformers", *words]
    if recipe != "serve":
        given.append("adapter=null")
    if recipe == "generate":
        given.append("prompt=Why?")
    if recipe == "evaluate":
        given.append(f"output={tmp_path}/found.json")
    given.append("tokenizer={_component_: tests.toy_data.tokenizer}")
    with pytest.raises(UserError) as error:
        module.check(load_config(module.Config, given))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
def test_a_server_answers_many_at_once(tmp_path: Path) -> None:
    """Requests of the base and of an adapter that join and leave between tokens: the tokens of
    each alone."""
    hub_models.save_hub_model("qwen3_5", tmp_path / "model")
    adapter, folder = AdapterConfig("dora", rank=4, alpha=8), str(tmp_path / "adapter")
    model = built(tmp_path / "model", adapter)
    save_adapter(model, adapter, str(tmp_path / "model"), Path(folder), cpu_world())
    config = ModelConfig(str(tmp_path / "model"), dtype="fp32", implementation="transformers")
    base, world = QuantizationConfig("none"), cpu_world()
    decoders = load_adapters_of_one_base(config, base, "base", {"mine": folder}, world)
    shared = [p.data_ptr() for n, p in decoders["base"].named_parameters()]
    assert {p.data_ptr() for p in decoders["mine"].parameters()} > set(shared)
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(f" {token}" for token in ids))
    models = {name: Model(decoder, tokenizer, {2}) for name, decoder in decoders.items()}
    engine, answers = Engine(models, world.device, 2), Queue[Any]()
    asked = [(which, prompt) for which in models for prompt in [*PROMPTS, [7, 8]]]
    engine.start()
    texts = [""] * len(asked)
    for at, (which, prompt) in enumerate(asked):
        sampling = SamplingConfig(max_new_tokens=NEW + at)
        tell = partial(lambda at, piece: answers.put((at, piece)), at)
        engine.submit(Request(which, prompt, sampling, [], tell, math.inf))
    for _ in asked:
        finish = None
        while finish is None:
            at, piece = answers.get(timeout=60)
            texts[at], finish = texts[at] + piece.text, piece.finish
    engine.stop()
    for at, (which, prompt) in enumerate(asked):
        sampling = SamplingConfig(max_new_tokens=NEW + at)
        (alone,) = generate(decoders[which], [prompt], sampling, {2}, world)
        assert texts[at] == tokenizer.decode(alone)
    assert texts[0] != texts[3]


def test_a_new_token_has_its_position(tmp_path: Path) -> None:
    """Bamba's own is 0 for the first token of every call, also with a cache."""
    hub_models.save_hub_model("bamba", tmp_path)
    model, row = built(tmp_path), torch.arange(40, 63).unsqueeze(0)
    cache, lengths = HubCache([20]), [20, 1, 1, 1]
    with torch.no_grad():
        kept = torch.cat([model(part, cache=cache) for part in row.split(lengths, 1)])
        whole = model(row)[0, 19:]
    assert (kept - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.long
def test_200_tokens_from_states_equal_computing_them_anew(tmp_path: Path) -> None:
    """Each token's logits, from the states that Gated DeltaNet has kept of those before."""
    hub_models.save_hub_model("qwen3_5", tmp_path)
    longest = max(map(len, PROMPTS))
    given = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS])
    cache = HubCache([len(prompt) for prompt in PROMPTS])
    hub_models.check_200_tokens(built(tmp_path), PROMPTS, cache, given)
