"""Whole recipes on a GPU and on the CPU beside it: the same losses, the same answers.

    python benchmarks/gpu_recipes.py [--quick] [--only NAME ...] [--json recipes.json]

Each case runs a recipe as typed, on a small random model in fp32. The cases cover adapters, formats
of weights, offloading, preference tuning, mixtures, recurrent layers and models of transformers.
Several processes run the cases on the CPU, and several on the GPU. Their times say nothing of
speed. `--quick` takes a few cases, and the CPU for both where there is no GPU.

    recipes_equal, recipes_unequal   cases; a case that fails or that differs is unequal
    recipes_loss_difference          the largest of all cases, of losses and validation losses
    recipes/CASE                     1: equal
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, base_arguments, tell, write_figures
from qfsdp.common.devices import accelerator
from tests import hub_models
from tests.tiny import GPT_OSS, MOE, ROOT, run_recipe, write_tiny_model
from tests.toy_data import TOY_CONFIG

LIMIT = 5e-3  # of a loss of about 7; fp32 differs by 1e-5, an update of Adam enlarges it
GPU_PROCESSES, CPU_PROCESSES = 5, 5
QDORA, FULL = "qdora_distributed", "full_finetune_distributed"
SAMPLES, HELD = "tests.toy_data.Samples", "validation.sets.held"
PAIRS = [f"{key}._component_=tests.preferences.preferences" for key in ("dataset", HELD)]
LABELS = [f"{key}.labels=true" for key in ("dataset", HELD)]
CONFIG = """
output_dir: {folder}/run
max_steps: 3
epochs: 3
validation:
  eval_every: 3
  sets: {{held: {{_component_: tests.toy_data.Samples, size: 5, seed: 3}}}}
