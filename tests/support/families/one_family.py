"""The family that the id of a parametrised test names, for ``pytest --family NAME``."""

from __future__ import annotations

from functools import cache

from weights.published import PUBLISHED, family_facts, family_names


@cache
def family_of(name: str) -> str | None:
    """Return the family that a test's id names: by name, small checkpoint, size or repo id."""
    repos = {model.repo_id: model.family for model in PUBLISHED}
    parts = (_family_of_part(part) for part in name.split("-"))
    return repos.get(name) or next(filter(None, parts), None)


@cache
def _family_of_part(part: str) -> str | None:
    small = (family for family in family_names() if part in family_facts(family).small)
    begins = (family for family in family_names() if f"{part}_".startswith(f"{family}_"))
    return next(small, None) or max(begins, key=len, default=None)
