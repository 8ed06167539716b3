"""``vitgraph encode --graph``: capturing graphs, and encoding through them."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch

from encoders.base.encoder import Encoder
from encoders.base.paths_encoder import PathsEncoder
from encoders.streams.calls import ItemResults, join_inputs
from graphwrap import GraphedEncoder, GraphStats

from .encode_items import WHOLE, Encoded, describe, prepare, to_cpu, whole
from .encode_media import Media, named
from .graph_options import MAX_GRAPHS, GraphOptions
from .terminal import counted

TRIAL_BUDGET, TRIAL_GRAPHS = 2048, 8
"""Largest budget and most budgets without CUDA graphs, where each costs a run of the tower."""
EVERY_FIELD = ("last_hidden_state", "pooler_output", "deepstack_features")


def graph_encoder(encoder: Encoder, options: GraphOptions) -> GraphedEncoder:
    """Return the encoder with its graphs captured; notes about that go to stderr.

    Without CUDA the "static" backend does the same padding and packing without graphs: the answers
    are right and nothing is faster.

    Raises:
        ValueError: budgets that cannot work, or no memory for any.
    """
    if options.budgets is not None and isinstance(encoder, PathsEncoder):
        raise ValueError(
            f"--budgets: {type(encoder).__name__} has the paths {', '.join(encoder.paths)}, whose "
            "items differ in size; leave --budgets out, and each path gets its own"
        )
    device = next(encoder.parameters()).device
    on_cuda = device.type == "cuda"
    trial = not on_cuda and options.budgets is None
    if not on_cuda:
        _note(
            f"there are no CUDA graphs on {device}: items are padded to budgets and run without, "
            "for trial only; leave --graph out or use --device cuda"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphed = GraphedEncoder(
            encoder,
            options.budgets,
            max_batch_size=options.items,
            max_frames_per_batch=options.segments,
            outputs=EVERY_FIELD,
            backend="cudagraph" if on_cuda else "static",
            max_budget=max(TRIAL_BUDGET, options.items) if trial else None,
            max_graphs=TRIAL_GRAPHS if trial else MAX_GRAPHS,
        )
        _capture(graphed)
    for warning in caught:
        _note(str(warning.message))
    return graphed


def _capture(graphed: GraphedEncoder) -> None:
    try:
        graphed.capture(progress=sys.stderr.isatty())
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the device ran out of memory before anything was captured: give smaller --budgets, "
            "or leave --graph out"
        ) from error


def _note(text: str) -> None:
    print(f"vitgraph: note: {text}", file=sys.stderr)


def encode_graphed(
    graphed: GraphedEncoder,
    encoder: Encoder,
    media: Iterable[Media],
    limits: Mapping[str, object],
    wanted: ItemResults = WHOLE,
) -> Iterator[Encoded]:
    """Encode through graphs, as many items at a time as one replay takes.

    Args:
        graphed: ``encoder`` with its graphs.
        encoder: prepares pixels and lays features out.
        media: the items to encode; with ``open_media`` only one batch is in memory at a time.
        limits: keywords of ``encoder.preprocess``.
        wanted: whether vectors are made, and the most tokens per call of ``graphed``.

    Yields:
        The results for each item, in order. The milliseconds of an item are those of its own
        preprocessing and a share of its replay in proportion to its tokens.

    Raises:
        ValueError: an item that cannot be encoded; the message begins with the item's name.
    """
    remaining, size = iter(media), graphed.max_batch_size
    while group := list(islice(remaining, size)):
        yield from _encode_group(graphed, encoder, group, limits, wanted)
        group.clear()  # or two batches would be in memory while the next one is decoded


def _encode_group(
    graphed: GraphedEncoder,
    encoder: Encoder,
    media: Sequence[Media],
    limits: Mapping[str, object],
    wanted: ItemResults,
) -> list[Encoded]:
    prepared, own_ms = [], []
    for medium in media:
        start = time.perf_counter()
        with named(medium):
            prepared.append(prepare(encoder, medium, limits))
        own_ms.append((time.perf_counter() - start) * 1e3)
    start = time.perf_counter()
    with named(*media):
        encoding = graphed.encoding()
        results = encoding.run(join_inputs(prepared), whole(wanted))
        outputs = list(map(to_cpu, results))
    tokens = [encoding.tokens(inputs) for inputs in prepared]
    each_ms = (time.perf_counter() - start) * 1e3 / max(sum(tokens), 1)
    times = [own + count * each_ms for own, count in zip(own_ms, tokens, strict=True)]
    columns = zip(media, prepared, outputs, times, strict=True)
    return [describe(encoder, *column, wanted) for column in columns]


def summary(stats: GraphStats) -> str:
    """Return two lines: what was replayed and what was not, and what capture took."""
    hits = sum(budget.hits for budget in stats.budgets)
    items = sum(budget.items for budget in stats.budgets)
    reasons = ", ".join(f"{why}: {count}" for why, count in sorted(stats.eager_reasons.items()))
    eager = f"{stats.eager_items} eagerly" + f" ({reasons})" * bool(reasons)
    tokens = [budget.tokens for budget in stats.budgets]
    span = f" of {min(tokens)} to {max(tokens)} tokens" if tokens else ""
    budgets = counted(len(tokens), "budget")
    replayed = f"{counted(items, 'item')} in {counted(hits, 'replay')}"
    return (
        f"graphs: {replayed} with {stats.padding:.1%} padding, {eager}\n"
        f"{stats.backend}: {budgets}{span} in {stats.capture_seconds:.2f} s, "
        f"arena {stats.arena_bytes / 2**20:.0f} MiB, pool {stats.pool_bytes / 2**20:.0f} MiB"
    )
