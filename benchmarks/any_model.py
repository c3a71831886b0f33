"""Every causal language model of the installed transformers, tiny and random, as qfsdp trains it.

    python benchmarks/any_model.py [MODEL_TYPE ...] [--json any_model.json] [--write]

For each architecture a model of a few thousand weights is saved by transformers and built by
`HubDecoder`. Compared are logits of the plain base with transformers' own, and logits, loss and all
gradients over NF4 with LoRA with PEFT's over the dequantized base, in fp32; and the logits of a row
of three samples with those of each sample alone. Three updates on two ranks have the losses of one,
and a resumed run on two ranks ends with the same bits. Each runs in processes of its own with a
limit of time. What the file of `--json` has is not computed again.

`--write` writes `docs/reference/models.md`, and `qfsdp/modules/hub_models/checked.json`: what is
equal, which is what `model.implementation: auto` takes. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from qfsdp.common.quiet import quiet_torchao  # noqa: E402

quiet_torchao()

from benchmarks.any_run import one_rank, two_ranks  # noqa: E402
from qfsdp.checkpoint.adapter_files import adapter_parameters, save_adapter  # noqa: E402
from qfsdp.common.errors import UserError  # noqa: E402
from qfsdp.common.messages import first_line  # noqa: E402
from qfsdp.modules.adapters.config import AdapterConfig  # noqa: E402
from qfsdp.modules.families import FAMILIES  # noqa: E402
from qfsdp.modules.hub_models.config import CHECKED, hub_config, known_models  # noqa: E402
from qfsdp.modules.hub_models.packing import module_names  # noqa: E402
from tests import hub_models  # noqa: E402
from tests.models import cpu_world  # noqa: E402
from tests.peft_oracle import dequantized_base  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "models.md"
SECONDS = 240  # of CPU time, of one architecture
LARGEST = 100e6  # weights of a tiny model
BOUND = 1e-5  # of logits and losses, relative to the largest; of gradients ten times that
TOKENS, AT = 24, 17
SAMPLES = [9, 1, 14]  # of the packed row

# Sizes by the names of configs. A config gets those that it has.
SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"head_dim": 16, "global_head_dim": 16, "ffn_dim": 96, "ffn_hidden_size": 96, "d_ff": 96},
    **{"word_embed_proj_dim": 64, "rotary_dim": 8, "moe_intermediate_size": 32, "num_experts": 4},
    **{"num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2},
    **{"shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1},
    **{"topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 16, "linear_num_key_heads": 2, "mamba_n_heads": 4},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16, "mamba_d_head": 32},
    **{"num_kv_shared_layers": 0, "sliding_window": 16, "mamba_d_state": 16, "state_size": 16},
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    **{"mamba_n_groups": 1, "mamba_d_ssm": 128, "lru_width": 64, "embedding_size": 64},
    **{"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "chunk_size": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dropout": 0.0},
    **{"decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "d_model": 64},
    **{"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 96},
}
# Classes that are encoders, or a half of a model that translates, by default: as decoders.
DECODES = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False}
DECODES |= {"causal": True}
# The same of vision and audio models.
PICTURES: dict[str, Any] = {
    **{"hidden_size": 32, "embed_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"depth": 2, "num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"head_dim": 16, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "d_model": 32},
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64},
    **{"projection_dim": 64, "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [0, 1]},
    **{"base_channels": 32},
}
MLA = {"num_key_value_heads": 4}  # latent attention has no groups
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), MLA),
    **dict.fromkeys(("axk1", "axk2", "youtu", "longcat_flash", "kimi_linear", "mistral4"), MLA),
    "lfm2": {"full_attn_idxs": [1, 3]},
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text")
        + ("glm4v_text", "glm46v_text", "glm_ocr_text"),
        {"rope_parameters": MROPE},
    ),
    "glm4v_moe_text": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    **dict.fromkeys(("dots3_note_text", "mistral_large4_text"), MLA),
    "glm5_next_text": MLA | {"index_kpool": 4, "qk_rope_head_dim": 0},
    "cosmos3_edge_text": {"rope_parameters": MROPE},
    "ernie4_5_vl_moe_text": {"rope_parameters": MROPE | {"mrope_section": [3, 3, 2]}},
    "hunyuan_vl_text": {"rope_parameters": MROPE | {"mrope_section": [2, 2, 2, 2]}},
    **dict.fromkeys(("chameleon", "emu3"), {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}}),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "olmo_hybrid": {"linear_num_value_heads": 2},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
    "longcat_flash": {
        **{"num_key_value_heads": 4, "head_dim": 8, "num_layers": 2, "num_hidden_layers": 4},
        **{"zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 64, "indexer_compress_ratio": 4, "hc_lowrank": 16},
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "stablelm": {"qk_layernorm": True},
}
MORE["kimi_linear"] = MLA | {"layer_types": ["linear_attention", "full_attention"] * 2}
# Model type -> changes of `MORE` for a second model, which has other modules.
SECOND: dict[str, dict[str, dict[str, Any]]] = {
    "gemma4": {"gemma4_text": MORE["gemma4_text"] | {"enable_moe_block": True, "top_k_experts": 2}},
    "mistral3": {"mistral3": {"text_config": {"model_type": "ministral3"} | SIZES}},
}


def tiny_config(kind: str, architecture: str) -> Any:
    """A config of few weights; raises what transformers raises."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    usual, more = cls(), MORE.get(kind, {})
    if kind in known_models()[0] and _encodes(usual):
        config = cls(**_sizes(usual, SIZES | DECODES) | more)
    elif usual.get_text_config() is usual:
        config = cls(**_sizes(usual, SIZES) | more)
    else:
        config = cls(**dict(_parts(usual)) | more)
    config.architectures = [architecture]
    return config


