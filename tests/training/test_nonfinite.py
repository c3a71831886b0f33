"""NaN and infinity in training: named, never applied, never saved; through the recipes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._python_dispatch import TorchDispatchMode

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data import PackedDataset, StepLoader
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.training.memory_usage import plain_tensors
from qfsdp.training.nonfinite import MAX_SKIPPED
from qfsdp.training.steps import StepClock, decides_on_device
from tests.host_waits import waits_for
from tests.json_lines import metric_lines
from tests.ranks import run_ranks
from tests.tiny import load_recipe, needs_compiler, write_tiny_model
from tests.toy_data import TOY_CONFIG, Samples

pytestmark = pytest.mark.usefixtures("eager")
QDORA, FULL = "qdora_distributed", "full_finetune_distributed"
CONFIG = (
    TOY_CONFIG
    + """\
output_dir: {folder}/run
batch_size: 6
gradient_accumulation_steps: 2
epochs: 2
checkpoint: {{keep_last: 99}}
"""
)
ADAPTER = "adapter: {rank: 5, alpha: 7, dropout: 0.1}\n"
STEPS = 6  # 26 samples, 12 a step on one rank and 24 on two
TOO_HIGH = ["optimizer.lr=1e30", "checkpoint.every_n_steps=1"]
NAN = float("nan")
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("torch.optim.AdamW", {"lr": 1e-3, "fused": True}),
    ("torchao.optim.AdamW8bit", {"lr": 1e-3}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    write_tiny_model(folder / "model")
    (folder / f"{FULL}.yaml").write_text(CONFIG.format(folder=folder))
    (folder / f"{QDORA}.yaml").write_text(CONFIG.format(folder=folder) + ADAPTER)
    return folder


# ---- runs, some of them poisoned -----------------------------------------------------------------


def run(folder: Path, jobs: list[tuple[str, str | None, list[str]]]) -> list[str]:
    """Runs (recipe, poison, words) in turn; returns the messages of those that end with an error.
    Runs on every rank."""
    messages = []
    for name, poison, words in jobs:
        recipe = load_recipe(name)
        if poison is not None:
            load = recipe.load_model
            recipe.load_model = lambda *a, p=poison, load=load, **k: poisoned(load(*a, **k), p)
        cfg = load_config(recipe.Config, ["--config", f"{folder}/{name}.yaml", *words])
        try:
            recipe.main(cfg)
            messages.append("")
        except UserError as error:
            messages.append(str(error))
    return messages


def poisoned(model: Any, what: str) -> Any:
    """`model` with one fault: "weight NAME", "sample INDEX", "gradient NAME" or "backward NAME"."""
    kind, name = what.split()
    if kind == "weight":
        with torch.no_grad():
            local_part(model.get_parameter(name))[:1] = NAN
    elif kind == "sample":
        poison_sample(model, int(name))
    elif kind == "gradient":
        param = model.get_parameter(name)
        param.register_post_accumulate_grad_hook(lambda p: local_part(p.grad)[:1].fill_(math.inf))
    else:
        module = model.get_submodule(name)
        forward = module.forward

        def faulty(x: Tensor) -> Tensor:
            out = forward(x)
            x.register_hook(lambda grad: grad * NAN)
            return out

        module.forward = faulty
    return model


def poison_sample(model: Any, index: int) -> None:
    """Makes the output of a linear in layer 1 NaN for one sample."""
    tokens = Samples(None)[index]["tokens"]
    hit: list[int] = []

    def find(module: nn.Module, args: tuple[Tensor]) -> None:
        rows = enumerate(args[0])
        hit[:] = [row for row, given in rows if torch.equal(given[: len(tokens)], tokens)]

    model.model.embed_tokens.register_forward_pre_hook(find)
    linear = model.model.layers[1].mlp.down_proj
    forward = linear.forward
    linear.forward = lambda x: forward(x).index_fill(0, torch.tensor(hit, dtype=torch.int64), NAN)


def loader(rank: int, size: int, **changes: Any) -> StepLoader:
    given: dict[str, Any] = {"batch_size": 6, "gradient_accumulation_steps": 2} | changes
    dataset = given.pop("dataset", Samples(None))
    return StepLoader(
        dataset, rank=rank, world_size=size, seed=0, pad_id=0, max_seq_len=64, **given
    )


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def numbers(value: Any) -> list[Tensor]:
    """All floating-point tensors in a checkpoint's state."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for entry in value for t in numbers(entry)] if isinstance(value, list) else []


