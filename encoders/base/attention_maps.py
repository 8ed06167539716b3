"""Attention maps: the softmax weight that each patch gets from chosen queries, per block.

The blocks run without fused kernels. Each attention layer passes its queries and keys to
:func:`encoders.layers.attention.observe_attention`. The softmax weights are computed from these,
for a bounded number of queries at a time, and then arranged in space by the encoder's
``feature_maps``.

Shapes: T rows of hidden states (patches, class tokens) in the order in which a block processes
them, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..data import Metadata, VisionInputs
from ..grids import plain_values
from ..layers.attention import observe_attention
from .encoder import Encoder
from .intermediates import BlockOutputs, block_indices
from .map_settings import Heads, MapSettings, Queries
from .raster import stitch_items
from .tile_encoder import InnerStack
from .vision_encoder import VisionEncoder

if TYPE_CHECKING:
    from ..contract import CallBlock

SCORES_AT_ONCE = 1 << 24
"""The most scores (products of a query and a key) in memory at a time: 64 MiB of float32."""


class ObservedPath(NamedTuple):
    """One input path of an encoder (such as "image"), and how its blocks are observed."""

    tower: VisionEncoder
    inner: Mapping[str, InnerStack]
    """The stacks of blocks that run before ``tower.blocks``, by name: "sam" in DeepSeek-OCR."""
    outputs_for: Callable[[AttentionObserver], BlockOutputs]
    """Takes an observer, and returns a function that runs ``tower.blocks`` and yields, for each
    block, the values of the observer instead of hidden states."""


@torch.no_grad()
def attention_maps(
    encoder: Encoder,
    paths: Mapping[str, ObservedPath],
    inputs: VisionInputs,
    settings: MapSettings,
) -> list[list[Tensor]]:
    """Return one list per item with one attention map per block.

    Args:
        encoder: an encoder of one input path or of several.
        paths: the input paths of the encoder by name, such as "image" and "tiles".
        inputs: the result of ``encoder.preprocess``.
        settings: the blocks, queries, heads and input path to show, as the method
            ``attention_maps`` of the encoder takes them.

    Returns:
        Maps [t, h, w] or, if all heads are shown, [H, t, h, w] in float32 or wider. The list of an
        item that does not use the input path, such as an image without tiles, is empty.

    Raises:
        ValueError: an accelerated encoder, or blocks, queries, heads or a path that do not exist.
    """
    if settings.heads not in get_args(Heads):
        raise ValueError(f'heads={settings.heads!r}: must be "mean" or "all"')
    path, inner = _read_path(paths, settings.path)
    tower = paths[path].tower
    depth = tower.config.depth if inner is None else len(inner.blocks)
    indices = block_indices(settings.blocks, depth)
    if not inputs.paths[path].items or not indices:
        return [[] for _ in inputs.grid_thw]
    observer = AttentionObserver(tower.blocks if inner is None else inner.blocks)
    numbers, (pixels, grid_thw, _) = sorted(set(indices)), inputs.paths[path]
    if inner is None:
        states = paths[path].outputs_for(observer)(pixels, grid_thw, numbers)
    else:
        patches, call = inner.embed(pixels), _call_without_context
        states = observer.run_blocks(patches, {}, numbers, inner.blocks, call, iter(()))
    rows = _maps_of_path(encoder, inputs, settings.path, next(states))
    observer.query_weights = _query_weights(rows, settings.queries, observer.shape)
    maps_by_block = {}
    is_mean = settings.heads == "mean"
    for number, weights in zip(numbers, states, strict=True):
        shown_weights = weights.mean(-1, keepdim=True) if is_mean else weights
        maps = _maps_of_path(encoder, inputs, settings.path, shown_weights).items()
        maps_by_block[number] = {
            item: x.squeeze(-1) if is_mean else x.movedim(-1, 0) for item, x in maps
        }
    return [
        [maps_by_block[number][item] for number in indices if item in rows]
        for item in range(len(inputs.grid_thw))
    ]


def _read_path(paths: Mapping[str, ObservedPath], path_name: str) -> tuple[str, InnerStack | None]:
    """Read the name of an input path and, if one is named, its inner stack of blocks.

    Args:
        paths: the input paths of an encoder by name.
        path_name: the name of a path, such as "image", or of a path and a stack of blocks that its
            tower runs before ``blocks``, such as "image.sam"; without one, it is None.

    Raises:
        ValueError: there is no such path, or the encoder is accelerated.
    """
    path, _, inner = path_name.partition(".")
    path = path if len(paths) > 1 or inner else "image"
    stacks = {name: observed.inner for name, observed in paths.items()}
    if path not in stacks or (inner and inner not in stacks[path]):
        names = [
            f"{name}.{stack}" for name, inner_stacks in stacks.items() for stack in inner_stacks
        ]
        raise _no_path(path_name, [*stacks, *names])
    if paths[path].tower.accelerator is not None:
        raise ValueError(
            "an accelerated encoder gives no attention maps, since its kernels keep no weights: "
            "call attention_maps of the encoder that accelerated() was called on"
        )
    return path, stacks[path][inner] if inner else None


def _call_without_context(block: nn.Module, hidden: Tensor) -> Tensor:
    """Call a block of an inner stack, such as SAM's, which takes nothing but the hidden state."""
    return block(hidden, None)


