"""A merged folder is a plain model that computes the same as the adapted one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qfsdp.checkpoint.adapter_base import BASE_FILE
from qfsdp.checkpoint.adapter_files import CONFIG_FILE, WEIGHTS_FILE, save_adapter
from qfsdp.checkpoint.lock import FolderLock
from qfsdp.checkpoint.weights import convert
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.merge import Merge, merged_rows
from qfsdp.checkpoint.weights.output_folder import BEGUN
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.checkpoint.weights.safetensors_folder import INDEX, SINGLE
from qfsdp.checkpoint.weights.save import save_model
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.nf4 import NF4Tensor
from qfsdp.tensor_subclasses.nf4_fp32_absmax import NF4Fp32AbsmaxTensor
from tests.models import adapted_model, cpu_world, load_model, randomize_adapters
from tests.modules import test_families as families
from tests.ranks import run_ranks
from tests.tiny import ROOT, TINY_CONFIG, load_recipe, run_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

TOKENS = torch.randint(0, 577, (2, 48), generator=torch.Generator().manual_seed(0))
EVEN = {"intermediate_size": 576}  # a multiple of 64, as bitsandbytes requires
HEAD_TOO = ["all-linear", "lm_head"]


def merged(model: Path, adapter: Path, output: Path, *words: str) -> Path:
    """The recipe's output with its shipped config and the overrides `words`."""
    argv = ["--config", str(ROOT / "configs/merge.yaml"), f"model.path={model}"]
    argv += [f"adapter={adapter}", f"output_dir={output}", *words]
    run_recipe("merge", argv)
    return output


def trained(
    model_dir: Path, section: AdapterConfig, adapter: Path, dtype: str = "fp32", format: str = "nf4"
) -> nn.Module:
    """A model in eval mode with randomized adapters, which are saved to `adapter`."""
    model = adapted_model(model_dir, section, dtype=dtype, format=format).eval()
    randomize_adapters(model)
    save_adapter(model, section, str(model_dir), adapter, cpu_world())
    return model


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        out = model(tokens)
    return (out if isinstance(out, Tensor) else out.logits).float()


def quantized_like(model_dir: Path) -> str:
    """The targets that tests.models quantizes: all linears, and an untied `lm_head`."""
    tied = json.loads((model_dir / "config.json").read_text())["tie_word_embeddings"]
    return f"quantization.targets={'all-linear' if tied else '[all-linear,lm_head]'}"


