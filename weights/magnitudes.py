"""The largest weight of each tensor, found while its bytes are read, and what it must not be.

NaN and infinity make every feature NaN, and a weight beyond the range of the dtype that it is cast
to becomes infinite. Neither is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from encoders.stored_tensors import STORED_DTYPES

from .errors import CheckpointError, problem_line
from .files.checkpoint import TowerTensor


class Magnitudes:
    """Finds the largest magnitude among weights of one dtype, whose bytes come piece by piece.

    Without their sign, the bits of floating-point numbers rise with the magnitude when they are
    taken for an integer, and those of infinity and NaN are the greatest. A number has the highest
    bit of its exponent if its magnitude is 2 or more. In most pieces of a tower no weight has it,
    and one pass shows that. In the cache of an EPYC core that pass read 60 GB/s of bfloat16, the
    search for the two greatest integers 30, torch's ``aminmax`` 16 and ``isfinite`` 0.7.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Begin with no weight; ``dtype`` is one of ``STORED_DTYPES``."""
        size = dtype.itemsize
        bits = 8 * size
        self._dtype, self._sign = dtype, 1 << (bits - 1)
        self._signed, self._unsigned = np.dtype(f"i{size}"), np.dtype(f"u{size}")
        self._exponents = sum(1 << (bits - 2 + shift) for shift in range(0, 64, bits))
        self._largest = 0

    def add(self, piece: memoryview) -> None:
        """Look at the bytes of some whole weights."""
        if len(piece) % 8 == 0:
            words = np.frombuffer(piece, np.uint64)
            if not int(np.bitwise_or.reduce(words)) & self._exponents:
                return
        # The greatest signed integer is the largest positive number. The greatest unsigned one is
        # the negative number of the largest magnitude, if there are negative numbers.
        positive = int(np.frombuffer(piece, self._signed).max())
        either = int(np.frombuffer(piece, self._unsigned).max()) & ~self._sign
        self._largest = max(self._largest, positive, either)

    @property
    def largest(self) -> Tensor:
        """The largest magnitude, a scalar in the weights' dtype; 0 if it is less than 2."""
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self._dtype.itemsize]
        return torch.tensor(self._largest, dtype=integer, device="cpu").view(self._dtype)


def check_magnitudes(
    largest: Iterable[tuple[TowerTensor, Tensor]], dtype: torch.dtype, label: str
) -> None:
    """Raise a :class:`CheckpointError` that lists the tensors whose values are not finite.

    Infinite scalars are allowed, because they are bounds of clamped layers that clamp nothing.

    Args:
        largest: tensors of the tower, and the largest magnitude in each, NaN if it has a NaN.
        dtype: the dtype that the tensors are cast to.
        label: name of the checkpoint in messages.
    """
    odd, beyond, needed = [], [], 0.0
    for tensor, value in largest:
        if value.isnan() or (value.isinf() and tensor.entry.shape):
            odd.append(f"{tensor.name} (has {value.item()})")
        elif tensor.entry.shape and value.to(dtype).isinf():
            beyond.append(f"{tensor.name} (largest {value.item():,.6g})")
            needed = max(needed, value.item())
    if odd:
        raise CheckpointError(
            f"{label}: the weights are damaged:\n  {problem_line('not finite', odd)}\n"
            "Every feature would be NaN: download the checkpoint again or, if it was published so, "
            "use another revision"
        )
    if beyond:
        wider = [d for d in STORED_DTYPES.values() if torch.finfo(d).max >= needed and d != dtype]
        names = " or ".join(repr(str(d).removeprefix("torch.")) for d in wider)
        raise CheckpointError(
            f"{label}: weights would become infinite in {str(dtype).removeprefix('torch.')}, whose "
            f"largest number is {torch.finfo(dtype).max:,.6g}:\n  "
            f"{problem_line('beyond it', beyond)}\nPass dtype={names}"
        )
