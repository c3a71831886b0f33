"""Real tokens per second with packed rows against padded ones.

    python benchmarks/packing.py [--quick] [--json packing.json] [--data train.jsonl]

SmolLM2-135M with its base in NF4 and LoRA adapters, in bf16. Forward and backward of shuffled
batches of 8 samples, padded to the longest, and of 2 packs of 1,024 slots, in turns (with --quick 3
samples and 1 pack). The data are rows with `question` and `answer` (`--data`), such as GSM8K's;
without it, the generated problems of the demonstration.

    packed_over_padded_tokens           ratio of real tokens per second, the median of all turns;
                                        `_min` and `_max` are the worst and the best turn
    packed_over_padded_cpu              the same per second of processor time, with `_min` and
                                        `_max`; for shared machines
    packed_efficiency, padded_efficiency
                                        real tokens over slots, of the whole epoch
    loss_difference                     difference of the mean losses of the same samples
    pack_seconds_per_million_samples    seconds to choose packs for a million such samples
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.demo.prepare import prepare
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.common.quiet import quiet_torchao
from qfsdp.data import Batch, HFTokenizer, StepLoader, TokenizedDataset, collate, hf_tokenizer
from qfsdp.data.conversations import instruct_dataset
from qfsdp.data.packing import PackedDataset, best_fit
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.compute_dtype import compute_dtype
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder

MAX_SEQ_LEN = 1024


class Sizes(NamedTuple):
    """Number of turns, samples or packs in a batch, rows of the data (None: all)."""

    turns: int
    samples: int = 8
    packs: int = 2
    rows: int | None = None


QUICK = Sizes(turns=2, samples=3, packs=1, rows=800)


def load_model(folder: Path) -> Decoder:
    weights = ModelWeights(folder)
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(folder)).to(compute_dtype("bf16"))
    quantize_linears(model, QuantizationConfig(), weights.formats)
    add_adapters(model, AdapterConfig("lora"))
    load_base(model, weights, torch.device("cpu"))
    init_adapters(model, seed=0)
    return model.train()


def loss_of(model: Decoder, batch: Batch) -> Tensor:
    loss = model(batch.tokens, batch.positions, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
    return loss / batch.num_targets


def tokens_per_second(model: Decoder, batch: Batch) -> tuple[float, float]:
    """Real tokens of a forward and backward per second, and per second of processor time."""
    since, cpu_since = time.perf_counter(), time.process_time()
    loss_of(model, batch).backward()
    seconds, cpu_seconds = time.perf_counter() - since, time.process_time() - cpu_since
    model.zero_grad()
    return batch.num_tokens / seconds, batch.num_tokens / cpu_seconds


def loader(
    data: TokenizedDataset | PackedDataset, tokenizer: HFTokenizer, batch_size: int
) -> StepLoader:
    return StepLoader(
        data,
        batch_size=batch_size,
        gradient_accumulation_steps=1,
        rank=0,
        world_size=1,
        seed=0,
        pad_id=tokenizer.pad_id,
        max_seq_len=MAX_SEQ_LEN,
    )


@torch.no_grad()
def loss_difference(model: Decoder, packed: PackedDataset, packs: int, pad_id: int) -> float:
    """Difference of the losses of the first packs' samples, packed and one per row."""
    together = [packed[n] for n in range(packs)]
    alone = [packed.dataset[i] for n in range(packs) for i in packed.samples(n)]
    losses = [
        loss_of(model, collate(items, pad_id=pad_id, max_seq_len=MAX_SEQ_LEN)).item()
        for items in (together, alone)
    ]
    return abs(losses[0] - losses[1])


def packing_seconds(lengths: list[int]) -> float:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(lengths), (1_000_000,), generator=generator)
    million = torch.tensor(lengths).clamp(max=MAX_SEQ_LEN)[drawn]
    since = time.perf_counter()
    best_fit(million, MAX_SEQ_LEN, seed=0)
    return time.perf_counter() - since


def run(file: Path, folder: Path, sizes: Sizes) -> dict[str, float]:
    tokenizer = hf_tokenizer(str(folder))
    data = instruct_dataset(
        tokenizer, source=str(file), prompt_column="question", max_rows=sizes.rows
    )
    packed_data = PackedDataset(data, MAX_SEQ_LEN, seed=0)
    padded = loader(data, tokenizer, sizes.samples)
    packed = loader(packed_data, tokenizer, sizes.packs)
    print(f"{file.name}: {len(data)} samples of {statistics.mean(data.lengths):.0f} tokens")
    epoch = [padded.step(step)[0] for step in range(padded.steps_per_epoch)]
    figures = {
        "pack_seconds_per_million_samples": packing_seconds(data.lengths),
        "packed_efficiency": packed_data.efficiency,
        "padded_efficiency": sum(b.num_tokens for b in epoch) / sum(b.num_slots for b in epoch),
    }
    model = load_model(folder)
    figures["loss_difference"] = loss_difference(model, packed_data, sizes.packs, tokenizer.pad_id)
    tokens_per_second(model, collate([data[0]], pad_id=tokenizer.pad_id))
    ratios: dict[str, list[float]] = {"tokens": [], "cpu": []}
    print("turn   padded: slots  tokens/s   packed: slots  tokens/s   ratio")
    for turn in range(sizes.turns):
        batches = epoch[turn], packed.step(turn)[0]
        slow, fast = (tokens_per_second(model, batch) for batch in batches)
        for of_turns, one, other in zip(ratios.values(), fast, slow, strict=True):
            of_turns.append(one / other)
        slots, ratio = [batch.num_slots for batch in batches], fast[0] / slow[0]
        print(f"{turn:4} {slots[0]:15} {slow[0]:9.0f} {slots[1]:15} {fast[0]:9.0f} {ratio:7.2f}")
    for kind, of_turns in ratios.items():
        key = f"packed_over_padded_{kind}"
        figures[key] = statistics.median(of_turns)
        figures[f"{key}_min"], figures[f"{key}_max"] = min(of_turns), max(of_turns)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller batches, 2 threads")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--data", type=Path, help="a .jsonl file with questions and answers")
    parser.add_argument("--turns", type=int, default=10, help="batches of each kind")
    parser.add_argument(
        "--threads", type=int, help="default: 1; on a busy machine more threads wait for each other"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads or (2 if args.quick else 1))
    quiet_torchao()
    folder, generated, _ = prepare()
    file = args.data or generated
    figures = run(file, folder, QUICK if args.quick else Sizes(args.turns))
    for key, value in figures.items():
        print(f"{key} {value:.4g}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
