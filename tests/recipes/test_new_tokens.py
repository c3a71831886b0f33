"""`tokenizer.new_tokens` from a run to what is made of it: on one rank and three, resumed, compared
with PEFT over a model that transformers resized, merged, in a GGUF file, and generated from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from qfsdp.checkpoint.adapter_files import WEIGHTS_FILE
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.checkpoint.test_gguf import tokenizer_of
from tests.data.test_tokenizer import write_folder
from tests.models import cpu_world
from tests.ranks import run_ranks
from tests.tiny import (
    ROOT,
    load_recipe,
    run_recipe,
    write_tiny_model,
    write_tiny_model_with_tokenizer,
)

pytestmark = pytest.mark.usefixtures("eager")

NEW = ["<think>", "</think>"]
TEXT = "Hm. <think>2 + 3</think> 5"
DELTA = "token_adapter.trainable_tokens_delta"


def shop(folder: Path, tokenizer: Path, tied: bool = True) -> list[str]:
    """The words of a short run in fp32, whose answers have the new tokens."""
    model = write_tiny_model_with_tokenizer(
        folder / "model", tokenizer, hidden_size=96, num_hidden_layers=1, tie_word_embeddings=tied
    )
    rows = [{"question": f"{n} + 2?", "answer": f"<think>{n}</think> {n + 2}"} for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("--config", str(ROOT / "configs/smollm2_135m_new_tokens.yaml"), f"model.path={model}"),
        *(f"dataset.source={folder}/rows.jsonl", "model.dtype=fp32", "max_steps=4"),
        *(
            "batch_size=2",
            "global_batch_size=6",
            "metric_logger=null",
            "report=false",
            "preflight=false",
        ),
        *("optimizer.eps=1e-6", "lr_scheduler=null", "dataset.tokenized_cache=null"),
    ]


def runs(words: list[list[str]]) -> None:
    for argv in words:
        run_recipe("qdora_distributed", argv)


def adapter_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter" / WEIGHTS_FILE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    """The folder of a run on one rank, in `run`, and what it was made from."""
    folder = tmp_path_factory.mktemp("new_tokens")
    run_ranks(1, runs, [[*shop(folder, smollm2_dir), f"output_dir={folder}/run"]])
    return folder


def loaded(folder: Path) -> tuple[Any, Any]:
    """transformers' base, resized as PEFT's users do, and the tokenizer beside the adapter."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "run/adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    base.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    return base, tokenizer


@pytest.mark.long
def test_peft_merge_and_gguf(whole: Path) -> None:
    """Logits of the adapter here, of PEFT, and of the merged folder in transformers are equal."""
    from peft import PeftModel

    base, tokenizer = loaded(whole)
    reader = AutoTokenizer.from_pretrained(whole / "model")
    reader.add_tokens(NEW)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert torch.equal(ids, reader(TEXT, return_tensors="pt").input_ids)
    assert {49152, 49153} <= set(ids.flatten().tolist())
    written = json.loads((whole / "run/adapter/adapter_config.json").read_text())
    assert written["trainable_token_indices"] == [49152, 49153]
    mean = base.get_input_embeddings().weight[:49152].mean(0)
    rows = adapter_of(whole / "run")[f"base_model.model.model.embed_tokens.{DELTA}"]
    assert rows.shape == (2, 96) and (rows - mean).abs().max() > 1e-3, "they were trained"
    settings = json.loads((whole / "run/adapter/qfsdp_base.json").read_text())
    assert settings["model"]["mean_rows"] == [49152, 49216]
    assert settings["tokenizer"]["path"] == "." and "new_tokens" not in settings["tokenizer"]

    model = ModelConfig(str(whole / "model"), "fp32", mean_rows=[49152, 49216])
    adapter, plain = str(whole / "run/adapter"), QuantizationConfig("none")
    given = (model, plain, adapter, ShardingConfig(strategy="ddp"), cpu_world())
    with torch.no_grad():
        ours = load_for_inference(*given)(ids)
        theirs = PeftModel.from_pretrained(base, adapter).eval()(ids).logits
    bound = 1e-5 * ours.abs().max()
    tokens = slice(0, 49154)  # rows beyond are theirs, with noise
    assert (ours - theirs)[..., tokens].abs().max() <= bound

    words = [f"adapter={adapter}", "quantization.format=none"]
    argv = ["--config", str(ROOT / "configs/merge.yaml"), *words]
    run_recipe("merge", [*argv, "dtype=fp32", f"output_dir={whole}/merged"])
    assert AutoTokenizer.from_pretrained(whole / "merged")(TEXT).input_ids == ids[0].tolist()
    merged = AutoModelForCausalLM.from_pretrained(whole / "merged", dtype=torch.float32).eval()
    assert merged.config.vocab_size == len(merged.get_input_embeddings().weight) == 49216
    with torch.no_grad():
        assert (merged(ids).logits - ours).abs().max() <= bound

    gguf = pytest.importorskip("gguf")
    recipe = load_recipe("export")
    argv = ["--config", str(ROOT / "configs/export.yaml"), *words, "gguf_type=f32"]
    cfg = load_config(recipe.Config, [*argv, f"output_dir={whole}/gguf"])
    recipe.check(cfg)
    recipe.main(cfg)
    read = gguf.GGUFReader(recipe.gguf_file(cfg))
    names = read.fields["tokenizer.ggml.tokens"].contents()
    assert names[49152:49154] == NEW and len(names) == 49216
    table = next(t for t in read.tensors if t.name == "token_embd.weight")
    assert torch.equal(torch.tensor(table.data)[49152:49154], rows)


