"""Comparisons of lists of tensors that two empty lists do not pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def assert_all_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Hold that two lists are equally long, not empty, and have equal tensors in one order."""
    pairs = list(zip(ours, theirs, strict=True))
    assert pairs, "there is nothing to compare"
    differing = [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]
    assert not differing, f"tensors {differing} of {len(pairs)} differ"
