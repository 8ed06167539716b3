"""The checkpoints that are known to load."""

from __future__ import annotations

from fnmatch import fnmatchcase

from weights.families import PUBLISHED


def list_models(pattern: str = "*") -> list[str]:
    """List the repo ids of the checkpoints that are known to load.

    Args:
        pattern: shell-style pattern, matched without case against the whole repo id and against
            the part after the slash, for example "qwen3*".

    Returns:
        Sorted repo ids; none if the pattern matches none.
    """
    pattern = pattern.lower()
    return sorted(
        {
            model.repo_id
            for model in PUBLISHED
            for name in (model.repo_id.lower(), model.repo_id.lower().partition("/")[2])
            if fnmatchcase(name, pattern)
        }
    )
