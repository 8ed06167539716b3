"""The checkpoints that are known to load, and the towers that they hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weights import JsonDict
    from weights.published import FamilyFacts, PublishedModel


@dataclass(frozen=True)
class PublishedTower:
    """One size of a family's tower, and the published checkpoints that have this tower."""

    family: FamilyFacts
    models: tuple[PublishedModel, ...]

    @property
    def layouts(self) -> list[str]:
        """The layouts in which the checkpoints name the tower's tensors, without repetitions."""
        return list(dict.fromkeys(model.layout for model in self.models))

    @property
    def images_only(self) -> bool:
        """Whether no checkpoint with this tower can encode videos, like timm's Qwen towers."""
        return all(name in self.family.images_only for name in self.layouts)

    @property
    def repo_ids(self) -> list[str]:
        """The repo ids of the checkpoints, sorted."""
        return sorted(model.repo_id for model in self.models)

    def to_dict(self) -> JsonDict:
        """Return the tower as plain data for JSON; building its config imports torch."""
        from weights import FAMILIES, build_config

        model = self.models[0]
        config = build_config(FAMILIES[self.family.name], model.config, None, model.repo_id)
        return {
            "family": self.family.name,
            "verified": self.family.verified,
            "encoder": self.family.encoder,
            "parameters": model.parameters,
            "projector_parameters": model.projector_parameters,
            "images_only": self.images_only,
            "layouts": self.layouts,
            "repo_ids": self.repo_ids,
            "config": asdict(config),
        }


def list_models(pattern: str = "*") -> list[str]:
    """List the repo ids of the checkpoints that are known to load.

    Args:
        pattern: shell-style pattern such as "qwen3*", matched without regard to case against the
            whole repo id and against the part after the slash.

    Returns:
        Sorted repo ids; an empty list if none matches.

    Raises:
        TypeError: ``pattern`` is not a string.
    """
    from weights.published import PUBLISHED

    if not isinstance(pattern, str):
        raise TypeError(f"pattern={pattern!r}: must be a string, such as 'qwen3*'")
    pattern = pattern.lower()
    return [
        repo_id
        for repo_id in sorted(model.repo_id for model in PUBLISHED)
        for owner, _, name in [repo_id.lower().partition("/")]
        if fnmatchcase(f"{owner}/{name}", pattern) or fnmatchcase(name, pattern)
    ]


def published_towers(pattern: str = "*") -> list[PublishedTower]:
    """List the towers of the checkpoints that are known to load.

    Args:
        pattern: pattern of repo ids as in :func:`list_models`; a tower is listed if one of its repo
            ids matches.

    Returns:
        One entry per family and config, with the ids of all repos that have this tower.
    """
    from weights.published import PUBLISHED, family_facts

    matching_ids = set(list_models(pattern))
    towers: dict[tuple[str, int, int], list[PublishedModel]] = {}
    for model in PUBLISHED:
        # Towers of one family with equal parameter counts have equal configs; a test checks this.
        counts = (model.family, model.parameters, model.projector_parameters)
        towers.setdefault(counts, []).append(model)
    return [
        PublishedTower(family_facts(family), tuple(models))
        for (family, _, _), models in towers.items()
        if matching_ids.intersection(model.repo_id for model in models)
    ]