def _encodes(usual: Any) -> bool:
    """Whether a class is an encoder, or has one, unless its config says otherwise."""
    decodes = [getattr(usual, key, True) for key in ("is_decoder", "causal")]
    return usual.is_encoder_decoder or not all(decodes)


def _sizes(usual: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of `sizes` that a config has."""
    names = {*usual.to_dict(), *(getattr(type(usual), "attribute_map", None) or {})}
    ids = ("pad_token_id", "bos_token_id", "eos_token_id")
    found = {k: v for k, v in sizes.items() if k in names or k in ids}
    for name, size in found.items():
        several = vars(usual).get(name)
        if isinstance(several, list) and isinstance(size, int):
            of_layers = len(several) == vars(usual).get("num_hidden_layers")
            found[name] = size if of_layers else [size] * len(several)
    if "qk_rope_head_dim" in found:
        found.pop("head_dim", None)  # another name of it
    return found


def _parts(usual: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configs of a whole model's parts: all of few weights."""
    for name in type(usual).sub_configs:
        part = getattr(usual, name, None)
        if part is not None:
            of_text = part is usual.get_text_config()
            more = MORE.get(part.model_type, {}) if of_text else {}
            kind = {"model_type": part.model_type}
            yield name, kind | _sizes(part, SIZES if of_text else PICTURES) | more


def random_model(config: Any) -> Any:
    """transformers' own model in fp32, with every matrix random."""
    import transformers

    cls = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"no tiny config: {size / 1e6:.0f} million weights")
    torch.manual_seed(0)
    model = cls(config).float().eval()
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.05)
    return model


def compare(kind: str, architecture: str) -> dict[str, Any]:
    """What is found of one architecture: `status` is "equal", "differs", "refused" or "unknown"
    (no tiny model, or transformers itself fails on it)."""
    row = compare_one(kind, architecture)
    if row["status"] == "equal" and kind in SECOND:
        with mock.patch.dict(MORE, SECOND[kind]):
            second = compare_one(kind, architecture)
        if second["status"] != "equal":
            return second
        row["packed"] = max(row["packed"], second["packed"])
        row["modules"] = sorted({*row["modules"], *second["modules"]})
    return row


