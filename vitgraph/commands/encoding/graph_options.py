"""The options of ``vitgraph encode --graph``: the kind of items expected, and graphs for it.

A modality says which kind of items to expect, and so which shapes of a token budget are worth a
graph. An image is one attention segment. A clip has one segment per frame pair, so graphs for clips
come in the two shapes that :mod:`graphwrap` captures: few long segments, and many short ones.
InternViT's segments are tiles of one length, in images as in clips: one shape serves both there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MODALITIES = {"image": 1, "video": 1, "image+video": 2}
"""The number of items that one replay takes by default, per value of ``--modality``."""
CLIP_SEGMENTS = 64
"""The attention segments, one per two frames, that a graph for videos has room for."""
MAX_GRAPHS = 48
"""The most graphs that ``--graph`` captures; it is the default of :class:`GraphedEncoder` as well.
"""
MOST_ITEMS = 8192
"""The most items per replay: an item has at least one token, and the largest default budget has as
many tokens."""


@dataclass(frozen=True)
class GraphOptions:
    """The settings of the graphs that ``--graph`` captures.

    ``modality`` is a key of :data:`MODALITIES`. ``budgets`` are output tokens per graph; with None
    they are chosen automatically. ``max_batch_size`` is the number of items per replay; None takes
    that of the modality.
    """

    modality: str
    budgets: tuple[int, ...] | None = None
    max_batch_size: int | None = None

    @property
    def items(self) -> int:
        """The most items that one replay of a graph takes."""
        return self.max_batch_size or MODALITIES[self.modality]

    @property
    def segments(self) -> int:
        """The most attention segments per replay: one per image, one per two frames of a clip."""
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
    """Check the options of ``--graph`` before anything is read or fetched.

    Args:
        graph: whether ``--graph`` is given.
        budgets: output tokens separated by commas, such as ``"64,256,1024"``; None chooses them
            automatically.
        max_batch_size: items per replay; None takes that of the modality.
        modality: one of :data:`MODALITIES`; None takes what ``images`` and ``videos`` need.
        images: files that will be encoded as images.
        videos: files that will be encoded as videos.

    Returns:
        The options, or None without ``graph``.

    Raises:
        ValueError: a value that is not valid, options without ``--graph``, or files of a kind that
            the modality excludes.
    """
    values = {"budgets": budgets, "max-batch-size": max_batch_size, "modality": modality}
    if not graph:
        for name, value in values.items():
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
    """Return the token budgets in a text such as ``"64,256,1024"``.

    Raises:
        ValueError: an entry that is not a positive integer, or more than :data:`MAX_GRAPHS`
            budgets.
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
