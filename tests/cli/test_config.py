"""Configs: valid files and words, the message for each mistake, and writing YAML."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from qfsdp.common.errors import InvalidField, UserError, check_bounds, user_errors
from qfsdp.config.component import Component
from qfsdp.config.load import check_components, load_config, to_yaml
from qfsdp.config.recipe_files import load_recipe
from tests.cli.stand_in import ROOT


@dataclass
class Model:
    path: str
    dtype: Literal["bf16", "fp32"] = "bf16"


@dataclass
class Adapter:
    rank: int = 16
    alpha: float = 32.0
    targets: str | list[str] = "all-linear"
    dropout: float | None = None

    def check(self) -> None:
        if self.rank < 1:
            raise InvalidField("rank", self.rank, "an integer of at least 1")


@dataclass
class Sharding:
    strategy: Literal["full_shard", "ddp", 3] = "full_shard"
    cpu_offload: bool = False


@dataclass
class Odd:
    size: int
    kind: Literal["even", "uneven"] = "even"


def adamw() -> Component:
    return Component("torch.optim.AdamW", {"lr": 2e-4})


@dataclass
class Config:
    model: Model
    output_dir: str
    adapter: Adapter = field(default_factory=lambda: Adapter(rank=64))
    sharding: Sharding = field(default_factory=Sharding)
    optimizer: Component = field(default_factory=adamw)
    logger: Component | None = None
    batch_size: int = 2
    max_steps: int | None = None
    resume: bool | str = False
    save_every: int | Literal["epoch", "never"] = "epoch"
    names: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    log_dir: str = "${output_dir}/tb"
    odd: Odd | None = None

    def check(self) -> None:
        if self.batch_size > 100:
            raise InvalidField("batch_size", self.batch_size, "at most 100")


YAML = """
model:
  path: ~/llama
output_dir: /tmp/run
adapter:
  alpha: 8
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(*words: str, text: str = YAML, schema: type = Config) -> Any:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        return load_config(schema, ["--config", str(file), *words])

    return load


@pytest.fixture
def error(load: Any, tmp_path: Path) -> Any:
    def error(*words: str, **kwargs: Any) -> str:
        with pytest.raises(UserError) as info:
            load(*words, **kwargs)
        message = str(info.value)
        assert "\n" not in message
        return message.replace(f"{tmp_path}/", "")

    return error


def test_yaml_over_defaults(load: Any) -> None:
    config = load()
    assert config.model == Model("~/llama", "bf16")  # `~` is not expanded
    assert config.adapter == Adapter(rank=64, alpha=8.0)  # the field's default, not the class's
    assert isinstance(config.adapter.alpha, float)
    assert config.optimizer == Component("torch.optim.AdamW", {"lr": 2e-4})
    assert config.log_dir == "/tmp/run/tb"  # a default may interpolate


