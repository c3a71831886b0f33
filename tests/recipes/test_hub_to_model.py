"""A user's way from a hub name to a model of their own, by command, against a hub of our own."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.hub_server import HubServer
from tests.tiny import write_tiny_model_with_tokenizer
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.long]
BASE = "org/tiny"
QUESTION = "What is 3 + 4?"


def qfsdp(folder: Path, hub: HubServer, *words: str, status: int = 0) -> tuple[str, str]:
    """Runs the command as an installed one; its standard output and standard error."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_TOKEN": "hf_write",
        "HF_HUB_DISABLE_XET": "1",
        "QFSDP_EAGER_KERNELS": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-m", "qfsdp.cli.command", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def test_hub_name_to_trained_generated_merged_and_pushed(tmp_path: Path, smollm2_dir: Path) -> None:
    model = write_tiny_model_with_tokenizer(tmp_path / "served", smollm2_dir, hidden_size=96)
    work = tmp_path / "work"
    work.mkdir()
    rows = [{"question": f"What is {n} + 4?", "answer": str(n + 4)} for n in range(40)]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with HubServer() as hub:
        hub.add(BASE, model)
        train = [
            *("recipes/qdora_distributed", "--config", "configs/smollm2_135m_qdora.yaml"),
            *(f"model.path={BASE}", "dataset.source=rows.jsonl", "output_dir=run"),
            *("push_to_hub=me/tuned", "validation.sets=null", "~metric_logger", "max_steps=3"),
        ]
        _, stderr = qfsdp(
            work, hub, "run", *train, "dataset.source=none.jsonl", "~validation", status=2
        )
        assert "none.jsonl" in stderr.splitlines()[-1]
        assert hub.served["model.safetensors"] < 110_000  # the header only
        hub.served.clear()

        stdout, _ = qfsdp(work, hub, "run", "--nproc_per_node", "2", *train, "~validation")
        assert f"pushed to {hub.url}/me/tuned" in stdout
        size = (model / "model.safetensors").stat().st_size
        assert size <= hub.served["model.safetensors"] < size + 110_000  # one download, one header

        folder = work / "run/adapter"
        written = json.loads((folder / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == BASE
        assert yaml.safe_load((work / "run/config.yaml").read_text())["model"]["path"] == BASE
        umask = os.umask(0)
        os.umask(umask)
        for file in folder.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask, file
        card = (folder / "README.md").read_text()
        head = yaml.safe_load(card.split("---\n")[1])
        assert head["base_model"] == BASE and head["library_name"] == "peft"
        for part in ("DoRA, rank 16", "rows.jsonl", "| updates | 3 |", "training loss, last"):
            assert part in card, card
        pushed = hub.repositories["me/tuned"]
        assert pushed.private
        for file in folder.iterdir():
            assert (pushed.revisions["main"] / file.name).read_bytes() == file.read_bytes()

        hub.served.clear()
        base = [f"model.path={BASE}", "quantization.format=nf4"]
        generate = ["recipes/generate", "--config", "configs/generate.yaml", *base]
        stdout, _ = qfsdp(
            work,
            hub,
            "run",
            *generate,
            *("adapter=me/tuned", f"prompt={QUESTION}", "sampling.max_new_tokens=4"),
        )
        assert stdout.strip()
        weights = {"adapter_config.json", "adapter_model.safetensors", "qfsdp_base.json"}
        assert set(hub.served) <= weights | {"tokenizer.json", "tokenizer_config.json"}

        merge = ["recipes/merge", "--config", "configs/merge.yaml", *base, "model.dtype=bf16"]
        hub.uploads_fail = True
        _, stderr = qfsdp(
            work,
            hub,
            "run",
            *merge,
            *("adapter=run/adapter", "output_dir=merged", "push_to_hub=me/merged"),
        )
        assert "hf upload me/merged merged . --private" in stderr

    from transformers import AutoModelForCausalLM, AutoTokenizer

    head = yaml.safe_load((work / "merged/README.md").read_text().split("---\n")[1])
    assert head["library_name"] == "transformers" and head["base_model"] == BASE
    tokenizer = AutoTokenizer.from_pretrained(work / "merged")
    merged = AutoModelForCausalLM.from_pretrained(work / "merged", dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = merged.generate(**ids, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > ids["input_ids"].shape[1]
