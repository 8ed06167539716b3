"""Attention maps: the softmax weight that each patch gets from chosen queries, per block.

The blocks run as modules, and each attention layer passes its queries and keys to
:func:`encoders.layers.attention.observe_attention`. The softmax weights are computed from these,
for a bounded number of queries at a time, and then arranged in space by the encoder's
``feature_maps``.

Shapes: T rows of hidden states (patches, class tokens) in the order in which a block processes
them, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from encoders import Encoder, VisionEncoder
from encoders.base.intermediates import block_indices
from encoders.base.raster import stitch_items
from encoders.base.vision_encoder import InnerStack
from encoders.block_parts import CutsViews
from encoders.contract import Limits, VisionInputs
from encoders.grids import plain_values
from encoders.layers.attention import observe_attention
from encoders.streams import ImagesLike, VideosLike

SCORES_AT_ONCE = 1 << 24
"""The most scores (products of a query and a key) in memory at a time: 64 MiB of float32."""

Queries: TypeAlias = Sequence[tuple[int, int, int]] | Literal["cls"] | None
"""The queries of attention maps: points (frame, row, column) from 0, "cls" for the class token of
each tile, or None for all patches."""
Heads: TypeAlias = Literal["mean", "all"]
"""Whether attention is shown as the mean over the heads or for each of them."""


def attention_maps(
    encoder: Encoder,
    images: ImagesLike = (),
    videos: VideosLike = (),
    *,
    blocks: int | Sequence[int] | None = (-1,),
    queries: Queries = None,
    heads: Heads = "mean",
    path: str = "image",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_tiles: int | None = None,
    max_soft_tokens: int | None = None,
    fps: float | None = None,
    num_frames: int | None = None,
) -> list[list[Tensor]]:
    """Return the weight that attention gives to each patch, as maps in raster order.

    The weights are computed for some queries at a time, so memory is bounded.

    Args:
        encoder: an encoder that is neither accelerated nor wrapped in CUDA graphs.
        images, videos: as ``preprocess`` takes them.
        blocks: n for the last n blocks, numbers (negatives from the end), None for all.
        queries: the rows whose attention is shown: None for all patches of the map, "cls" for
            the class token of each tile, or points (frame, row, column) of the map.
        heads: "mean" over the heads, or "all" of them.
        path: "image", or another key of ``paths`` or ``feature_maps``, such as "tiles";
            "image.sam" and "tiles.sam" show the blocks of SAM in DeepSeek-OCR.
        min_pixels, max_pixels, ..., num_frames: as ``preprocess`` takes them.

    Returns:
        For each item a list with one map [t, h, w] per block, of all heads [H, t, h, w], in float32
        or wider. Tiles are stitched, and an item that does not use the path has an empty list. A
        value is the mean, over the queries, of their attention weight on the patch, which is 0 for
        a query in another window or tile; patches that are merged share the weight of their row
        equally. Weights of class tokens and thumbnails are left out, and the others are not
        normalised again.

    Raises:
        ValueError: an accelerated or wrapped encoder, what ``preprocess`` rejects, a block, point
            or path that does not exist, or no class token.
    """
    require_plain(encoder)
    limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
    inputs = encoder.preprocess(images, videos, **limits._asdict())
    return maps_of_inputs(encoder, inputs, blocks=blocks, queries=queries, heads=heads, path=path)


def require_plain(encoder: object) -> None:
    """Check that an encoder is not wrapped, as in CUDA graphs.

    Raises:
        ValueError: a wrapper, or anything else that is no encoder.
    """
    if not isinstance(encoder, Encoder):
        raise ValueError(
            f"{type(encoder).__name__} gives no attention maps: pass the encoder that it was made "
            "from, its attribute encoder"
        )


def spread_blocks(encoder: Encoder, path: str, count: int) -> list[int]:
    """Return the numbers of at most ``count`` blocks, evenly spread from the first to the last.

    Args:
        encoder: an encoder of one input path or of several.
        path: as :func:`attention_maps` takes it.
        count: the number of blocks, at least 2.

    Raises:
        ValueError: an accelerated encoder, or a path that does not exist.
    """
    name, inner = _read_path(encoder, path)
    depth = _depth(encoder.paths[name], inner)
    most = min(count, depth)
    return [round(number * (depth - 1) / max(most - 1, 1)) for number in range(most)]


@torch.no_grad()
def maps_of_inputs(
    encoder: Encoder,
    inputs: VisionInputs,
    *,
    blocks: int | Sequence[int] | None = (-1,),
    queries: Queries = None,
    heads: Heads = "mean",
    path: str = "image",
) -> list[list[Tensor]]:
    """Return attention maps of inputs that are preprocessed already.

    Args:
        encoder: an encoder of one input path or of several.
        inputs: the result of ``encoder.preprocess``.
        blocks, queries, heads, path: as :func:`attention_maps` takes them.

    Returns:
        As :func:`attention_maps` returns them.

    Raises:
        ValueError: an accelerated encoder, or blocks, queries, heads or a path that do not exist.
    """
    if heads not in get_args(Heads):
        raise ValueError(f'heads={heads!r}: must be "mean" or "all"')
    run = PathRun(encoder, inputs, blocks, path)
    if run.is_empty:
        return [[] for _ in inputs.grid_thw]
    query_weights = cache(partial(run.query_weights, queries))
    query_weights(run.shape)  # bad queries are refused before any block runs
    maps_by_block = {}
    for number, block, call, hidden in run.steps():
        weights = weights_of_block(block, call, query_weights(hidden.shape[:-1]), heads)
        of_patches = weights.squeeze(-1) / run.patches_per_row(hidden)
        maps_by_block[number] = _shown(of_patches, heads, run.arrange)
    return [
        [maps_by_block[number][item] for number in run.indices if item in run.rows]
        for item in range(len(inputs.grid_thw))
    ]


class PathRun:
    """A run of chosen blocks of one input path, in which the calls of attention are observed.

    Args:
        encoder: an encoder of one input path or of several.
        inputs: the result of ``encoder.preprocess``.
        blocks, path: as :func:`attention_maps` takes them.

    Raises:
        ValueError: an accelerated encoder, or blocks or a path that do not exist.
    """

    def __init__(
        self,
        encoder: Encoder,
        inputs: VisionInputs,
        blocks: int | Sequence[int] | None,
        path: str,
    ) -> None:
        name, inner = _read_path(encoder, path)
        tower = encoder.paths[name]
        self._encoder, self._inputs, self._path = encoder, inputs, path
        self._tower, self._inner = tower, inner
        self._stack = tower.blocks if inner is None else inner.blocks
        self.indices = block_indices(blocks, _depth(tower, inner))
        self.is_empty = not inputs.paths[name].items or not self.indices
        if self.is_empty:
            return
        pixels, grid_thw, _ = inputs.paths[name]
        self._metadata = tower.prepare_encoder_metadata(grid_thw)
        self._hidden = (
            tower.embed_patches(pixels, self._metadata)
            if inner is None
            else inner.embed_patches(pixels)
        )
        self.shape = self._hidden.shape[:-1]
        self.rows = self.row_maps(self.shape)

    def arrange(self, rows: Tensor) -> dict[int, Tensor]:
        """Return rows as a map [t, h, w, C] by the number of an item."""
        ordered = self._tower.in_input_order(rows, self._metadata) if self._inner is None else rows
        return _maps_of_path(self._encoder, self._inputs, self._path, ordered)

    def row_maps(self, shape: torch.Size) -> dict[int, Tensor]:
        """Return the number of each patch's row as a map [t, h, w, 1] by the number of an item.

        ``shape`` [..] is that of the rows. Patches that a tower has merged have the same row.
        """
        numbers = torch.arange(shape.numel(), device=self._hidden.device)
        return self.arrange(numbers.view(*shape, 1))

    def patches_per_row(self, hidden: Tensor) -> int:
        """Return how many patches each row of a hidden state is for, 1 in most towers."""
        return self.shape.numel() // hidden.shape[:-1].numel()

    def query_weights(self, queries: Queries, shape: torch.Size) -> Tensor:
        """Return the factor of each row in the mean over the queries of its item, [.., 1].

        ``shape`` [..] is that of the rows.
        """
        class_rows = None if self._inner else self._metadata.get("prefix_index")  # of segments
        return _query_weights(self.row_maps(shape), queries, shape, class_rows)

    def steps(self) -> Iterator[tuple[int, nn.Module, AttentionCall, Tensor]]:
        """Yield number, block, its call of attention, and its output, for each chosen block."""
        hidden = self._hidden
        steps = self._tower.steps(self._stack, hidden, self._metadata, stop=max(self.indices) + 1)
        for number, (block, step) in enumerate(zip(self._stack, steps, strict=False)):
            with _CallsOfAttention() as observed:
                hidden = step(hidden)
            if number in self.indices:
                yield number, block, _only_call(observed, number, block), hidden


def _shown(
    weights: Tensor, heads: Heads, arrange: Callable[[Tensor], dict[int, Tensor]]
) -> dict[int, Tensor]:
    """Return a map [t, h, w] by item, or [H, t, h, w] of all heads, of ``weights`` [.., H]."""
    if heads == "mean":
        return {item: x.squeeze(-1) for item, x in arrange(weights).items()}
    return {item: x.movedim(-1, 0) for item, x in arrange(weights).items()}


def _depth(tower: VisionEncoder, inner: InnerStack | None) -> int:
    """Return the number of blocks of a tower, or of a stack of blocks that it runs before them."""
    return tower.config.depth if inner is None else len(inner.blocks)


def _read_path(encoder: Encoder, path_name: str) -> tuple[str, InnerStack | None]:
    """Read the name of an input path and, if one is named, its inner stack of blocks.

    ``path_name`` is the name of a path, such as "image", or of a path and a stack of blocks that
    its tower runs before ``blocks``, such as "image.sam"; without one, the stack is None.

    Raises:
        ValueError: there is no such path, or the encoder is accelerated.
    """
    towers: Mapping[str, VisionEncoder] = encoder.paths
    name, _, inner = path_name.partition(".")
    name = name if len(towers) > 1 or inner else "image"
    if name not in towers or (inner and inner not in towers[name].inner_stacks):
        names = [
            f"{name}.{stack}" for name, tower in towers.items() for stack in tower.inner_stacks
        ]
        raise _no_path(path_name, [*towers, *names])
    if towers[name].accelerator is not None:
        raise ValueError(
            "an accelerated encoder gives no attention maps, because its kernels keep no weights: "
            "pass the encoder that accelerated() was called on"
        )
    return name, towers[name].inner_stacks[inner] if inner else None


class AttentionCall(NamedTuple):
    """The queries and keys of one call of attention, and the factor that scales their products.

    Queries and keys are [T, H, K] or, if ``cu_seqlens`` is None, [S, H, n, K] for segments of n
    rows each.
    """

    q: Tensor
    k: Tensor
    cu_seqlens: Tensor | None
    scale: float
    causal_half: bool = False
    """Whether the first half of a segment attends to that half, and each row of the second half to
    the rows up to itself; if not, all rows attend to all."""


class _CallsOfAttention(TorchFunctionMode):
    """A context manager that records the queries and keys of every call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []

    def __torch_function__(  # type: ignore[explicit-any]  # called for every function of torch
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is observe_attention:
            self.calls.append(AttentionCall._make(args))
            return None
        return func(*args, **(kwargs or {}))


def _only_call(observed: _CallsOfAttention, number: int, block: nn.Module) -> AttentionCall:
    """Return the call of attention that a block made.

    Raises:
        ValueError: the block did not call this library's attention exactly once.
    """
    if len(observed.calls) != 1:
        raise ValueError(
            f"block {number} of type {type(block).__name__} made {len(observed.calls)} calls of "
            "attention that can be observed, not 1: maps need the attention of this library, "
            "called without torch.compile"
        )
    return observed.calls[0]


def weights_of_block(
    block: nn.Module, call: AttentionCall, query_weights: Tensor, heads: Heads
) -> Tensor:
    """Return the attention weights that each row gets in one block, [.., H, G] or [.., 1, G]."""

    def attend(query_weights: Tensor) -> Tensor:
        weights = _weights(call, query_weights.flatten(0, -2), heads).flatten(1)
        return torch.unflatten(weights, 0, query_weights.shape[:-1])

    weights = (
        block.cut_views(attend, query_weights)
        if isinstance(block, CutsViews)
        else attend(query_weights)
    )
    return torch.unflatten(weights, -1, (-1, query_weights.shape[-1]))


def _weights(call: AttentionCall, query_weights: Tensor, heads: Heads) -> Tensor:
    """Return the softmax weights that each row gets as a key, summed over queries.

    ``query_weights`` are [T, G], the factors of each row in G sums. The result is [T, H, G], or
    [T, 1, G] with the mean over the heads.
    """
    q, k = call.q, call.k
    if call.cu_seqlens is None:  # q and k are [S, H, n, K], S segments of n rows each
        offsets = list(range(0, len(q) * q.shape[2] + 1, q.shape[2]))
        q, k = (rearrange(x, "s h n k -> (s n) h k") for x in (q, k))
    else:
        offsets = call.cu_seqlens.tolist()
    dtype = torch.promote_types(q.dtype, torch.float32)
    shape = (len(q), q.shape[1] if heads == "all" else 1, query_weights.shape[1])
    weights = torch.zeros(shape, dtype=dtype, device=q.device)
    for start, end in pairwise(offsets):
        query_rows = start + query_weights[start:end].any(1).nonzero().flatten()
        keys = k[start:end].to(dtype).permute(1, 2, 0)
        for part in query_rows.split(max(SCORES_AT_ONCE // max(q.shape[1] * (end - start), 1), 1)):
            scores = (q[part].to(dtype) * call.scale).transpose(0, 1) @ keys
            if call.causal_half:
                last = (part - start).clamp(min=(end - start) // 2 - 1)
                hidden = torch.arange(end - start, device=q.device) > last[:, None]
                scores = scores.masked_fill(hidden, -torch.inf)
            received = scores.softmax(-1)
            if heads == "mean":
                received = received.mean(0, keepdim=True)
            weights[start:end] += torch.einsum(
                "h q n, q g -> n h g", received, query_weights[part].to(dtype)
            )
    return weights


def _query_weights(
    rows: dict[int, Tensor], queries: Queries, shape: torch.Size, prefix: Tensor | None
) -> Tensor:
    """Return the factor of each row in the mean over the queries of its item."""
    device = next(iter(rows.values())).device
    query_weights = torch.zeros(shape.numel(), dtype=torch.float64, device=device)
    for numbers in rows.values():
        if queries is None:
            query_rows = numbers.flatten()
        elif isinstance(queries, str):
            query_rows = _class_rows(numbers, queries, shape, prefix)
        else:
            query_rows = _rows_of_points(numbers, queries)
        query_weights.index_add_(
            0,
            query_rows,
            torch.full_like(query_rows, 1 / len(query_rows), dtype=query_weights.dtype),
        )
    return query_weights.view(*shape, 1)


def _class_rows(numbers: Tensor, queries: str, shape: torch.Size, prefix: Tensor | None) -> Tensor:
    """Return the row numbers of an item's class tokens, which precede the patches of each tile."""
    if queries != "cls":
        raise ValueError(f'queries={queries!r}: must be None, "cls" or points (frame, row, column)')
    if prefix is not None:
        of_segments = prefix[:, 0].contiguous()
        segment = torch.searchsorted(of_segments, numbers.flatten(), right=True).unique() - 1
        return of_segments[segment]
    length = shape[-1] if len(shape) == 2 else numbers.numel()
    first: Tensor = (numbers.flatten() // length).unique() * length
    rows = (first[:, None] + torch.arange(length, device=first.device)).flatten()
    others = rows[~torch.isin(rows, numbers)]
    if len(shape) != 2 or not len(others):
        raise ValueError(
            "queries='cls': this encoder has no class token; take None for all patches, or points"
        )
    return others


def _rows_of_points(numbers: Tensor, queries: Queries) -> Tensor:
    """Return the row numbers of the patches at some points of an item, [points]."""
    entries = plain_values(queries)
    candidates = [plain_values(point) for point in entries] if isinstance(entries, Iterable) else []
    points = [tuple(point) for point in candidates if isinstance(point, Iterable)]
    all_integers = all(len(p) == 3 and all(type(n) is int for n in p) for p in points)
    if not points or len(points) != len(candidates) or not all_integers:
        raise ValueError(
            f'queries={queries!r}: must be None, "cls" or a list of points (frame, row, column)'
        )
    shape = numbers.shape[:3]
    for point in points:
        if any(not 0 <= index < size for index, size in zip(point, shape, strict=True)):
            raise ValueError(
                f"point {point}: must be (frame, row, column), counted from 0, of a map of "
                f"{shape[0]} x {shape[1]} x {shape[2]} patches"
            )
    return torch.stack([numbers[point][0] for point in points])


def _maps_of_path(
    encoder: Encoder, inputs: VisionInputs, path: str, rows: Tensor
) -> dict[int, Tensor]:
    """Return a map [t, h, w, C] by item number, for each item that uses an input path."""
    path, _, inner = path.partition(".")
    if len(encoder.paths) == 1 and not inner:
        item_maps = encoder.feature_maps(rows, inputs)
        if path not in item_maps[0]:
            raise _no_path(path, item_maps[0])
        return {item: maps[path] for item, maps in enumerate(item_maps)}
    _, grid_thw, items = inputs.paths[path]
    tilings = inputs.tiles or [(1, 1, False)] * len(inputs.grid_thw)
    tiles = [(*tilings[item][:2], False) for item in items] if path == "tiles" else None
    if inner:  # the rows of an inner stack are [views, h, w, C]
        maps = stitch_items(rows.split(grid_thw[:, 0].tolist()), tiles)
    else:
        maps = encoder.paths[path].feature_maps(rows, grid_thw, tiles)
    return dict(zip(items, maps, strict=True))


def _no_path(path: str, names: Iterable[str]) -> ValueError:
    known_names = ", ".join(map(repr, names))
    return ValueError(f"path={path!r}: this encoder has attention maps of {known_names}")
