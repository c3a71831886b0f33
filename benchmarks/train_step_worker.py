"""One contestant of `benchmarks/train_step.py`; runs as a process.

    python benchmarks/train_step_worker.py JOB

JOB is a `Job` as JSON. The process loads the model and writes a line of JSON to stdout. Then it
takes one train step for every line on stdin and answers with a line of JSON: seconds, loss, memory.
A step is forward, backward, clipping to norm 1, AdamW. All contestants get the same tokens and
start from the same adapters.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.memory import PeakMemory, private_bytes
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.low_rank.linear import low_rank_linears
from qfsdp.modules.rope import RopeConfig
from qfsdp.modules.targets import LINEAR_NAMES
from qfsdp.modules.transformer import Decoder

ROOT = Path(__file__).parent.parent
ALPHA, LEARNING_RATE, CLIP, SEED = 32, 1e-4, 1.0, 0
ADAPTED = [name for name in LINEAR_NAMES if name != "lm_head"]

Step = Callable[[Tensor, Tensor], float]  # tokens and their targets -> mean loss


@dataclass(frozen=True)
class Job:
    """A contestant and the size of its steps."""

    library: Literal["ours", "peft", "torchtune"]
    method: Literal["lora", "dora", "rslora", "miss", "oft", "pissa"]  # PEFT: the first two
    base: Literal["nf4", "none"]
    rank: int
    model: str  # a Hugging Face folder
    batch: int
    seq: int
    device: str
    dtype: Literal["bf16", "fp32"] = "bf16"  # of products, and of the base if it is not quantized
    compile: bool = False  # ours only
    checkpointing: Literal["none", "selective", "full"] = "none"  # ours only


def ours(job: Job) -> Step:
    """The recipe's `train_step`, which includes the refresh of DoRA's norms."""
    from qfsdp.config.component import Component
    from qfsdp.config.recipe_files import load_recipe
    from qfsdp.data import Batch
    from qfsdp.modules.quantized_linear import QuantizationConfig

    recipe = load_recipe(ROOT / "recipes/qdora_distributed.py")
    cfg = recipe.Config(
        output_dir="unused",
        model=recipe.ModelConfig(job.model, job.dtype),
        tokenizer=None,
        dataset=None,
        optimizer=Component("torch.optim.AdamW", {"lr": LEARNING_RATE, "fused": True}),
        quantization=QuantizationConfig(job.base),
        adapter=adapter_of(job),
        activation=ActivationConfig(job.checkpointing),
        compile=job.compile,
        seed=SEED,
    )
    world = recipe.init_world()
    clock = recipe.StepClock(world.device)
    model = recipe.load_model(cfg, world)
    optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(model))

    def step(tokens: Tensor, labels: Tensor) -> float:
        batches = [Batch(tokens, labels, tokens.numel())]
        return recipe.train_step(model, optimizer, None, batches, CLIP, world, clock)["loss"]

    return step


def adapter_of(job: Job) -> AdapterConfig:
    """Section `adapter` of a job."""
    if job.method == "rslora":
        return AdapterConfig("lora", job.rank, ALPHA, rslora=True)
    if job.method == "pissa":
        return AdapterConfig("lora", job.rank, ALPHA, init="pissa")
    return AdapterConfig(job.method, job.rank, ALPHA)


def peft(job: Job) -> Step:
    """PEFT on a transformers model, with bitsandbytes' NF4 if the base is quantized.

    bf16 runs under autocast, as in transformers' Trainer with `bf16: true`. Without autocast PEFT
    multiplies by its adapters in fp32: QLoRA at 4 x 512 tokens took 4.3 s and 5.2 GB instead of
    3.7 s and 4.4 GB. `prepare_model_for_kbit_training` is not called: it casts the norms and the
    output layer to fp32 and turns checkpointing on, which no other contestant does. DoRA's
    magnitudes are set to fp32 norms; PEFT's own start is rounded to bf16, up to 0.4 % off.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils.integrations import dequantize_module_weight
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": COMPUTE_DTYPES[job.dtype], "device_map": {"": job.device}}
    if job.base == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=COMPUTE_DTYPES[job.dtype],
        )
    base = AutoModelForCausalLM.from_pretrained(job.model, **options)
    base.config.use_cache = False  # as its Trainer does
    config = LoraConfig(
        r=job.rank,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules=ADAPTED,
        use_dora=job.method == "dora",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config).train()
    for name, a in initial_adapters(job).items():
        layer: Any = model.get_submodule(f"base_model.model.{name}")
        layer.lora_A["default"].weight.data.copy_(a)
        if job.method == "dora":
            norms = dequantize_module_weight(layer.get_base_layer()).float().norm(dim=1)
            layer.lora_magnitude_vector["default"].weight.data.copy_(norms)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(job.device, torch.bfloat16, enabled=job.dtype == "bf16"):
            return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    return training_step(model, loss, job.device)


