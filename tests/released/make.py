"""Makes tests/released/NAME with the code of a checkout; run it once for every release.

    git worktree add --detach /tmp/released COMMIT
    python tests/released/make.py /tmp/released NAME [KEY=VALUE ...]

The words change the run's config: `lr_scheduler=null` for a commit that cannot import torchtune's.
Writes what tests/checkpoint/test_released.py reads: a checkpoint from the middle of a QDoRA run,
the run's losses, its adapter, the base quantized, and the base with the adapter merged. The
model, random and of 50 KB in bf16, is the same for all of them. About 120 KB for each release.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = HERE / "model"
STEP = 4
CONFIG = """\
model: {path: MODEL, dtype: fp32}
tokenizer: {_component_: tests.toy_data.tokenizer}
dataset: {_component_: tests.toy_data.Samples}
optimizer: {_component_: torch.optim.AdamW, lr: 1e-2, eps: 1e-6, fused: true}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
adapter: {rank: 2, alpha: 4, dropout: 0.1}
max_seq_len: 64
batch_size: 4
epochs: 1
preflight: false
checkpoint: {every_n_steps: 4, keep_last: 99}
"""


def main(checkout: Path, name: str, *changes: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model = MODEL.relative_to(HERE.parents[1])  # no path of this machine is kept
        shutil.copytree(MODEL, work / model)
        (work / "config.yaml").write_text(CONFIG.replace("MODEL", str(model)))
        words = ["output_dir=run", *changes]
        run(checkout, work, "qdora_distributed", *words, config="config.yaml")
        run(checkout, work, "quantize", f"model.path={model}", "output_dir=quantized")
        words = [f"model.path={model}", "model.dtype=fp32", "adapter=run/adapter"]
        run(checkout, work, "merge", *words, "output_dir=merged")
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint = f"checkpoints/step_{STEP:08}"
        shutil.copytree(work / "run" / checkpoint, folder / "run" / checkpoint)
        shutil.copytree(work / "run/adapter", folder / "run/adapter")
        for file in ("config.yaml", "metrics.jsonl"):
            shutil.copy(work / "run" / file, folder / "run" / file)
        no_locks = shutil.ignore_patterns(".lock")
        shutil.copytree(work / "quantized", folder / "quantized", ignore=no_locks)
        (folder / "merged").mkdir()
        shutil.copy(work / "merged/model.safetensors", folder / "merged")


def run(checkout: Path, work: Path, recipe: str, *words: str, config: str | None = None) -> None:
    """Runs a recipe of the checkout in the folder `work`."""
    config = config or str(checkout / f"configs/{recipe}.yaml")
    command = [sys.executable, checkout / f"recipes/{recipe}.py", "--config", config, *words]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=work, env=environment, check=True)


def write_model() -> None:
    """Writes the model, once and for all: another one would have other losses."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.tiny import write_tiny_model

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    file = write_tiny_model(MODEL, **sizes, **heads) / "model.safetensors"
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((MODEL / "config.json").read_text())
    (MODEL / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
