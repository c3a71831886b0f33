"""A tiny model, rows, a finished run and a config for every recipe, all of which work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from tests.tiny import write_tiny_model

ROWS = 24


@dataclass
class GoodInputs:
    """Files that work; a bad input changes one thing.

    Fields:
        model: a random model folder with SmolLM2's tokenizer.
        rows: a JSONL file with the columns question and answer.
        pairs: one with the columns prompt, chosen and rejected.
        run: the output_dir of a finished run with two checkpoints.
        configs: recipe -> its YAML file.
    """

    folder: Path
    model: Path
    rows: Path
    pairs: Path
    run: Path
    configs: dict[str, Path]

    def command(self, recipe: str, *words: str) -> list[str]:
        """The words that run a recipe with its good config and `words`."""
        return ["run", f"recipes/{recipe}", "--config", str(self.configs[recipe]), *words]


def write_good_inputs(folder: Path) -> GoodInputs:
    """Writes everything; a child process trains the run."""
    tokenizer = prepare_model(cache_dir())
    sizes = {"vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    from tests.faults.bad_inputs import Case, in_child, run_case

    folder.mkdir(parents=True)
    model, rows = folder / "model", folder / "rows.jsonl"
    in_child(lambda: write_tiny_model(model, **sizes, **heads))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((tokenizer / name).read_bytes())
    lines = ({"question": f"{n} + {n}?", "answer": f"It is {2 * n}."} for n in range(ROWS))
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = folder / "pairs.jsonl"
    answers = ({"chosen": f"It is {2 * n}.", "rejected": f"It is {n}."} for n in range(1, ROWS))
    lines = ({"prompt": f"{n} + {n}?"} | both for n, both in enumerate(answers, 1))
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "text.txt").write_text("One sentence after the other. " * 40)
    run = folder / "run"
    configs = {}
    for recipe, tree in _trees(model, rows, folder).items():
        configs[recipe] = folder / f"{recipe}.yaml"
        configs[recipe].write_text(yaml.safe_dump(tree))
    good = GoodInputs(folder, model, rows, pairs, run, configs)
    work = folder / "training"
    work.mkdir()
    words = [f"output_dir={run}", "max_steps=4", "checkpoint.every_n_steps=2"]
    trained = run_case(Case("", "", good.command("qdora_distributed", *words)), work)
    if trained.status != 0:
        raise RuntimeError("\n".join(trained.errors))
    return good


def _trees(model: Path, rows: Path, folder: Path) -> dict[str, dict]:
    """Recipe -> the tree of its config."""
    tokenizer = {"_component_": "qfsdp.data.hf_tokenizer", "path": "${model.path}"}
    columns = {"prompt_column": "question", "answer_column": "answer"}
    dataset = {"_component_": "qfsdp.data.instruct_dataset", "source": str(rows), **columns}
    training = {
        "output_dir": "run",
        "model": {"path": str(model), "dtype": "fp32"},
        "tokenizer": {**tokenizer, "max_seq_len": "${max_seq_len}"},
        "dataset": dataset,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "batch_size": 2,
        "max_seq_len": 64,
        "max_steps": 2,
    }
    adapter = {"rank": 4, "alpha": 8}
    pairs = {"_component_": "qfsdp.data.preference_dataset", "source": str(folder / "pairs.jsonl")}
    endpoint = {"url": "http://127.0.0.1:9/v1", "model": "m"}  # nobody listens there
    base = {"model": {"path": str(model), "dtype": "fp32"}, "tokenizer": tokenizer}
    questions = {"source": str(rows), "question_column": "question", "answer_column": "answer"}
    return {
        "qdora_distributed": {**training, "adapter": adapter},
        "full_finetune_distributed": training,
        "dpo_distributed": {**training, "adapter": adapter, "dataset": pairs},
        "generate": {**base, "prompt": "2 + 2?", "sampling": {"max_new_tokens": 4}},
        "evaluate": {
            **base,
            "output": "out.json",
            "loss": {"rows": dataset},
            "text": {"text": {"file": str(folder / "text.txt"), "window": 32}},
            "exact_match": {"rows": {**questions, "max_rows": 2, "max_new_tokens": 4}},
            "batch_size": 2,
            "max_seq_len": 64,
        },
        "merge": {
            "model": {"path": str(model), "dtype": "fp32"},
            "adapter": str(folder / "run" / "adapter"),
            "output_dir": "merged",
        },
        "quantize": {"model": {"path": str(model)}, "output_dir": "quantized"},
        "chat": base,
        "serve": {**base, "port": 0},
        "export": {
            "model": {"path": str(model), "dtype": "fp32"},
            "adapter": str(folder / "run" / "adapter"),
            "quantization": {"format": "nf4"},
            "output_dir": "exported",
        },
        "judge": {"output_dir": "judged", "judge": endpoint, "candidates": {"a": endpoint}},
        "sweep": {
            "config": str(folder / "qdora_distributed.yaml"),
            "output_dir": "sweep",
            "gpu": "rtx4090",
            "grid": {"batch_size": [1, 2]},
        },
        "add_tokens": {
            "model": {"path": str(model)},
            "output_dir": "more",
            "new_tokens": ["<new>"],
        },
        "block_expansion": {"model": {"path": str(model)}, "output_dir": "expanded", "rate": 0.5},
    }