# ---- logits ------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize(
    "family, section, format",
    [
        ("llama", AdapterConfig("lora", 5, 7.0), "nf4"),
        ("llama", AdapterConfig("dora", 5, 7.0, targets=HEAD_TOO), "nf4"),
        ("llama", AdapterConfig("dora", 5, 7.0, targets=["q_proj"], rslora=True), "nf4"),
        ("llama", AdapterConfig("dora", 5, 7.0, targets=HEAD_TOO), "nf4_fp32_absmax"),
        ("llama", AdapterConfig("dora", 5, 7.0, targets=HEAD_TOO), "hqq"),
        ("llama", AdapterConfig("dora", 5, 7.0, targets=HEAD_TOO), "none"),
        ("biases", AdapterConfig("lora", 5, 7.0), "none"),
        ("biases", AdapterConfig("dora", 5, 7.0), "nf4"),
        ("tied", AdapterConfig("lora", 5, 7.0, targets=HEAD_TOO), "nf4"),
        ("tied", AdapterConfig("dora", 5, 7.0, targets=HEAD_TOO), "nf4"),
        ("tied", AdapterConfig("dora", 5, 7.0), "nf4"),
        ("llama", AdapterConfig("ia3"), "nf4"),
        ("biases", AdapterConfig("ia3", targets=HEAD_TOO), "nf4"),
        ("biases", AdapterConfig("ia3"), "none"),
        ("tied", AdapterConfig("ia3", targets=HEAD_TOO), "nf4"),
    ],
)
def test_transformers_computes_what_training_did(
    family: str, section: AdapterConfig, format: str, tmp_path: Path
) -> None:
    model_dir = write_tiny_model(tmp_path / "model", shards=3, **FAMILIES[family])
    ours = logits(trained(model_dir, section, tmp_path / "adapter", format=format))
    base = logits(load_model(model_dir, format=format))
    words = ["dtype=fp32", "model.dtype=fp32", f"quantization.format={format}"]
    words.append(quantized_like(model_dir))
    folder = merged(model_dir, tmp_path / "adapter", tmp_path / "merged", *words)
    model = plain_model(folder)
    difference = (logits(model) - ours).abs().max().item()
    print(f"{family}, {section.method}, {format}: logits differ by {difference:.1e}")
    assert difference < 1e-4
    assert (ours - base).abs().max() > 0.3, "the adapter must matter"
    # An adapter on tied embeddings applies to the output layer only.
    untied = family != "tied" or section.targets == HEAD_TOO
    head, embeddings = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head is not embeddings) == untied
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is not untied
    assert torch.equal(embeddings, load_model(model_dir).model.embed_tokens.weight)
    assert not list(folder.glob("*.partial")) and not (folder / BEGUN).exists()


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_bf16_is_no_further_from_the_truth_than_training_was(method: str, tmp_path: Path) -> None:
    """Two bf16 roundings of a model differ; both are compared with fp32."""
    model_dir = write_tiny_model(tmp_path / "model")
    section = AdapterConfig(method, 5, 7.0, targets=HEAD_TOO)
    ours = logits(trained(model_dir, section, tmp_path / "adapter", dtype="bf16"))
    # The same adapter, and the same bf16 embeddings and norms, in fp32 arithmetic.
    words = ["model.dtype=bf16", quantized_like(model_dir)]
    exact = merged(model_dir, tmp_path / "adapter", tmp_path / "fp32", *words, "dtype=fp32")
    truth = logits(plain_model(exact))
    bf16 = merged(model_dir, tmp_path / "adapter", tmp_path / "bf16", *words, "dtype=bf16")
    theirs = logits(plain_model(bf16, torch.bfloat16))
    for name, value in load_file(bf16 / SINGLE).items():
        assert torch.equal(value, load_file(exact / SINGLE)[name].bfloat16()), "rounded once"
    error, usual = ((x - truth).abs().mean().item() for x in (theirs, ours))
    agree = (theirs.argmax(-1) == ours.argmax(-1)).float().mean().item()
    print(f"{method}: {error:.4f} off fp32 on average, training {usual:.4f}; {agree:.0%} agree")
    assert error < 1.3 * usual
    assert agree > 0.9


def test_a_routers_correction_stays_fp32(tmp_path: Path) -> None:
    """As in transformers, which loads it in fp32: GLM-4.5's lie closer together than bf16's steps
    there. In a merged model and in one that was trained whole."""
    folder = tmp_path / "model"
    families.reference("glm4-moe").to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    names = [name for name in tensors if name.endswith("e_score_correction_bias")]
    expected = {name: torch.linspace(6.817, 7.063, len(tensors[name])) for name in names}
    save_file(tensors | expected, folder / SINGLE, {"format": "pt"})
    trained(folder, AdapterConfig("lora", 4), tmp_path / "adapter", "bf16", "none")
    words = ["model.dtype=bf16", "dtype=bf16", "quantization.format=none"]
    written = [merged(folder, tmp_path / "adapter", tmp_path / "merged", *words)]
    model = load_model(folder, dtype="bf16", format="none")
    save_model(model, ModelWeights(folder), torch.bfloat16, tmp_path / "whole", cpu_world())
    for output in (*written, tmp_path / "whole"):
        found = load_file(output / SINGLE)
        assert expected
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert {found[name].dtype for name in found.keys() - expected} == {torch.bfloat16}


