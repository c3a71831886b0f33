"""What a base model was trained with is what generate, evaluate and the merged model use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qfsdp.checkpoint.saved_template import TEMPLATE_FILE, build_tokenizer, model_template
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.config.component import Component
from qfsdp.config.load import load_config
from qfsdp.data import HFTokenizer, hf_tokenizer
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.prompts import stop_ids
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.data.test_tokenizer import CHAT, CHATML, byte_level, write_folder
from tests.models import cpu_world
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, run_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
CONFIG = """
model: {{path: {folder}/model, dtype: fp32}}
tokenizer: {{_component_: qfsdp.data.hf_tokenizer, path: "${{model.path}}"}}
dataset: {{_component_: qfsdp.data.chat_dataset, source: {folder}/rows.jsonl}}
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-3}}
adapter: {{method: lora, rank: 2}}
output_dir: {folder}/run
max_seq_len: 256
max_steps: 1
report: false
preflight: false
"""


def train(config: str, words: list[str], recipe_name: str) -> None:
    """A training recipe; runs on every rank."""
    recipe = load_recipe(recipe_name)
    cfg = load_config(recipe.Config, ["--config", config, *words])
    recipe.check(cfg)
    recipe.main(cfg)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base model without a chat template, rows, documents and a config."""
    write_tiny_model(tmp_path / "model")
    write_folder(tmp_path / "model", byte_level())
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 8)
    (tmp_path / "text.jsonl").write_text('{"text": "a document"}\n' * 8)
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "intermediate_size": 384,  # w4a16 needs whole groups of 64
    "vocab_size": 608,
    "sliding_window": None,
}


