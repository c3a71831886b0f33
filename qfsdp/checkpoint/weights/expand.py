"""Block expansion: a deeper model that computes what the old one does (Llama-Pro).

Llama-Pro (https://arxiv.org/abs/2401.02415) puts copies of decoder blocks between them. In a copy
`self_attn.o_proj` and `mlp.down_proj` are zero, so it adds zero to the residual stream, and the
model's function is unchanged to the last bit. Then the new blocks alone are trained.

    old   0 1 2 3   4 5 6 7                  depth 8, two new blocks
    new   0 1 2 3 * 4 5 6 7 *                each a copy of the block before it

Weights are copied as bytes from file to file, some megabytes at a time.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import torch

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import streamed
from qfsdp.checkpoint.weights.output_folder import write_model_folder
from qfsdp.checkpoint.weights.quantize import copy_pieces
from qfsdp.checkpoint.weights.read import Read
from qfsdp.checkpoint.weights.write import (
    MAX_FILE_BYTES,
    Entry,
    PlannedFile,
    SafetensorsFile,
    plan_files,
    write_files,
)
from qfsdp.cli.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import base_parameters
from qfsdp.modules.decoder_config import EXPANDED, DecoderConfig
from qfsdp.modules.transformer import Decoder

# What a block adds to the residual stream comes out of these.
ZEROED = re.compile(r"model\.layers\.(\d+)\.(self_attn\.o_proj|mlp\.down_proj)\.(weight|bias)")


# ---- where new blocks go ---------------------------------------------------------------------


def blocks_of_rate(depth: int, rate: float) -> int:
    """How many new blocks `rate` means: rate * depth, rounded to the nearest, halves up.

    The rate's decimal digits count, not its binary fraction: 0.35 of 90 is 31.5, and gives 32.
    """
    return floor(Fraction(str(rate)) * depth + Fraction(1, 2))


def expanded_positions(depth: int, new_blocks: int) -> list[int]:
    """Indices that the new blocks have in the expanded model, ascending.

    The j-th of n new blocks (j = 1 .. n) comes after ceil(j * depth / n) old ones. So the last one
    comes last, the numbers of old blocks between new ones differ by at most one, and no old block
    is followed by more than ceil(n / depth) new ones.

    Args:
        depth: number of old blocks, at least 1.
        new_blocks: at least 1; may be more than `depth`.
    """
    return [-(-j * depth // new_blocks) + j - 1 for j in range(1, new_blocks + 1)]


def block_sources(depth: int, new_blocks: int) -> list[int]:
    """For every block of the expanded model the old one that it is, or is a copy of."""
    new, sources = set(expanded_positions(depth, new_blocks)), list[int]()
    for index in range(depth + new_blocks):
        before = sources[-1] if sources else -1
        sources.append(before if index in new else before + 1)
    return sources


# ---- the folder ------------------------------------------------------------------------------


def expanded_config(config: dict[str, Any], new_blocks: int) -> dict[str, Any]:
    """A `config.json` for the expanded model.

    `expanded_layers` has the indices of the new blocks. Those of an earlier expansion are not among
    them: they are old blocks now.
    """
    decoder = DecoderConfig.from_dict(config)
    depth = decoder.num_hidden_layers
    sources = block_sources(depth, new_blocks)
    expanded = dict(config, num_hidden_layers=len(sources))
    if isinstance(kinds := config.get("layer_types"), list):
        expanded["layer_types"] = [kinds[source] for source in sources]
    # The first so many blocks attend without the window, as do the copies of them.
    unwindowed = config.get("max_window_layers", decoder.max_window_layers)
    if unwindowed:
        expanded["max_window_layers"] = sum(source < unwindowed for source in sources)
    return expanded | {EXPANDED: expanded_positions(depth, new_blocks)}


def check_plain(weights: ModelWeights) -> int:
    """The number of blocks of a model that can be expanded. Reads headers only.

    Raises:
        UserError: its weights are packed, or are not those that its config.json means.
    """
    if weights.quantized:
        raise UserError(
            f"model.path: '{weights.folder}' holds packed weights; expected plain ones: expand the "
            "model that it was packed from, and pack the result (recipes/quantize)"
        )
    config = DecoderConfig.from_dir(weights.folder)
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
    """Writes the model in `weights` with `new_blocks` more, as a model folder.

    Every rank must call it; each writes a part of the files. Dtypes stay as they are stored.

    Raises:
        UserError: see `check_plain` and `write_model_folder`; or a weight holds NaN or infinity,
            which times zero would not be zero.
    """
    check_plain(weights)
    config = json.loads((weights.folder / "config.json").read_text(encoding="utf-8"))
    sources = _tensor_sources(config, new_blocks)
    stored = {name: weights.plain[source] for name, (source, _) in sources.items()}
    groups = {name: {name: Entry(t.dtype, t.shape)} for name, t in stored.items()}
    copied = {name for name, (_, zero) in sources.items() if not zero}

    def write(files: list[PlannedFile]) -> None:
        names = [name for file in files for name in file.groups if name in copied]
        cpu = torch.device("cpu")
        reads = [Read(stored[name], range(stored[name].rows), cpu) for name in names]
        with streamed(reads, world.rank == 0 and bool(files)) as pieces:

            def fill(name: str, file: SafetensorsFile) -> None:
                if name in copied:  # a new file is zero where nothing was written
                    copy_pieces(name, next(pieces), file)

            try:
                for _ in write_files(folder, files, fill):
                    pass
            except ValueError as error:
                raise UserError(f"{weights.folder}: {error}") from None

    write_model_folder(
        folder,
        plan_files(groups, max_file_bytes),
        write,
        weights.folder,
        lambda: expanded_config(config, new_blocks),
        world,
    )


def _tensor_sources(config: dict[str, Any], new_blocks: int) -> dict[str, tuple[str, bool]]:
    """Name of every tensor of the expanded model -> the old one, and whether it is zero instead."""
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