class AttentionCall(NamedTuple):
    """The queries and keys of one call of attention, and the factor that scales their products.

    Queries and keys are [T, H, K] or, if ``cu_seqlens`` is None, [S, H, n, K] for segments of n
    rows each.
    """

    q: Tensor
    k: Tensor
    cu_seqlens: Tensor | None
    scale: float


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


class AttentionObserver:
    """Runs the blocks of a tower and yields their attention weights in place of hidden states."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.blocks = blocks
        """The stack of blocks to observe; a tower may have several, such as SAM's and CLIP's."""

    query_weights: Tensor
    """The factor of each row in the mean over queries, [.., 1]; 0 for rows that are no queries. The
    caller sets it between the first and the second value that ``run_blocks`` yields."""
    shape: torch.Size
    """The shape of the hidden states without their last axis; ``run_blocks`` sets it."""

    def run_blocks(
        self,
        hidden: Tensor,
        metadata: Metadata,
        numbers: Sequence[int],
        blocks: nn.ModuleList,
        call_block: CallBlock,
        reference: Iterator[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the row numbers from 0, [.., 1], then the attention weights of each block, [.., H].

        The value of a row is the sum over queries of attention to it, times ``query_weights``.

        Args:
            hidden: [.., D], the rows that the first block reads.
            metadata: the result of ``prepare_encoder_metadata``; not used here.
            numbers: block numbers from 0, ascending, each once.
            blocks: the stack to run. If it is not ``self.blocks``, nothing is observed, and the
                states of ``reference`` are yielded.
            call_block: calls a block as a module, on the hidden state.
            reference: yields the hidden states after the blocks in ``numbers``, unobserved.

        Raises:
            ValueError: a block that does not call this library's attention exactly once.
        """
        if blocks is not self.blocks:
            yield from reference
            return
        self.shape = hidden.shape[:-1]
        yield torch.arange(self.shape.numel(), device=hidden.device).view(*self.shape, 1)
        for number, block in enumerate(islice(blocks, max(numbers) + 1)):
            with _CallsOfAttention() as observed:
                hidden = call_block(block, hidden)
            if number not in numbers:
                continue
            calls = observed.calls
            if len(calls) != 1:
                raise ValueError(
                    f"block {number} of type {type(block).__name__} made {len(calls)} calls of "
                    "attention that can be observed, not 1: maps need the attention of this "
                    "library, called without torch.compile"
                )
            yield _weights_of_block(block, calls[0], self.query_weights)


