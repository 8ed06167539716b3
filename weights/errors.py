"""The exceptions of this package: one to catch, one more that is handled inside."""

from __future__ import annotations

__all__ = ["CheckpointError", "DamagedError"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, or that does not hold exactly the tower it says it holds.

    The message names the repo and revision (or folder), what is wrong with it, and what to do.
    """


class DamagedError(CheckpointError):
    """A kept copy is no longer what was recorded of it; it is fetched again where that can be."""
