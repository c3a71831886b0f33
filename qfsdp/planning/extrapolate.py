"""Estimates of large runs from dry runs of smaller ones: fewer layers, fewer rows."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from qfsdp.config.load import get_key
from qfsdp.distributed.gradients import reduces_every_update
from qfsdp.modules.attention.cut_rows import AT_ONCE
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES, planned_for
from qfsdp.modules.hub_models.config import AnyConfig, HubConfig
from qfsdp.modules.hub_models.depth import begins_alike, layer_kinds, pattern_of
from qfsdp.modules.loss import CHUNK_LOGITS
from qfsdp.planning.estimate import (
    BuildModel,
    Estimate,
    Kinds,
    Target,
    TrainStep,
    estimate,
    model_folder,
    reserved_bytes,
)
from qfsdp.planning.known_models import find_config, planned_config
from qfsdp.planning.tracker import Point

MANY_TOKENS = 4096  # all that a kernel allocates per call is small beside their tensors
_LAYER = re.compile(r"(?<=layers\.)-?\d+")


def estimate_fast(
    build_model: BuildModel,
    train_step: TrainStep,
    cfg: Any,
    world_size: int,
    local_world_size: int | None = None,
    target: Target = "cuda",
) -> Estimate:
    """Like `estimate`, from dry runs of the same model with two small numbers of layers.

    The memory at each moment within the first and last layers is linear in the depth, and the peak
    is one of these moments. A 70B model takes a tenth of the time; the peak differs by less than
    0.5 % (tests). Likewise, the estimate of a large micro-batch comes from two smaller ones, and
    that of very long rows from two shorter lengths.
    """
    cfg = _with_reduction(build_model, cfg, target)
    given = (build_model, train_step, cfg, world_size, local_world_size, target)

    def smaller(one: Any) -> Estimate:
        return estimate_fast(build_model, train_step, one, world_size, local_world_size, target)

    config = planned_config(cfg.model)
    cfg.model.check_length(cfg.max_seq_len, config.max_position_embeddings)
    rows, depth = _few_rows(cfg, config), config.num_hidden_layers
    if cfg.batch_size > 4 * max(rows):
        one, two = (smaller(replace(cfg, batch_size=size)) for size in rows)
        return _more_rows(one, two, rows, cfg.batch_size, depth)
    if (short := _shorter(cfg, config)) is not None:
        lengths = (short[0].max_seq_len, short[1].max_seq_len)
        return _more_rows(smaller(short[0]), smaller(short[1]), lengths, cfg.max_seq_len, depth)
    kinds = layer_kinds(config) if isinstance(config, HubConfig) else []
    first, pattern = pattern_of(kinds) if isinstance(config, HubConfig) else config.pattern
    every = math.lcm(cfg.activation.every_n_layers, pattern)
    # Both models have all first layers in their first half.
    # Offloaded activations of three layers are on the way: their growth is not that of depth.
    least = 8 if get_key(cfg, "activation.offload") else 4
    shallow = max(2 * every, 2 * cfg.sharding.prefetch + 2, least) + 2 * first
    shallow += (depth - shallow) % every
    sizes = (shallow, shallow + every)
    if depth <= sizes[1] or not _layers_are_equal(cfg, config, sizes):
        return estimate(*given)
    return _extrapolate(estimate(*given, sizes[0]), estimate(*given, sizes[1]), sizes, depth)


def _with_reduction(build_model: BuildModel, cfg: Any, target: Target) -> Any:
    """`cfg` with what `sharding.reduce_gradients: auto` means for all layers: a few have few."""
    sharding = cfg.sharding
    if sharding.reduce_gradients != "auto" or cfg.gradient_accumulation_steps == 1:
        return cfg
    with model_folder(cfg.model, None) as (folder, formats), planned_for(target):
        whole = replace(cfg, compile=False, model=replace(cfg.model, path=str(folder)))
        once = reduces_every_update(build_model(whole, formats), sharding)
    chosen = "every_update" if once else "every_micro_batch"
    return replace(cfg, sharding=replace(sharding, reduce_gradients=chosen))


def _few_rows(cfg: Any, config: AnyConfig) -> tuple[int, int]:
    """Two micro-batches between which memory is linear in the rows.

    The loss has the logits of a chunk of tokens at a time, and a dry run goes through all chunks:
    100,000 rows of 256 tokens took minutes. So both have at least two whole chunks.
    """
    chunk = CHUNK_LOGITS // config.vocab_size or 1
    least = -(-2 * chunk // cfg.max_seq_len)
    if cfg.batch_size * cfg.max_seq_len > (by_head := _tokens_by_head(cfg, config)):
        least = max(least, -(-by_head // cfg.max_seq_len))
    return least, 2 * least


def _tokens_by_head(cfg: Any, config: AnyConfig) -> int:
    """With so many tokens of shared rows, and more, heads go through attention one by one. So
    memory is linear from there. 0: no rows are shared."""
    if cfg.sharding.context_parallel == 1 or isinstance(config, HubConfig):
        return 0
    return AT_ONCE // (2 * config.head_dim * COMPUTE_DTYPES[cfg.model.dtype].itemsize)


def _shorter(cfg: Any, config: AnyConfig) -> tuple[Any, Any] | None:
    """The config with two lengths of rows between which memory is linear in the length; None if
    rows are not several times longer.

    A dry run of 524,288 tokens has 1,000 chunks of the loss. Masks of sliding windows grow with the
    square of the length.
    """
    chunk, parts = CHUNK_LOGITS // config.vocab_size or 1, cfg.sharding.context_parallel
    if isinstance(config, HubConfig) or any(layer.window for layer in config.layers):
        return None
    least = parts * max(4 * (cfg.activation.tile_of(config) or MANY_TOKENS), 2 * chunk)
    if cfg.max_seq_len <= 8 * least or cfg.max_seq_len // parts < config.vocab_size:
        return None
    least = max(least, _tokens_by_head(cfg, config))
    if cfg.max_seq_len <= 2 * least:
        return None
    # As for the whole length: rows of fewer tokens would split it.
    gather = cfg.sharding.vocabulary == "auto"
    sharding = replace(cfg.sharding, vocabulary="gather") if gather else cfg.sharding
    one, two = (replace(cfg, max_seq_len=n, sharding=sharding) for n in (least, 2 * least))
    return one, two


def _more_rows(
    one: Estimate, two: Estimate, rows: tuple[int, int], batch_size: int, depth: int
) -> Estimate:
    """The estimate for `batch_size` rows from those for two smaller numbers of rows; or for longer
    rows from those for two lengths."""
    share = (batch_size - rows[0]) / (rows[1] - rows[0])
    known = _by_place(one.timeline, depth, 2 * depth)
    points = [
        _point_on_line(known[place], point, share, place[2] or 0)
        for place, point in _by_place(two.timeline, depth, 2 * depth).items()
        if place in known
    ]
    return _between(one, two, share, points)


def _layers_are_equal(cfg: Any, config: AnyConfig, sizes: tuple[int, int]) -> bool:
    """Whether the config trains the same parameters in every layer, and models of `sizes` layers
    are the beginning of the whole one."""
    adapter = get_key(cfg, "adapter")
    if adapter is not None and (adapter.selects or not all(map(str.isidentifier, adapter.ends))):
        return False
    if get_key(cfg, "trainable.layers") not in (None, "all"):
        return False
    if not isinstance(config, HubConfig):
        return True
    content = find_config(cfg.model.path)
    return all(begins_alike(config, content, size) for size in sizes)


def _extrapolate(one: Estimate, two: Estimate, sizes: tuple[int, int], depth: int) -> Estimate:
    """The estimate for `depth` layers from those for two smaller numbers of layers, `sizes`."""
    share = (depth - sizes[0]) / (sizes[1] - sizes[0])
    known = _by_place(one.timeline, sizes[0], sizes[0])
    ends: list[tuple[int, Point]] = []  # with the layer of each, for the points that both have
    for place, point in _by_place(two.timeline, sizes[1], sizes[0]).items():
        if place in known:
            layer = -1 if place[2] is None else place[2] % depth
            ends.append((layer, _point_on_line(known[place], point, share, layer)))
    return _between(one, two, share, _filled(ends))


def _between(one: Estimate, two: Estimate, share: float, timeline: list[Point]) -> Estimate:
    """The estimate at `share` of the line from `one` (0) to `two` (1), with its timeline."""
    where = max(timeline, key=lambda point: point.total)
    return Estimate(
        peak=where.total,
        at_peak=dict(where.by_kind),
        where=where,
        steady=round(one.steady + share * (two.steady - one.steady)),
        host=_on_line(one.host, two.host, share),
        wire=_on_line(one.wire, two.wire, share),
        between=_on_line(one.between, two.between, share),
        moved=_on_line(one.moved, two.moved, share),
        launches=round(one.launches + share * (two.launches - one.launches)),
        timeline=timeline,
        reserved=reserved_bytes(where.total) if two.reserved else 0,
    )


def _on_line(a: Kinds, b: Kinds, share: float) -> Kinds:
    """The values at `share` of the line from `a` (0) to `b` (1)."""
    return {k: round(a.get(k, 0) + share * (b.get(k, 0) - a.get(k, 0))) for k in a | b}


def _point_on_line(a: Point, b: Point, share: float, layer: int) -> Point:
    module, at = _LAYER.sub(str(layer), a.module), a.at + share * (b.at - a.at)
    return Point(a.phase, module, at, _on_line(a.by_kind, b.by_kind, share))


def _filled(ends: list[tuple[int, Point]]) -> list[Point]:
    """The points of the first and last layers, and interpolated ones for the layers between."""
    visits = [(layer, [p for _, p in found]) for layer, found in groupby(ends, itemgetter(0))]
    timeline = list(visits[0][1])
    for (first, points), (last, others) in pairwise(visits):
        step = 1 if first < last else -1
        for layer in range(first + step, last, step):
            share = (layer - first) / (last - first)
            pairs = zip(points, others, strict=False)
            timeline += [_point_on_line(a, b, share, layer) for a, b in pairs]
        timeline += others
    return timeline


Place = tuple[str, str, int | None, int]


def _by_place(points: list[Point], layers: int, shallow: int) -> dict[Place, Point]:
    """Points by phase, module, last layer seen, and how often these three occurred before.

    The first `shallow // 2` layers count from 0, the others from the end with negative numbers, as
    many as a model of `shallow` layers has. Points of the layers between are left out.
    """
    met = Counter[Any]()
    found: dict[Place, Point] = {}
    layer: int | None = None
    for point in points:
        if match := _LAYER.search(point.module):
            layer = int(match[0])
            layer -= layers if layer >= shallow // 2 else 0
        if layer is None or not shallow // 2 - shallow > layer >= shallow // 2 - layers:
            place = (point.phase, _LAYER.sub(str(layer), point.module), layer)
            found[*place, met[place]] = point
            met[place] += 1
    return found
