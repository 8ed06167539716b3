"""The one exception of this package."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, or that does not hold exactly the tower it says it holds.

    The message names the repo and revision (or folder), what is wrong with it, and what to do.
    """
