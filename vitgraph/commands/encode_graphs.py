"""``vitgraph encode --graph``: captures CUDA graphs, and describes how they were used."""

from __future__ import annotations

import sys
import warnings

import torch

from encoders import Encoder
from encoders.contract import OUTPUT_FIELDS, Precision
from graphwrap import GraphedEncoder, GraphStats

from ..terminal import counted
from .graph_options import MAX_GRAPHS, GraphOptions

TRIAL_BUDGET, TRIAL_GRAPHS = 2048, 8
"""The largest token budget, and the most budgets, on a device without CUDA graphs.

They are few and small because there, too, preparing a budget costs one run of the encoder.
"""


def graph_encoder(
    encoder: Encoder, options: GraphOptions, precision: Precision, progress: bool = False
) -> GraphedEncoder:
    """Capture the CUDA graphs of an encoder, and print warnings about the capture to stderr.

    Without CUDA the backend "static" is used, which pads and packs inputs in the same way but runs
    without graphs: the results are right, but nothing is faster.

    Args:
        encoder: the encoder, on the device to run on.
        options: the modality, the token budgets and the batch size to capture for.
        precision: "bf16", or "fp8" for matrix products in e4m3.
        progress: whether to show a bar while graphs are captured.

    Raises:
        ValueError: token budgets that the encoder cannot take, or too little memory for any graph.
    """
    if options.budgets is not None and len(encoder.paths) > 1:
        raise ValueError(
            f"--budgets: {type(encoder).__name__} has the paths {', '.join(encoder.paths)}, whose "
            "items differ in size; leave --budgets out, and each path gets its own"
        )
    device = next(encoder.parameters()).device
    on_cuda = device.type == "cuda"
    trial = not on_cuda and options.budgets is None
    smallest = max(path.budget_range[0] for path in encoder.paths.values())
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
            outputs=OUTPUT_FIELDS,
            backend="cudagraph" if on_cuda else "static",
            max_budget=max(TRIAL_BUDGET, smallest, options.items) if trial else None,
            max_graphs=TRIAL_GRAPHS if trial else MAX_GRAPHS,
            precision=precision,
        )
        _capture(graphed, progress)
    for warning in caught:
        _note(str(warning.message))
    return graphed


def _capture(graphed: GraphedEncoder, progress: bool) -> None:
    try:
        graphed.capture(progress=progress)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "the device ran out of memory before anything was captured: give smaller --budgets, "
            "or leave --graph out"
        ) from error


def _note(text: str) -> None:
    print(f"vitgraph: note: {text}", file=sys.stderr)


def summary(stats: GraphStats) -> str:
    """Return two lines of text: how many images and videos were replayed or run eagerly, and the
    seconds and memory that the capture took.
    """
    hits = sum(budget.hits for budget in stats.budgets)
    items = sum(budget.items for budget in stats.budgets)
    reasons = ", ".join(
        f"{reason}: {count}" for reason, count in sorted(stats.eager_reasons.items())
    )
    because = f" ({reasons})" if reasons else ""
    tokens = [budget.tokens for budget in stats.budgets]
    ends = dict.fromkeys(str(end) for end in (min(tokens), max(tokens))) if tokens else ()
    sizes = f" of {' to '.join(ends)} tokens" if ends else ""
    budgets = counted(len(tokens), "budget")
    replayed = f"{counted(items, 'item')} in {counted(hits, 'replay')}"
    return (
        f"graphs: {replayed} with {stats.padding:.1%} padding, "
        f"{stats.eager_items} eagerly{because}\n"
        f"{stats.backend}: {budgets}{sizes} in {stats.capture_seconds:.2f} s, "
        f"arena {stats.arena_bytes / 2**20:.0f} MiB, pool {stats.pool_bytes / 2**20:.0f} MiB"
    )
