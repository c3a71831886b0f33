"""Generation: the answers of transformers, the same in any batch and on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, TopPLogitsWarper

from examples.demo import arithmetic
from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.merge import Merge
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.common.errors import UserError
from qfsdp.data import HFTokenizer, hf_tokenizer
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, init_world
from qfsdp.evaluation.generation import SamplingConfig, generate, prompt_randoms, sample_tokens
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.log_likelihood import log_likelihoods
from qfsdp.evaluation.prompts import chat_tokens, stop_ids
from qfsdp.evaluation.serving.engine import Engine, Model, Request
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.adapted import adapted_linears
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder
from tests.models import adapted_model, load_model, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

CPU = World(torch.device("cpu"))
NF4, PLAIN = QuantizationConfig(), QuantizationConfig("none")
DORA = AdapterConfig("dora", rank=4)
SAMPLED = SamplingConfig(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=3)


def load(
    folder: Path | str, quantization: QuantizationConfig = PLAIN, adapter: Any = None
) -> Decoder:
    config = ModelConfig(str(folder), "fp32")
    adapter = None if adapter is None else str(adapter)
    return load_for_inference(config, quantization, adapter, ShardingConfig(), CPU)


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> HFTokenizer:
    return hf_tokenizer(str(smollm2_dir))


@pytest.fixture(scope="module")
def prompts(tokenizer: HFTokenizer) -> list[list[int]]:
    """Prompts of 4 to about 80 tokens."""
    questions = [problem["question"] for problem in arithmetic.generate(2, seed=0)]
    chats = [chat_tokens(tokenizer, [{"role": "user", "content": q}]) for q in questions]
    texts = ["The capital of France is", "def fibonacci(n):\n    return n if n < 2 else"]
    return [*chats, *(tokenizer.encode(text, add_eos=False) for text in texts)]


def greedy_of_transformers(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    whole: Any = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new)
    return whole[0, len(prompt) :].tolist()


def test_smollm2_answers_as_transformers(
    smollm2_dir: Path, tokenizer: HFTokenizer, prompts: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir).eval()
    expected = [greedy_of_transformers(model, prompt, 12) for prompt in prompts]
    stops = stop_ids(tokenizer, smollm2_dir)
    assert stops == {tokenizer.eos_id}
    expected = [[token for token in answer if token not in stops] for answer in expected]
    assert len({len(prompt) for prompt in prompts}) == len(prompts)
    sampling = SamplingConfig(max_new_tokens=12)
    ours = load(smollm2_dir)
    assert generate(ours, prompts, sampling, stops, CPU) == expected
    assert generate(ours, prompts[1:2], sampling, stops, CPU) == expected[1:2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # bitsandbytes' folder needs columns divisible by 64.
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), intermediate_size=576)


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = adapted_model(tiny, DORA, format="none")
    randomize_adapters(model)
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(model, DORA, str(tiny), folder, CPU)
    return folder


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(577, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_prompts(9, 1, 30, 14)


@torch.no_grad()
def greedy_without_cache(model: Decoder, prompt: list[int], new: int) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(new):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.usefixtures("eager")
def test_quantized_base_with_dora_step_by_step(tiny: Path, adapter: Path) -> None:
    model = load(tiny, NF4, adapter)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    found = generate(model, PROMPTS, SamplingConfig(max_new_tokens=24), set(), CPU)
    assert found == [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]
    assert found != generate(load(tiny, NF4), PROMPTS, SamplingConfig(24), set(), CPU)


@pytest.mark.usefixtures("eager")
@torch.no_grad()
def test_a_loaded_adapter_equals_merging(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    """Also tests that DoRA's norms are computed from the loaded tensors."""
    tokens = torch.tensor(random_prompts(40))
    for quantization in (NF4, PLAIN):
        folder = tmp_path / quantization.format
        merge = Merge(ModelWeights(tiny), quantization, torch.float32, adapter, torch.float32)
        merge.write(folder, CPU)
        difference = load(tiny, quantization, adapter)(tokens) - load(folder)(tokens)
        assert difference.abs().max() < 1e-4


@pytest.mark.usefixtures("eager")
def test_stored_quantized_folders_equal_quantizing(tiny: Path, tmp_path: Path) -> None:
    expected = generate(load(tiny, NF4), PROMPTS, SAMPLED, set(), CPU)
    for layout in ("qfsdp", "bnb"):
        quantize_folder(ModelWeights(tiny), NF4, tmp_path / layout, CPU, layout)
        assert generate(load(tmp_path / layout, NF4), PROMPTS, SAMPLED, set(), CPU) == expected


def test_a_training_model_stays_in_training_mode(tiny: Path) -> None:
    """Dropout is off while it answers."""
    dropping = AdapterConfig("lora", rank=4, dropout=0.9)
    model = adapted_model(tiny, dropping, format="none")
    randomize_adapters(model)
    expected = generate(model.eval(), PROMPTS, SAMPLED, set(), CPU)
    assert generate(model.train(), PROMPTS, SAMPLED, set(), CPU) == expected
    assert model.training and next(adapted_linears(model))[1].training