def torchtune(job: Job) -> Step:
    """The setup of torchtune's `lora_finetune_single_device`, without its data and logs.

    Adapters and optimizer have the job's dtype, and NF4 is torchao's. torchtune rotates
    neighbouring rows of a head and Hugging Face rotates halves, so torchtune permutes the rows of
    q and k as it converts them. A has no such rows, and B is zero.
    """
    from torchtune import training
    from torchtune.models.convert_weights import _FROM_HF, get_mapped_key, hf_to_tune
    from torchtune.models.llama3 import lora_llama3
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    config = DecoderConfig.from_dir(job.model)
    rope = config.layers[0].rope
    if rope is None or rope.scaling != RopeConfig.scaling:
        raise ValueError(f"{rope}: not set up for torchtune here")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    with training.set_default_dtype(COMPUTE_DTYPES[job.dtype]), torch.device(job.device):
        model = lora_llama3(
            ["q_proj", "k_proj", "v_proj", "output_proj"],
            apply_lora_to_mlp=True,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            embed_dim=config.hidden_size,
            max_seq_len=job.seq,
            intermediate_dim=config.intermediate_size,
            norm_eps=config.norm.eps,
            rope_base=rope.theta,  # type: ignore[arg-type]
            lora_rank=job.rank,
            lora_alpha=ALPHA,
            use_dora=job.method == "dora",
            quantize_base=job.base == "nf4",
        )
    if config.tie_word_embeddings:
        model.output.weight = model.tok_embeddings.weight
    set_trainable_params(model, get_adapter_params(model))
    for file in sorted(Path(job.model).glob("*.safetensors")):
        state = hf_to_tune(load_file(file), heads, kv_heads, config.hidden_size, config.head_dim)
        model.load_state_dict(state, strict=False)
    for name, a in initial_adapters(job).items():
        key = get_mapped_key(f"{name}.weight", _FROM_HF).removesuffix(".weight")
        model.get_submodule(key).lora_a.weight.data.copy_(a)
    loss_fn = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_fn.num_output_chunks)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return loss_fn(model(tokens), labels)

    return training_step(model.train(), loss, job.device)


LIBRARIES = {"ours": ours, "peft": peft, "torchtune": torchtune}


def training_step(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], device: str) -> Step:
    """A train step like that of Trainer and of torchtune's recipe, with fused AdamW."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def step(tokens: Tensor, labels: Tensor) -> float:
        mean = loss(tokens.to(device), labels.to(device))
        mean.backward()
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return mean.item()

    return step


def initial_adapters(job: Job) -> dict[str, Tensor]:
    """Hugging Face name of every adapted linear -> our initial A; every B starts at zero."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(job.model))
    add_adapters(model, AdapterConfig("lora", job.rank, ALPHA))
    for _, module in low_rank_linears(model):
        module.lora_A = nn.Parameter(torch.empty_like(module.lora_A, device="cpu"))
    init_adapters(model, SEED)
    return {name: module.lora_A.data for name, module in low_rank_linears(model)}


def random_batch(job: Job, vocabulary: int, index: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of step `index`, `[batch, seq]` each; every position has a target."""
    generator = torch.Generator().manual_seed(index)
    drawn = torch.randint(0, vocabulary, (job.batch, job.seq + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def take_step(step: Step, batch: tuple[Tensor, Tensor], device: str) -> dict[str, float]:
    """Seconds, CPU time and loss of a step, and the memory after it (on a GPU: the peak)."""
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    since, cpu_since = time.perf_counter(), time.process_time()
    loss = step(*batch)
    if on_gpu:
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - since, time.process_time() - cpu_since
    peak = torch.cuda.max_memory_allocated() if on_gpu else private_bytes()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "cpu": cpu, "loss": loss, "peak": peak, "rss": rss}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    step = LIBRARIES[job.library](job)
    vocabulary = DecoderConfig.from_dir(job.model).vocab_size
    print(json.dumps({"idle": 0.0}), file=answers)
    at_rest = time.process_time()
    for index, line in enumerate(sys.stdin):
        idle = time.process_time() - at_rest
        # Sampling runs in a thread, so sampled steps are not timed.
        memory = PeakMemory() if line.strip() == "sample" and job.device == "cpu" else None
        answer = take_step(step, random_batch(job, vocabulary, index), job.device)
        if memory is not None:
            answer["peak"] = memory.stop() + memory.before
        print(json.dumps(answer | {"idle": idle}), file=answers)
        at_rest = time.process_time()


if __name__ == "__main__":
    main()
