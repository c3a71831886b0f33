"""Runs TRL's trainers over the jobs of a folder, in TRL's own environment.

    $QFSDP_TRL_PYTHON tests/trl_oracle.py FOLDER

FOLDER has `model`, `adapter` (a start for LoRA), `head` (one with a score head), and `jobs.json`:
name -> trainer ("DPO", "KTO", "CPO", "ORPO" or "Reward"), its options, and rows of token ids.
Writes `result.json`: name -> a list with the metrics of every update.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Special tokens are found within words too: "w1" would be found in "w12".
WORDS = ["<pad>", "<end>", *(f"w{number}" for number in range(2, 577))]


def tokenizer() -> Any:
    """A tokenizer of `WORDS`, whose ids are their places."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def text(ids: list[int]) -> str:
    return "".join(f" {WORDS[number]}" for number in ids)


def trainer_of(name: str) -> tuple[Any, Any]:
    import trl
    from trl.experimental import cpo, orpo

    place = {"CPO": cpo, "ORPO": orpo}.get(name, trl)
    return getattr(place, f"{name}Trainer"), getattr(place, f"{name}Config")


def run(folder: Path, job: dict[str, Any]) -> list[dict[str, float]]:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind, config = trainer_of(job["trainer"])
    losses: list[float] = []

    class Recorded(kind):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    adapter, build, labels = "adapter", AutoModelForCausalLM, {}
    if job["trainer"] == "Reward":
        adapter, build, labels = "head", AutoModelForSequenceClassification, {"num_labels": 1}
    model = build.from_pretrained(folder / "model", dtype="float32", **labels)
    model = PeftModel.from_pretrained(model, folder / adapter, is_trainable=True)
    rows = [
        {
            key: text(value) if isinstance(value, list) and not key.endswith("_ids") else value
            for key, value in row.items()
        }
        for row in job["rows"]
    ]
    args = config(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=job["batch_size"],
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_epsilon=job["eps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **job["options"],
    )
    trainer = Recorded(
        model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [entry | {"loss": loss} for entry, loss in zip(logged, losses, strict=True)]


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    results = {name: run(folder, job) for name, job in jobs.items()}
    (folder / "result.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
