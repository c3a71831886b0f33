"""Which conditions on the device no test takes, traced: what a CPU's tests leave to the GPU suite.

    python tests/device_branches.py [--results FILE] [PYTEST'S WORDS ...]

Runs pytest with every condition of `qfsdp/` rewritten that asks for a device (`asks`): it notes the
answers it gives, in child processes too. Prints conditions that gave one answer only, and which is
missing. The words choose tests; `--results` adds to a file of earlier runs, so that parts add up:
its lines are a condition and an answer. On a GPU, `-m gpu` adds what its tests run.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "qfsdp"


def asks(node: ast.AST) -> bool:
    """Whether an expression has an answer, true or false, that depends on the device."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        of_torch = name.startswith(("torch.cuda.", "torch.accelerator."))
        return name.endswith("on_cpu") or of_torch and name.split(".")[-1].startswith("is_")
    if isinstance(node, ast.Compare):
        text = ast.unparse(node)
        words = ("device.type", "device_type", "get_device_capability", "device(device).type")
        return any(word in text for word in words) and "'meta'" not in text
    return False


class Noting(ast.NodeTransformer):
    """Wraps the conditions of a file into calls that note their answers. A place is named by the
    file, the function and the condition: earlier results stay true when lines move."""

    def __init__(self, file: str) -> None:
        self.within, self.places = [file], set[str]()

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.within.append(node.name)
            self.generic_visit(node)
            self.within.pop()
            return node
        if not asks(node):
            return self.generic_visit(node)
        assert isinstance(node, ast.expr)
        place = f"{self.within[0]} {'.'.join(self.within[1:])}: {ast.unparse(node)}"
        self.places.add(place)
        call = ast.Call(ast.Name("__noted__", ast.Load()), [ast.Constant(place), node], [])
        return ast.copy_location(call, node)


def rewritten(path: Path) -> tuple[ast.Module, set[str]]:
    noting = Noting(str(path.relative_to(ROOT)))
    tree = noting.visit(ast.parse(path.read_text()))
    return ast.fix_missing_locations(tree), noting.places


def install(results: str) -> None:
    """Makes this process rewrite modules of qfsdp as it imports them."""
    seen: set[tuple[str, bool]] = set()

    def noted(place: str, answer: Any) -> Any:
        if (key := (place, bool(answer))) not in seen:
            seen.add(key)
            with open(results, "a") as file:
                file.write(f"{place}\t{bool(answer)}\n")
        return answer

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            return compile(rewritten(Path(self.path))[0], self.path, "exec", dont_inherit=True)

        def exec_module(self, module: Any) -> None:
            module.__noted__ = noted
            super().exec_module(module)

    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
            if name.partition(".")[0] != "qfsdp":
                return None
            spec = super().find_spec(name, path, target)
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                spec.loader = Loader(name, spec.origin)
            return spec

    sys.meta_path.insert(0, Finder)


def run(words: list[str], results: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        code = f"import sys; sys.path.append({str(ROOT)!r})\n"
        code += f"from tests.device_branches import install; install({str(results)!r})\n"
        Path(folder, "sitecustomize.py").write_text(code)
        # Dynamo cannot trace a function that writes a file.
        environment = os.environ | {"QFSDP_EAGER_KERNELS": "1"}
        path = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT), *([path] if path else [])])
        command = [sys.executable, "-m", "pytest", "-q", *words]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


# What only a GPU answers, and the part of `benchmarks/gpu_suite.py` that asks it.
PARTS = {
    "qfsdp/cli/": "doctor",
    "qfsdp/common/": "doctor",
    "qfsdp/checkpoint/": "tests_first",
    "qfsdp/data/": "ours_qlora_4096",
    "qfsdp/distributed/": "two_ranks",
    "qfsdp/modules/adapters/": "norms",
    "qfsdp/modules/experts/": "mixture",
    "qfsdp/modules/activation_offload.py": "tiled_row_65536",
    "qfsdp/modules/hub_models/": "none, a model of transformers on a GPU",
    "qfsdp/modules/": "packed_rows_graphs_4096",
    "qfsdp/planning/": "none, a run on a GPU, and one that is out of memory",
    "qfsdp/tensor_subclasses/dtensor.py": "two_ranks",
    "qfsdp/tensor_subclasses/fp8.py": "scaled_mm",
    "qfsdp/tensor_subclasses/": "dequantize",
    "qfsdp/training/cuda_graphs.py": "ours_qlora_graphs_4096",
    "qfsdp/training/distillation.py": "none, a distillation on a GPU",
    "qfsdp/training/throughput.py": "bandwidth",
    "qfsdp/training/": "ours_qlora_4096",
}


def missing(results: Path) -> list[str]:
    """Conditions of today's files, each with an answer that it has not given."""
    lines = results.read_text().splitlines() if results.is_file() else []
    given = {tuple(line.rsplit("\t", 1)) for line in lines}
    places = set().union(*(rewritten(file)[1] for file in sorted(LIBRARY.rglob("*.py"))))
    wanted = [(place, answer) for place in sorted(places) for answer in ("True", "False")]
    return [
        f"{place} is never {answer}" for place, answer in wanted if (place, answer) not in given
    ]


def main(words: list[str]) -> int:
    results = Path(tempfile.gettempdir()) / "device_branches.txt"
    if words[:1] == ["--results"]:
        results, words = Path(words[1]), words[2:]
    status = run(words, results.resolve()) if words else 0
    found = missing(results)
    for line in found:
        part = next((part for start, part in PARTS.items() if line.startswith(start)), "?")
        print(f"{line}; suite: {part}")
    print(f"{len(found)} answers are missing")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
