"""The recipe through `tune`, on the real model, and its messages about mistakes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from examples.demo.arithmetic import write_splits
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from tests.json_lines import metric_lines
from tests.tiny import ROOT, load_recipe, needs_compiler, write_tiny_model_with_tokenizer
from tests.waiting import LIMIT_S, without_waiting

TUNE = Path(sys.executable).with_name("tune")
RECIPE = "recipes/qdora_distributed"


def tune(
    *words: str, cwd: Path = ROOT, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command, by default with eager kernels, which give the same bits."""
    environment = {"OMP_NUM_THREADS": "1", "QFSDP_EAGER_KERNELS": "1"} | (environment or {})
    return subprocess.run(
        [TUNE, *words],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe()


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("arithmetic"), train=64, heldout=8)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "eager", ["1", pytest.param("0", marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_two_ranks_on_the_real_model(
    eager: str, smollm2_dir: Path, train_file: Path, tmp_path: Path
) -> None:
    """Three updates by the command as typed, and all files that a run leaves."""
    words = ["--config", "configs/smollm2_135m_qdora.yaml", "max_steps=3", "batch_size=2"]
    words += ["lr_scheduler.warmup_ratio=null"]
    words += [f"model.path={smollm2_dir}", f"dataset.source={train_file}"]
    words += [f"output_dir={tmp_path}/run"]
    # Compiled kernels are the default; a rank builds them in 10 s or more.
    environment = {"QFSDP_EAGER_KERNELS": eager}
    done = tune("run", "--nproc_per_node", "2", RECIPE, *words, environment=environment)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"

    lines = metric_lines(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    names = {"loss", "grad_norm", "lr", "tokens_per_second_per_rank", "peak_memory_gib"}
    names |= {"slot_efficiency", "seconds_per_step"}
    names |= {"model_flops_utilization", "hardware_flops_utilization"}
    phases = ("data", "forward", "backward", "optimizer", "norm_refresh", "logging")
    names |= {f"seconds/{phase}" for phase in phases}
    kinds = ("quantized", "plain", "trained")
    names |= {f"memory/parameters_{kind}_gib" for kind in kinds}
    names |= {"memory/gradients_gib", "memory/optimizer_state_gib", "memory/peak_rank"}
    of_first = {"memory/load_peak_gib", "trained/parameters", "trained/percent", "trained/mb"}
    for line in lines:
        missing = names ^ (line.keys() - {"step"})
        # A line has the logging time of the step before.
        assert missing == (of_first | {"seconds/logging"} if line["step"] == 1 else set())
        assert 0.5 < line["slot_efficiency"] <= 1
        assert 0 < line["model_flops_utilization"] <= line["hardware_flops_utilization"]
        assert all(line[f"seconds/{phase}"] > 0 for phase in phases[:-1])
    assert all(1.0 < line["loss"] < 2.5 for line in lines)
    assert [line["lr"] for line in lines] == pytest.approx([1e-4, 2e-4, 3e-4])
    assert "step 3/3" in done.stderr and "\r" not in done.stderr

    assert "Gradient norm" in (run / "report.html").read_text()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    machine = json.loads((run / "machine.json").read_text())
    assert (machine["recipe"], machine["world_size"]) == ("qdora_distributed", 2)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["tensors"]) == names | of_first
    logged = [event.tensor_proto.float_val[0] for event in events.Tensors("loss")]
    assert logged == pytest.approx([line["loss"] for line in lines], rel=1e-6)

    assert (run / "recipe.py").read_text() == (ROOT / f"{RECIPE}.py").read_text()
    again = load_config(load_recipe().Config, ["--config", str(run / "config.yaml")])
    assert again.max_steps == 3 and again.adapter.method == "dora"

    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["use_dora"] is True and config["r"] == 16 and config["lora_alpha"] == 32
    with safe_open(run / "adapter" / "adapter_model.safetensors", "pt") as tensors:
        keys = list(tensors.keys())
        b = tensors.get_tensor("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")
    assert len(keys) == 30 * 7 * 3
    assert b.abs().max() > 0, "B is still as it was initialised"


@pytest.mark.long
@needs_compiler
def test_packed_compiled_and_recorded(smollm2_dir: Path, train_file: Path, tmp_path: Path) -> None:
    """Packed rows, compiled layers, 8-bit AdamW and the profiler in one run of the command."""
    # torchao keeps 8-bit states only where 256 divides the numbers of a rank's rows.
    sizes = {"intermediate_size": 576}
    model = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, **sizes)
    words = ["--config", "configs/smollm2_135m_qdora.yaml", "max_steps=3", "batch_size=1"]
    words += ["lr_scheduler.warmup_ratio=null"]
    words += [f"model.path={model}", f"dataset.source={train_file}", f"output_dir={tmp_path}/run"]
    words += ["packed=true", "compile=true", f"compile_cache_dir={tmp_path}/cache"]
    words += ["profiler.steps=[2]", "profiler.ranks=[1]"]
    words += ["optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused"]
    done = tune("run", "--nproc_per_node", "2", RECIPE, *words)
    assert done.returncode == 0, done.stderr
    assert f"compiled code: {tmp_path}/cache\n" in done.stdout
    assert any((tmp_path / "cache").iterdir())
    traces = [file.name for file in (tmp_path / "run" / "profile").iterdir()]
    assert traces == ["step_00000002_rank1.json.gz"]
    lines = metric_lines(tmp_path / "run")
    assert sum(line["slot_efficiency"] for line in lines) > 3 * 0.7
    assert [line["lr"] for line in lines] == pytest.approx([1e-4, 2e-4, 3e-4])


@pytest.mark.long
def test_tune_cp_and_an_edited_recipe(smollm2_dir: Path, tmp_path: Path, train_file: Path) -> None:
    """The edited copy runs from its directory, and the run keeps a copy of it."""
    model = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir)
    assert tune("cp", RECIPE, "my_recipe.py", cwd=tmp_path).returncode == 0
    copy = tmp_path / "my_recipe.py"
    edit = 'print("edited!")\n    world = init_world('
    copy.write_text(copy.read_text().replace("world = init_world(", edit))
    words = ["--config", "configs/smollm2_135m_qlora.yaml", "max_steps=2", f"model.path={model}"]
    words += [f"dataset.source={train_file}"]
    done = tune("run", "my_recipe", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "edited!" in done.stdout
    run = tmp_path / "runs" / "smollm2_135m_qlora"
    assert "edited!" in (run / "recipe.py").read_text()
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["use_dora"] is False


LITERAL = "configs/llama3_70b_qdora.yaml"


@pytest.mark.parametrize(
    "torchrun_flags", [[], pytest.param(["--nproc_per_node", "2"], marks=pytest.mark.long)]
)
def test_the_literal_command_without_the_weights(torchrun_flags: list[str], tmp_path: Path) -> None:
    # A port of this machine that nobody listens on, so the test needs no network.
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)}
    done = tune("run", *torchrun_flags, RECIPE, "--config", LITERAL, environment=hub)
    assert done.returncode == 2
    (line,) = without_waiting(done.stderr).splitlines()
    start = (
        "error: model.path: 'meta-llama/Meta-Llama-3-70B-Instruct' is no folder, is not complete"
    )
    assert line.startswith(start) and "http://127.0.0.1:9 cannot be reached" in line


