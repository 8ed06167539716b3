"""Offsets of attention segments, made on the host from the lengths of the segments.

Shapes: S segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def segment_metadata(
    lengths: Sequence[int],
    *,
    max_batch_size: int | None = None,
    max_frames_per_batch: int | None = None,
    max_seqlen_override: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return ``cu_seqlens`` and ``max_seqlen`` of segments, padded to a capacity if given.

    Args:
        lengths: rows of each segment.
        max_batch_size: capacity in segments, unless ``max_frames_per_batch`` gives it.
        max_frames_per_batch: capacity in segments.
        max_seqlen_override: the longest segment to plan for; at least the true longest.

    Returns:
        ``cu_seqlens`` int32 [S+1] (S the capacity if given) and ``max_seqlen`` 0-dim int32 on the
        CPU.

    Raises:
        ValueError: more segments than the capacity, or an override below the true longest segment.
    """
    capacity = max_frames_per_batch if max_frames_per_batch is not None else max_batch_size
    name = "max_batch_size" if max_frames_per_batch is None else "max_frames_per_batch"
    longest = max(lengths, default=0)
    if max_seqlen_override is not None:
        if max_seqlen_override < longest:
            raise ValueError(
                f"max_seqlen_override={max_seqlen_override} is below the longest segment of "
                f"{longest} rows: attention would truncate it; pass at least {longest}"
            )
        longest = max_seqlen_override
    return {
        "cu_seqlens": padded_offsets(lengths, capacity, name).to(device),
        "max_seqlen": torch.tensor(longest, dtype=torch.int32, device="cpu"),
    }


def padded_offsets(
    lengths: Sequence[int], capacity: int | None, name: str, kind: str = "segments"
) -> Tensor:
    """Cumulative offsets int32 [S+1], padded to ``capacity+1`` by repeating the last one.

    A repeated offset is an empty segment; a zero would give a segment of negative length.

    Args:
        lengths: rows of each segment or window.
        capacity: the largest number of segments; None pads nothing.
        name: the keyword by which the caller got ``capacity``, for the error message.
        kind: what is counted, for the error message.

    Returns:
        int32 [S+1] on the CPU, S the capacity if given.

    Raises:
        ValueError: more than the capacity.
    """
    if capacity is not None and len(lengths) > capacity:
        raise ValueError(
            f"{len(lengths)} {kind} do not fit {name}={capacity}: raise it to {len(lengths)} "
            "or pass fewer items"
        )
    padding = 0 if capacity is None else capacity - len(lengths)
    steps = torch.tensor([0, *lengths, *[0] * padding], dtype=torch.int64, device="cpu")
    return steps.cumsum(0).to(torch.int32)
