"""The recipe that answers prompts, and its messages about mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data import hf_tokenizer
from qfsdp.evaluation.generation import generate
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.modules.adapters.config import AdapterConfig
from tests.models import adapted_model, cpu_world, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import (
    ROOT,
    load_recipe,
    needs_compiler,
    run_recipe,
    write_tiny_model_with_tokenizer,
)

CONFIG = str(ROOT / "configs/generate.yaml")
NEW = 6


@pytest.fixture(scope="module")
def model_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_with_tokenizer(tmp_path_factory.mktemp("tiny") / "model", smollm2_dir)


@pytest.fixture(scope="module")
def adapter(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AdapterConfig("dora", rank=2)
    model = adapted_model(model_dir, config, format="none")
    randomize_adapters(model)
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(model, config, str(model_dir), folder, cpu_world())
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Seven rows: texts and a chat, of various lengths."""
    rows: list[dict[str, Any]] = [
        {"id": n, "q": "Why? " * n, "empty": None} for n in (1, 9, 3, 5, 2, 7)
    ]
    rows.append({"id": 0, "q": [{"role": "user", "content": "Zażółć?"}], "empty": None})
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("generate")


def words(model_dir: Path, *more: str) -> list[str]:
    return ["--config", CONFIG, f"model.path={model_dir}", f"sampling.max_new_tokens={NEW}", *more]


def config(recipe: ModuleType, model_dir: Path, *more: str) -> Any:
    return load_config(recipe.Config, words(model_dir, *more))


def answer(words: list[str]) -> None:
    """The recipe; runs on every rank."""
    run_recipe("generate", words)


@pytest.mark.usefixtures("eager")
def test_a_file_on_two_ranks(
    recipe: ModuleType, model_dir: Path, adapter: Path, prompts: Path, tmp_path: Path, capfd: Any
) -> None:
    """The rows in their order, with the answers of one process."""
    more = [f"adapter={adapter}", f"prompts={prompts}", "prompt_column=q", "batch_size=2"]
    more += ["model.dtype=fp32", "sampling.temperature=1.0"]
    command = words(
        model_dir, *more, "sharding.strategy=full_shard", f"output={tmp_path}/a/o.jsonl"
    )
    run_ranks(2, answer, command)
    assert f"7 answers, {7 * NEW} tokens in " in capfd.readouterr().err
    text = (tmp_path / "a/o.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["id"] for row in rows] == [1, 9, 3, 5, 2, 7, 0] and "ż" in text
    assert len({row["completion"] for row in rows}) == 7

    cfg = config(recipe, model_dir, *more)
    recipe.check(cfg)
    recipe.main(cfg)
    assert capfd.readouterr().out == text

    world, tokenizer = cpu_world(), cfg.tokenizer.build()
    model = load_for_inference(cfg.model, cfg.quantization, cfg.adapter, cfg.sharding, world)
    for row in rows:
        (prompt,) = recipe.tokenized(cfg, tokenizer, [row])
        (found,) = generate(model, [prompt], cfg.sampling, set(), world)
        assert tokenizer.decode(found) == row["completion"]


@pytest.mark.usefixtures("eager")
def test_a_prompt_is_answered_piece_by_piece(
    recipe: ModuleType, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(
        recipe, "print", lambda text="", **options: pieces.append(text), raising=False
    )
    cfg = config(recipe, model_dir, "prompt=Why is it dark at night?", "system_prompt=Be short.")
    recipe.check(cfg)
    recipe.main(cfg)
    assert len(pieces) == NEW + 1 and "".join(pieces)
    tokenizer = hf_tokenizer(str(model_dir))
    chat = [{"role": "system", "content": "Be short."}]
    chat.append({"role": "user", "content": "Why is it dark at night?"})
    prompt = tokenizer.encode_chat(chat)
    assert recipe.tokenized(cfg, tokenizer, recipe.rows_of(cfg)) == [prompt]
    cfg = config(recipe, model_dir, "prompt=Why is", "chat_template=false")
    (text,) = recipe.tokenized(cfg, tokenizer, recipe.rows_of(cfg))
    assert text == tokenizer.encode("Why is", add_eos=False)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("eager")
def test_compiled(recipe: ModuleType, model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    more = [f"prompts={prompts}", "prompt_column=q", "model.dtype=fp32"]
    written = []
    for compiled in ("false", "true"):
        output = tmp_path / f"{compiled}.jsonl"
        cfg = config(recipe, model_dir, *more, f"compile={compiled}", f"output={output}")
        recipe.main(cfg)
        written.append(output.read_text(encoding="utf-8"))
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "prompt: null; expected"),
        (["prompt=a", "prompts=b.jsonl"], "prompts: 'b.jsonl' is not valid; .* one of the two"),
        (["prompt=a", "output=b.jsonl"], "output: .* it is for prompts"),
        (["prompt=a", "chat_template=false", "system_prompt=b"], "system_prompt: .*chat_template"),
        (["prompts=none.jsonl"], "prompts: 'none.jsonl': No such file .*; expected a .jsonl file"),
        (["prompts={prompts}"], "prompts.jsonl, line 1: no column 'prompt'; expected one of id, q"),
        (["prompts={prompts}", "prompt_column=empty"], "prompt 1 of 7: expected a text, or a list"),
        (["prompts={prompts}", "prompt_column=q", "output={prompts}"], "output: .* exists already"),
        (
            ["prompts={prompts}", "prompt_column=q", "output={prompts}/o"],
            "output: .*cannot be writ",
        ),
        (["prompts={prompts}", "prompt_column=q", "batch_size=0"], "batch_size: 0 is not valid"),
        (["prompt=a", "adapter=nowhere"], "nowhere does not exist; expected an adapter in PEFT's"),
        (["prompt=a", "adapter={other}"], "adapter_model.safetensors: .* has shape"),
        (["prompt=a", "model.path=nowhere"], "nowhere"),
        (["prompt=a", "tokenizer.path=nowhere"], "tokenizer.path: nowhere has no tokenizer.json"),
        (["prompt=a", "sampling.top_p=0"], "sampling.top_p: 0.0 is not valid; .* above 0"),
        (["prompt=a", "sampling.temperature=-1"], "sampling.temperature: -1.0 is not valid"),
        (
            ["prompt=a", "sampling.max_new_tokens=250"],
            "250 after .* tokens of prompt 1; .* 256 pos",
        ),
        (["prompt=a", "sampling.max_tokens=2"], "unknown key 'sampling.max_tokens'"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    more: list[str],
    message: str,
    recipe: ModuleType,
    model_dir: Path,
    prompts: Path,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    other = tmp_path / "other"
    if "adapter={other}" in more:
        from safetensors.torch import load_file, save_file

        other.mkdir()
        (other / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        tensors = {key: t[..., :-1].contiguous() for key, t in tensors.items()}
        save_file(tensors, other / "adapter_model.safetensors")
    given = [word.format(prompts=prompts, other=other) for word in more]
    with pytest.raises(UserError, match=message) as caught:
        recipe.check(config(recipe, model_dir, *given))
    assert "\n" not in str(caught.value)
