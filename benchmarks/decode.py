"""Tokens per second of a finetuned model: merged or not, ours and transformers + PEFT.

    python benchmarks/decode.py [--quick] [--json decode.json] [--compile]

SmolLM2-135M-Instruct with adapters of rank 16 on all linears answers short prompts, one at a time
and ten at a time, with some new tokens each; rates include the pass over the prompts. bf16 (fp32 on
a CPU without bf16 products). The contestants take turns, and ratios are of the same round.

    merged_bf16            the LoRA adapter merged, weights not quantized
    merged_nf4             the same, quantized to NF4
    lora, dora             NF4 base, adapter not merged
    transformers_bf16      transformers on the merged folder
    peft_lora, peft_dora   PEFT on transformers' model in 4 bits (bitsandbytes NF4)

With --linears only the seven linears of one layer run, on one thread, with the adapter as in
training and folded, as at inference.

    tokens_per_s/WHO/BATCH       rates
    dora_over_lora/BATCH         ratio of the rates of dora and lora
    WHO_over_peft_WHO/BATCH      ratio of ours and PEFT's, for lora and dora
    linears/dora_over_lora/BATCH, linears/dora_over_lora_folded/BATCH    ratios of rates
    linears/folded_over_lora/BATCH                                       what folding gains
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.generate import Answer, by_transformers, ours, transformers
from benchmarks.timing import (
    Cases,
    Figures,
    Times,
    arguments,
    in_turns,
    ratios,
    spread,
    table,
    tell,
    usual_dtype,
    write_figures,
)
from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.checkpoint.weights.merge import Merge
from qfsdp.data import hf_tokenizer
from qfsdp.distributed.world import World
from qfsdp.evaluation.prompts import chat_tokens
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.folded import FoldedLinear
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.low_rank.linear import LowRankLinear, low_rank_linears
from qfsdp.modules.quantized_linear import QuantizationConfig, QuantizedLinear
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses import nf4

BATCHES = (1, 10)
SHAPES = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]


def write_adapter(method: Any, base: Path, into: Path, std: float = 0.01) -> Path:
    """An adapter of rank 16 on all linears, with numbers as after some training."""
    config, world = AdapterConfig(method, rank=16, alpha=32), World(torch.device("cpu"))
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(base))
    add_adapters(model, config)
    load_base(model, ModelWeights(base), world.device)
    init_adapters(model, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, linear in low_rank_linears(model):
            linear.lora_B.normal_(std=std, generator=generator)
            if linear.magnitude is not None:
                noise = torch.randn(linear.magnitude.shape, generator=generator)
                linear.magnitude.mul_(1 + 0.02 * noise)
    save_adapter(model, config, str(base), into / method, world)
    return into / method


def peft(base: Path, adapter: Path, dtype: torch.dtype, device: str) -> Answer:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    given: Any = {"dtype": dtype, "quantization_config": four_bit, "device_map": device}
    model = AutoModelForCausalLM.from_pretrained(base, **given)
    return by_transformers(PeftModel.from_pretrained(model, str(adapter)), device)


def contestants(
    base: Path, into: Path, name: Any, device: str, compile: bool, peers: bool
) -> dict[str, Answer]:
    adapters = {method: write_adapter(method, base, into) for method in ("lora", "dora")}
    merged, dtype, cpu = into / "merged", COMPUTE_DTYPES[name], World(torch.device("cpu"))
    plain = QuantizationConfig("none")
    Merge(ModelWeights(base), plain, torch.float32, adapters["lora"], dtype).write(merged, cpu)
    who = {
        f"merged_{name}": ours(merged, name, device, "none"),
        "merged_nf4": ours(merged, name, device, "nf4"),
    }
    for method, adapter in adapters.items():
        who[method] = ours(base, name, device, "nf4", adapter=adapter)
        if compile:
            who[f"{method}_compiled"] = ours(base, name, device, "nf4", True, adapter)
    if peers:
        who[f"transformers_{name}"] = transformers(merged, name, device)
        for method, adapter in adapters.items():
            who[f"peft_{method}"] = peft(base, adapter, dtype, device)
    return who


def linears(rounds: int) -> Figures:
    """The linears of a layer of SmolLM2 over one token of every row, NF4, bf16."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: dict[str, list[torch.nn.Module]] = {}
    for folded in (False, True):
        for method in ("lora", "dora"):
            name = f"{method}_folded" if folded else method
            layers[name] = [adapted(method, shape, folded) for shape in SHAPES]
    figures = Figures()
    for batch in BATCHES:
        inputs = [torch.randn(batch, 1, cols, dtype=torch.bfloat16) for _, cols in SHAPES]
        times = on_processor(
            {n: partial(pass_over, ms, inputs) for n, ms in layers.items()}, rounds
        )
        figures |= ratios(f"linears/dora_over_lora/{batch}", times["lora"], times["dora"])
        key = f"linears/dora_over_lora_folded/{batch}"
        figures |= ratios(key, times["lora_folded"], times["dora_folded"])
        key = f"linears/folded_over_lora/{batch}"
        figures |= ratios(key, times["lora"], times["lora_folded"])
    return figures