@runtime_checkable
class CutsViews(Protocol):
    """A block over views [B, h, w, D], as in SAM, with attention inside a view or windows of it."""

    def cut_views(self, attend: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply ``attend`` to views ``x`` [B, h, w, D] or each window; return [B, h, w, ..]."""
        ...


def _weights_of_block(block: nn.Module, call: AttentionCall, query_weights: Tensor) -> Tensor:
    """Return the attention weights that each row gets in one block, [.., H].

    Args:
        block: the block whose attention was observed.
        call: the queries and keys of that attention.
        query_weights: the factor of each row as a query in the sum over queries, [.., 1].
    """

    def attend(query_weights: Tensor) -> Tensor:
        return torch.unflatten(_weights(call, query_weights.flatten()), 0, query_weights.shape[:-1])

    return (
        block.cut_views(attend, query_weights)
        if isinstance(block, CutsViews)
        else attend(query_weights)
    )


def _weights(call: AttentionCall, query_weights: Tensor) -> Tensor:
    """Return the softmax weights that each row gets as a key, summed over queries, [T, H].

    Args:
        call: the queries and keys of one call of attention.
        query_weights: the factor of each query in the sum, [T]; queries with 0 are skipped.
    """
    q, k = call.q, call.k
    if call.cu_seqlens is None:  # q and k are [S, H, n, K], S segments of n rows each
        offsets = list(range(0, len(q) * q.shape[2] + 1, q.shape[2]))
        q, k = (rearrange(x, "s h n k -> (s n) h k") for x in (q, k))
    else:
        offsets = call.cu_seqlens.tolist()
    dtype = torch.promote_types(q.dtype, torch.float32)
    weights = torch.zeros(q.shape[:2], dtype=dtype, device=q.device)
    for start, end in pairwise(offsets):
        query_rows = start + query_weights[start:end].nonzero().flatten()
        keys = k[start:end].to(dtype).permute(1, 2, 0)
        for part in query_rows.split(max(SCORES_AT_ONCE // max(q.shape[1] * (end - start), 1), 1)):
            scores = (q[part].to(dtype) * call.scale).transpose(0, 1) @ keys
            received = torch.einsum(
                "h q n, q -> n h", scores.softmax(-1), query_weights[part].to(dtype)
            )
            weights[start:end] += received
    return weights


def _query_weights(rows: dict[int, Tensor], queries: Queries, shape: torch.Size) -> Tensor:
    """Return the factor of each row in the mean over the queries of its item.

    Args:
        rows: per item number, the numbers of the rows that are its patches, [t, h, w, 1].
        queries: None, "cls" or points, as the method ``attention_maps`` takes them.
        shape: shape of the hidden states without their last axis.

    Returns:
        float64 [*shape, 1]: 1/n for each of the n queries of an item, 0 for all other rows.

    Raises:
        ValueError: other queries, no class token, or a point outside of the map.
    """
    device = next(iter(rows.values())).device
    query_weights = torch.zeros(shape.numel(), dtype=torch.float64, device=device)
    for numbers in rows.values():
        if queries is None:
            query_rows = numbers.flatten()
        elif isinstance(queries, str):
            query_rows = _class_rows(numbers, queries, shape)
        else:
            query_rows = _rows_of_points(numbers, queries)
        query_weights.index_add_(
            0,
            query_rows,
            torch.full_like(query_rows, 1 / len(query_rows), dtype=query_weights.dtype),
        )
    return query_weights.view(*shape, 1)


def _class_rows(numbers: Tensor, queries: str, shape: torch.Size) -> Tensor:
    """Return the row numbers of an item's class tokens, which precede the patches of each tile.

    Args:
        numbers: the row numbers of the item's patches, [t, h, w, 1].
        queries: must be "cls".
        shape: shape of the hidden states without their last axis, [tiles, n] if there are tiles.

    Raises:
        ValueError: a text other than "cls", or a tower without class token.
    """
    if queries != "cls":
        raise ValueError(f'queries={queries!r}: must be None, "cls" or points (frame, row, column)')
    length = shape[-1] if len(shape) == 2 else numbers.numel()
    first: Tensor = (numbers.flatten() // length).unique() * length
    class_count = length - numbers.numel() // len(first) if len(shape) == 2 else 0
    if not class_count:
        raise ValueError(
            "queries='cls': this encoder has no class token; take None for all patches, or points"
        )
    return (first[:, None] + torch.arange(class_count, device=first.device)).flatten()


def _rows_of_points(numbers: Tensor, queries: Queries) -> Tensor:
    """Return the row numbers of the patches at some points of an item, [points].

    Args:
        numbers: the row numbers of the item's patches, [t, h, w, 1].
        queries: a list of points (frame, row, column), from 0.

    Raises:
        ValueError: anything else than such a list, or a point outside of the map.
    """
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
                f"point {point} lies outside of a map of {shape[0]} frames of {shape[1]}x"
                f"{shape[2]} patches, as (frame, row, column) from 0"
            )
    return torch.stack([numbers[point][0] for point in points])


def _maps_of_path(
    encoder: Encoder, inputs: VisionInputs, path: str, rows: Tensor
) -> dict[int, Tensor]:
    """Return a map [t, h, w, C] by item number, for each item that uses an input path.

    Args:
        encoder: an encoder of one input path or of several.
        inputs: the result of ``encoder.preprocess``.
        path: the path, "image", or with a dot also an inner stack of blocks, "image.sam".
        rows: C values for each row of the hidden states, [.., C], in their order.

    Raises:
        ValueError: the encoder has no such path.
    """
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
