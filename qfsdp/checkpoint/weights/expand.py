"""Block expansion (Llama-Pro): a deeper model with the same outputs.

Llama-Pro (https://arxiv.org/abs/2401.02415) inserts copies of decoder blocks. In a copy
`self_attn.o_proj` and `mlp.down_proj` are zero, so it adds zero to the residual stream, and the
model's outputs are unchanged to the last bit. Then only the new blocks are trained.

    old   0 1 2 3   4 5 6 7                  depth 8, two new blocks
    new   0 1 2 3 * 4 5 6 7 *                each a copy of the block before it

Weights are copied as bytes from file to file, 16 MB at a time.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import torch

from qfsdp.checkpoint.weights.convert import (
    WeightConversion,
    convert_folder,
    copied,
    plain_config,
)
from qfsdp.checkpoint.weights.experts import stored_as
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.checkpoint.weights.read import StoredTensor
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES
from qfsdp.common.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.decoder_config import EXPANDED, DecoderConfig
from qfsdp.modules.decoder_parts import DecoderParts
from qfsdp.modules.families.hybrid import RECURRENT
from qfsdp.modules.families.keys import FULL, SLIDING
from qfsdp.modules.transformer import Decoder

# The outputs of these linears are what a block adds to the residual stream.
PER_LAYER = ("layer_types", "layers_block_type", "no_rope_layers")  # lists in config.json
ZEROED = re.compile(
    r"model\.layers\.(\d+)\.(self_attn\.o_proj|linear_attn\.out_proj|(mlp|block_sparse_moe)\.([a-z_]+\.)?down_proj"
    r"|shared_mlp\.output_linear)"
    r"\.(weight|bias)"
)


# ---- where new blocks go ---------------------------------------------------------------------


def blocks_of_rate(depth: int, rate: float) -> int:
    """The number of new blocks: rate * depth, rounded to the nearest integer, halves up.

    Computed from the rate's decimal digits, not its binary fraction: 0.35 of 90 is 31.5, and gives
    32.
    """
    return floor(Fraction(str(rate)) * depth + Fraction(1, 2))


def expanded_positions(depth: int, new_blocks: int) -> list[int]:
    """Indices of the new blocks in the expanded model, ascending.

    The j-th of n new blocks (j = 1 .. n) comes after ceil(j * depth / n) old ones. So the last
    block is a new one, the numbers of old blocks between new ones differ by at most one, and at
    most ceil(n / depth) new blocks follow an old one.

    Args:
        depth: number of old blocks, at least 1.
        new_blocks: at least 1; may be more than `depth`.
    """
    return [-(-j * depth // new_blocks) + j - 1 for j in range(1, new_blocks + 1)]


def block_sources(depth: int, new_blocks: int) -> list[int]:
    """For every block of the expanded model, the old block that it is or copies."""
    new, sources = set(expanded_positions(depth, new_blocks)), list[int]()
    for index in range(depth + new_blocks):
        before = sources[-1] if sources else -1
        sources.append(before if index in new else before + 1)
    return sources


# ---- the folder ------------------------------------------------------------------------------


def expanded_config(config: dict[str, Any], new_blocks: int) -> dict[str, Any]:
    """The `config.json` of the expanded model.

    `expanded_layers` lists the new blocks. Blocks of an earlier expansion count as old ones.
    """
    decoder = DecoderConfig.from_dict(config)
    depth = decoder.num_hidden_layers
    sources = block_sources(depth, new_blocks)
    expanded = dict(config, num_hidden_layers=len(sources))
    for key in PER_LAYER:
        if isinstance(kinds := config.get(key), list):
            expanded[key] = [kinds[source] for source in sources]
    # The first `max_window_layers` blocks attend without the window, and so do their copies.
    if unwindowed := config.get("max_window_layers"):
        expanded["max_window_layers"] = sum(source < unwindowed for source in sources)
    layers = tuple(decoder.layers[source] for source in sources)
    dense = [at for at, kind in enumerate(layers) if not kind.mixture]
    expanded |= _dense_layers(dense, config)  # also where the rules name no mixture
    if DecoderConfig.from_dict(expanded).layers != layers:
        # Without those keys a family's rule says which layers are which, for another depth.
        usual = {True: FULL, False: SLIDING}
        expanded["layer_types"] = [
            RECURRENT if kind.recurrent else usual[kind.window is None] for kind in layers
        ]
        if any(kind.rope is None and not kind.recurrent for kind in layers):
            expanded["no_rope_layers"] = [int(kind.rope is not None) for kind in layers]
    return expanded | {EXPANDED: expanded_positions(depth, new_blocks)}


def _dense_layers(dense: list[int], config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a mixture's `config.json` that say which layers are dense, for these layers."""
    if "first_k_dense_replace" in config or "n_routed_experts" in config:
        return {"first_k_dense_replace": len(dense)}
    rules = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1} if rules else {}


def check_plain(
    weights: ModelWeights, what: str = "expand the model that it was quantized from"
) -> int:
    """Checks that a model can be expanded, and returns its number of blocks. Reads headers only.
    Raises UserError: its weights are quantized, or do not match its config.json.

    Args:
        what: what is to be done before quantizing, for the message.
    """
    if weights.quantized:
        raise UserError(
            f"model.path: '{weights.folder}' holds quantized weights; expected plain ones: {what}, "
            "and quantize the result (recipes/quantize)"
        )
    config = DecoderConfig.of_text(weights.folder)
    with torch.device("meta"):
        weights.check(Decoder(config))
    return config.num_hidden_layers


def expand_folder(
    weights: ModelWeights,
    new_blocks: int,
    folder: Path,
    world: World,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a model folder with `new_blocks` more blocks than `weights`.

    Every rank must call it; each rank writes a part of the files. Dtypes are unchanged. Raises
    UserError: see `check_plain` and `convert_folder`. NaN and infinity are refused, as they are not
    zero when multiplied by zero."""
    check_plain(weights)
    config = plain_config(weights.folder)
    new_config = expanded_config(config, new_blocks)
    parts, conversions = DecoderConfig.from_dict(new_config), {}
    for name, (source, zero) in _tensor_sources(config, new_blocks).items():
        stored = weights.plain[source]
        target = stored_as(name, stored.shape, parts)
        conversions[name] = zeros(name, stored, parts) if zero else copied(name, stored, target)
    convert_folder(conversions, weights, OutputFolder(folder), new_config, world, max_file_bytes)


def zeros(name: str, like: StoredTensor, parts: DecoderParts) -> WeightConversion:
    """A tensor of zeros: what a new file holds where nothing is written."""
    group = stored_as(name, like.shape, parts).group(like.dtype)
    return WeightConversion(group, [], lambda file, pieces: None)


def _tensor_sources(config: dict[str, Any], new_blocks: int) -> dict[str, tuple[str, bool]]:
    """Name of every tensor of the expanded model -> name of the old one, and whether the new one is
    zero."""
    depth = int(config["num_hidden_layers"])
    sources = block_sources(depth, new_blocks)
    new = set(expanded_positions(depth, new_blocks))
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(expanded_config(config, new_blocks)))
    found = {}
    for name, _ in base_parameters(model):
        index = re.match(r"model\.layers\.(\d+)\.", name)
        if index is None:
            found[name] = name, False
            continue
        old = f"model.layers.{sources[int(index[1])]}.{name[index.end() :]}"
        found[name] = old, int(index[1]) in new and ZEROED.fullmatch(name) is not None
    return found