def adapted(method: Any, shape: tuple[int, int], folded: bool) -> torch.nn.Module:
    weight = torch.randn(shape, dtype=torch.bfloat16).mul_(0.02)
    base = QuantizedLinear(nf4.quantize(weight), None)
    linear = LowRankLinear(base, AdapterConfig(method, rank=16, alpha=32)).requires_grad_(False)
    init_adapters(linear, seed=0)
    torch.nn.init.normal_(linear.lora_B, std=0.01)
    return FoldedLinear(linear) if folded else linear


@torch.no_grad()
def pass_over(linears: Sequence[torch.nn.Module], inputs: Sequence[torch.Tensor]) -> None:
    for _ in range(3):
        for linear, x in zip(linears, inputs, strict=True):
            linear(x)


def on_processor(cases: Cases, rounds: int) -> Times:
    """`in_turns` by the processor's seconds of this process."""
    times: Times = {name: [] for name in cases}
    for number in range(1 + rounds):  # the first compiles kernels
        for name, case in cases.items():
            since = time.process_time()
            case()
            if number:
                times[name].append(time.process_time() - since)
    return times


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="seconds of one core, whatever else runs on it; sets one thread",
    )
    parser.add_argument("--compile", action="store_true", help="measure compiled layers too")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers and PEFT out")
    parser.add_argument("--linears", action="store_true", help="only the linears of one layer")
    parser.add_argument("--tokens", type=int, help="of an answer; default 32, 4 with --quick")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")  # the peers warn
    if args.linears:
        return tell(linears(5 * args.repeat), args.json)
    if args.processor_time:
        torch.set_num_threads(1)
    new, rounds = (args.tokens or 4, 2) if args.quick else (args.tokens or 32, args.repeat)
    base, name = prepare_model(cache_dir()), usual_dtype(args.device)
    tokenizer = hf_tokenizer(str(base))
    asked = [f"What is {n} times {n + 7}? Explain each step." for n in range(max(BATCHES))]
    prompts = [chat_tokens(tokenizer, [{"role": "user", "content": text}]) for text in asked]
    figures, rows = Figures(), [["tokens/s, " + name, *(f"batch {batch}" for batch in BATCHES)]]
    with tempfile.TemporaryDirectory() as folder:
        given = (base, Path(folder), name, args.device, args.compile, not args.no_peers)
        who = contestants(*given)
    cells: dict[str, list[str]] = {name: [] for name in who}
    for batch in BATCHES:
        cases = {name: partial(answer, prompts[:batch], new) for name, answer in who.items()}
        times = in_turns(cases, rounds) if not args.processor_time else on_processor(cases, rounds)
        for one, seconds in times.items():
            figures |= spread(f"tokens_per_s/{one}/{batch}", (batch * new / s for s in seconds))
            cells[one].append(f"{figures[f'tokens_per_s/{one}/{batch}']:.1f}")
        figures |= ratios(f"dora_over_lora/{batch}", times["lora"], times["dora"])
        for method in ("lora", "dora") if not args.no_peers else ():
            key = f"{method}_over_peft_{method}/{batch}"
            figures |= ratios(key, times[f"peft_{method}"], times[method])
        write_figures(args.json, figures)
        print(f"batch {batch}: measured", flush=True)
    table(rows + [[one, *of_one] for one, of_one in cells.items()])
    tell(figures, args.json)


if __name__ == "__main__":
    main()
