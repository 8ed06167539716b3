"""Checks of the keywords of ``preprocess``, for all towers."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from ..data import Limits
from .sampling import read_rate
from .sizes import MOST_PIXELS


def check_limits(limits: Limits) -> None:
    """Check the values of the keywords of ``preprocess`` that are not None.

    Raises:
        ValueError: an ``fps`` that is not a positive number, another keyword that is not a positive
            integer, or ``min_pixels`` over ``MOST_PIXELS``, the largest area of an image.
    """
    for name, value in limits._asdict().items():
        if name == "fps":
            if value is not None and read_rate(value) is None:
                raise ValueError(f"fps={value!r}: must be a positive number of frames per second")
            continue
        number = 1 if value is None else _as_integer(value)
        if number < 1:
            raise ValueError(f"{name}={value!r}: must be a positive integer")
        if name == "min_pixels" and number > MOST_PIXELS:
            raise ValueError(f"min_pixels={value}: must be at most {MOST_PIXELS}, an area")


def _as_integer(value: object) -> int:
    """Return ``value`` as int if it is an integer of any type but bool, and 0 otherwise."""
    if isinstance(value, bool):
        return 0
    try:
        return index(value) if isinstance(value, SupportsIndex) else 0
    except TypeError:  # an array of several numbers, or of floats
        return 0