def test_an_answer_that_ends_with_a_new_token(tmp_path: Path) -> None:
    """Merged, in 4 bits for vLLM and in GGUF: the files know the token, and that answers end."""
    gguf = pytest.importorskip("gguf")
    backend = tokenizer_of("gpt-2", specials=["<s>", "</s>"])
    model = write_tiny_model(tmp_path / "model", vocab_size=512, intermediate_size=576)
    write_folder(model, backend)
    first = backend.get_vocab_size()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "2?", "answer": "2"}) + "\n")
    words = [
        *("--config", str(ROOT / "configs/smollm2_135m_new_tokens.yaml"), f"model.path={model}"),
        *(f"dataset.source={tmp_path}/rows.jsonl", "model.dtype=fp32", "max_steps=1"),
        *("batch_size=1", "metric_logger=null", "report=false", "preflight=false"),
        *("tokenizer.new_tokens=['<|im_start|>','<|im_end|>']", "tokenizer.chat_template=chatml"),
        *("quantization.format=none", f"output_dir={tmp_path}/run"),
    ]
    run_recipe("qdora_distributed", words)
    given = [f"adapter={tmp_path}/run/adapter", "quantization.format=none"]
    for name, more in (
        ("merge", ["dtype=fp32"]),
        ("export", ["format=w4a16", "group_size=32"]),
        ("export", ["format=gguf"]),
    ):
        output = tmp_path / more[0].split("=")[1]
        config = ["--config", str(ROOT / f"configs/{name}.yaml"), f"output_dir={output}"]
        run_recipe(name, [*config, *given, *more])
        if "gguf" not in more[0]:
            ends = json.loads((output / "generation_config.json").read_text())["eos_token_id"]
            assert ends == [first + 1, 1]
            assert AutoTokenizer.from_pretrained(output)("<|im_end|>").input_ids == [first + 1]
    fields = gguf.GGUFReader(tmp_path / "gguf/gguf-Q8_0.gguf").fields
    assert fields["tokenizer.ggml.eot_token_id"].contents() == first + 1
    assert 'stop "<|im_end|>"' in (tmp_path / "gguf/gguf-Q8_0.Modelfile").read_text()