def assert_finite(checkpoint: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(checkpoint / "state", tmp_path / "state.pt")
    found = numbers(torch.load(tmp_path / "state.pt", weights_only=False))
    assert found and all(torch.isfinite(tensor).all() for tensor in found)


# ---- a learning rate that is too high --------------------------------------------------------


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_run_stops_and_its_checkpoint_resumes(folder: Path, ranks: int, tmp_path: Path) -> None:
    jobs: list[tuple[str, str | None, list[str]]] = []
    for name in (QDORA, FULL):
        words = [*TOO_HIGH, f"output_dir={tmp_path}/{name}"]
        jobs += [(name, None, words), (name, None, [*words, "resume=auto"])]
    for messages in run_ranks(ranks, run, folder, jobs):
        for message, again in zip(messages[::2], messages[1::2], strict=True):
            assert message.startswith("step 2: ") and "\n" not in message
            assert "; first not finite: " in message
            assert message.endswith(
                "; stopped: step 1 is saved; expected another optimizer.lr or dataset in a new "
                "run, or resume=auto with on_nonfinite=skip"
            )
            assert again == message
    for name in (QDORA, FULL):
        output = tmp_path / name
        assert steps(output) == ["step_00000001"]
        assert_finite(output / "checkpoints/step_00000001", tmp_path)
        assert not (output / "adapter").exists() and not (output / "model").exists()
        lines = metric_lines(output)
        assert [line["step"] for line in lines] == [1]


RUINOUS = ["optimizer._component_=torch.optim.SGD", "~optimizer.eps", "~optimizer.fused"]
RUINOUS += ["optimizer.lr=1e38", "optimizer.weight_decay=1e4"]  # one update makes infinity


def test_weights_that_the_last_update_ruins_are_not_written(folder: Path, tmp_path: Path) -> None:
    words = [*RUINOUS, "max_steps=1", f"output_dir={tmp_path}/run"]
    (message,) = run_ranks(1, run, folder, [(FULL, None, words)])[0]
    assert "NaN or infinity" in message and "\n" not in message
    assert not (tmp_path / "run/model").exists()


def test_a_save_that_failed_is_not_called_saved(folder: Path, tmp_path: Path) -> None:
    """Step 1 makes infinite weights, so its checkpoint is left out; step 2 finds them."""
    words = [*RUINOUS, "checkpoint.every_n_steps=1", "checkpoint.on_failure=continue"]
    for messages in run_ranks(2, run, folder, [(FULL, None, [*words, f"output_dir={tmp_path}"])]):
        assert messages[0].startswith("step 2: ")
        assert "; stopped: there is no checkpoint yet; expected" in messages[0]
    assert steps(tmp_path) == []


# ---- where the numbers come from -------------------------------------------------------------


def test_the_first_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    """With dropout and accumulation, on two ranks that hold one sample each of every micro-batch's
    rows in turn."""
    second = loader(1, 2).step(0)[1]
    index = second.samples[2][0]
    layer = "model.layers.1"
    cases = {
        f"weight {layer}.self_attn.v_proj.lora_A": (
            f"grad_norm nan; first not finite: weight {layer}.self_attn.v_proj.lora_A, ranks 0, 1"
        ),
        f"sample {index}": f"not finite: output of {layer}.mlp.down_proj, rank 1, sample {index};",
        f"backward {layer}.mlp.up_proj": (f"gradient of the output of {layer}.self_attn"),
        f"gradient {layer}.mlp.up_proj.lora_B": (
            f"grad_norm inf; first not finite: gradient of {layer}.mlp.up_proj.lora_B, ranks 0, 1"
        ),
    }
    jobs = [
        (QDORA, poison, [f"output_dir={tmp_path}/{number}"]) for number, poison in enumerate(cases)
    ]
    for messages in run_ranks(2, run, folder, jobs):
        for message, expected in zip(messages, cases.values(), strict=True):
            assert message.startswith("step 1: ") and expected in message, message
            assert "; stopped: there is no checkpoint yet; expected" in message


def test_batches_name_their_samples() -> None:
    first = loader(0, 1).step(0) + loader(0, 1).step(1) + loader(0, 1).step(2)
    assert sorted(i for batch in first for (i,) in batch.samples) == list(range(26))
    packs = PackedDataset(Samples(None), 64, seed=0)
    of_packs = loader(0, 2, dataset=packs, batch_size=2)
    batch = of_packs.step(0)[0].to("cpu")
    for row, samples in zip(batch.tokens, batch.samples, strict=True):
        tokens = torch.cat([Samples(None)[i]["tokens"] for i in samples])
        assert torch.equal(row[: len(tokens)], tokens)
    assert len(batch.samples) == 2


@pytest.mark.long
@needs_compiler
def test_compiled_packs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QFSDP_EAGER_KERNELS")
    words = ["compile=true", "packed=true", "batch_size=2", "activation.checkpointing=full"]
    words += ["gradient_accumulation_steps=1", f"output_dir={tmp_path}/run"]
    weight = "model.layers.1.mlp.gate_proj.lora_B"
    for (message,) in run_ranks(2, run, folder, [(QDORA, f"weight {weight}", words)]):
        assert f"first not finite: weight {weight}, ranks 0, 1, samples" in message


# ---- nothing is applied ----------------------------------------------------------------------


@pytest.mark.long
def test_what_is_saved_continues_like_a_run_without_the_fault(folder: Path, tmp_path: Path) -> None:
    """The stop saves the state of the step before with its random state, so that the resumed run
    drops the same numbers."""
    index = loader(0, 1).step(3)[1].samples[0][0]
    assert index not in [i for b in loader(0, 1).step(0) for (i,) in b.samples]
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    jobs = [
        (QDORA, f"sample {index}", [f"output_dir={broken}"]),
        (QDORA, None, [f"output_dir={broken}", "resume=auto", "on_nonfinite=skip"]),
        (QDORA, None, [f"output_dir={whole}"]),
    ]
    messages = run_ranks(1, run, folder, jobs)[0]
    stopped = int(messages[0].removeprefix("step ").partition(":")[0])
    assert stopped > 1 and steps(broken)[0] == f"step_{stopped - 1:08d}"
    assert messages[1:] == ["", ""]
    file = "adapter/adapter_model.safetensors"
    assert (broken / file).read_bytes() == (whole / file).read_bytes()


def everything(model: nn.Module, optimizer: Any, scheduler: Any) -> list[Tensor]:
    """Copies of all that an update changes, and of the base."""
    tensors = [*model.parameters()]
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        tensors += [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
    plain = [part.clone() for t in tensors for part in plain_tensors(local_part(t.detach()))]
    lr = float(optimizer.param_groups[0]["lr"])
    return [*plain, torch.tensor([scheduler.last_epoch, lr])]


def faulty_steps(folder: Path) -> list[bool]:
    """For each optimizer, whether nothing has changed after a step with NaN; two steps without it
    came before."""
    return [one_faulty_step(folder, path, arguments) for path, arguments in OPTIMIZERS]


def one_faulty_step(folder: Path, optimizer: str, arguments: dict[str, Any]) -> bool:
    from qfsdp.training.optimizer import build_optimizer

    recipe = load_recipe(QDORA)
    torch.compiler.set_stance("force_eager")  # torchao's optimizers compile their step
    words = ["--config", f"{folder}/{QDORA}.yaml", "adapter.rank=16", "activation.offload=true"]
    cfg = load_config(recipe.Config, words)
    world = recipe.init_world(cfg.sharding)
    model = recipe.load_model(cfg, world)
    component = recipe.Component(optimizer, arguments)
    built = build_optimizer(component, trainable_parameters(model))
    scheduler = torch.optim.lr_scheduler.ConstantLR(built)
    clock, data = recipe.StepClock(world.device), loader(world.rank, world.size)

    def step(number: int) -> dict[str, float]:
        given = (data.step(number), 1.0, world, clock)
        metrics: dict[str, float] = recipe.train_step(model, built, scheduler, *given)
        return metrics

    step(0), step(1)
    before = everything(model, built, scheduler)
    poison_sample(model, data.step(0)[0].samples[0][0])
    assert math.isnan(step(0)["loss"])
    after = everything(model, built, scheduler)
    return all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_nothing_changes(folder: Path, ranks: int) -> None:
    assert run_ranks(ranks, faulty_steps, folder) == [[True] * len(OPTIMIZERS)] * ranks


# ---- skipping ----------------------------------------------------------------------------------


def test_skipping(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One bad sample costs one update of each epoch; a bad weight ends the run."""
    index = loader(0, 1).step(1)[0].samples[0][0]
    jobs = [
        (QDORA, f"sample {index}", ["on_nonfinite=skip", f"output_dir={tmp_path}/sample"]),
        (
            QDORA,
            "weight model.layers.0.mlp.up_proj.lora_A",
            ["on_nonfinite=skip", "epochs=9", f"output_dir={tmp_path}/weight"],
        ),
    ]
    messages = run_ranks(1, run, folder, jobs)[0]
    assert messages[0] == ""
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert warnings[0] == (
        "warning: step 2: loss nan, grad_norm nan; first not finite: output of "
        f"model.layers.1.mlp.down_proj, rank 0, sample {index}; the update is skipped"
    )
    assert len(warnings) == 2 + MAX_SKIPPED
    skipped = [line.get("skipped_steps", 0) for line in metric_lines(tmp_path / "sample")]
    assert skipped == sorted(skipped) and skipped[0] == 0 and skipped[-1] == 2
    adapter = load_file(tmp_path / "sample/adapter/adapter_model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in adapter.values())
    assert messages[1].startswith(f"step {MAX_SKIPPED + 1}: ")
    assert f"; stopped after {MAX_SKIPPED} skipped updates: " in messages[1]


# ---- optimizer_in_backward -------------------------------------------------------------------


@pytest.mark.long
def test_updates_in_backward(folder: Path, tmp_path: Path) -> None:
    """A loss of NaN changes nothing. A gradient of infinity has been used: nothing is saved."""
    words = ["optimizer_in_backward=true", "clip_grad_norm=null", "gradient_accumulation_steps=1"]
    index = loader(0, 2, gradient_accumulation_steps=1).step(1)[0].samples[3][0]
    weight = "model.layers.0.mlp.up_proj.weight"
    jobs = [
        (FULL, f"sample {index}", [*words, f"output_dir={tmp_path}/loss"]),
        (FULL, None, [*words, f"output_dir={tmp_path}/loss", "resume=auto"]),
        (FULL, None, [*words, f"output_dir={tmp_path}/whole"]),
        (FULL, "late", [*words, f"output_dir={tmp_path}/gradient"]),
    ]
    jobs[3] = (FULL, f"backward {weight.removesuffix('.weight')}", jobs[3][2])
    for messages in run_ranks(2, run, folder, jobs):
        where = f"output of model.layers.1.mlp.down_proj, rank 0, sample {index}"
        assert messages[0].startswith(f"step 2: loss nan; first not finite: {where}; stopped: ")
        assert "; stopped: step 1 is saved; " in messages[0]
        assert messages[1:3] == ["", ""]
        assert messages[3].startswith("step 1: grad_norm nan; first not finite: gradient of ")
        end = "there is no checkpoint yet; expected another optimizer.lr or dataset in a new run"
        assert messages[3].endswith(end)
    for file in (tmp_path / "whole/model").glob("*.safetensors"):
        assert (tmp_path / "loss/model" / file.name).read_bytes() == file.read_bytes()
    assert not (tmp_path / "gradient/checkpoints").exists() or not steps(tmp_path / "gradient")


# ---- cost ----------------------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Notes operations whose result the host, or the size of their result, waits for."""

    def __init__(self, clock: StepClock, found: list[str]) -> None:
        super().__init__()
        self._clock, self._found = clock, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits_for(func, args, kwargs) and self._clock.now is not None:
            self._found.append(f"{func._opname} in {self._clock.now}")
        return func(*args, **(kwargs or {}))


def waits_and_collectives(folder: Path, name: str, words: list[str]) -> list[str]:
    """What the host waits for, and all-reduces, in the order of one update."""
    recipe = load_recipe(name)
    cfg = load_config(recipe.Config, ["--config", f"{folder}/{name}.yaml", *words])
    world = recipe.init_world(cfg.sharding)
    model = recipe.load_model(cfg, world)
    optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(model))
    batches = loader(world.rank, world.size).step(0)
    found: list[str] = []

    def noting(owner: Any, method: str) -> None:
        original = getattr(owner, method)
        noted = lambda *a, **k: (found.append(method), original(*a, **k))[1]  # noqa: E731
        setattr(owner, method, noted)

    for owner, method in (
        *((Tensor, name) for name in ("item", "tolist", "__bool__", "__float__")),
        (dist, "all_reduce"),
        (optimizer, "step"),
    ):
        noting(owner, method)
    clock = StepClock(world.device)
    with Waits(clock, found):
        recipe.train_step(model, optimizer, None, batches, 1.0, world, clock)
        with clock.phase("control"):
            _ = batches[0].labels[batches[0].labels > 0]
    return found


@pytest.mark.parametrize(
    ("name", "words", "end"),
    [
        (QDORA, [], ["step", "tolist"]),  # fused: the device decides, and the host waits last
        (FULL, [], ["step", "tolist"]),
        (QDORA, ["optimizer.fused=false"], ["tolist", "step"]),
    ],
)
def test_a_step_waits_once(folder: Path, name: str, words: list[str], end: list[str]) -> None:
    # Number of targets; squared gradient norm and loss.
    expected = ["all_reduce", "all_reduce", *end, "index in control"]
    for found in run_ranks(2, waits_and_collectives, folder, name, words):
        # Unfused AdamW reads its numbers of steps, which it keeps on the host.
        own = ("item", "_local_scalar_dense in optimizer") if words else ()
        assert [one for one in found if one not in own] == expected


# ---- numbers of the config -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr=.inf"], "optimizer.lr: inf is not valid; expected a finite number"),
        (["optimizer.weight_decay=.nan"], "optimizer.weight_decay: nan is not valid; expected"),
        (["optimizer.betas=[0.9, .nan]"], "optimizer.betas[1]: nan is not valid; expected"),
        (["clip_grad_norm=.inf"], "clip_grad_norm: inf is not valid; expected a finite number"),
        (["clip_grad_norm=inf"], "clip_grad_norm: 'inf' is not valid; expected a number or null"),
        (["adapter.lora_plus_ratio=.inf"], "adapter.lora_plus_ratio: inf is not valid; expected"),
        (["adapter.alpha=.nan"], "adapter.alpha: nan is not valid; expected a finite number"),
        (["checkpoint.every_minutes=.nan"], "checkpoint.every_minutes: nan is not valid; expected"),
        (["on_nonfinite=ignore"], "on_nonfinite: 'ignore' is not valid; expected one of 'stop'"),
    ],
)
def test_numbers_of_a_config_are_finite(folder: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(load_recipe(QDORA).Config, ["--config", f"{folder}/{QDORA}.yaml", *words])
    assert str(error.value).startswith(message)


def test_gradients_that_are_used_at_once_cannot_be_skipped(folder: Path) -> None:
    words = ["optimizer_in_backward=true", "clip_grad_norm=null", "on_nonfinite=skip"]
    words += ["--config", f"{folder}/{FULL}.yaml", "gradient_accumulation_steps=1"]
    with pytest.raises(UserError, match="^on_nonfinite: 'skip' is not valid; expected stop, as"):
        load_config(load_recipe(FULL).Config, words)


def test_a_parameter_on_the_host_is_not_told_by_the_device() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    assert decides_on_device(optimizer, torch.device("cpu"))
    assert not decides_on_device(optimizer, torch.device("cuda", 0))  # sharding.cpu_offload