@pytest.mark.parametrize(
    ("word", "get", "value"),
    [
        ("adapter.rank=4", lambda c: c.adapter.rank, 4),
        ("adapter.alpha=1e-4", lambda c: c.adapter.alpha, 1e-4),
        ("adapter.alpha='1e-4'", lambda c: c.adapter.alpha, 1e-4),
        ("adapter.targets=[q_proj, v_proj]", lambda c: c.adapter.targets, ["q_proj", "v_proj"]),
        ("adapter.targets=q_proj", lambda c: c.adapter.targets, "q_proj"),
        ("adapter.dropout=0.1", lambda c: c.adapter.dropout, 0.1),
        ("max_steps=5", lambda c: c.max_steps, 5),
        ("max_steps=null", lambda c: c.max_steps, None),
        ("max_steps=None", lambda c: c.max_steps, None),
        ("resume=true", lambda c: c.resume, True),
        ("resume=step_3", lambda c: c.resume, "step_3"),
        ("save_every=3", lambda c: c.save_every, 3),
        ("save_every=never", lambda c: c.save_every, "never"),
        ("sharding.strategy=3", lambda c: c.sharding.strategy, 3),
        ("output_dir=a=b", lambda c: c.log_dir, "a=b/tb"),
        ("output_dir=${oc.env:QFSDP_TEST}", lambda c: c.output_dir, "there"),
        ("extra.a.b=[1, {c: null}]", lambda c: c.extra, {"a": {"b": [1, {"c": None}]}}),
        ("odd.size=3", lambda c: c.odd, Odd(3)),
        ("~adapter.alpha", lambda c: c.adapter, Adapter(rank=64)),
        ("~adapter", lambda c: c.adapter, Adapter(rank=64)),
        ("logger=a.B", lambda c: c.logger, Component("a.B")),
        ("optimizer=a.B", lambda c: c.optimizer, Component("a.B", {"lr": 2e-4})),
        ("optimizer.lr=1", lambda c: c.optimizer, Component("torch.optim.AdamW", {"lr": 1})),
        ("optimizer={_component_: a.B}", lambda c: c.optimizer, Component("a.B")),
    ],
)
def test_overrides(
    load: Any, monkeypatch: pytest.MonkeyPatch, word: str, get: Any, value: Any
) -> None:
    monkeypatch.setenv("QFSDP_TEST", "there")
    found = get(load(word))
    assert found == value and type(found) is type(value)


def test_words_apply_in_order(load: Any) -> None:
    assert load("batch_size=3", "batch_size=4").batch_size == 4
    assert load("batch_size=3", "~batch_size").batch_size == 2
    sgd = load("logger=torch.optim.SGD", "logger.lr=0.1").logger
    assert sgd == Component("torch.optim.SGD", {"lr": 0.1})


def test_component_in_yaml_replaces_the_default(load: Any) -> None:
    text = YAML + "optimizer:\n  _component_: a.B\n  path: ${model.path}\n"
    assert load(text=text).optimizer == Component("a.B", {"path": "~/llama"})
    assert load("optimizer=c.D", text=text).optimizer == Component("c.D", {"path": "~/llama"})


def test_empty_section_means_defaults(load: Any) -> None:
    assert load(text="model: {path: x}\noutput_dir: y\nadapter:\n").adapter == Adapter(rank=64)


def test_two_configs(error: Any) -> None:
    """The second won without a word."""
    assert error("--config=b.yaml").startswith("--config: given 2 times: ")


def test_config_with_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(YAML)
    assert load_config(Config, [f"--config={tmp_path}/c.yaml"]).batch_size == 2