@pytest.mark.long
def test_mistakes_that_ranks_find_are_one_line_too(smollm2_dir: Path, tmp_path: Path) -> None:
    """Ranks find NaN when they read weights, after the preflight."""
    model = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][400, 3] = float("nan")
    save_file(tensors, model / "model.safetensors")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "2 + 3?", "answer": "5"}) + "\n")
    words = ["--config", "configs/smollm2_135m_qdora.yaml", f"output_dir={tmp_path}/run"]
    # In fp32: with bf16 some CPUs print a second line.
    words += [f"model.path={model}", f"dataset.source={data}", "model.dtype=fp32"]
    done = tune("run", "--nproc_per_node", "2", RECIPE, *words)
    assert done.returncode == 2
    expected = "model.layers.1.mlp.up_proj.weight: row 400 holds NaN or infinity; it cannot be"
    assert without_waiting(done.stderr) == f"error: {model}: {expected} quantized\n"


@pytest.fixture(scope="module")
def nothing_wrong(
    recipe: ModuleType,
    smollm2_dir: Path,
    train_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """A command line that passes every check."""
    run = tmp_path_factory.mktemp("runs") / "run"
    argv = ["--config", str(ROOT / "configs/smollm2_135m_qdora.yaml"), f"output_dir={run}"]
    argv += [f"model.path={smollm2_dir}", f"dataset.source={train_file}"]
    recipe.check(load_config(recipe.Config, argv))
    return argv


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adapter.rnak=8"], "unknown key 'adapter.rnak'; did you mean 'adapter.rank'?"),
        (["adapter.rank=-1"], "adapter.rank: -1 is not valid; expected an integer of at least 1"),
        (["adapter.dropout=1.5"], "adapter.dropout: 1.5 is not valid; expected a probability"),
        (["adapter.targets=[q_prj]"], "adapter.targets: 'q_prj' is not a linear of the decoder"),
        (["quantization.targets=all"], "did you mean 'all-linear'?"),
        (["quantization.format=nf5"], "did you mean 'nf4'?"),
        (["sharding.wrap=layer"], "expected one of 'decoder_layer', 'linear'"),
        (["batch_size=0"], "batch_size: 0 is not valid; expected an integer of at least 1"),
        (["max_steps=many"], "max_steps: 'many' is not valid; expected an integer or null"),
        (["model.lora_rank=8"], "unknown key 'model.lora_rank'; here it is 'adapter.rank'"),
        (["enable_activation_checkpointing=true"], "here it is 'activation.checkpointing=full'"),
        (["optimizer.learning_rate=1"], "'torch.optim.AdamW' takes no argument 'learning_rate'"),
        (["optimizer.lr=-1"], "optimizer.lr: -1; expected a number of at least 0"),
        (["optimizer.eps=-1"], "optimizer: torch.optim.AdamW refuses its arguments: Invalid"),
        (["optimizer=torch.optim.AdmaW"], "did you mean 'torch.optim.AdamW'?"),
        (["lr_scheduler.warmup=3"], "takes no argument 'warmup'"),
        (["dataset.source=missing.jsonl"], "dataset.source: "),
        (["profiler.steps=[0]"], "profiler.steps: [0] is not valid; expected a list of integers"),
        (["dataset.packed=true"], "takes no argument 'packed'"),
        (["max_seq_len=9000"], "max_seq_len: 9000; expected at most 8192, the model's positions"),
        (
            ["max_seq_len=9000", "model.max_positions=8500"],
            "max_seq_len: 9000; expected at most 8500, model.max_positions",
        ),
        (["quantization.targets=[lm_head]"], "'lm_head' is tied to the token embeddings"),
        (["fsdp_cpu_offload=true"], "here it is 'sharding.cpu_offload'"),
        (["tokenizer.path=nowhere"], "tokenizer.path: 'nowhere' does not exist"),
        (["adapter.start_from=nowhere"], "nowhere does not exist; expected an adapter in PEFT's"),
        (["tokenizer._component_=qfsdp.data.hf_tokeniser"], "did you mean 'qfsdp.data.hf_tokeni"),
    ],
)
def test_mistakes_are_one_line_before_anything_loads(
    words: list[str], message: str, recipe: ModuleType, nothing_wrong: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        recipe.check(load_config(recipe.Config, [*nothing_wrong, *words]))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_output_directory_that_cannot_be_written_fails_before_loading(
    recipe: ModuleType, smollm2_dir: Path, train_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    argv = ["--config", str(ROOT / "configs/smollm2_135m_qdora.yaml")]
    argv += [f"model.path={smollm2_dir}", f"dataset.source={train_file}"]
    cfg = load_config(recipe.Config, [*argv, f"output_dir={tmp_path}/file/run"])
    with pytest.raises(UserError, match="^output_dir: .* cannot be written: .*Not a directory"):
        recipe.main(cfg)


def test_a_recipe_stays_readable() -> None:
    """A recipe has at most 260 lines, a function at most 60."""
    for file in (ROOT / "recipes").glob("*.py"):
        assert len(file.read_text().splitlines()) <= 260, file
    for file in [*ROOT.glob("recipes/*.py"), *ROOT.glob("qfsdp/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                assert lines <= 60, f"{file}: {node.name} has {lines} lines"
