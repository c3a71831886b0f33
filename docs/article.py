"""Writes `configs/article_*.yaml`: the runs of Answer.AI's article on QDoRA, with its settings.

    python docs/article.py            writes them
    python docs/article.py --check    status 1 if they are not what would be written

Full finetuning, QLoRA, QDoRA and Llama-Pro of Llama-2-7B and Llama-3-8B on 10,000 and 100,000
problems of Orca-Math. The settings are those of `train.py` and `train_orca_math.sh` of
https://github.com/AnswerDotAI/fsdp_qlora at the time of the article
(https://www.answer.ai/posts/2024-04-26-fsdp-qdora-llama3.html).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"llama2": "meta-llama/Llama-2-7b-hf", "llama3": "meta-llama/Meta-Llama-3-8B"}
ROWS = {"10k": 10_000, "100k": 100_000}
# Method -> its title, and rows -> (batch_size, gradient_accumulation_steps).
METHODS = {
    "full": ("Full finetuning", {"10k": (1, 4), "100k": (2, 4)}),
    "qlora": ("QLoRA", {"10k": (4, 2), "100k": (4, 1)}),
    "qdora": ("QDoRA", {"10k": (4, 2), "100k": (4, 1)}),
    "llama_pro": ("Quantized Llama-Pro", {"10k": (4, 2), "100k": (4, 1)}),
}
LINEARS = "[k_proj, q_proj, v_proj, up_proj, down_proj, gate_proj]"
ADAPTER = """
quantization:
  format: nf4

adapter:
  method: {method}
  rank: 64
  alpha: {alpha}
  dropout: {dropout}
  targets: {linears}
"""
FULL = """
trainable:
  layers: {layers}
  dtype: fp32
"""
CONFIG = """# tune run recipes/{recipe} --config configs/{name}.yaml
# {title} on {model}: {rows:,} rows of Orca-Math, as in Answer.AI's article.
# `python docs/article.py` writes this file. What our other configs have instead, and why:
#   model: the chat model with its own template, so that answers end as it has learnt
#   lr: {usual} with cosine, the usual rate of the method
#   weight_decay 0, betas 0.9 and 0.999, eps 1e-8, clipping at 1: what most finetuning uses
#   packed: true, and less checkpointing: both are faster
{more}# Two settings are not the article's:
#   rows: the first of the dataset; the article takes the first after a shuffle
#   weights: trained ones in fp32; in the article's bf16 small updates are lost
# The number of GPUs is not published. batch_size and gradient_accumulation_steps are per GPU, from
# the published commands of Llama-3-8B{missing}.

output_dir: runs/{name}
resume: null # auto: continue from the newest checkpoint in output_dir

model:
  path: {path}

tokenizer:
  _component_: qfsdp.data.hf_tokenizer
  path: ${{model.path}}
  max_seq_len: ${{max_seq_len}}
  chat_template: >-
    {{{{ bos_token }}}}{{% for m in messages %}}{{% if m['role'] == 'user' %}}{{{{ '###Question:\\n'
    + m['content'] + '\\n###Answer:\\n' }}}}{{% else %}}{{{{ m['content'] + eos_token
    }}}}{{% endif %}}{{% endfor %}}

dataset:
  _component_: qfsdp.data.orca_math_dataset
  source: microsoft/orca-math-word-problems-200k
  max_rows: {max_rows}
{part}
sharding:
  strategy: full_shard
{offload}
activation:
  checkpointing: full

optimizer:
  _component_: torch.optim.AdamW
  lr: 1e-5
  betas: [0.9, 0.95]
  eps: 1e-5
  weight_decay: 0.1
  fused: true

lr_scheduler: null # a constant learning rate

batch_size: {batch} # rows per rank and micro-batch
gradient_accumulation_steps: {micro} # micro-batches per update
max_seq_len: 2048 # tokens
packed: false
epochs: 1
clip_grad_norm: null
"""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="status 1 if it would write others")
    args = parser.parse_args(words)
    wanted = {ROOT / "configs" / f"{name}.yaml": text for name, text in configs().items()}
    if args.check:
        return any(not f.is_file() or f.read_text() != text for f, text in wanted.items())
    for file, text in wanted.items():
        file.write_text(text)
    return 0


def configs() -> dict[str, str]:
    """Name -> text of every config."""
    return {
        f"article_{size}_{model}_{method}": text(size, model, method)
        for size in ROWS
        for model in MODELS
        for method in METHODS
    }


def text(size: str, model: str, method: str) -> str:
    title, batches = METHODS[method]
    batch, micro = batches[size]
    adapter, path = method in ("qlora", "qdora"), MODELS[model]
    more, usual, part, offload = "", "1e-4", "", ""
    if adapter:
        alpha, dropout = (16, 0.1) if method == "qlora" else (64, 0.0)
        kind = method.removeprefix("q")
        given = {"method": kind, "alpha": alpha, "dropout": dropout, "linears": LINEARS}
        part = ADAPTER.format(**given).rstrip("\n") + "\n"
        more = "#   alpha 128, dropout 0, all linears: the article leaves o_proj out\n"
    elif method == "full":
        part, usual = FULL.format(layers="all").rstrip("\n") + "\n", "1e-5"
        offload = "  cpu_offload: true\n" if size == "10k" else ""
    else:
        part = FULL.format(layers="expanded") + "\nquantization:\n  format: nf4\n"
        usual = "5e-5"
        made = f"models/{Path(path).name}-pro-0.1"
        more = (
            "#   new blocks: 25 % of the old ones, as in the paper; these 10 % come from\n"
            "#   `tune run recipes/block_expansion --config configs/block_expansion.yaml\n"
            f"#   model.path={path} output_dir={made}`\n"
        )
        path = made
    missing = "; those of Llama-2-7B are not" if model == "llama2" else ""
    missing = "; those of Llama-Pro are not" if method == "llama_pro" else missing
    return CONFIG.format(
        recipe="qdora_distributed" if adapter else "full_finetune_distributed",
        name=f"article_{size}_{model}_{method}",
        title=title,
        model={"llama2": "Llama-2-7B", "llama3": "Llama-3-8B"}[model],
        rows=ROWS[size],
        max_rows=ROWS[size],
        usual=usual,
        more=more,
        missing=missing,
        path=path,
        part=part,
        offload=offload,
        batch=batch,
        micro=micro,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