@pytest.mark.parametrize(
    "text", ["${x}", "\\${x}", "1e-4", "null", "on", "2024-01-01", "a: b", "", "é\n", "12:30", "~"]
)
def test_to_yaml_comes_back_equal(load: Any, text: str) -> None:
    config = load("max_steps=3", "odd.size=3", "adapter.targets=[a,b]", "logger=a.B")
    config.output_dir = config.resume = text
    config.names = [text, text]
    config.extra = {"deep": [{"er": text}, 1.5, None, True]}
    config.optimizer = Component("torch.optim.AdamW", {"betas": [0.9, 0.95], "name": text})
    assert load(text=to_yaml(config)) == config


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("adapter.rnak=4", "unknown key 'adapter.rnak'; did you mean 'adapter.rank'?"),
        ("rank=4", "unknown key 'rank'; did you mean 'adapter.rank'?"),
        ("cpu_ofload=true", "unknown key 'cpu_ofload'; did you mean 'sharding.cpu_offload'?"),
        ("model.rank=4", "unknown key 'model.rank'; did you mean 'adapter.rank'?"),
        ("xyzzy=4", "unknown key 'xyzzy'"),
        (
            "fsdp_cpu_offload=True",
            "unknown key 'fsdp_cpu_offload'; here it is 'sharding.cpu_offload'",
        ),
        ("model.lora_rank=8", "unknown key 'model.lora_rank'; here it is 'adapter.rank'"),
        (
            "model._component_=torchtune.models.llama3.lora_llama3_70b",
            "unknown key 'model._component_'; here it is 'model.path'",
        ),
        (
            "log_peak_memory_stats=True",
            "unknown key 'log_peak_memory_stats'; peak memory is always logged; remove the key",
        ),
        ("batch_size=two", "batch_size: 'two' is not valid; expected an integer"),
        ("batch_size=true", "batch_size: True is not valid; expected an integer"),
        ("batch_size=1.5", "batch_size: 1.5 is not valid; expected an integer"),
        (
            "batch_size=",
            "'batch_size=': no value; expected batch_size=VALUE, or batch_size=null for none",
        ),
        ("max_steps=x", "max_steps: 'x' is not valid; expected an integer or null"),
        ("adapter.alpha=x", "adapter.alpha: 'x' is not valid; expected a number"),
        ("adapter.alpha=true", "adapter.alpha: True is not valid; expected a number"),
        ("names=3", "names: 3 is not valid; expected a list of strings"),
        ("names=a", "names: 'a' is not valid; expected a list of strings"),
        ("names=[a,3]", "names[1]: 3 is not valid; expected a string"),
        ("adapter.targets=[3]", "adapter.targets[0]: 3 is not valid; expected a string"),
        (
            "adapter.targets=3",
            "adapter.targets: 3 is not valid; expected a string or a list of strings",
        ),
        ("extra=3", "extra: 3 is not valid; expected a mapping"),
        (
            "model=meta/llama",
            "model: 'meta/llama' is not valid; expected a section with the keys path, dtype; "
            "here it is 'model.path'",
        ),
        (
            "sharding.strategy=full_shrad",
            "sharding.strategy: 'full_shrad' is not valid; "
            "expected one of 'full_shard', 'ddp', 3; did you mean 'full_shard'?",
        ),
        (
            "save_every=epochs",
            "save_every: 'epochs' is not valid; "
            "expected an integer or one of 'epoch', 'never'; did you mean 'epoch'?",
        ),
        ("optimizer=3", "optimizer: 3 is not valid; expected a mapping with _component_"),
        ("logger.x=1", "logger._component_ is required; give it in the config file"),
        ("adapter.rank=-1", "adapter.rank: -1 is not valid; expected an integer of at least 1"),
        ("batch_size=101", "batch_size: 101 is not valid; expected at most 100"),
        ("odd.kind=even", "odd.size is required; give it in the config file or as odd.size=VALUE"),
        ("output_dir=${nope}", "output_dir: Interpolation key 'nope' not found"),
        (
            "output_dir=${oc.env:QFSDP_NOPE}",
            "output_dir: KeyError raised while resolving interpolation: "
            "\"Environment variable 'QFSDP_NOPE' not found\"",
        ),
        ("--batch_size=4", "'--batch_size=4': overrides are written without dashes: batch_size=4"),
        ("batch_size", "'batch_size' is not understood; overrides are written key=value"),
        ("--resume", "'--resume' is not understood; overrides are written key=value"),
        ("=4", "'=4' is not understood; overrides are written key=value"),
        (
            "names=[a",
            "'names=[a': the value is not valid YAML: expected ',' or ']', but got '<stream end>'",
        ),
        (
            "steps=010",  # 8
            "'steps=010': the value is not valid YAML: 010 is no decimal number; expected one, or "
            "quotes",
        ),
        ("~batch_size", "~batch_size: the config file has no such key to remove"),
        ("~model.path.x", "~model.path.x: the config file has no such key to remove"),
    ],
)
def test_mistakes_on_the_command_line(error: Any, word: str, message: str) -> None:
    assert error(word) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "output_dir: x",
            "model.path is required; give it in the config file or as model.path=VALUE",
        ),
        (
            "model:\n  path: ???\noutput_dir: x",
            "model.path is required; give it in the config file or as model.path=VALUE",
        ),
        (
            "model: {path: x}",  # the default of log_dir refers to output_dir and fails first
            "output_dir is required; give it in the config file or as output_dir=VALUE",
        ),
        (
            "model: {path: x}\noutput_dir: ???",
            "output_dir is required; give it in the config file or as output_dir=VALUE",
        ),
        ("- a\n- b", "c.yaml: expected keys and values, not a list"),
        ("a: 1\nb: c: d", "c.yaml, line 2: not valid YAML: mapping values are not allowed .*"),
        ("a: 1\na: 2", "c.yaml, line 2: not valid YAML: found duplicate key a"),
        ("a: {b: 010}", "c.yaml, line 1: not valid YAML: 010 is no decimal number; .*"),  # 8
        ("a: 1\nb: [1:30]", "c.yaml, line 2: not valid YAML: 1:30 is no decimal number; .*"),  # 90
        ("a: ${b", "c.yaml: a: no viable alternative at input '${b'"),
    ],
)
def test_mistakes_in_the_file(error: Any, text: str, message: str) -> None:
    found = error(text=text)
    assert found == message or re.fullmatch(message, found)


