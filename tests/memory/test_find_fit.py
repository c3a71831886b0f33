"""`tune run recipes/find_fit`: its overrides fit; with a tiny model folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qfsdp.common.sizes import parse_size
from qfsdp.config.load import load_config
from qfsdp.config.tool_config import run_tool
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.hardware import known_gpu
from qfsdp.planning.predict import Predictor, step_load
from tests.recipes.test_sharded_mixtures import MIXTURE
from tests.tiny import ROOT, load_recipe, write_tiny_model

CARD = known_gpu("h100")
CONFIG = ["--config", str(ROOT / "configs/llama3_8b_lora.yaml")]


def find_fit(*words: str, recipe: str = "recipes/find_fit") -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "tune"), "run", recipe]
    return subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.long
def test_the_best_is_a_config_that_fits(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    training = [*CONFIG, f"model.path={model}", "gradient_accumulation_steps=4"]
    hardware = ["gpu=rtx4090", "device_memory=1GiB", "world_size=2", "pcie=10GB/s"]
    done = find_fit(*training, *hardware)
    assert done.returncode == 0, done.stderr
    assert "2 GPUs of 1.00 GiB" in done.stdout and "PCIe 10 GB/s" in done.stdout
    assert "4 samples of 2048 tokens per GPU and step" in done.stdout
    table = done.stdout.partition("way to run")[2].partition("\n\n")[0].splitlines()[1:]
    seconds = [float(re.split(r"  +", line)[-3]) for line in table]
    assert seconds == sorted(seconds)

    words = re.search(r"as overrides:\n\n(.*)\n", done.stdout)
    assert words is not None
    recipe = load_recipe()
    cfg = load_config(recipe.Config, [*training, *words[1].split()])
    assert cfg.batch_size * cfg.gradient_accumulation_steps == 4
    assert estimate_fast(recipe.build_model, recipe.train_step, cfg, 2).reserved <= parse_size(
        "1GiB"
    )
    assert _per_gpu(table[0]) == _estimated(tmp_path, *training, *words[1].split(), "world_size=2")
    yaml = done.stdout.partition("in the config:\n\n")[2].partition("\n\n")[0]
    for word in words[1].split():
        key, _, value = word.partition("=")
        assert re.search(rf"^ *{key.split('.')[-1]}: {value}$", yaml, re.MULTILINE)


def _per_gpu(row: str) -> str:
    """What a row of find_fit's table says of a GPU: "830.12 MiB"."""
    return re.split(r"  +", row)[2].strip()


def _estimated(folder: Path, *words: str) -> str:
    """What estimate_memory says of the same config, beside its peak."""
    words = (*words, f"picture={folder}/step.png")
    done = find_fit(*words, recipe="recipes/estimate_memory")
    assert done.returncode == 0, done.stderr
    found = re.search(r"with fragmentation, CUDA context and NCCL: about (.*)", done.stdout)
    assert found is not None, done.stdout
    return found[1]