def compare_one(kind: str, architecture: str) -> dict[str, Any]:
    """`compare` of the model that `MORE` gives now."""
    from transformers import CONFIG_MAPPING

    try:  # encoders, and what takes more than text
        usual = CONFIG_MAPPING[kind]()
        given = usual.to_dict() | {"architectures": [architecture], "model_type": kind}
        if kind in known_models()[0] and _encodes(usual):
            given |= {key: value for key, value in DECODES.items() if key in given}
        hub_config(given, kind)
    except UserError as error:
        return {"status": "refused", "why": str(error).removeprefix(f"{kind}: ")}
    except Exception:
        pass  # no usual sizes; the tiny config may be right
    tokens = two_rows()
    try:
        reference = random_model(tiny_config(kind, architecture))
        with torch.no_grad():
            expected = reference(tokens, use_cache=False).logits
            others = torch.cat([tokens[:, :AT], tokens[:, AT:] + 1], 1)
            earlier = reference(others, use_cache=False).logits[:, :AT]
        assert expected.shape[:2] == tokens.shape and expected.isfinite().all(), "its logits"
        assert _relative(earlier, expected[:, :AT]) <= 10 * BOUND, "a token sees later ones"
    except Exception as error:
        return {"status": "unknown", "why": f"{type(error).__name__}: {first_line(error):.120}"}
    with tempfile.TemporaryDirectory() as scratch:
        reference.save_pretrained(scratch)
        try:
            return _compared(Path(scratch), reference, tokens, expected)
        except UserError as error:
            why = str(error).replace(f"{scratch}/config.json: ", "").replace(scratch, "FOLDER")
            return {"status": "refused", "why": why}
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error):.160}"
            return {"status": "differs", "why": why}


def two_rows() -> torch.Tensor:
    return torch.randint(3, 250, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def on_ranks(kind: str, architecture: str) -> dict[str, Any]:
    """How far the losses of two ranks are from those of one, and whether a resume has the same
    bits; of an architecture that is equal."""
    with tempfile.TemporaryDirectory() as scratch:
        random_model(tiny_config(kind, architecture)).save_pretrained(scratch)
        given = Path(scratch), two_rows()
        one = in_processes(partial(one_rank, *given))
        two = in_processes(partial(two_ranks, *given), 2)
    failed = next((row["why"] for row in (one, two) if "why" in row), None)
    if failed is not None:
        return {"ranks": failed}
    losses = [torch.tensor(row["losses"]) for row in (one, two)]
    return {"ranks": _relative(losses[1], losses[0]), "resume": two["resume"]}


def _compared(
    folder: Path, reference: Any, tokens: torch.Tensor, expected: torch.Tensor
) -> dict[str, Any]:
    from peft import PeftModel

    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    found: dict[str, Any] = {}
    with torch.no_grad():
        plain_model = hub_models.built(folder, None)
        found["logits"] = _relative(plain_model(tokens), expected)
        found["packed"] = _packed_apart(plain_model, tokens[:1])
        found["modules"] = sorted(module_names(reference))
    adapter = AdapterConfig("lora", rank=4, alpha=8)
    model = hub_models.built(folder, adapter)
    save_adapter(model, adapter, str(folder), folder / "adapter", cpu_world())
    reference.load_state_dict(dequantized_base(model), strict=False)
    peft: Any = PeftModel.from_pretrained(reference, str(folder / "adapter"), is_trainable=True)
    logits = peft.eval()(tokens, use_cache=False).logits
    loss = model(tokens, labels=labels) / (labels != -100).sum()
    theirs = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    theirs.backward()
    with torch.no_grad():
        found["nf4_logits"] = _relative(model(tokens), logits)
    found["loss"] = _relative(loss, theirs)
    gradients = {n: p.grad for n, p in peft.named_parameters() if p.requires_grad}
    mine = {
        key.replace(".weight", ".default.weight"): param.grad
        for key, param in adapter_parameters(model).items()
    }
    other = sorted(mine.keys() ^ gradients.keys())
    assert not other, f"PEFT adapts other linears, such as {other[0]}"
    found["gradients"] = _of_gradients(mine, gradients)
    plain = {name.rpartition(".")[2] for name in model.plain_linears}
    only = {name.rpartition(".")[2] for name in model.not_adapted}
    found |= {"plain": sorted(plain), "not_adapted": sorted(only)}
    exact = all(found[key] <= BOUND for key in ("logits", "nf4_logits", "loss"))
    found["status"] = "equal" if exact and found["gradients"] <= 10 * BOUND else "differs"
    return found


def _packed_apart(model: Any, tokens: torch.Tensor) -> float:
    """How far the logits of a row of samples are from those of each sample alone."""
    parts = tokens.split(SAMPLES, 1)
    alone = torch.cat([model(part) for part in parts], 1)
    positions = torch.cat([torch.arange(length) for length in SAMPLES])[None]
    borders = torch.tensor([0, *itertools.accumulate(SAMPLES)], dtype=torch.int32)
    try:
        return _relative(model(tokens, positions, cu_seqlens=borders), alone)
    except Exception:  # transformers fails on such positions
        return math.inf


def _relative(ours: torch.Tensor, theirs: torch.Tensor, least: float = 1e-9) -> float:
    """The largest difference, relative to the largest number; infinite if one is not finite."""
    difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(least))
    return difference if math.isfinite(difference) else math.inf