def test_list_is_given_as_a_whole(error: Any) -> None:
    text = YAML + "names: [a]\n"
    assert error("names.0=b", text=text) == (
        "names.0=b: 'names' is a list; give it as a whole: names=[...]"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for argv, message in [
        ([], "no config given; expected --config FILE [key=value ...]"),
        (["--config"], "no config given; expected --config FILE [key=value ...]"),
        (
            ["--config", "nope.yaml"],
            "--config nope.yaml: no such file; `qfsdp ls` lists those that come with qfsdp",
        ),
    ]:
        with pytest.raises(UserError) as info:
            load_config(Config, argv)
        assert str(info.value) == message
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\xfe")
    for path in (tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(UserError, match="cannot be read"):
            load_config(Config, ["--config", str(path)])


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qfsdp_parts.py").write_text(
        "from __future__ import annotations\n"
        "def part(data, size: int, rate: float | None = None, flag: bool = False, *, name='x'):\n"
        "    return (data, size, rate, name)\n"
        "def loose(data, size: int = 1, **kwargs): return kwargs\n"
        "def deaf(data, size: int = 1, **kwargs): return data\n"
        "class Thing:\n"
        "    def __init__(self, lr: float | list = 1.0, tag: int | str = 0): pass\n"
        "constant = 3\n"
    )
    (tmp_path / "qfsdp_broken.py").write_text("raise RuntimeError('no GPU')\n")
    (tmp_path / "qfsdp_needy.py").write_text("import qfsdp_absent\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "torch.optim.AdmaW",
            "'torch.optim.AdmaW' does not exist; did you mean 'torch.optim.AdamW'?",
        ),
        (
            "torch.optm.AdamW",
            "'torch.optm.AdamW' does not exist; did you mean 'torch.optim.AdamW'?",
        ),
        ("torchh.optim.SGD", "'torchh.optim.SGD' does not exist; did you mean 'torch.optim.SGD'?"),
        ("torch.optim.AdamW.qqq", "'torch.optim.AdamW.qqq' does not exist"),
        ("qfsdp_broken.x", "importing 'qfsdp_broken.x' failed: no GPU"),
        ("qfsdp_needy.x", "importing 'qfsdp_needy.x' failed: No module named 'qfsdp_absent'"),
        ("qfsdp_parts.constant", "'qfsdp_parts.constant' cannot be called"),
    ],
)
def test_component_that_does_not_resolve(parts: None, path: str, message: str) -> None:
    with pytest.raises(UserError) as info:
        Component(path, {}).check("optimizer")
    assert str(info.value) == f"optimizer._component_: {message}"


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("part", {"size": 1}, None),
        ("part", {"size": 1, "rate": 1e-4, "flag": True, "name": "y"}, None),
        ("part", {"siez": 1}, "part.siez: '{}' takes no argument 'siez'; did you mean 'size'?"),
        ("part", {}, "part.size is required by '{}'"),
        ("part", {"data": 1}, "part.data: the recipe passes this argument itself; remove it"),
        ("part", {"size": "x"}, "part.size: 'x' is not valid; expected an integer"),
        (
            "part",
            {"size": 1, "rate": "x"},
            "part.rate: 'x' is not valid; expected a number or null",
        ),
        ("part", {"size": 1, "flag": "x"}, "part.flag: 'x' is not valid; expected true or false"),
        ("loose", {"anything": "x"}, None),
        (
            "deaf",
            {"anything": 1},
            "part.anything: 'qfsdp_parts.deaf' takes no argument 'anything'; "
            "remove it: ~part.anything",
        ),
        ("part", {"size": 1.5}, "part.size: 1.5 is not valid; expected an integer"),
        (
            "part",
            {"size": 1, "rate": [1]},
            "part.rate: [1] is not valid; expected a number or null",
        ),
        ("Thing", {"lr": True}, "part.lr: True is not valid; expected a number or a list"),
        ("part", {"size": True}, "part.size: True is not valid; expected an integer"),
        ("loose", {"size": "x"}, "part.size: 'x' is not valid; expected an integer"),
        ("Thing", {"tag": "x"}, None),
        ("Thing", {"lr": "x"}, "part.lr: 'x' is not valid; expected a number or a list"),
    ],
)
def test_component_arguments(parts: None, path: str, kwargs: dict[str, Any], message: Any) -> None:
    component = Component(f"qfsdp_parts.{path}", kwargs)
    if message is None:
        return component.check("part", ["data"])
    with pytest.raises(UserError) as info:
        component.check("part", ["data"])
    assert str(info.value) == message.format(component.path)


