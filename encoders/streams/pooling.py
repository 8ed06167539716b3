"""One vector per item: pooling over the rows of an encoder's output.

Shapes: N tokens of an item, D width of ``pooler_output`` or, for "cls", of the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import EncoderOutput, PartialOutput

VectorPool: TypeAlias = Literal["mean", "max", "cls", "head"]
"""The values of the argument ``pool`` of ``embed``: how an item becomes one vector."""
VECTOR_POOLS: tuple[VectorPool, ...] = get_args(VectorPool)
Pool: TypeAlias = Literal["none", VectorPool]
"""The values of the option ``--pool`` of commands; "none" keeps the whole output of an item."""


class PoolingHead(NamedTuple):
    """The learned head of an encoder, which makes one vector of the features of an item."""

    apply: Callable[[Sequence[Tensor]], Tensor]
    """Takes the features of each item, and returns [items, D]."""
    reads: Literal["pooler_output", "prefix"] = "pooler_output"
    """The features that it takes: tokens [N, D] (SigLIP), or the rows before the patches
    [segments, r, D] (CLIP)."""


def pool_items(
    outputs: Iterable[EncoderOutput | PartialOutput],
    method: Pool,
    normalize: bool = False,
    head: PoolingHead | None = None,
) -> list[Tensor]:
    """Make one vector of the output of each item.

    Args:
        outputs: the output of each item, as the encoder's ``split`` returns it.
        method: "mean", "max", "cls" or "head", as ``embed`` takes it.
        normalize: divide each vector by its L2 norm.
        head: the learned head of the encoder, for ``method="head"`` only; None if it has none.

    Returns:
        [D] per item in float32, or in float64 where the outputs are float64.

    Raises:
        ValueError: what :func:`pool` raises, or ``method="head"`` without a head.
    """
    vectors = pool_batch(outputs, method, normalize, head)
    return [] if vectors is None else [*vectors]


def pool_batch(
    outputs: Iterable[EncoderOutput | PartialOutput],
    method: Pool,
    normalize: bool = False,
    head: PoolingHead | None = None,
) -> Tensor | None:
    """Make one vector of each output, [items, D], as :func:`pool_items`; None of no items.

    Items of one size are pooled in one operation.
    """
    check_pool(method, normalize)
    if method == "head" and head is None:
        raise ValueError(_NO_HEAD)
    name = head.reads if method == "head" and head else "prefix" if method == "cls" else None
    features = [_rows(output, name or "pooler_output", method) for output in outputs]
    if not features:
        return None
    if method == "head" and head is not None:
        vectors = head.apply(features)
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    elif len(features) > 1 and all(rows.shape == features[0].shape for rows in features):
        vectors = _pool_rows(torch.stack(features), method)
    else:
        vectors = torch.stack([_pool_rows(rows, method) for rows in features])
    return F.normalize(vectors, dim=1) if normalize else vectors


def pool(output: EncoderOutput | PartialOutput, method: Pool, normalize: bool = False) -> Tensor:
    """Make one vector of the output of one item.

    Args:
        output: the output of one item, as the encoder's ``split`` returns it.
        method: "mean" or "max" over all tokens of ``pooler_output``, whatever tile or frame they
            come from; "cls" is the class token, the first row of ``"prefix"`` of each segment,
            averaged over the segments (tiles, frames).
        normalize: divide the vector by its L2 norm.

    Returns:
        [D] in float32, or in float64 where the output is float64. Means are taken in that dtype.

    Raises:
        ValueError: a ``method`` that makes no vector, a field that the output lacks, or no class
            token.
    """
    check_pool(method, normalize)
    if method == "head":
        raise ValueError("pool='head' needs the encoder's head: call embed(pool='head')")
    rows = _rows(output, "prefix" if method == "cls" else "pooler_output", method)
    vector = _pool_rows(rows, method)
    return F.normalize(vector, dim=0) if normalize else vector


def _pool_rows(rows: Tensor, method: Pool) -> Tensor:
    """Return the vector [D] of the features of an item, or [items, D] of several of one size."""
    if method == "cls":  # [segments, r, D]
        rows = rows[..., 0, :]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return rows.amax(-2).to(dtype) if method == "max" else rows.mean(-2, dtype=dtype)


def check_pool(method: Pool, normalize: bool) -> None:
    """Check the arguments ``pool`` (here ``method``) and ``normalize`` of ``embed``.

    Raises:
        ValueError: a ``method`` that makes no vector, or a ``normalize`` that is not a bool.
    """
    if method not in VECTOR_POOLS:
        raise ValueError(f"pool={method!r}: must be one of {', '.join(map(repr, VECTOR_POOLS))}")
    if not isinstance(normalize, bool):
        raise ValueError(f"normalize={normalize!r}: must be True or False")


def check_fields(
    method: Pool,
    fields: tuple[str, ...],
    head: PoolingHead | None,
    class_token: bool,
) -> None:
    """Check, before an encoder runs, that its outputs can be pooled to vectors by ``method``.

    Args:
        method: how items become vectors; "none" for whole outputs.
        fields: the fields of :class:`EncoderOutput` that the encoder returns; extras are always
            among them.
        head: the learned head of the encoder; None if it has none.
        class_token: whether the encoder has a class token.

    Raises:
        ValueError: the encoder lacks what ``method`` needs: a field of the output, a class token
            or a head.
    """
    if method == "cls" and not class_token:
        raise ValueError(_NO_CLASS_TOKEN)
    if method == "head" and head is None:
        raise ValueError(_NO_HEAD.replace("'mean' or 'max'", "'cls'") if class_token else _NO_HEAD)
    reads = head.reads if head is not None and method == "head" else "pooler_output"
    if method not in ("none", "cls") and reads not in ("prefix", *fields):
        raise ValueError(f"{_missing_tokens(method)} (it returns {', '.join(fields)})")


_NO_CLASS_TOKEN = "pool='cls': this encoder has no class token; take pool='mean' or 'max'"
_NO_HEAD = (
    "pool='head': this encoder has no head that makes one vector; those of SigLIP and SigLIP2 "
    "(SiglipEncoder, Siglip2Encoder), of CLIP (ClipEncoder) and of C-RADIO (CRadioEncoder) have "
    "one; take pool='mean' or 'max'"
)


def _missing_tokens(method: Pool) -> str:
    return (
        f"pool={method!r} reads pooler_output, which this encoder leaves out: name it in "
        "GraphedEncoder(outputs=['pooler_output', ...])"
    )


def _rows(
    output: EncoderOutput | PartialOutput,
    name: Literal["pooler_output", "prefix"],
    method: Pool,
) -> Tensor:
    """Return the features of an item that a pool reads.

    Raises:
        ValueError: the output lacks them.
    """
    rows = output.extras.get("prefix") if name == "prefix" else output.pooler_output
    if rows is None:
        raise ValueError(_NO_CLASS_TOKEN if name == "prefix" else _missing_tokens(method))
    return rows