def test_an_answer_does_not_depend_on_its_batch(tiny: Path) -> None:
    model = load(tiny)
    for sampling in (SamplingConfig(12), SAMPLED):
        whole = generate(model, PROMPTS, sampling, set(), CPU)
        alone = [generate(model, [prompt], sampling, set(), CPU)[0] for prompt in PROMPTS]
        assert whole == alone == generate(model, PROMPTS[::-1], sampling, set(), CPU)[::-1]
        assert all(len(answer) == 12 for answer in whole)
    other_seed = SamplingConfig(12, SAMPLED.temperature, SAMPLED.top_p, seed=4)
    assert all(
        a != b for a, b in zip(whole, generate(model, PROMPTS, other_seed, set(), CPU), strict=True)
    )
    longer = SamplingConfig(20, SAMPLED.temperature, SAMPLED.top_p, SAMPLED.seed)
    assert [answer[:12] for answer in generate(model, PROMPTS, longer, set(), CPU)] == whole


def ended(answers: list[list[int]], stops: set[int]) -> list[list[int]]:
    """Endless answers, cut at the first stop token."""
    ends = [next((at for at, t in enumerate(a) if t in stops), len(a)) for a in answers]
    return [answer[:end] for answer, end in zip(answers, ends, strict=True)]


def test_answers_end_at_stop_tokens(tiny: Path) -> None:
    model = load(tiny)
    endless = generate(model, PROMPTS, SAMPLED, set(), CPU)
    for stops in ({endless[0][0]}, {endless[1][4], endless[2][7]}, {a[6] for a in endless}):
        steps: list[list[int | None]] = []
        found = generate(model, PROMPTS, SAMPLED, stops, CPU, steps.append)
        assert found == ended(endless, stops) != endless
        columns = zip(*steps, strict=True)
        assert found == [[t for t in column if t is not None] for column in columns]
        assert len(steps) <= max(map(len, found)) + 1  # the last step gives a stop token


def on_rank(
    tiny: Path, adapter: Path, stops: set[int], shares: list[list[int]], given: list[Any]
) -> list[Any]:
    """This rank's answers to its share of `PROMPTS`, for each sharding in `given`."""
    found = []
    for sharding in (ShardingConfig(**fields) for fields in given):
        world = init_world(sharding)
        config = ModelConfig(str(tiny), "fp32")
        model = load_for_inference(config, NF4, str(adapter), sharding, world)
        mine = [PROMPTS[at] for at in shares[world.rank]]
        found.append(generate(model, mine, SAMPLED, stops, world))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("shares", "shardings"),
    [
        ([[2], [0, 3, 1], []], [{}, {"strategy": "ddp"}, {"offload_base": "cpu"}]),
        pytest.param(
            [[0, 1, 2, 3], []],
            [
                {},
                {"strategy": "shard_grad_op", "wrap": "linear"},
                {"strategy": "hybrid_full_shard", "shard": 1},
                {"cpu_offload": True},
            ],
            marks=pytest.mark.slow,  # the recipe's test has two ranks in the normal run
        ),
    ],
    ids=["3", "2"],
)
@pytest.mark.usefixtures("eager")
def test_ranks_give_the_answers_of_one_process(
    shares: list[list[int]], shardings: list[dict[str, Any]], tiny: Path, adapter: Path
) -> None:
    """Also if a rank has no prompt, or if all answers of a rank have ended."""
    endless = generate(load(tiny, NF4, adapter), PROMPTS, SAMPLED, set(), CPU)
    stops = {endless[2][3], endless[1][5]}
    expected = ended(endless, stops)
    by_rank = run_ranks(len(shares), on_rank, tiny, adapter, stops, shares, shardings)
    for share, of_rank in zip(shares, by_rank, strict=True):
        for sharding, found in zip(shardings, of_rank, strict=True):
            assert found == [expected[at] for at in share], sharding


def test_prompts_that_cannot_be_answered(tiny: Path) -> None:
    model = load(tiny)
    with pytest.raises(UserError, match="prompt 2 of 2: no tokens; expected at least one"):
        generate(model, [[1], []], SAMPLED, set(), CPU)
    with pytest.raises(UserError, match="max_new_tokens: 12 after 245 tokens of prompt 1; .* 256"):
        generate(model, random_prompts(245), SAMPLED, set(), CPU)
    assert len(generate(model, random_prompts(244), SAMPLED, set(), CPU)[0]) == 12
    assert generate(model, [], SAMPLED, set(), CPU) == []


def frequencies(logits: Tensor, sampling: SamplingConfig, count: int = 20_000) -> Tensor:
    """How often each token is sampled with evenly spaced draws, which leave nothing to chance."""
    draws = (torch.arange(count) + 0.5) / count
    tokens = sample_tokens(logits.expand(count, -1), draws, sampling)
    return torch.bincount(tokens, minlength=len(logits)) / count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (1, 1e-6)])
