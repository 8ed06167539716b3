"""Packed segments: their offsets, the padding behind them, and tensors that all blocks read.

Shapes: T packed rows, S segments, B tiles of n rows; ``cu_seqlens`` [S+1] are offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex, TypeAlias

import torch
from torch import Tensor

from ..data import Metadata

BlockContext: TypeAlias = tuple[Tensor, ...] | tuple[tuple[Tensor, ...], ...] | None
"""The tensors, made once per forward, that blocks of an encoder read beside the hidden state."""
BELONGING_METADATA = "pass what prepare_encoder_metadata makes of the grid_thw of these pixels"


def segment_metadata(
    lengths: Sequence[int],
    *,
    max_batch_size: int | None = None,
    max_frames_per_batch: int | None = None,
    max_seqlen_override: int | None = None,
) -> dict[str, Tensor]:
    """Return the offsets and the greatest length of packed segments, which attention reads.

    Args:
        lengths: rows of each segment.
        max_batch_size: number of segments to pad the offsets to; None: no padding.
        max_frames_per_batch: the same number, and the one that counts if both are given.
        max_seqlen_override: ``max_seqlen`` to return, at least the length of the longest segment;
            None returns that length.

    Returns:
        ``cu_seqlens`` int32 [S+1] (S segments after padding) and ``max_seqlen`` 0-dim int32, both
        on the CPU.

    Raises:
        ValueError: more segments than the number to pad to, or an override below the longest one.
    """
    capacity = max_frames_per_batch if max_frames_per_batch is not None else max_batch_size
    name = "max_batch_size" if max_frames_per_batch is None else "max_frames_per_batch"
    longest = max(lengths, default=0)
    if max_seqlen_override is not None:
        if not isinstance(max_seqlen_override, SupportsIndex) or max_seqlen_override < longest:
            raise ValueError(
                f"max_seqlen_override={max_seqlen_override!r}: must be an integer of at least "
                f"{longest}, the rows of the longest segment, or attention would truncate it"
            )
        longest = max_seqlen_override
    return {
        "cu_seqlens": padded_offsets(lengths, capacity, name),
        "max_seqlen": torch.tensor(longest, dtype=torch.int32, device="cpu"),
    }


def padded_offsets(
    lengths: Sequence[int], capacity: int | None, name: str, kind: str = "segments"
) -> Tensor:
    """Return cumulative offsets int32 [S+1], padded to ``capacity+1`` by repeating the last one.

    A repeated offset is an empty segment; a zero would give a segment of negative length.

    Args:
        lengths: rows of each segment or window.
        capacity: the largest number of segments; None pads nothing.
        name: the name by which the user passed ``capacity``, for the error message.
        kind: "segments" or "windows", for the error message.

    Returns:
        int32 [S+1] on the CPU, with S the capacity if there is one, else the number of segments.

    Raises:
        ValueError: more segments or windows than the capacity, or a capacity that is no integer.
    """
    count = len(lengths)
    if capacity is not None and not isinstance(capacity, SupportsIndex):
        raise ValueError(f"{name}={capacity!r}: must be an integer of at least {count}")
    if capacity is not None and count > capacity:
        raise ValueError(
            f"{count} {kind} do not fit {name}={capacity!r}: raise it to {count} or pass "
            "fewer items"
        )
    padding = 0 if capacity is None else capacity - count
    padded = torch.tensor([0, *lengths, *[0] * padding], dtype=torch.int64, device="cpu")
    return padded.cumsum(0).to(torch.int32)


def prefix_metadata(
    lengths: Sequence[int], prefix: int, segments: int, patches: int
) -> dict[str, Tensor]:
    """Return where the rows of packed segments come from that begin with rows of their own.

    The rows of a segment are its ``prefix`` rows (class token, registers), then its patches::

        segments of 2 and 3 patches, 1 prefix row:  c0 p0 p1 c1 p2 p3 p4 | padding

    Padding stands at the end: the prefix rows of unused segments, then the patches beyond those of
    ``lengths``.

    Args:
        lengths: patches of each segment.
        prefix: rows before the patches of each segment.
        segments: number of segments to pad to.
        patches: number of patches to pad to.

    Returns:
        int64 on the CPU: ``prefix_index`` [segments, prefix] and ``patch_index`` [patches], the
        place of each row among the packed rows, and ``packed_index`` [segments * prefix + patches],
        which sorts the rows of all prefixes, followed by all patches, into packed rows.
    """
    counts = torch.tensor([*lengths], dtype=torch.int64, device="cpu")
    numbers = torch.arange(segments, device="cpu")
    starts = torch.full((segments,), int(counts.sum()), dtype=torch.int64, device="cpu")
    starts[: len(counts)] = counts.cumsum(0) - counts
    prefix_index = (starts + numbers * prefix)[:, None] + torch.arange(prefix, device="cpu")
    before = torch.full((patches,), segments, dtype=torch.int64, device="cpu")
    before[: int(counts.sum())] = numbers[: len(counts)].repeat_interleave(counts) + 1
    patch_index = torch.arange(patches, device="cpu") + before * prefix
    packed_index = torch.cat((prefix_index.flatten(), patch_index)).argsort()
    return {
        "prefix_index": prefix_index,
        "patch_index": patch_index,
        "packed_index": packed_index,
    }


def mean_segments(prefixes: Sequence[Tensor]) -> Tensor:
    """Return the mean over the segments of each item, [items, r, D].

    Args:
        prefixes: the rows before the patches of each item, [segments, r, D].
    """
    if len({len(prefix) for prefix in prefixes}) == 1:  # in one call, not in one per item
        return torch.stack(list(prefixes)).mean(1)
    return torch.stack([prefix.mean(0) for prefix in prefixes])


def padding_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """Return which of ``rows`` packed rows are padding after all segments, bool [rows, 1, 1]."""
    return (torch.arange(rows, device=cu_seqlens.device) >= cu_seqlens[-1])[:, None, None]


def check_equal_segments(max_seqlen: Tensor, segment_rows: int) -> None:
    """Check that metadata was not made for tiles of fewer rows than ``segment_rows``.

    No GPU sync: in eager mode ``max_seqlen`` is on the host. :func:`attention` checks the offsets
    themselves, on the CPU only. Padding may make ``max_seqlen`` longer than every real segment.

    Raises:
        ValueError: all real segments are shorter.
    """
    if torch.compiler.is_compiling() or max_seqlen.device.type != "cpu":
        return
    if 0 < int(max_seqlen) < segment_rows:
        raise ValueError(
            f"encoder_metadata has segments of at most {int(max_seqlen)} rows, and these pixels "
            f"make segments of {segment_rows}: {BELONGING_METADATA}"
        )


class TileSegments(NamedTuple):
    """The offsets of tiles of equal length; rows of a tile attend to one another only."""

    cu_seqlens: Tensor
    max_seqlen: Tensor
    padding: Tensor
    """Bool [B*n, 1, 1], true for the rows of tiles that are padding."""

    @classmethod
    def of(cls, metadata: Metadata, hidden: Tensor) -> TileSegments:
        """Take the offsets of the tiles ``hidden`` [B, n, D] from the encoder's ``metadata``."""
        if hidden.shape[0]:
            check_equal_segments(metadata["max_seqlen"], hidden.shape[1])
        offsets, rows = metadata["cu_seqlens"], hidden.shape[0] * hidden.shape[1]
        return cls(offsets, metadata["max_seqlen"], padding_rows(offsets, rows))


class RotarySegments(NamedTuple):
    """The tensors that all blocks of a tower with rotary positions read, made once per forward."""

    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor
    max_seqlen: Tensor
    padding: Tensor

    @classmethod
    def of(cls, metadata: Metadata, *, repeated: bool = True) -> RotarySegments:
        """Make rotary tensors from ``metadata``: cos and sin [T, 1, 1, K], half of sin negated.

        Unless ``repeated``, they have one column per rotary angle, [T, 1, 1, K/2], none negated.
        """
        cos, sin = metadata["rotary_pos_emb_cos"], metadata["rotary_pos_emb_sin"]
        if repeated:
            cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
        offsets = metadata["cu_seqlens"]
        padding = padding_rows(offsets, cos.shape[0])
        return cls(cos[:, None, None], sin[:, None, None], offsets, metadata["max_seqlen"], padding)