def _of_gradients(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest of `_relative` over all tensors; rounding of those near zero does not count."""
    given = {key: grad for key, grad in theirs.items() if grad is not None}
    assert given.keys() == {k for k, grad in ours.items() if grad is not None}, "no gradients"
    largest = max(float(grad.abs().max()) for grad in given.values())
    return max(_relative(ours[key], grad, 1e-3 * largest) for key, grad in given.items())


def architectures() -> list[tuple[str, str]]:
    """(`model_type`, class): models of text, then those that take pictures too."""
    return list(dict.fromkeys(pair for models in known_models() for pair in models.items()))


def in_processes(task: Callable[[], dict[str, Any]], ranks: int = 1) -> dict[str, Any]:
    """What `task` returns on the first of `ranks` processes, which are ended after `SECONDS`."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_started(task, rank, ranks, Path(folder)) for rank in range(ranks)]
        ends = [os.waitpid(child, 0)[1] for child in children]
        if not any(ends):
            return dict(json.loads(Path(folder, "found").read_text()))
        why = [f"its process ended with {status}" for status in ends if status]
        if signal.SIGPROF in ends:
            why = [f"took over {SECONDS} s"]
        error = Path(folder, "error")
        return {"status": "unknown", "why": error.read_text() if error.is_file() else why[0]}


def _started(task: Callable[[], dict[str, Any]], rank: int, ranks: int, folder: Path) -> int:
    if child := os.fork():
        return child
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
        try:
            if ranks > 1:
                store = dist.FileStore(str(folder / "store"), ranks)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            found = task()
            if rank == 0:
                Path(folder, "found").write_text(json.dumps(found))
            if ranks > 1:
                dist.barrier()
        except BaseException as error:
            Path(folder, "error").write_text(f"{type(error).__name__}: {first_line(error):.160}")
            os._exit(1)
    os._exit(0)


HEAD = """# Models

Written by `python benchmarks/any_model.py --write` with transformers {version}; do not edit. Every
causal language model that transformers has, and the text part of every model that takes pictures,
tiny and random, was compared with transformers and PEFT: logits, and over NF4 with LoRA the loss
and all gradients. Three updates on two ranks have the losses of one within 1e-5, and a run that is
resumed on two ranks ends with the same bits. `model.implementation: auto` takes the {native}
architectures that qfsdp builds itself, and of the others those that are equal:
{text}; of those that take pictures {whole}.
[How they are trained](../internals/models-of-transformers.md).

## Equal

`packed`: the samples of a row do not see each other, so `packed: true` is allowed. `plain`:
linears that are neither quantized nor adapted. `only quantized`: those whose names experts have
too, or that PEFT would not find. Stacked experts are not listed: they are quantized, and adapted
if `adapter.targets` names them.
"""
TABLE = """
| architecture | also built by qfsdp | packed | plain | only quantized |
| --- | --- | --- | --- | --- |
"""
TITLES = {
    "differs": "Different, and refused by `auto`",
    "refused": "Refused",
    "unknown": "Not compared, and refused by `auto`",
}


def by_class(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One row for each class. Several model types may have one: it is equal if all of them are that
    are not refused."""
    order = ("differs", "unknown", "equal", "refused")
    found: dict[str, dict[str, Any]] = {}
    for key, row in rows.items():
        name = key.split()[1]
        found[name] = min(row, found.get(name, row), key=lambda one: order.index(one["status"]))
    return found


def write_page(rows: dict[str, dict[str, Any]]) -> None:
    """Writes the page and the list of what is equal."""
    from transformers import __version__

    found = by_class(rows)
    equal = sorted(name for name, row in found.items() if row["status"] == "equal")
    apart = [name for name in equal if found[name].get("packed", 1) <= BOUND]
    # An indexer chooses the keys that a token sees; of 24 tokens it chooses all.
    apart = [name for name in apart if "Indexer" not in " ".join(found[name]["modules"])]
    packed = {name: " ".join(found[name]["modules"]) for name in apart}
    whole = set(known_models()[1].values()) & found.keys()
    parts = {"text": found.keys() - whole, "whole": whole}
    words = {}
    for key, models in zip(parts, known_models(), strict=True):
        right = sum(
            rows.get(f"{kind} {name}", {}).get("status") == "equal" for kind, name in models.items()
        )
        words[key] = f"{right} of {len(models)} model types"
    lines = [HEAD.format(version=__version__, native=len(FAMILIES), **words)]
    for key, those in parts.items():
        lines += ["\nThe text part of:\n"] if key == "whole" else []
        lines.append(TABLE)
        for name in (name for name in equal if name in those):
            cells = ["yes" if yes else "" for yes in (name in FAMILIES, name in packed)]
            cells += [", ".join(found[name][key]) for key in ("plain", "not_adapted")]
            lines.append(f"| {name} | {' | '.join(cells)} |\n")
    for status, title in TITLES.items():
        reasons: dict[str, list[str]] = {}
        for name, row in sorted(found.items()):
            if row["status"] == status:
                figures = ("logits", "nf4_logits", "loss", "gradients")
                why = row.get("why") or ", ".join(f"{key} {row[key]:.0e}" for key in figures)
                why = why.partition(";")[0].removeprefix(name).removesuffix(":").strip()
                reasons.setdefault(why, []).append(name)
        lines += [f"\n## {title}\n\n"] if reasons else []
        for why, names in reasons.items():
            text = f"{', '.join(names)}: {why}"
            lines.append(textwrap.fill(text, 98, initial_indent="* ", subsequent_indent="  "))
            lines.append("\n")
    PAGE.write_text("".join(lines))
    checked = {"transformers": __version__, "equal": equal, "packed": packed}
    CHECKED.write_text(json.dumps(checked, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", help="model types; default: all")
    parser.add_argument("--json", type=Path, help="write the figures here; those it has are kept")
    parser.add_argument("--write", action="store_true", help="write the page and the list")
    args = parser.parse_args()
    os.environ["QFSDP_EAGER_KERNELS"] = "1"
    torch.set_num_threads(1)
    compare("llama", "LlamaForCausalLM")  # imports take longer than a model
    found: dict[str, dict[str, Any]] = {}  # "MODEL_TYPE CLASS" -> its row
    if args.json and args.json.is_file():
        found = json.loads(args.json.read_text())
    for kind, name in architectures():
        if args.kinds and kind not in args.kinds:
            continue
        row = found.get(f"{kind} {name}") or in_processes(partial(compare, kind, name))
        if row["status"] == "equal" and "ranks" not in row:
            row |= on_ranks(kind, name)
            if not (row.get("resume") == 0 and row["ranks"] <= BOUND):
                why = f"two ranks {row['ranks']}, resumed {row.get('resume')}"
                row |= {"status": "differs", "why": why}
        found[f"{kind} {name}"] = row
        print(f"{kind:28}{name:36}{json.dumps(row)}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.write:
        write_page(found)


if __name__ == "__main__":
    main()