def test_component_build(parts: None) -> None:
    component = Component("qfsdp_parts.part", {"size": 1, "rate": 0.5})
    assert component.build("d", size=2, name="n") == ("d", 2, 0.5, "n")
    assert component.kwargs == {"size": 1, "rate": 0.5}


def test_real_components() -> None:
    Component("torch.optim.AdamW", {"lr": 1e-4, "fused": True}).check("optimizer", ["params"])
    schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    passed = ["optimizer", "num_training_steps", "last_epoch"]
    Component(schedule, {"num_warmup_steps": 3}).check("lr_scheduler", passed)
    with pytest.raises(UserError, match="optimizer.lr: '1e-4x' is not valid; expected a number"):
        Component("torch.optim.AdamW", {"lr": "1e-4x"}).check("optimizer", ["params"])
    with pytest.raises(UserError, match="optimizer.lr: True is not valid; expected a number"):
        Component("torch.optim.AdamW", {"lr": True}).check("optimizer", ["params"])


def test_check_components_reaches_all(parts: None) -> None:
    @dataclass
    class Outer:
        inner: Any
        many: list[Any]

    fine = Component("qfsdp_parts.part", {})  # the recipe may pass the missing argument
    check_components(Outer(fine, [fine]))
    bad = Component("qfsdp_parts.part", {"siez": 1})
    with pytest.raises(UserError, match=r"^many\[1\].siez: "):
        check_components(Outer(fine, [fine, bad]))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("adapter.alpha=.nan", "adapter.alpha: nan is not valid; expected a finite number"),
        ("adapter.alpha=.inf", "adapter.alpha: inf is not valid; expected a finite number"),
        ("adapter.alpha='-inf'", "adapter.alpha: -inf is not valid; expected a finite number"),
        ("optimizer.lr=.inf", "optimizer.lr: inf is not valid; expected a finite number"),
        ("optimizer.betas=[.nan, 1]", "optimizer.betas[0]: nan is not valid; expected a finite "),
        ("extra.a=[{b: .inf}]", "extra.a[0].b: inf is not valid; expected a finite number"),
        (f"max_steps={2**80}", f"max_steps: {2**80} is not valid; expected an integer of at most"),
        (f"max_steps={'9' * 900}", f"max_steps: {'9' * 150}...{'9' * 150} is not valid; "),
        (f"adapter.alpha={'9' * 900}", "adapter.alpha: 999"),
        ('output_dir="a\\0b"', r"output_dir: 'a\x00b' is not valid; expected a text without NUL"),
        ("batch_size=" + "[" * 5000, "the value is not valid YAML"),
        (f"max_steps={'9' * 5000}", "the value is not valid YAML"),  # more than Python converts
        ("output_dir=caf\udce9", r"'output_dir=caf\udce9': not UTF-8; expected UTF-8 text"),
        ("output_dir=~nobody-here/run", "expected a path in the home of a user of this machine"),
        ("adapter.rank= ", "'adapter.rank= ': no value; expected adapter.rank=VALUE, or adapter."),
        ("=2", "'=2' is not understood; overrides are written key=value"),
    ],
)
def test_values_that_no_field_takes(error: Any, word: str, message: str) -> None:
    assert message in error(word)