"""
SEVERAL = ["~dataset", "global_batch_size=4"]
for seed, name in enumerate(("lora", "dora"), 1):
    data = f"{{_component_: {SAMPLES}, seed: {seed}}}"
    SEVERAL.append(f"adapters.{name}={{method: {name}, rank: 4, dataset: {data}}}")
EXPERTS = ["adapter.method=lora", "quantization.format=nf4"]
OF_HUB = [*EXPERTS, f"adapter.targets=[all-linear,{','.join(hub_models.EXPERT_NAMES)}]"]
TEACHER = ["teacher.model.path=${model.path}", "teacher.model.dtype=fp32"]


@dataclass(frozen=True)
class Case:
    """A recipe, its words, and its model: "tiny" (ours), or one of tests/hub_models.py."""

    words: tuple[str, ...] = ()
    recipe: str = QDORA
    model: str = "tiny"
    changes: tuple[tuple[str, Any], ...] = ()  # of the tiny model's config


def case(*words: str, recipe: str = QDORA, model: str = "tiny", **changes: Any) -> Case:
    return Case(words, recipe, model, tuple(changes.items()))


def of_transformers(name: str) -> Case:
    mixture = hub_models.adapter_of(name).method == "lora" or name == "minimax_m2"
    words = OF_HUB if mixture else []
    return case("model.implementation=transformers", *words, model=name)


HUB = ["qwen3_5", "gemma4", "deepseek_v3", "lfm2", "llama", "qwen3_5_moe", "glm4_7", "gemma4_moe"]
HUB += ["gpt2", "falcon", "gemma3", "qwen3_next", "nemotron_h", "minimax_m2", "exaone4"]
CASES: dict[str, Case] = {
    "packed": case("packed=true"),
    "hub_packed": case("packed=true", "model.implementation=transformers", model="llama"),
    "answers": case(recipe="generate"),
    "planned": case("preflight=true", "global_batch_size=4"),
    "hqq_compiled": case("quantization.format=hqq", "compile=true"),
    "mxfp4_activations_on_host": case(
        "quantization.format=mxfp4", "activation.checkpointing=full", "activation.offload=true"
    ),
    "base_on_host": case("sharding.offload_base=cpu"),
    "base_on_disk": case("sharding.offload_base=disk", "model.quantize_cache=${output_dir}-cache"),
    "parameters_on_host": case("sharding.cpu_offload=true"),
    "tiles": case("activation.tile_tokens=16", "activation.checkpointing=full"),
    "miss": case("adapter.method=miss"),
    "oft": case("adapter.method=oft", "adapter.block_size=32", "adapter.targets=[q_proj,o_proj]"),
    "ia3": case("adapter={method: ia3}", "optimizer.lr=0.01"),
    "pissa": case("adapter.method=lora", "adapter.init=pissa"),
    "loftq": case("adapter.init=loftq"),
    "lora_plus": case("adapter.lora_plus_ratio=8"),
    "whole_head": case("adapter.modules_to_save=[lm_head]", "sharding.vocabulary=split"),
    "rows_of_tokens": case("adapter.trainable_token_indices={embed_tokens: [5, 9, 17]}"),
    "qwen3_5": case(model="qwen3_5"),
    "qwen3_5_packed": case("packed=true", model="qwen3_5"),
    "qwen3_5_answers": case(recipe="generate", model="qwen3_5"),
    "qwen3_5_moe": case(*EXPERTS, model="qwen3_5_moe"),
    "gpt_oss": case(*EXPERTS, "packed=true", **GPT_OSS),
    "qwen3_moe": case(*EXPERTS, "packed=true", **MOE),
    "full": case("trainable.layers=all", recipe=FULL),
    "one_layer": case("trainable.layers=[1]", "quantization.format=nf4", recipe=FULL),
    "in_backward": case(
        "trainable.layers=all", "optimizer_in_backward=true", "clip_grad_norm=null", recipe=FULL
    ),
    "expanded": case("trainable.layers=expanded", "quantization.format=nf4", recipe=FULL),
    "dpo": case(*PAIRS, recipe="dpo_distributed"),
    "dpo_packed": case(*PAIRS, "packed=true", recipe="dpo_distributed"),
    "kto": case(*PAIRS, *LABELS, "loss=kto", "batch_size=4", recipe="dpo_distributed"),
    "hub_dpo": case(
        *PAIRS, "model.implementation=transformers", recipe="dpo_distributed", model="gemma4"
    ),
    "reward": case(*PAIRS, recipe="reward_distributed"),
    "distilled": case(*TEACHER, "distillation.divergence=jsd", recipe="distill_distributed"),
    "several": case(*SEVERAL, recipe="several_adapters"),
    **{f"hub_{name}": of_transformers(name) for name in HUB},
    "hub_answers": case("model.implementation=transformers", recipe="generate", model="gemma4"),
}  # fmt: skip
QUICK = ["answers", "several", "hub_llama"]


# ---- one case, on the device of this process -----------------------------------------------------


def write_model(given: Case, folder: Path) -> None:
    from tests.data.test_tokenizer import CHATML, byte_level, write_folder

    folder.mkdir(parents=True)
    if given.model != "tiny":
        hub_models.save_hub_model(given.model, folder)
    else:
        write_tiny_model(folder, **dict(given.changes))
    write_folder(folder, byte_level(), chat_template=CHATML, eos_token="<|im_end|>")
    if "trainable.layers=expanded" in given.words:
        old = folder.rename(folder.with_name("old"))
        words = [f"model.path={old}", f"output_dir={folder}", "rate=null", "new_blocks=2"]
        run_recipe(
            "block_expansion", ["--config", str(ROOT / "configs/block_expansion.yaml"), *words]
        )


def answers(given: Case, folder: Path) -> list[str]:
    model, output, prompts = (folder / name for name in ("model", "out.jsonl", "in.jsonl"))
    asked = ["Why?", "What is 17 + 25, and why?", "x" * 40]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    words = [f"model.path={model}", f"tokenizer.path={model}", "model.dtype=fp32", *given.words]
    words.append("quantization.format=mxfp4")  # NF4 has other bits on GPUs, as in bitsandbytes
    words += [f"prompts={prompts}", f"output={output}", "sampling.max_new_tokens=40"]
    run_recipe("generate", ["--config", str(ROOT / "configs/generate.yaml"), *words])
    return [json.loads(line)["completion"] for line in output.read_text().splitlines()]


def result(given: Case, folder: Path) -> list[Any]:
    """The losses of a run, or the answers of a model."""
    write_model(given, folder / "model")
    if given.recipe == "generate":
        return answers(given, folder)
    (folder / "config.yaml").write_text((TOY_CONFIG + CONFIG).format(folder=folder))
    one_adapter = given.recipe not in (FULL, "several_adapters")
    words = [*(["adapter={rank: 4, alpha: 8}"] if one_adapter else []), *given.words]
    if accelerator() is None and "compile=true" in words:  # minutes of a C++ compiler
        words.remove("compile=true")
    run_recipe(given.recipe, ["--config", f"{folder}/config.yaml", *words])
    found = []
    for file in sorted((folder / "run").rglob("metrics.jsonl")):
        for line in file.read_text().splitlines():
            found += [value for key, value in json.loads(line).items() if key.endswith("loss")]
    assert found, "no losses"
    return found


def work(names: list[str], folder: Path) -> None:
    """Runs cases in turn; each result, or the error, goes to a file."""
    import torch

    torch.set_num_threads(1)
    for name in names:
        since, found = time.perf_counter(), dict[str, Any]()
        try:
            found["result"] = result(CASES[name], folder / name)
        except (Exception, SystemExit):
            found["error"] = traceback.format_exc()[-2000:]
        found["seconds"] = round(time.perf_counter() - since, 1)
        unfinished = folder / f"{name}.part"
        unfinished.write_text(json.dumps(found))
        unfinished.rename(folder / f"{name}.json")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter as it shuts down


# ---- all cases, on both --------------------------------------------------------------------------


def start(device: str, names: list[str], folder: Path, processes: int) -> list[Any]:
    """Processes that share the cases out."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "QFSDP_EAGER_KERNELS": "1"}
    folder.mkdir()
    started = []
    for part in range(min(processes, len(names))):
        words = [sys.executable, __file__, "--work", str(folder), "--only", *names[part::processes]]
        with open(folder / f"{part}.log", "w") as log:
            started.append(
                subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    return started


def difference(one: list[Any], other: list[Any]) -> float:
    """The largest of losses; of answers 0 if they are equal, else infinite."""
    if len(one) != len(other) or any(isinstance(value, str) for value in one):
        return 0.0 if one == other else float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def compare(name: str, cpu: dict[str, Any], gpu: dict[str, Any], found: Figures) -> None:
    """Adds a case to the figures, and prints it."""
    errors = [
        f"{where}: {of['error']}" for where, of in (("CPU", cpu), ("GPU", gpu)) if "error" in of
    ]
    away = float("inf") if errors else difference(cpu["result"], gpu["result"])
    equal = away <= LIMIT
    found["recipes_equal" if equal else "recipes_unequal"] += 1
    found[f"recipes/{name}"] = float(equal)
    if away < float("inf"):
        found["recipes_loss_difference"] = max(found["recipes_loss_difference"], away)
    state = "equal" if equal else "UNEQUAL"
    print(f"{state:8}{name:28}{away:9.2g}  {cpu['seconds']:5} s  {gpu['seconds']:5} s", flush=True)
    for error in errors:
        print(error, flush=True)
    if not equal and not errors:
        print(f"  CPU {cpu['result']}\n  GPU {gpu['result']}", flush=True)


def arguments() -> argparse.Namespace:
    parser = base_arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="cases")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    names = args.only or (QUICK if args.quick else list(CASES))
    if args.work is not None:
        work(names, args.work)
    found: Figures = dict.fromkeys(
        ("recipes_equal", "recipes_unequal", "recipes_loss_difference"), 0.0
    )
    with tempfile.TemporaryDirectory() as work_folder:
        cpu, gpu = Path(work_folder, "cpu"), Path(work_folder, "gpu")
        processes = start("gpu", names, gpu, 1 if args.quick else GPU_PROCESSES)
        processes += start("cpu", names, cpu, 1 if args.quick else CPU_PROCESSES)
        waiting = list(names)
        while waiting:
            alive = any(process.poll() is None for process in processes)
            for name in [n for n in waiting if all((f / f"{n}.json").exists() for f in (cpu, gpu))]:
                both = [json.loads((folder / f"{name}.json").read_text()) for folder in (cpu, gpu)]
                compare(name, both[0], both[1], found)
                write_figures(args.json, found)
                waiting.remove(name)
            if waiting and not alive:
                break
            time.sleep(0.1)
        for name in waiting:  # the process that ran it has ended
            found["recipes_unequal"] += 1
            print(f"UNEQUAL {name}: not run to its end")
        for log in sorted(Path(work_folder).glob("*/*.log")) if waiting else ():
            print(f"{log.parent.name} {log.name}: {log.read_text()[-1500:]}")
    tell(found, args.json)


if __name__ == "__main__":
    main()