@pytest.mark.long
def test_it_says_whether_dividing_experts_pays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gathering 4 experts in 4 bits sends as much as 50 tokens that travel to 2 of them."""
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=4096, **MIXTURE)
    recipe, tool = load_recipe(), load_recipe("find_fit")
    said = {}
    for tokens in (8, 4096):
        words = [*CONFIG, f"model.path={model}", f"max_seq_len={tokens}", "quantization.format=nf4"]
        cfg = load_config(recipe.Config, words)
        hardware = tool.Config(gpu="rtx4090", interconnect="1GB/s", world_size=2).build(None)
        predict = Predictor(recipe.build_model, recipe.train_step, cfg, 2, 2, hardware)
        whole, best = predict({}), SimpleNamespace(strategy="full_shard")
        trial = SimpleNamespace(prediction=whole, candidate=best)
        tool.show_expert_parallel(trial, predict, 2)
        divided = predict({"sharding.expert_parallel": 2})
        said[tokens] = capsys.readouterr().out
        pays = divided.time.seconds < whole.time.seconds
        assert f"expert_parallel=2 {'pays' if pays else 'does not pay'}: " in said[tokens]
    assert " pays" in said[8] and "does not pay" in said[4096]


@pytest.mark.long
def test_nothing_fits(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    done = find_fit(*CONFIG, f"model.path={model}", "device_memory=780MiB")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"error: nothing fits; the smallest needs .* of every GPU", last)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu=rtx4091"], "gpu: 'rtx4091' is unknown; did you mean 'rtx4090'?"),
        (
            ["device_memory=1MiB"],
            "device_memory: 1.00 MiB; expected more than the 768.00 MiB that ",
        ),
        (["gpu=l4", "host_memory=1KiB"], "host_memory: 1.00 KiB; expected more than the 3.00 GiB"),
        (["gpu=l4", "world_size=1000000000"], "world_size: 1000000000 is not valid; expected an "),
        (["device_memory=much"], "device_memory: 'much' is not valid; expected a size such as"),
        (["gpu=l4", "disk=slow"], "disk: 'slow' is not valid; expected a rate such as 25GB/s"),
        (["gpu=l4", "world_size=3", "local_world_size=2"], "local_world_size: 2 is not valid"),
        (["gpu=l4", "world_size=4", "local_world_size=2"], "network: null; expected what a mach"),
        (["gpu=l4", "batch_sise=2"], "unknown key 'batch_sise'; did you mean 'batch_size'?"),
        (["device_memory=null"], "gpu: null; expected gpu=rtx4090, "),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["find_fit", *CONFIG, *words])
    tool = load_recipe("find_fit")
    with pytest.raises(SystemExit) as ended:
        run_tool(tool.Config, tool.main)
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"error: {message}") and stderr.count("\n") == 1


@pytest.mark.long
def test_a_copy_and_a_config_that_trains_nothing(tmp_path: Path) -> None:
    copy = tmp_path / "my_find_fit.py"
    copy.write_text((ROOT / "recipes/find_fit.py").read_text())
    done = find_fit("--config", "configs/quantize.yaml", "gpu=l4", recipe=str(copy))
    assert done.returncode == 2
    message = r"error: .*quantize.yaml: it belongs to recipes/quantize, which trains nothing\n"
    assert re.fullmatch(message, done.stderr)


@pytest.mark.long
def test_the_load_of_a_step_counts_norms_and_kernels(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    recipe, ranks = load_recipe(), 2
    loads, launches = {}, {}
    for method in ("lora", "dora"):
        for micro_batches in (2, 3, 4):
            words = [f"model.path={model}", "quantization.format=nf4", f"adapter.method={method}"]
            words += [f"gradient_accumulation_steps={micro_batches}", "max_seq_len=64"]
            cfg = load_config(recipe.Config, [*CONFIG, *words])
            predictor = Predictor(recipe.build_model, recipe.train_step, cfg, ranks, ranks, CARD)
            found = estimate_fast(recipe.build_model, recipe.train_step, cfg, ranks)
            built = predictor._model(cfg)
            loads[method, micro_batches] = step_load(built, cfg, found, ranks)
            launches[method, micro_batches] = found.launches
    weights = [m.weight for m in built.modules() if isinstance(m, LowRankLinear)]
    once = sum(w.data.qdata.numel() + w.numel() * w.dtype.itemsize for w in weights)
    for count in (2, 3, 4):  # a rank refreshes the norms of its own rows, once an update
        more = loads["dora", count].dequantized_bytes - loads["lora", count].dequantized_bytes
        assert more == once / ranks
        assert loads["lora", count].dequantized_bytes % (once * count) == 0
    for method in ("lora", "dora"):
        two, three, four = (launches[method, count] for count in (2, 3, 4))
        assert 0 < four - three == three - two < two
    assert launches["dora", 2] > launches["lora", 2] + 2 * len(weights)
