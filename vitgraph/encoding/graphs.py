"""``vitgraph encode --graph``: which graphs to capture, and encoding through them.

A modality says what will come, and so which shapes of a token budget are worth a graph. An image is
one attention segment. A clip has one segment per frame pair, so graphs for clips come in the two
shapes that :mod:`graphwrap` captures: few long segments, and many short ones. InternViT's segments
are tiles of one length, in images as in clips: one shape serves both there.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from encoders.encoder import Encoder
from encoders.paths import PathsEncoder
from encoders.streams import ItemResults, join_inputs
from graphwrap import GraphedEncoder, GraphStats

from .items import WHOLE, Encoded, describe, prepare, to_cpu, whole
from .media import Media, named

MODALITIES = {"image": 1, "video": 1, "image+video": 2}
"""What may come, and how many items one replay takes by default."""
CLIP_SEGMENTS = 64
"""Frame pairs that a graph for clips holds: 128 frames."""
MAX_GRAPHS = 48
"""As many as :class:`GraphedEncoder` captures by default."""
MOST_ITEMS = 8192
"""Items per replay at most: the tokens of the largest default budget."""
TRIAL_BUDGET, TRIAL_GRAPHS = 2048, 8
"""Largest budget and most budgets without CUDA graphs, where each costs a run of the tower."""
EVERY_FIELD = ("last_hidden_state", "pooler_output", "deepstack_features")


@dataclass(frozen=True)
class GraphOptions:
    """What ``--graph`` captures."""

    modality: str
    budgets: tuple[int, ...] | None = None
    max_batch_size: int | None = None

    @property
    def items(self) -> int:
        """Items per replay."""
        return self.max_batch_size or MODALITIES[self.modality]

    @property
    def segments(self) -> int:
        """Attention segments per replay: one per image, or one per frame pair of a clip."""
        return self.items if self.modality == "image" else max(CLIP_SEGMENTS, self.items)


def read_graph_options(
    *,
    graph: bool,
    budgets: str | None = None,
    max_batch_size: int | None = None,
    modality: str | None = None,
    images: Sequence[object] = (),
    videos: Sequence[object] = (),
) -> GraphOptions | None:
    """Check the options of the command line before anything is read or fetched.

    Args:
        graph: whether to capture at all.
        budgets: output tokens separated by commas, such as ``"64,256,1024"``.
        max_batch_size: items per replay.
        modality: one of :data:`MODALITIES`; by default what ``images`` and ``videos`` are.
        images: files that will be encoded as images.
        videos: files that will be encoded as videos.

    Returns:
        The options, or None without ``graph``.

    Raises:
        ValueError: an option that is not a number, options without ``graph``, or files of a kind
            that the modality leaves out.
    """
    given = {"budgets": budgets, "max-batch-size": max_batch_size, "modality": modality}
    if not graph:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"--{name} {value}: says what to capture; it needs --graph")
        return None
    if modality is not None and modality not in MODALITIES:
        raise ValueError(f"--modality {modality}: must be one of {', '.join(MODALITIES)}")
    if max_batch_size is not None and max_batch_size < 1:
        raise ValueError(f"--max-batch-size {max_batch_size}: must be a positive integer")
    if max_batch_size is not None and max_batch_size > MOST_ITEMS:
        raise ValueError(
            f"--max-batch-size {max_batch_size}: an item makes at least one token, and graphs are "
            f"captured for up to {MOST_ITEMS}; give at most that"
        )
    if modality is None:
        modality = "+".join(["image"] * bool(images) + ["video"] * bool(videos)) or "image+video"
    for kind, files in (("image", images), ("video", videos)):
        if files and kind not in modality:
            raise ValueError(
                f"{files[0]}: is {'an image' if kind == 'image' else 'a video'}, and --modality "
                f"{modality} captures no graphs for it; use --modality image+video, or leave it out"
            )
    tokens = None if budgets is None else read_budgets(budgets)
    return GraphOptions(modality, tokens, max_batch_size)


def read_budgets(text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as ``"64,256,1024"``.

    Raises:
        ValueError: an entry that is no positive integer, or more budgets than graphs.
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not (entry.isascii() and entry.isdigit()) or int(entry) < 1:
            raise ValueError(
                f"--budgets {text}: {entry!r} is no positive integer; give output tokens with "
                "commas between, as 64,256,1024"
            )
    tokens = tuple(map(int, entries))
    if len(set(tokens)) > MAX_GRAPHS:
        raise ValueError(
            f"--budgets names {len(set(tokens))}, and at most {MAX_GRAPHS} graphs are captured: "
            "leave some out"
        )
    return tokens


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
    limits: Mapping[str, Any],
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
    limits: Mapping[str, Any],
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
    return (
        f"graphs: {items} items in {hits} replays with {stats.padding:.1%} padding, {eager}\n"
        f"{stats.backend}: {len(tokens)} budgets{span} in {stats.capture_seconds:.2f} s, arena "
        f"{stats.arena_bytes / 2**20:.0f} MiB, pool {stats.pool_bytes / 2**20:.0f} MiB"
    )