@pytest.mark.long
def test_generated_from_the_adapter_alone(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No key of model, rows or tokenizer; evaluation too."""
    argv = ["--config", str(ROOT / "configs/generate.yaml"), f"adapter={whole}/run/adapter"]
    run_recipe("generate", [*argv, "prompt=2 + 3?", "sampling.max_new_tokens=4"])
    cfg = load_config(load_recipe("generate").Config, argv)
    assert cfg.model.mean_rows == [49152, 49216]
    assert cfg.tokenizer.build().encode(NEW[0], add_eos=False) == [49152]
    assert capsys.readouterr().out


@pytest.mark.long
def test_three_ranks_and_a_resumed_run(whole: Path, smollm2_dir: Path, tmp_path: Path) -> None:
    """Three ranks that split the vocabulary compute what one does; a resumed run goes on bit for
    bit."""
    words = shop(tmp_path, smollm2_dir)
    three = [*words, f"output_dir={tmp_path}/three", "sharding.vocabulary=split"]
    run_ranks(3, runs, [three])
    alone = adapter_of(whole / "run")
    for name, tensor in adapter_of(tmp_path / "three").items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-5, msg=name)
    half = [*words, f"output_dir={tmp_path}/half", "checkpoint.every_n_steps=2"]
    run_ranks(1, runs, [[*half, "max_steps=2"], [*half, "resume=auto"]])
    for name, tensor in adapter_of(tmp_path / "half").items():
        assert torch.equal(tensor, alone[name]), name


@pytest.mark.long
def test_weights_of_its_own(smollm2_dir: Path, tmp_path: Path) -> None:
    """An output layer that is not tied trains the rows too, unless whole modules are named."""
    words = shop(tmp_path, smollm2_dir, tied=False)
    run_ranks(1, runs, [[*words, f"output_dir={tmp_path}/run"]])
    found = adapter_of(tmp_path / "run")
    for name in ("lm_head", "model.embed_tokens"):
        assert found[f"base_model.model.{name}.{DELTA}"].shape == (2, 96)
    whole = [
        *words,
        f"output_dir={tmp_path}/whole",
        "adapter.modules_to_save=[embed_tokens,lm_head]",
    ]
    run_ranks(1, runs, [whole])
    assert adapter_of(tmp_path / "whole")["base_model.model.lm_head.weight"].shape == (49216, 96)


def test_tokens_before_that_have_no_rows(smollm2_dir: Path, tmp_path: Path) -> None:
    """As a padding token that was added to the tokenizer alone; its row is the mean too."""
    words = [*shop(tmp_path, smollm2_dir), f"output_dir={tmp_path}/run"]
    write_tiny_model(tmp_path / "model", vocab_size=49150, hidden_size=96, tie_word_embeddings=True)
    recipe = load_recipe()
    recipe.check(cfg := load_config(recipe.Config, words))
    assert cfg.model.mean_rows == [49150, 49216]


def test_mistakes(smollm2_dir: Path, tmp_path: Path) -> None:
    """Each is one line, before anything is loaded."""
    words = [*shop(tmp_path, smollm2_dir), f"output_dir={tmp_path}/run"]
    for more, message in (
        ("tokenizer.new_tokens=['<|im_end|>']", "is token 2 already; expected new ones"),
        ("tokenizer.new_tokens=[<a>,<a>]", "'<a>'; expected different texts that are not empty"),
        ("tokenizer.new_tokens=<a>", "expected"),
        ("tokenizer.new_tokens=[]", "expected a list of texts"),
        ("adapter.trainable_token_indices=[49216]", "expected ids of this model, 0 to 49215"),
        ("adapter.targets=[q_proj,lm_head]", "is adapted; expected one of both"),
        ("adapter.method=miss", "expected lora, dora or adapter.modules"),
        ("model.quantize_cache=cache", "expected null with tokenizer.new_tokens"),
        ("model.mean_rows=[5]", r"expected \[first, rows\]"),
    ):
        with pytest.raises((UserError, InvalidField), match=message):
            recipe = load_recipe()
            recipe.check(load_config(recipe.Config, [*words, more]))
    for name in ("full_finetune_distributed", "reward_distributed"):
        config = {"f": "smollm2_135m_full", "r": "smollm2_135m_reward"}[name[0]]
        argv = ["--config", str(ROOT / f"configs/{config}.yaml"), "tokenizer.new_tokens=[<a>]"]
        with pytest.raises(UserError, match="expected null in this recipe; recipes/add_tokens"):
            load_config(load_recipe(name).Config, argv)