def greedy(model: Any, tokens: Tensor, count: int) -> list[int]:
    for _ in range(count):
        tokens = torch.cat((tokens, logits(model, tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens[0, -count:].tolist()


@pytest.mark.long
@pytest.mark.parametrize("method", [pytest.param("lora", marks=pytest.mark.slow), "dora"])
def test_a_real_model(method: str, smollm2_dir: Path, tmp_path: Path) -> None:
    """fp32: logits, and greedy text by transformers' generation with the copied tokenizer."""
    from transformers import AutoTokenizer

    section = AdapterConfig(method, 8, 8.0)
    adapted = trained(smollm2_dir, section, tmp_path / "adapter")
    words = ["dtype=fp32", "model.dtype=fp32", "max_file_bytes=200000000"]
    folder = merged(smollm2_dir, tmp_path / "adapter", tmp_path / "merged", *words)
    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
    model = plain_model(folder)
    difference = (logits(model) - logits(adapted)).abs().max().item()
    print(f"{method}: logits differ by {difference:.1e}")
    assert difference < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The lighthouse keeper walked up the stairs", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert out[0, -12:].tolist() == greedy(adapted, prompt["input_ids"], 12)


def test_rows_in_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(s, generator=generator) for s in ((9, 40), (3, 40), (9, 3)))
    m = torch.rand(9, generator=generator)
    expected = w.double() + 0.7 * b.double() @ a.double()
    torch.testing.assert_close(merged_rows(w, a, b, 0.7, None), expected.float())
    expected *= (m.double() / expected.norm(dim=1))[:, None]
    torch.testing.assert_close(merged_rows(w, a, b, 0.7, m), expected.float())
    zero = merged_rows(torch.zeros(2, 40), a, torch.zeros(2, 3), 0.7, m[:2])
    assert torch.equal(zero, torch.zeros(2, 40)), "a row of zeros stays one"


# ---- bases, ranks, files -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that bitsandbytes can quantize, and a DoRA adapter of some of its linears."""
    folder = tmp_path_factory.mktemp("even")
    model_dir = write_tiny_model(folder / "model", **EVEN)
    trained(model_dir, AdapterConfig("dora", 5, 7.0, targets=["q_proj", "up_proj"]), folder / "a")
    return model_dir, folder / "a"


def assert_same_tensors(one: Path, other: Path) -> None:
    tensors = [
        {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
        for folder in (one, other)
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        assert torch.equal(value, tensors[1][name]), name


@pytest.mark.parametrize("requantize", ["none", "nf4-bnb"])
def test_bases_that_are_stored_quantized(
    requantize: str, even: tuple[Path, Path], tmp_path: Path
) -> None:
    """In qfsdp's layout or bitsandbytes': the result is bit for bit the same."""
    model_dir, adapter = even
    words = [
        "model.dtype=fp32",
        "dtype=fp32",
        quantized_like(model_dir),
        f"requantize={requantize}",
    ]
    expected = merged(model_dir, adapter, tmp_path / "plain", *words)
    for layout in ("qfsdp", "bnb"):
        quantized = tmp_path / layout
        config = QuantizationConfig("nf4", HEAD_TOO)
        quantize_folder(ModelWeights(model_dir), config, quantized, cpu_world(), layout=layout)
        folder = merged(quantized, adapter, tmp_path / f"of {layout}", *words)
        assert_same_tensors(folder, expected)
        files = {file.name for file in folder.iterdir()}
        whole = {BASE_FILE} if requantize == "none" else set()
        assert files == {"config.json", SINGLE, "README.md", ".lock"} | whole
        method = json.loads((folder / "config.json").read_text()).get("quantization_config")
        assert (method is None) == (requantize == "none")


def test_files_beside_the_base_that_would_mislead_transformers(
    even: tuple[Path, Path], tmp_path: Path
) -> None:
    """With `trust_remote_code` it asks for what `auto_map` names, as of Phi-4-mini. torchtune
    writes an adapter beside merged weights: transformers takes the base that this names."""
    from transformers import AutoConfig

    source = tmp_path / "source"
    shutil.copytree(even[0], source)
    shutil.copy(even[1] / CONFIG_FILE, source)
    config = json.loads((source / "config.json").read_text())
    named = {"auto_map": {"AutoConfig": "configuration_llama.LlamaConfig"}}
    (source / "config.json").write_text(json.dumps(config | named))
    folder = merged(source, even[1], tmp_path / "merged")
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type == "llama"
    assert not (folder / CONFIG_FILE).exists()
    assert torch.isfinite(logits(plain_model(folder))).all()


def merge_files(model: Path, adapter: Path, output: Path) -> None:
    merged(model, adapter, output, "max_file_bytes=400000")


@pytest.mark.long
def test_ranks_share_the_files_out(even: tuple[Path, Path], tmp_path: Path) -> None:
    merge_files(*even, tmp_path / "one")
    run_ranks(3, merge_files, *even, tmp_path / "three")
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "three").iterdir())
    assert INDEX in files and len(files) > 6
    for name in files:
        if name != ".lock":
            one, three = ((tmp_path / ranks / name).read_bytes() for ranks in ("one", "three"))
            assert one == three, name
    sizes = [file.stat().st_size for file in (tmp_path / "one").glob("*.safetensors")]
    assert sorted(sizes)[-3] < 450_000, "all but the two that hold one large tensor"


# ---- 4 bits again ------------------------------------------------------------------------------


def loaded_logits(folder: Path) -> Tensor:
    """The overrides for a quantized folder as the training recipe loads it: `lm_head` plain."""
    recipe = load_recipe()
    model = recipe.ModelConfig(str(folder), dtype="fp32")
    adapter = AdapterConfig("lora", 1, 1.0)  # B is zero
    unused = {"output_dir": "", "tokenizer": None, "dataset": None, "optimizer": None}
    cfg = recipe.Config(model=model, adapter=adapter, **unused)
    return logits(recipe.load_model(cfg, cpu_world()).eval())


@pytest.mark.parametrize("format", ["nf4", "nf4_fp32_absmax", "hqq", "none"])
def test_requantized(format: str, even: tuple[Path, Path], tmp_path: Path) -> None:
    """Weights with an adapter, and HQQ weights, are quantized again; other bytes are unchanged."""
    from transformers import AutoModelForCausalLM

    model_dir, adapter = even
    words = ["model.dtype=fp32", "dtype=fp32", f"quantization.format={format}"]
    words += ["quantization.targets=all-linear"]
    plain = load_file(merged(model_dir, adapter, tmp_path / "plain", *words) / SINGLE)
    folder = merged(model_dir, adapter, tmp_path / "bnb", *words, "requantize=nf4-bnb")
    tensors, base = load_file(folder / SINGLE), load_file(model_dir / SINGLE)
    kind = NF4Fp32AbsmaxTensor if format == "nf4_fp32_absmax" else NF4Tensor
    quantized = [n for n in base if f"{n}.absmax" in tensors]
    assert len(quantized) == 14
    for name in quantized:
        adapted = "q_proj" in name or "up_proj" in name
        expected = kind.empty(*base[name].shape, torch.float32, "cpu")
        expected.quantize_(plain[name] if adapted or format == "hqq" else base[name])
        half = base[name].size(1) // 2
        assert torch.equal(tensors[name].flatten(), expected.qdata[:, :half].flatten()), name
        absmax = tensors[f"{name}.absmax"].view(torch.uint8)
        assert torch.equal(absmax, expected.qdata[:, half:].flatten()), name
    for name in base.keys() - set(quantized):
        assert torch.equal(tensors[name], plain[name]), name
    # In training mode bitsandbytes multiplies by dequantized weights, in eval mode on CPUs in bf16.
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    assert type(theirs.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    assert type(theirs.lm_head) is nn.Linear
    ours = loaded_logits(folder)
    difference = (logits(theirs) - ours).abs().max().item()
    print(f"{format}: transformers + bitsandbytes differs by {difference:.1e}")
    assert difference < 1e-4
    moved = (ours - logits(plain_model(tmp_path / "plain"))).abs().mean().item()
    assert moved < 0.5, "4 bits of it, not another model"


def test_requantized_with_an_untied_head(tmp_path: Path) -> None:
    """The new `lm_head` stays plain next to quantized linears."""
    model_dir = write_tiny_model(tmp_path / "model", **EVEN, tie_word_embeddings=True)
    trained(model_dir, AdapterConfig("dora", 5, 7.0, targets=HEAD_TOO), tmp_path / "adapter")
    words = ["model.dtype=fp32", "dtype=fp32", "requantize=nf4-bnb"]
    folder = merged(model_dir, tmp_path / "adapter", tmp_path / "merged", *words)
    theirs = plain_model(folder).train()
    assert theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    assert (logits(theirs) - loaded_logits(folder)).abs().max() < 1e-4


# ---- memory ------------------------------------------------------------------------------------

MEMORY_SCRIPT = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.checkpoint.test_merge import merged

def peak():
    # Not ru_maxrss: in a child it starts with the value of its parent.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

folder, peaks = Path(sys.argv[2]), {}
for case in json.loads(sys.argv[3]):
    Path("/proc/self/clear_refs").write_text("5")
    peaks[case] = []
    for size in ("small", "large"):
        words = ["quantization.targets=[lm_head]", case]
        merged(folder / size, folder / size / "a", folder / f"{size} {case}", *words)
        peaks[case].append(peak())
print(json.dumps(peaks))
"""


def write_model_and_adapter(folder: Path, rows: int) -> None:
    """In bf16, with `rows` tokens of 64 numbers, and DoRA on the output layer."""
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 1, "vocab_size": rows, "intermediate_size": 64}
    (folder / "a").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | sizes))
    with torch.device("meta"):
        params = dict(Decoder(DecoderConfig.from_dir(folder)).named_parameters())
    numbers = torch.randn(1000 * 64).bfloat16()
    tensors = {n: numbers.repeat(p.numel() // 64000 + 1)[: p.numel()] for n, p in params.items()}
    save_file({n: tensors[n].view(p.shape) for n, p in params.items()}, folder / SINGLE)
    a, b = torch.randn(4, 64) * 0.1, torch.randn(rows, 4) * 0.1
    adapter = {"lora_A.weight": a, "lora_B.weight": b, "lora_magnitude_vector": torch.rand(rows)}
    stem = "base_model.model.lm_head."
    save_file({stem + name: t for name, t in adapter.items()}, folder / "a" / WEIGHTS_FILE)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "use_dora": True}
    (folder / "a" / CONFIG_FILE).write_text(json.dumps(settings))


@pytest.mark.long
def test_memory_is_that_of_one_quantized_weight(tmp_path: Path) -> None:
    """Compared with half the rows (which fill every buffer), no weight exists whole except in 4
    bits. 8, 20 and 36 to 56 MB more were seen; a whole copy in bf16 would add 51 MB."""
    rows = 800_000
    write_model_and_adapter(tmp_path / "small", rows // 2)
    write_model_and_adapter(tmp_path / "large", rows)
    cases = json.dumps(
        ["quantization.format=none", "quantization.format=nf4", "requantize=nf4-bnb"]
    )
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, ROOT, tmp_path, cases],
        # glibc's malloc keeps freed tensors of up to 32 MB, by chance some 200 MB of them.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weight = 2 * 64 * rows
    for case, (small, large) in json.loads(done.stdout.splitlines()[-1]).items():
        more = (large - small) / 1e6
        print(f"{case}: {small / 1e6:.0f} MB, and {more:.0f} for a weight of {weight / 1e6:.0f}")
        assert large - small < 0.8 * weight


# ---- errors ------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def test_an_interrupted_merge_is_no_model(
    even: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops; a later merge into the same folder writes everything anew."""
    model_dir, adapter = even
    words = ["max_file_bytes=400000", quantized_like(model_dir)]
    expected = merged(model_dir, adapter, tmp_path / "expected", *words)
    folder = tmp_path / "merged"

    def interrupt(*_: Any) -> None:
        raise Interrupted

    stops = (Merge, "_merged"), (convert, "write_index"), (convert, "write_text")
    for where, name in stops:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupt)
            with pytest.raises(Interrupted):  # with other values than the later merge
                merged(model_dir, adapter, folder, *words, "model.dtype=fp32", "dtype=fp32")
        assert list(folder.glob("*.safetensors*"))
        assert not (folder / "config.json").exists() and (folder / BEGUN).exists()
    merged(model_dir, adapter, folder, *words)
    assert {f.name for f in folder.iterdir()} == {f.name for f in expected.iterdir()}
    assert_same_tensors(folder, expected)


def test_one_writer_at_a_time(even: tuple[Path, Path], tmp_path: Path) -> None:
    with (
        FolderLock(tmp_path / "out", "output_dir"),
        pytest.raises(UserError, match="output_dir: .* is being written by process"),
    ):
        merged(*even, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["output_dir={model}"], "output_dir: '{model}' is not empty; expected a new folder"),
        (["output_dir={model}/config.json"], "config.json' is a file; expected a new folder"),
        (["adapter=nowhere"], "nowhere does not exist; expected an adapter in PEFT's format"),
        (["adapter={model}"], "adapter_config.json does not exist; expected an adapter in PEFT's"),
        (["model.path=nowhere"], "model.path: 'nowhere' does not exist"),
        (["model.path={other}"], "lora_A.weight' has shape [5, 192]; expected [5, 96]"),
        (
            ["model.path={odd}", "adapter={of_odd}", "requantize=nf4-bnb"],
            "requantize: nf4-bnb stores whole blocks of 64 columns, and "
            "'model.layers.0.mlp.down_proj.weight' has 577 columns; expected requantize=none",
        ),
        (["model.path={nan}"], "model.layers.1.input_layernorm.weight: holds NaN or infinity"),
        (
            ["model.path={large}", "dtype=fp16"],
            "embed_tokens.weight: holds NaN or infinity in fp16, whose largest number is 65,504",
        ),
        (["adapter={of_nan}"], "layers.0.mlp.up_proj.lora_A.weight' holds NaN or infinity"),
        (["dtype=fp8"], "dtype: 'fp8' is not valid; expected one of 'bf16', 'fp16', 'fp32'"),
        (["max_file_bytes=0"], "max_file_bytes: 0 is not valid; expected a number of bytes"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    words: list[str], message: str, even: tuple[Path, Path], tmp_path: Path
) -> None:
    model_dir, adapter = even
    places = {"model": model_dir, "other": tmp_path / "other", "of_odd": tmp_path / "of_odd"}
    places |= {name: tmp_path / name for name in ("odd", "nan", "large", "of_nan")}
    if any("{odd}" in word for word in words):
        section = AdapterConfig("lora", 5, 7.0)
        trained(write_tiny_model(places["odd"]), section, places["of_odd"])
    write_tiny_model(places["other"], **EVEN, hidden_size=96)
    for name, stored, value in (
        ("nan", "layers.1.input_layernorm.weight", float("nan")),
        ("large", "embed_tokens.weight", 1e5),
    ):
        write_tiny_model(places[name], **EVEN)
        tensors = load_file(places[name] / SINGLE)
        tensors[f"model.{stored}"].view(-1)[3] = value
        save_file(tensors, places[name] / SINGLE)
    shutil.copytree(adapter, places["of_nan"])
    tensors = load_file(adapter / WEIGHTS_FILE)
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"][0, 0] = float("nan")
    save_file(tensors, places["of_nan"] / WEIGHTS_FILE)
    with pytest.raises(UserError) as error:
        merged(model_dir, adapter, tmp_path / "out", *(word.format(**places) for word in words))
    assert message.format(**places) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_another_base_than_in_training_is_a_warning(
    even: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir, adapter = even
    run = tmp_path / "run"
    shutil.copytree(adapter, run / "adapter")
    config = "model: {dtype: bf16}\nquantization: {format: nf4, targets: all-linear}\n"
    (run / "config.yaml").write_text(config)
    merged(model_dir, run / "adapter", tmp_path / "same")
    assert "warning" not in capsys.readouterr().err
    merged(model_dir, run / "adapter", tmp_path / "other", "quantization.format=none")
    warnings = [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning")]
    assert warnings == [
        f"warning: quantization.format: 'none', but {run / 'adapter'} was trained with 'nf4': the "
        "result is not what training ran"
    ]
