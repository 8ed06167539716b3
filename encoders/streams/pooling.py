"""One vector per item: pooling over the rows of an encoder's output.

Shapes: N tokens of an item, D width of ``pooler_output`` or, for "cls", of the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import EncoderItemSpec, EncoderOutput, Grid, OutputField, PartialOutput

VectorPool: TypeAlias = Literal["mean", "max", "cls", "head"]
"""The values of the argument ``pool`` that turn the output of an item into one vector."""
Pool: TypeAlias = Literal["none", VectorPool]
"""All values of the argument ``pool``; "none" keeps the whole output of an item."""
POOLS: tuple[Pool, ...] = get_args(Pool)
PoolingHead: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""A learned head: takes the ``pooler_output`` [N, D] of each item, and returns [items, D]."""


def pool_items(
    outputs: Iterable[EncoderOutput | PartialOutput],
    method: Pool,
    grids: Iterable[Grid],
    normalize: bool = False,
    head: PoolingHead | None = None,
) -> list[Tensor]:
    """Make one vector of the output of each item.

    Args:
        outputs: the output of each item, as the encoder's ``split`` returns it.
        method: "mean", "max", "cls" or "head", as ``encode`` takes it.
        grids: the (t, h, w) of each item.
        normalize: divide each vector by its L2 norm.
        head: the learned head of the encoder, for ``method="head"`` alone; None if it has none.

    Returns:
        [D] per item in float32, or in float64 where the outputs are float64.

    Raises:
        ValueError: what :func:`pool` raises, or ``method="head"`` without a head.
    """
    if method != "head":
        pairs = zip(outputs, grids, strict=True)
        return [pool(output, method, grid, normalize) for output, grid in pairs]
    tokens = [output.pooler_output for output in outputs]
    if head is None or any(rows is None for rows in tokens):
        raise ValueError(_NO_HEAD if head is None else _missing_field(method))
    if not tokens:
        return []
    vectors = head([rows for rows in tokens if rows is not None])
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    return [*(F.normalize(vectors, dim=1) if normalize else vectors)]


def pool(
    output: EncoderOutput | PartialOutput, method: Pool, grid: Grid, normalize: bool = False
) -> Tensor:
    """Make one vector of the output of one item.

    Args:
        output: the output of one item, as the encoder's ``split`` returns it.
        method: "mean" or "max" over all tokens of ``pooler_output``, whatever tile or frame they
            come from; "cls" is the class token's row of ``last_hidden_state``, averaged over the
            tiles.
        grid: the (t, h, w) of the item.
        normalize: divide the vector by its L2 norm.

    Returns:
        [D] in float32, or in float64 where the output is float64. Means are taken in that dtype.

    Raises:
        ValueError: an unknown ``method``, a field that the output lacks, or no class token.
    """
    check_pool(method, normalize)
    if method == "none":
        raise ValueError("pool='none' makes no vector: take 'mean', 'max', 'cls' or 'head'")
    if method == "head":
        raise ValueError("pool='head' needs the encoder's head: call encode(pool='head')")
    rows = _class_rows(output.last_hidden_state, grid) if method == "cls" else output.pooler_output
    if rows is None:
        raise ValueError(_missing_field(method))
    dtype = torch.promote_types(rows.dtype, torch.float32)
    vector = rows.amax(0).to(dtype) if method == "max" else rows.mean(0, dtype=dtype)
    return F.normalize(vector, dim=0) if normalize else vector


def check_pool(method: Pool, normalize: bool) -> None:
    """Check the arguments ``pool`` (here ``method``) and ``normalize`` of ``encode``.

    Raises:
        ValueError: an unknown ``method``, a ``normalize`` that is no bool, or a true one with
            "none", which has no vector.
    """
    if method not in POOLS:
        raise ValueError(f"pool={method!r}: must be one of {', '.join(map(repr, POOLS))}")
    if not isinstance(normalize, bool):
        raise ValueError(f"normalize={normalize!r}: must be True or False")
    if normalize and method == "none":
        raise ValueError(
            "normalize=True needs one vector per item: also pass pool='mean', 'max', 'cls' or "
            "'head'"
        )


def check_fields(
    method: Pool,
    fields: tuple[OutputField, ...],
    grid: Grid,
    spec: EncoderItemSpec,
    head: PoolingHead | None = None,
) -> None:
    """Check, before an encoder runs, that its outputs can be pooled to vectors by ``method``.

    Args:
        method: one of :data:`POOLS`.
        fields: the fields of :class:`EncoderOutput` that the encoder returns.
        grid: the (t, h, w) of any item.
        spec: the sizes of that item, as ``item_specs`` returns them.
        head: the learned head of the encoder; None if it has none.

    Raises:
        ValueError: the encoder lacks what ``method`` needs: a field of the output, a class token
            or a head.
    """
    if method == "none":
        return
    if method == "cls" and spec.longest_segment != 1 + grid[1] * grid[2]:
        raise ValueError(_NO_CLASS_TOKEN)
    if method == "head" and head is None:
        raise ValueError(_NO_HEAD)
    if (field := "last_hidden_state" if method == "cls" else "pooler_output") not in fields:
        raise ValueError(f"{_missing_field(method)} (it returns {', '.join(fields)}, not {field})")


_NO_CLASS_TOKEN = "pool='cls': this encoder has no class token; take pool='mean' or 'max'"
_NO_HEAD = (
    "pool='head': this encoder has no head that pools by attention; those of SigLIP and SigLIP2 "
    "(SiglipEncoder, Siglip2Encoder) have one; take pool='mean' or 'max'"
)


def _missing_field(method: Pool) -> str:
    field = "last_hidden_state" if method == "cls" else "pooler_output"
    return (
        f"pool={method!r} reads {field}, which this encoder leaves out: name it in "
        f"GraphedEncoder(outputs=[{field!r}, ...])"
    )


def _class_rows(hidden: Tensor | None, grid: Grid) -> Tensor | None:
    """Return the class token of each tile of an item, [tiles, D].

    Args:
        hidden: ``last_hidden_state`` of the item, whose first row per tile is the class token;
            None, which is returned, if the output lacks it.
        grid: the (t, h, w) of the item.

    Raises:
        ValueError: the tiles have no class token.
    """
    if hidden is None:
        return None
    if hidden.ndim != 3 or hidden.shape[1] != 1 + grid[1] * grid[2]:
        raise ValueError(_NO_CLASS_TOKEN)
    return hidden[:, 0]
