"""The shapes of attention calls that decide which kernel runs, and which kernel is the fastest."""

from __future__ import annotations

from typing import NamedTuple

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes of 16 bits, which the fast kernels take."""


class AttentionShape(NamedTuple):
    """The properties of an attention call that decide which kernel is the fastest."""

    heads: int
    size: int
    """The number of columns of one attention head."""
    rows: int
    """The number of rows of the packed batch, padding included."""
    segments: int
    """The number of segments that the offsets have room for, empty ones included."""
    longest: int
    """An upper bound of the number of rows of the longest segment."""
    equal: bool
    """Whether every segment has exactly ``longest`` rows and there are no other rows."""
    dtype: str
    """The dtype as a string, such as "torch.bfloat16"."""
    group: int = 1
    """Query heads that share one head of keys and values."""
    causal_half: bool = False
    """Whether rows of a segment's second half attend to the rows up to themselves, and those of the
    first half to that half."""

    @property
    def pads(self) -> bool:
        """Whether rows of padding may follow the last segment."""
        return not self.equal or self.segments > 1

    @property
    def shared(self) -> int:
        """Number of key and value heads; each of them is shared by a group of query heads."""
        return self.heads // self.group


class RelativeShape(NamedTuple):
    """The sizes of attention with relative positions inside views of h x w patches or windows."""

    size: int
    """The number of columns of one attention head."""
    h: int
    w: int
    window: int
    """Side of the attention windows in patches; 0: attention is over the whole view."""
    dtype: str
    """The dtype as a string, such as "torch.bfloat16"."""

    @property
    def segment(self) -> tuple[int, int]:
        """Height and width in patches of a window, or of the view if there are no windows."""
        return (self.window, self.window) if self.window else (self.h, self.w)

    @property
    def cut(self) -> bool:
        """Whether windows at the edge reach beyond the view, so that they contain padding."""
        return self.window > 0 and bool(self.h % self.window or self.w % self.window)
