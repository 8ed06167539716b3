"""Warnings that name the user's line, however deep inside the library they are given."""

from __future__ import annotations

import inspect
import warnings

LIBRARIES = {"graphwrap", "encoders", "vitgraph", "torch"}
"""The packages whose frames lie between the user's line and a warning of graphwrap."""


def warn_caller(message: str) -> None:
    """Give a UserWarning at the innermost line outside of this library and torch.

    A fixed ``stacklevel`` cannot serve: ``capture()``, a first call and ``encode`` reach the same
    warning over different numbers of frames, and comprehensions have frames before Python 3.12.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and _package(frame.f_globals) in LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