def test_tokens_have_their_probabilities(
    temperature: float, top_p: float, dtype: torch.dtype
) -> None:
    logits = (2 * torch.randn(60, generator=torch.Generator().manual_seed(2))).to(dtype)
    scores = logits.float()[None] / temperature
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(torch.zeros(1, 0), scores)
    expected = scores.softmax(-1)[0]
    found = frequencies(logits, SamplingConfig(1, temperature, top_p))
    assert (found - expected).abs().max() < 2 / 20_000
    likely = expected > 2 / 20_000
    assert torch.equal(found[likely] > 0, likely[likely]) and not found[expected == 0].any()
    assert (expected > 0).sum() == {1.0: 60, 1e-6: 1}.get(top_p, (expected > 0).sum())


def test_a_temperature_of_zero_is_greedy() -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(2))
    assert frequencies(logits, SamplingConfig(1))[logits.argmax()] == 1
    for almost in (1e-4, 1e-29, 1e-40, 1e-320):
        for top_p in (1.0, 0.5):
            found = frequencies(logits, SamplingConfig(1, almost, top_p))
            assert found[logits.argmax()] == 1


def test_smallest_and_largest_draw() -> None:
    """Neither a draw of 0 nor the largest below 1 gives a token of probability 0."""
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]]).expand(2, -1)
    draws = torch.tensor([0.0, 1 - 2**-24])
    assert sample_tokens(logits, draws, SamplingConfig(1, temperature=1.0)).tolist() == [1, 2]
    assert sample_tokens(logits, draws, SamplingConfig(1, 1.0, top_p=0.99)).tolist() == [2, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_give_no_answer(temperature: float, tmp_path: Path) -> None:
    """fp16 ends at 65,504: token 0 was every answer, or one that the vocabulary does not have."""
    folder = write_tiny_model(tmp_path / "model")
    weights = load_file(folder / SINGLE)
    larger = {name: 100 * weight for name, weight in weights.items() if ".mlp." in name}
    save_file(weights | larger, folder / SINGLE)
    sampling = SamplingConfig(3, temperature)
    model = load_model(folder, dtype="fp16", format="none")
    with pytest.raises(UserError, match="logits are NaN or infinity.* model.dtype=bf16 or fp32"):
        generate(model, [[1, 2, 3]], sampling, set(), CPU)
    with pytest.raises(UserError, match="logits are NaN or infinity"):  # choice 1 of any question
        log_likelihoods(model, [([1, 2], [3]), ([1, 2], [4])], CPU, 1)
    pieces: Queue[Any] = Queue()
    no_text = SimpleNamespace(decode=lambda ids: "")
    engine = Engine({"model": Model(model, no_text, set())}, torch.device("cpu"), 1)
    engine.start()
    engine.submit(Request("model", [1, 2, 3], sampling, [], pieces.put, math.inf))
    assert pieces.get(timeout=60).finish == "failed"
    engine.stop()
    wide = load_model(folder, dtype="bf16", format="none")
    assert len(generate(wide, [[1, 2, 3]], sampling, set(), CPU)[0]) == 3
    some = torch.tensor([[1.0, 2.0], [torch.nan, 2.0], [1.0, torch.inf]])
    for top_p in (1.0, 0.5):
        tokens = sample_tokens(some, torch.zeros(3), SamplingConfig(1, temperature, top_p))
        assert tokens[0] >= 0 and tokens[1:].tolist() == [-1, -1]


def test_a_stop_string_that_is_a_special_token(tmp_path: Path) -> None:
    """The text has no special tokens, so that the string never came and the answer went on."""
    model, sampling = load(write_tiny_model(tmp_path)), SamplingConfig(max_new_tokens=6)
    answer = generate(model, [[1, 2, 3]], sampling, set(), CPU)[0]
    special = {"<|call|>": answer[3]}
    shown = SimpleNamespace(special_tokens=special, decode=lambda ids: "".join(map(chr, ids)))
    pieces: Queue[Any] = Queue()
    engine = Engine({"model": Model(model, shown, set())}, torch.device("cpu"), 1)
    engine.start()
    stops = ["nowhere", *special]
    engine.submit(Request("model", [1, 2, 3], sampling, stops, pieces.put, math.inf))
    *told, last = (pieces.get(timeout=60) for _ in range(answer.index(answer[3]) + 1))
    assert (last.finish, last.tokens) == ("stop", len(told))
    engine.stop()


def test_randoms_are_uniform_and_depend_on_prompt_and_seed() -> None:
    sampling = SamplingConfig(max_new_tokens=500, temperature=1.0)
    draws = prompt_randoms(random_prompts(*[3] * 40), sampling)
    assert draws.min() >= 0 and draws.max() < 1 and len(draws.unique()) > 0.99 * draws.numel()
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5
    correlated = torch.corrcoef(draws)[~torch.eye(40, dtype=torch.bool)]
    assert correlated.abs().max() < 5 * 500**-0.5
    again = prompt_randoms([[1, 2, 3]], SamplingConfig(20, 1.0, seed=1))
    assert not torch.equal(again, prompt_randoms([[1, 2, 3]], SamplingConfig(20, 1.0, seed=2)))
    assert torch.equal(again[:, :7], prompt_randoms([[1, 2, 3]], SamplingConfig(7, 1.0, seed=1)))
