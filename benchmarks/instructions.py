"""Instructions of a GPU for each weight, of the kernels that read NF4. Needs no GPU, but Triton.

    python benchmarks/instructions.py [--gpu a100 | rtx4090 | h100] [--json instructions.json]

Inductor generates its Triton code for tensors that exist in name only, Triton compiles it for
sm_80, sm_89 or sm_90, and nvdisasm, which comes with Triton, takes it apart. Instructions are
counted, not timed.

    one_kernel                                  that of `nf4_dequantize.py` for GPUs
    fp8_weights                                 the same, for e4m3
    two_kernels_weights, two_kernels_absmax     those of NF4 without double quantization
    NAME_fused                                  fused multiply-adds; 0: bits are those of a CPU
    NAME_registers, NAME_shared                 registers of a thread, bytes of shared memory
    NAME_spilled                                bytes of a thread that did not fit into registers
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, tell
from qfsdp.tensor_subclasses import nf4_dequantize as nf4
from qfsdp.tensor_subclasses.kernels import dry_run
from qfsdp.tensor_subclasses.kernels.dispatch import FLAT_ON_GPUS, ROUNDED_AS_ON_CPUS

ROWS, COLS = 8192, 8192
TILE, WARPS = 1024, 4  # outputs and warps of a program, as inductor chooses for such kernels
# Compute capability, multiprocessors, shared memory of a program in bytes.
GPUS = {"a100": (8, 0, 108, 166912), "rtx4090": (8, 9, 128, 101376), "h100": (9, 0, 132, 232448)}


def properties(gpu: str) -> Any:
    """What inductor asks of a GPU."""
    major, minor, processors, shared = GPUS[gpu]
    return SimpleNamespace(
        name=gpu,
        major=major,
        minor=minor,
        multi_processor_count=processors,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536 if minor == 9 else 2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block_optin=shared,
    )


Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@contextmanager
def pretended(gpu: str) -> Iterator[None]:
    """Makes inductor and Triton generate code for a GPU that is not there."""
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    card = properties(gpu)
    capability = (card.major, card.minor)
    number = 10 * card.major + card.minor
    stub = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", number, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    driver.set_active(stub)
    of_worker: dict[str, Any] = {
        "get_device_properties": lambda d=None: card,
        "current_device": lambda: 0,
    }
    of_device = of_worker | {"get_compute_capability": lambda d=None: number}
    of_device |= {"is_triton_capable": lambda d=None: True}
    of_device |= {"raise_if_triton_unavailable": lambda d=None: None}
    of_torch: dict[str, Any] = {
        "get_device_properties": lambda d=None: card,
        "current_device": lambda: 0,
    }
    of_torch |= {"is_available": lambda: True, "device_count": lambda: 1}
    of_torch |= {"get_device_capability": lambda d=None: capability}
    with ExitStack() as stack:
        for owner, functions in ((CudaInterface, of_device), (CudaInterface.Worker, of_worker)):
            for name, function in functions.items():
                static: Any = staticmethod(function)
                stack.enter_context(mock.patch.object(owner, name, static, create=True))
        for name, function in of_torch.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        yield


def generated(fn: Callable[..., Any], options: dict[str, Any], shapes: list[Shape]) -> str:
    """The code that inductor writes for `fn` on a GPU."""
    from torch._inductor import config
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    init_backend_registration()
    pure = functionalize(fn, remove="mutations_and_views")
    # Traced on the CPU, where PyTorch without CUDA can index tensors, but as if for a GPU.
    with FakeTensorMode() as mode, dry_run.following(cast(Any, SimpleNamespace(target="cuda"))):
        on_cpu = [torch.empty_strided(s, stride, dtype=t) for s, stride, t in shapes]
        graph = make_fx(pure, decomposition_table=select_decomp_table())(*on_cpu)
        gpu = torch.device("cuda", 0)
        inputs = [torch.empty_strided(s, stride, dtype=t, device=gpu) for s, stride, t in shapes]
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = node.kwargs | {"device": gpu}
        graph.recompile()
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    with config.patch(options), V.set_fake_mode(mode):
        lowering = GraphLowering(graph, example_inputs=inputs, is_inference=True)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), DebugContext():
            lowering.run(*inputs)
            code = lowering.codegen()[0]
    return str(getattr(code, "value", code))


def only_kernel(code: str, folder: Path) -> tuple[Any, dict[str, str]]:
    """The one Triton function in inductor's code, and the types of its arguments."""
    found = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.S)
    assert len(found) == 1, [name for name, _ in found]
    name, body = found[0]
    kinds = re.search(r"'signature': (\{.*?\}),", body)
    assert kinds is not None
    body = re.sub(r"@triton_heuristics\.\w+\(.*?\n\)\n(?=@triton.jit)", "", body, flags=re.S)
    file = folder / f"{name}.py"
    file.write_text(body.replace("triton_helpers.set_driver_to_gpu()", ""))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name), eval(kinds[1])  # a dictionary of words