def qwen2_folder(folder: Path, says: str) -> list[int]:
    """Qwen2's base models: the template ends turns with <|im_end|>, eos is <|endoftext|>. The
    output layer is changed so that the model always says one token.

    Returns:
        The ids of the two tokens.
    """
    backend = byte_level()
    backend.add_special_tokens(["<|endoftext|>"])
    ends = [int(backend.token_to_id(token)) for token in ("<|im_end|>", "<|endoftext|>")]
    write_tiny_model(folder, **QWEN2 | {"eos_token_id": ends[1]})
    write_folder(folder, backend, chat_template=CHATML, eos_token="<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[1]}))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(1e-3)  # the last hidden states are about the embeddings
    tensors["model.embed_tokens.weight"].copy_(1 + 0.1 * tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"].mul_(1e-3)[backend.token_to_id(says)] = 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return ends


def answers_until_the_end(folder: Path, quantized: bool = False) -> tuple[list[int], list[int]]:
    """What transformers and we answer, of up to 5 tokens, the one that ended it included."""
    import transformers

    tokenizer = hf_tokenizer(str(folder))
    prompt = tokenizer.encode_chat(CHAT[:4])
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = oracle.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)
    theirs = found[0, len(prompt) :].tolist()
    if quantized:  # the format of vLLM, which we write and do not read
        return theirs, theirs
    config, world = ModelConfig(str(folder), "fp32"), cpu_world()
    given = (QuantizationConfig("none"), None, ShardingConfig("ddp"), world)
    model, stops = load_for_inference(config, *given), stop_ids(tokenizer, folder)
    sampling = SamplingConfig(max_new_tokens=5)
    (ours,) = generate(model, [prompt], sampling, stops, world, keep_stop=True)
    return theirs, ours


@pytest.mark.long
@pytest.mark.parametrize("says", ["<|im_end|>", "<|endoftext|>"])
def test_all_outputs_of_a_qwen2_base_stop_at_both_ends(folder: Path, says: str) -> None:
    """Merged, exported for vLLM and llama.cpp, finetuned whole: both tokens end an answer."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("compressed_tensors")
    shutil.rmtree(folder / "model")
    ends = qwen2_folder(folder / "model", says)
    token = ends[0] if says == "<|im_end|>" else ends[1]
    config = str(folder / "config.yaml")
    run_ranks(1, train, config, ["optimizer.lr=1e-6"], "qdora_distributed")
    words = ["~adapter", "optimizer.lr=1e-6", f"output_dir={folder}/full"]
    run_ranks(1, train, config, words, "full_finetune_distributed")
    base = [f"model.path={folder}/model", "model.dtype=fp32", "quantization.format=none"]
    base.append(f"adapter={folder}/run/adapter")
    argv = ["--config", str(ROOT / "configs/merge.yaml"), *base, "dtype=fp32"]
    run_recipe("merge", [*argv, f"output_dir={folder}/merged"])
    argv = ["--config", str(ROOT / "configs/export.yaml"), *base]
    run_recipe("export", [*argv, "format=w4a16", "group_size=64", f"output_dir={folder}/w4a16"])
    for output in ("merged", "full/model", "w4a16"):
        settings = json.loads((folder / output / "generation_config.json").read_text())
        assert settings["eos_token_id"] == ends, output
        assert stop_ids(hf_tokenizer(str(folder / output)), folder / output) == set(ends)
        theirs, ours = answers_until_the_end(folder / output, output == "w4a16")
        assert theirs == ours == [token], output
    again = [f"model.path={folder}/merged", "adapter=null", *base[1:3]]
    for name, of in (("gguf", argv), ("gguf of merged", [*argv[:2], *again])):
        run_recipe("export", [*of, "gguf_type=f32", f"output_dir={folder}/{name}"])
        (file,) = (folder / name).glob("*.gguf")
        fields = gguf.GGUFReader(file).fields
        found = [fields[f"tokenizer.ggml.{kind}_token_id"].contents() for kind in ("eot", "eos")]
        assert found == ends, name


def ids_of_transformers(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(folder))
    return list(oracle.apply_chat_template(CHAT[:4], add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("name", [pytest.param("auto", marks=pytest.mark.long), "chatml"])
def test_from_training_to_the_merged_model(folder: Path, name: str) -> None:
    words = [f"tokenizer.chat_template={name}"]
    run_ranks(1, train, str(folder / "config.yaml"), words, "qdora_distributed")
    adapter = folder / "run/adapter"
    trained = build_tokenizer(
        Component("qfsdp.data.hf_tokenizer", {"path": f"{folder}/model", "chat_template": name}),
        None,
    )
    assert (adapter / TEMPLATE_FILE).read_text() == trained.chat_template.template.text

    recipe = load_recipe("generate")
    argv = ["--config", str(ROOT / "configs/generate.yaml"), f"model.path={folder}/model"]
    cfg = load_config(recipe.Config, [*argv, f"adapter={adapter}", "prompt=Hi"])
    answering = build_tokenizer(cfg.tokenizer, cfg.adapter)
    assert isinstance(answering, HFTokenizer) and answering.chat_template.remark is None
    prompt = answering.encode_chat(CHAT[:4])
    assert prompt == trained.encode_chat(CHAT[:4])
    end = answering.special_tokens["<|im_end|>" if name == "chatml" else "</s>"]
    assert stop_ids(answering, cfg.model.folder) == {answering.eos_id, end}

    recipe = load_recipe("merge")
    argv = ["--config", str(ROOT / "configs/merge.yaml"), f"model.path={folder}/model"]
    argv += [f"adapter={adapter}", f"output_dir={folder}/merged"]
    cfg = load_config(recipe.Config, argv)
    recipe.check(cfg)
    recipe.main(cfg)
    assert ids_of_transformers(folder / "merged") == prompt
    settings = json.loads((folder / "merged/generation_config.json").read_text())
    assert settings["eos_token_id"] == ([end, 1] if name == "chatml" else 1)


@pytest.mark.long
def test_full_finetuning_and_documents(folder: Path) -> None:
    config = str(folder / "config.yaml")
    words = ["~adapter", "tokenizer.chat_template=plain", f"output_dir={folder}/full"]
    run_ranks(1, train, config, words, "full_finetune_distributed")
    prompt = ids_of_transformers(folder / "full/model")
    assert "### Assistant:\n" in build_tokenizer(
        Component("qfsdp.data.hf_tokenizer", {"path": f"{folder}/full/model"}), None
    ).decode(prompt)
    words = ["dataset._component_=qfsdp.data.text_dataset", f"dataset.source={folder}/text.jsonl"]
    words.append("tokenizer.max_seq_len=32")
    run_ranks(1, train, config, words, "qdora_distributed")
    assert (folder / "run/adapter/adapter_config.json").is_file()
    assert not (folder / "run/adapter" / TEMPLATE_FILE).exists()


def test_a_template_in_the_config_wins(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "run/adapter").mkdir(parents=True)
    (folder / "run/adapter" / TEMPLATE_FILE).write_text(CHATML)
    given = {"path": f"{folder}/model"}
    for setting, said in (("plain", True), (CHATML, False)):
        caplog.clear()
        component = Component("qfsdp.data.hf_tokenizer", given | {"chat_template": setting})
        built = build_tokenizer(component, str(folder / "run/adapter"))
        assert ("chat_template.jinja" in caplog.text) is said
        assert (built.chat_template.template.text == CHATML) is not said
    built = build_tokenizer(
        Component("qfsdp.data.hf_tokenizer", given), str(folder / "run/adapter")
    )
    assert built.chat_template.template.text == CHATML


def test_a_template_other_than_the_models_own_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run with the model's own template writes none; its tokenizer lies beside the adapter."""
    adapter = folder / "adapter"
    for place in (folder / "model", adapter):
        place.mkdir(exist_ok=True)
        write_folder(place, byte_level(), chat_template=CHATML)
    for setting, said in (("plain", True), (CHATML, False), ("auto", False)):
        caplog.clear()
        given = {"path": f"{folder}/model", "chat_template": setting}
        build_tokenizer(Component("qfsdp.data.hf_tokenizer", given), str(adapter))
        assert (f"trained with that of {adapter}" in caplog.text) is said


@pytest.mark.parametrize("given", ["generation_config.json", "config.json", None])
def test_a_merged_model_stops_as_the_models_own_template_ends(folder: Path, given: Any) -> None:
    """Qwen2's base models: the template ends turns with <|im_end|>, eos is <|endoftext|>."""
    model = folder / "model"
    write_folder(model, byte_level(), chat_template=CHATML)
    settings = json.loads((model / "config.json").read_text()) | {"eos_token_id": None}
    (model / "generation_config.json").unlink()
    for name, value in (("config.json", settings), (given, {"eos_token_id": 1})):
        if name is not None:
            old = settings if name == "config.json" else {}
            (model / name).write_text(json.dumps(old | value))
    tokenizer = hf_tokenizer(str(model))
    end = tokenizer.special_tokens["<|im_end|>"]
    written = model_template({}, model)
    assert json.loads(written["generation_config.json"])["eos_token_id"] == [end, 1]
    assert stop_ids(tokenizer, model) == {end, 1}
    (model / "generation_config.json").write_text(written["generation_config.json"])
    assert model_template({}, model) == {}
    write_folder(model, byte_level())  # no template: nothing is added
    assert model_template({}, model) == {}
