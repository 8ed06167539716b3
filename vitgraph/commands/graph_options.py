"""The options of ``vitgraph encode --graph``, which say for which inputs CUDA graphs are captured.

A graph is captured for a token budget (the most output tokens of a replay) and for a number of
attention segments (sequences that do not attend to each other). An image is one segment; a video
has one segment per two frames. So for videos :mod:`graphwrap` captures two graphs per budget: one
for few long segments, one for many short ones. ``--modality`` says which inputs to expect.
InternViT needs one graph per budget: its segments are tiles of one length, in images and videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MODALITIES = {"image": 1, "video": 1, "image+video": 2}
"""The default number of items (images or videos) per replay, by the value of ``--modality``."""
CLIP_SEGMENTS = 64
"""The most attention segments, one per two frames, of a replay of a graph for videos."""
MAX_GRAPHS = 48
"""The most graphs that ``--graph`` captures, which is also the default of :class:`GraphedEncoder`.
"""
MOST_ITEMS = 8192
"""The most items (images or videos) per replay: the largest default budget has 8192 tokens, and
every item has at least one."""


@dataclass(frozen=True)
class GraphOptions:
    """The settings of the CUDA graphs that ``--graph`` captures.

    ``modality`` is a key of :data:`MODALITIES`. ``budgets`` are the most output tokens of each
    graph; None chooses them automatically. ``max_batch_size`` is the most images and videos per
    replay; None takes the value of ``modality`` in :data:`MODALITIES`.
    """

    modality: str
    budgets: tuple[int, ...] | None = None
    max_batch_size: int | None = None

    @property
    def items(self) -> int:
        """The most items (images or videos) that one replay of a graph takes."""
        return self.max_batch_size or MODALITIES[self.modality]

    @property
    def segments(self) -> int:
        """The most attention segments per replay: one per image, one per two frames of a video."""
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
    """Check and parse the options of ``--graph``; no file is read or downloaded.

    Args:
        graph: whether ``--graph`` is on the command line.
        budgets: the most output tokens of each graph, separated by commas, such as
            ``"64,256,1024"``; None chooses them automatically.
        max_batch_size: the most images and videos per replay; None takes the default of the
            modality in :data:`MODALITIES`.
        modality: a key of :data:`MODALITIES`; None takes the one that fits ``images`` and
            ``videos``.
        images: files that will be encoded as images.
        videos: files that will be encoded as videos.

    Returns:
        The settings of the graphs; None if ``graph`` is False.

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
        given = [kind for kind, files in (("image", images), ("video", videos)) if files]
        modality = "+".join(given) or "image+video"
    for kind, files in (("image", images), ("video", videos)):
        if files and kind not in modality:
            raise ValueError(
                f"{files[0]}: is {'an image' if kind == 'image' else 'a video'}, and --modality "
                f"{modality} captures no graphs for it; use --modality image+video, or leave it out"
            )
    tokens = None if budgets is None else read_budgets(budgets)
    return GraphOptions(modality, tokens, max_batch_size)


def read_budgets(text: str) -> tuple[int, ...]:
    """Return the token budgets (most output tokens per graph) in a text such as ``"64,256,1024"``.

    Raises:
        ValueError: a budget is not a positive integer, or there are more than :data:`MAX_GRAPHS`.
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not (entry.isascii() and entry.isdigit()) or int(entry) < 1:
            raise ValueError(
                f"--budgets {text}: {entry!r} is not a positive integer; give output tokens with "
                "commas between, as 64,256,1024"
            )
    tokens = tuple(map(int, entries))
    if len(set(tokens)) > MAX_GRAPHS:
        raise ValueError(
            f"--budgets names {len(set(tokens))}, and at most {MAX_GRAPHS} graphs are captured: "
            "leave some out"
        )
    return tokens