def machine_code(
    kernel: Any, kinds: dict[str, str], values: dict[str, Any], fused: bool
) -> tuple[str, Figures]:
    """The kernel for the pretended GPU, disassembled, and what a thread or program of it takes."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver

    aligned = [i for i, (k, kind) in enumerate(kinds.items()) if kind[0] == "*" or "numel" in k]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=values, attrs=attributes)
    options = {"num_warps": WARPS, "enable_fp_fusion": fused}
    built = triton.compile(source, target=driver.active.get_current_target(), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        listing, usage = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True).stdout
            for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    taken = {name: int(number) for name, number in re.findall(r"(REG|LOCAL|STACK):(\d+)", usage)}
    spilled = float(taken["LOCAL"] + taken["STACK"])
    shared = float(built.metadata.shared)
    card: Any = torch.cuda.get_device_properties(0)
    most = card.shared_memory_per_block_optin
    assert shared <= most, f"{kernel.__name__}: {shared:.0f} bytes of shared memory of {most}"
    return listing, {"registers": float(taken["REG"]), "shared": shared, "spilled": spilled}


def instructions(listing: str) -> list[str]:
    """Those up to the first unconditional end."""
    lines = [line for line in listing.splitlines() if re.search(r"/\*[0-9a-f]{4}\*/", line)]
    ends = [i for i, line in enumerate(lines) if re.search(r"\*/\s+EXIT", line)]
    return lines[: ends[0] + 1]


def traced(kernel: Any, *fixed: Any) -> Callable[..., Any]:
    """The function under a `compiled` kernel, as it is when it is compiled."""

    def call(*args: Any) -> Any:
        with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
            return kernel.__wrapped__(*args, *fixed)

    return call


def pointwise(folder: Path) -> Figures:
    fp32, bytes_ = torch.float32, torch.uint8
    row, blocks = COLS // 2 + COLS // 64, COLS // 64
    codes: Shape = ((ROWS, COLS // 2), (row, 1), bytes_)
    absmax: Shape = ((ROWS, blocks), (row, 1), bytes_)
    products: Shape = ((ROWS, blocks), (blocks, 1), fp32)
    scales: Shape = ((ROWS * blocks // 256,), (1,), fp32)
    offset: Shape = ((), (), fp32)
    levels: Shape = ((16,), (1,), fp32)
    dynamic: Shape = ((256,), (1,), fp32)
    bf16: Shape = ((ROWS, COLS // 2), (COLS // 2, 1), torch.int32)
    e4m3: Shape = ((ROWS, COLS // 2), (COLS // 2, 1), torch.int16)
    factor: Shape = ((ROWS,), (1,), fp32)

    def write(c: Any, p: Any, o: Any, table: Any, out: Any) -> None:
        traced(nf4._write_weights)(c, p, o, None, table, out)

    def at_once(c: Any, a: Any, s: Any, o: Any, d: Any, table: Any, out: Any) -> None:
        traced(nf4.write_at_once)(c, a, s, o, None, d, table, 0, out)

    def scaled(c: Any, a: Any, s: Any, o: Any, f: Any, d: Any, table: Any, out: Any) -> None:
        traced(nf4.write_at_once)(c, a, s, o, f, d, table, 0, out)

    cases: dict[str, tuple[Callable[..., Any], dict[str, Any], list[Shape], int]] = {
        "two_kernels_weights": (write, nf4.ONE_KERNEL, [codes, products, offset, levels, bf16], 2),
        "two_kernels_absmax": (traced(nf4.absmax_products, 0), {}, [absmax, scales, dynamic], 64),
        "one_kernel": (
            at_once,
            FLAT_ON_GPUS | ROUNDED_AS_ON_CPUS,
            [codes, absmax, scales, offset, dynamic, levels, bf16],
            2,
        ),
        "fp8_weights": (
            scaled,
            FLAT_ON_GPUS | ROUNDED_AS_ON_CPUS,
            [codes, absmax, scales, offset, factor, dynamic, levels, e4m3],
            2,
        ),
    }
    if torch.cuda.get_device_capability() < (8, 9):
        del cases["fp8_weights"]  # no numbers of 8 bits; qfsdp refuses them there
    found: Figures = {}
    for name, (fn, options, shapes, weights) in cases.items():
        kernel, kinds = only_kernel(generated(fn, options, shapes), folder)
        values = {key: TILE for key, kind in kinds.items() if kind == "constexpr"}
        fused = not options.get("emulate_precision_casts", False)
        listing, taken = machine_code(kernel, kinds, values, fused)
        lines = instructions(listing)
        found[name] = len(lines) * 32 * WARPS / (TILE * weights)
        found[f"{name}_fused"] = sum("FFMA" in line for line in lines)
        found |= {f"{name}_{key}": number for key, number in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        raise SystemExit("error: no Triton here; expected one, from `pip install triton`")
    with tempfile.TemporaryDirectory() as folder, pretended(args.gpu):
        found = pointwise(Path(folder))
    tell(found, args.json)


if __name__ == "__main__":
    main()