REFERENCES = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(range(256)), "cannot be read: "),
        ("a: caf\u00e9\n".encode("latin-1"), "cannot be read: 'utf-8' codec can't decode byte"),
        ("a: b\n".encode("utf-16"), "cannot be read: 'utf-8' codec can't decode byte"),
        (b"- 1\n", "expected keys and values, not a list"),
        (b"batch_size: 1\nbatch_size: 2\n", "line 2: not valid YAML: found duplicate key"),
        (b"a: " + b"[" * 100_000, "too deeply nested; expected keys and values"),
        (REFERENCES.encode(), "its references (*name) multiply; expected fewer of them"),
        (b"#" * 2_000_000, "expected a config of at most 1,048,576 characters"),
        (b"a: !!python/object/apply:os.getcwd []\n", "not valid YAML: could not determine a cons"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError) as info:
        load_config(Config, ["--config", str(file)])
    assert message in str(info.value) and "\n" not in str(info.value)


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory"):
        load_config(Config, ["--config", str(tmp_path)])


def test_references_in_a_config_are_followed(load: Any) -> None:
    text = YAML + "names: &names [a, b]\nextra: {again: *names}\n"
    assert load(text=text).extra == {"again": ["a", "b"]}


def test_a_name_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, user_errors():
        Path("x" * 300).stat()
    assert ended.value.code == 2
    assert "File name too long; expected at most 255 bytes per name\n" in capsys.readouterr().err


def test_bounds() -> None:
    section = Adapter(rank=0)
    with pytest.raises(InvalidField, match="rank: 0 is not valid; expected an integer of at least"):
        check_bounds(section, "rank", least=1)
    section.rank = 2**21
    with pytest.raises(InvalidField, match="expected an integer of at most 1048576"):
        check_bounds(section, "rank", least=1, most=2**20)
    check_bounds(section, "rank", least=1)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        *((word, word) for word in ("Fix: {x}", "{a}, {b}", "[1, 2]", "a # b", "- x", "12", "yes")),
        *((word, word) for word in ("0123", "*x", "@x", "1e5", "'tis", "2 = 1 + 1", "C:\\x", "é")),
        *(("null", None), ("'null'", "null"), ('"a\\nb"', "a\nb"), (" a ", "a")),
    ],
)
def test_text_is_taken_as_typed(word: str, expected: str | None) -> None:
    """YAML would make a mapping of "Fix: {x}", and cut "a # b"."""
    generate = load_recipe(ROOT / "recipes/generate.py").Config
    train = load_recipe(ROOT / "recipes/qdora_distributed.py").Config
    config = str(ROOT / "configs/generate.yaml")
    assert load_config(generate, ["--config", config, f"prompt={word}"]).prompt == expected
    config = str(ROOT / "configs/smollm2_135m_qdora.yaml")
    words = [
        f"dataset.prompt_template={word}",
        "validation.sets.mine._component_=qfsdp.data.alpaca_dataset",
        f"validation.sets.mine.prompt_template={word}",
        "optimizer.betas=[0.5, 0.9]",
        "tokenizer.path=${model.path}",
        "model.path=x",
    ]
    cfg = load_config(train, ["--config", config, *words])
    assert cfg.dataset.kwargs["prompt_template"] == expected
    assert cfg.validation.sets["mine"].kwargs["prompt_template"] == expected
    assert cfg.optimizer.kwargs["betas"] == [0.5, 0.9] and cfg.tokenizer.kwargs["path"] == "x"
