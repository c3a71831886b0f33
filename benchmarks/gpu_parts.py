"""The parts of `benchmarks/gpu_suite.py`, the ratios between them, and the table of aims."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import AIMS, format_number

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Part:
    """A part of the suite.

    Fields:
        limit: seconds; then it is ended.
        command: a script and its arguments; JSON stands for the file of its figures.
        tiny: arguments that `--dry` adds.
    """

    name: str
    limit: int
    command: tuple[str, ...]
    tiny: tuple[str, ...] = ("--quick",)

    def words(self, figures: Path, tiny: bool) -> list[str]:
        words = [*self.command, *(self.tiny if tiny else ())]
        return [str(figures) if word == "JSON" else word for word in words]


def script(name: str, limit: int, file: str, *words: str, tiny: str = "--quick") -> Part:
    command = (f"benchmarks/{file}.py", *words, "--json", "JSON")
    return Part(name, limit, command, tuple(tiny.split()))


def steps(name: str, tokens: int, limit: int, contestant: str, *words: str) -> Part:
    """Train steps of one size; their keys begin with the part's name. A process takes one size:
    graphs of a run keep the shapes that came first."""
    options = (contestant, *words, "--name", name, "--tokens", str(tokens))
    return script(f"{name}_{tokens}", limit, "gpu_train_step", *options)


def tests(name: str, limit: int, *options: str, tiny: str = "") -> Part:
    return script(name, limit, "gpu_tests", *options, "--name", name, tiny=tiny)


FP8 = "quantization.compute=fp8"
GRAPHS = "cuda_graphs=true"
FULL = "activation.checkpointing=full"
OF_70B = ("--model", "llama3_70b_8_layers", FULL)
QWEN = ("--model", "qwen3_8b")
DELTA = ("--model", "qwen3_5_9b")  # three layers of four are recurrent
LONG = ("--model", "llama3_1_8b", "--steps", "1", FULL, "compile=false")
TILES = "activation.tile_tokens=auto"
ONE_ROUND = "--quick --repeat 1"

# Most telling first. On an H200 the 8B steps at two sizes took 50 (QLoRA), 70 (QDoRA), 47 (LoRA)
# and 62 s (PEFT); dequantize, linear and bandwidth 20, 37 and 13 s. Limits are at least twice that.
# What no card has run yet comes before what an H200 has measured.
PARTS = (
    script("checks", 240, "gpu_checks"),
    *(steps(f"ours_{method}_graphs", 4096, 60, f"ours_{method}", GRAPHS)
      for method in ("qlora", "qdora")),
    steps("packed_rows_graphs", 4096, 80, "ours_qdora", "--packed", GRAPHS),
    steps("qwen3_5_9b_packed", 4096, 100, "ours_qlora", *DELTA, "--packed", "--kernels"),
    steps("qwen3_5_9b_tf32", 4096, 100, "ours_qlora", *DELTA, "--packed", "--tf32"),
    steps("qwen3_5_9b_graphs", 4096, 120, "ours_qlora", *DELTA, "--packed", GRAPHS),
    steps("qwen3_5_9b_qdora", 4096, 100, "ours_qdora", *DELTA),
    steps("qwen3_5_9b_memory", 4096, 100, "ours_qlora", *DELTA, "--estimate", FULL),
    steps("row", 32768, 60, "ours_qlora", *LONG, "--row", "32768"),
    steps("tiled_row", 32768, 80, "ours_qlora", *LONG, "--row", "32768", TILES, "--estimate"),
    script("lengths", 40, "gpu_lengths"),
    steps("peft_qlora", 4096, 60, "peft_qlora"),
    steps("peft_qdora", 4096, 120, "peft_qdora"),
    script("offload", 240, "gpu_offload"),
    steps("packed_rows", 8192, 100, "ours_qdora", "--packed"),
    steps("memory_8b", 8192, 120, "ours_qlora", "--estimate"),
    script("dequantize", 40, "dequantize", tiny=f"{ONE_ROUND} --shapes 64x64"),
    *(steps(f"ours_{method}", tokens, 60, f"ours_{method}", "--kernels")
      for tokens in (4096, 2048) for method in ("qlora", "qdora")),
    *(steps(f"ours_{method}_graphs", 2048, 60, f"ours_{method}", GRAPHS)
      for method in ("qlora", "qdora")),
    script("norms", 60, "gpu_norms", tiny=ONE_ROUND),
    script("mixture", 40, "mixture", tiny=f"{ONE_ROUND} --tokens 64"),
    steps("ours_qlora", 8192, 80, "ours_qlora"),
    steps("ours_qdora", 8192, 90, "ours_qdora"),
    steps("ours_lora", 4096, 80, "ours_lora"),
    steps("ours_lora", 8192, 80, "ours_lora"),
    steps("peft_qlora", 8192, 100, "peft_qlora"),
    steps("tiled_row", 65536, 120, "ours_qlora", *LONG, "--row", "65536", TILES, "--estimate",
          "activation.offload=true"),
    script("scaled_mm", 40, "gpu_scaled_mm", tiny=ONE_ROUND),
    steps("ours_fp8_qlora", 4096, 100, "ours_qlora", FP8, "--kernels"),
    steps("ours_fp8_qlora", 8192, 100, "ours_qlora", FP8),
    steps("memory_70b_8_layers", 2048, 150, "ours_qdora", "--estimate", *OF_70B),
    steps("fsdp_world_1", 4096, 100, "ours_qdora", "--fsdp"),
    steps("fsdp_norm_graphs", 4096, 100, "ours_qdora", "--fsdp", GRAPHS),
    steps("qwen3_8b_qlora", 4096, 100, "ours_qlora", *QWEN),
    steps("qwen3_8b_fp8_qlora", 4096, 100, "ours_qlora", FP8, *QWEN),
    steps("qwen3_8b_qdora", 4096, 100, "ours_qdora", *QWEN),
    steps("qwen3_8b_peft_qlora", 4096, 120, "peft_qlora", *QWEN),
    steps("ours_qlora_rank_64", 4096, 100, "ours_qlora", "adapter.rank=64"),
    steps("ours_qdora_rank_64", 4096, 100, "ours_qdora", "adapter.rank=64"),
    *(steps(f"losses_seed_{n}", 2048, 150, "ours_qlora", "--losses", "200", "--seed", str(n))
      for n in range(3)),
    steps("losses_fp8", 2048, 150, "ours_qlora", FP8, "--losses", "200"),
    script("linear", 80, "linear", tiny=f"{ONE_ROUND} --tokens 64"),
    script("bandwidth", 40, "bandwidth"),
    # What `checks` runs at once, one by one.
    tests("tests_first", 130, "--first-seconds", "100", tiny="--on-cpu --first-seconds 25"),
    script("recipes", 150, "gpu_recipes"),
    script("two_ranks", 60, "gpu_two_ranks"),
    script("doctor", 80, "gpu_doctor"),
    tests("tests_estimate", 80, "-k", "estimate", tiny="--on-cpu -k none-lora"),
    tests("tests_all", 400),
)  # fmt: skip

TIMES = {  # key: seconds of the first over those of the second
    "qdora_over_qlora_time": ("ours_qdora", "ours_qlora"),
    "qdora_over_qlora_time_graphs": ("ours_qdora_graphs", "ours_qlora_graphs"),
    "qdora_over_qlora_time_rank_64": ("ours_qdora_rank_64", "ours_qlora_rank_64"),
    "qlora_over_lora_tokens": ("ours_lora", "ours_qlora"),
    "qlora_over_peft_tokens": ("peft_qlora", "ours_qlora"),
    "qdora_over_peft_tokens": ("peft_qdora", "ours_qdora"),
    "graphs_over_qlora_tokens": ("ours_qlora", "ours_qlora_graphs"),
    "graphs_over_qdora_tokens": ("ours_qdora", "ours_qdora_graphs"),
    "graphs_over_packed_qdora_tokens": ("ours_qdora_graphs", "packed_rows_graphs"),
    "tiled_over_plain_row_time": ("tiled_row", "row"),
    "qwen3_5_9b_fp32_over_tf32_time": ("qwen3_5_9b_packed", "qwen3_5_9b_tf32"),
    "qwen3_5_9b_over_graphs_time": ("qwen3_5_9b_packed", "qwen3_5_9b_graphs"),
    "fp8_over_qlora_tokens": ("ours_qlora", "ours_fp8_qlora"),
}
PEAKS = {  # key: peak bytes of the first over those of the second
    "tiled_over_plain_row_memory": ("tiled_row", "row"),
    "qlora_memory_over_peft": ("ours_qlora", "peft_qlora"),
    "qdora_over_qlora_memory": ("ours_qdora", "ours_qlora"),
}
SIZES = (4096, 2048, 8192)  # tokens of a micro-batch
LONG_ROW = 32768

TABLE = {  # a figure: its aim
    "tests_failed": "= 0",
    "tests_left": "= 0",
    "tests_first_failed": "= 0",
    "tests_estimate_failed": "= 0",
    "tests_all_failed": "= 0",
    "recipes_unequal": "= 0",
    "doctor_red": "= 0",
    "two_ranks_loss_difference": "<= 0.02",
    "gpu_dequantize_over_copy": ">= 0.85",
    "gpu_vs_bitsandbytes": ">= 1",
    **{f"qdora_over_qlora_time_{tokens}": "<= 1.05" for tokens in SIZES},
    **{f"qdora_over_qlora_memory_{tokens}": "<= 1.03" for tokens in SIZES},
    "lengths_new_over_known": "<= 2",
    "graphs_over_packed_qdora_tokens_4096": ">= 0.9",
    "graphs_over_qlora_tokens_2048": ">= 1",
    "graphs_over_qdora_tokens_2048": ">= 1",
    "loop_over_grouped": ">= 1",
    "qlora_over_lora_tokens_4096": ">= 0.97",
    "qlora_over_lora_tokens_8192": ">= 0.97",
    "qlora_over_peft_tokens_4096": ">= 1.5",
    "qlora_over_peft_tokens_8192": ">= 1.5",
    "qlora_memory_over_peft_4096": "<= 0.45",
    "qlora_memory_over_peft_8192": "<= 0.45",
    "qdora_over_peft_tokens_4096": ">= 2",
    "fp8_over_qlora_tokens_8192": ">= 1",
    "cpu_loss_difference": "<= 0.02",
    "disk_loss_difference": "<= 0.02",
    "memory_8b_8192_estimate_over_peak": ">= 0.99",
    "qwen3_5_9b_memory_4096_estimate_over_peak": ">= 0.99",
    "tiled_over_plain_row_time_32768": "<= 1.05",
    "tiled_row_32768_estimate_over_peak": ">= 0.99",
    "tiled_row_65536_estimate_over_peak": ">= 0.99",
    "memory_70b_8_layers_2048_estimate_over_peak": ">= 0.99",
}


def compare(found: dict[str, float]) -> dict[str, float]:
    """Ratios between contestants with micro-batches of equal size."""
    ratios = {}
    for tokens in (*SIZES, LONG_ROW):
        for of_key, kind in ((TIMES, "seconds"), (PEAKS, "peak_bytes")):
            for key, pair in of_key.items():
                over, under = (found.get(f"{name}_{tokens}_{kind}") for name in pair)
                if over and under:
                    ratios[f"{key}_{tokens}"] = over / under
    return ratios


def aims(found: dict[str, float]) -> list[tuple[str, str, str, str]]:
    """Rows of the table of aims: figure, aim, value, and whether it is met."""
    rows = []
    for key, aim in TABLE.items():
        if key not in found:
            rows.append((key, aim, "", "not measured"))
            continue
        sign, limit = aim.split()
        met = AIMS[sign](abs(found[key]) if "difference" in key else found[key], float(limit))
        value = format_number(float(f"{found[key]:.4g}"))
        rows.append((key, aim, value, "met" if met else "MISSED"))
    return rows
