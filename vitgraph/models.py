"""The checkpoints that are known to load, and the towers that they hold."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .terminal import format_table

if TYPE_CHECKING:
    from weights import Family, PublishedModel

TOWERS_HEADER = (
    "family",
    "million parameters",
    "projector",
    "video",
    "image graphs",
    "video graphs",
    "layouts",
    "repo ids",
)
FINE_TUNES = "ColQwen3, Cosmos-Reason, Holo, Intern-S1, jina-reranker-m0, MiMo-VL, OpenCUA"
"""Models of others whose configs are those of a known tower; each has a test."""


@dataclass(frozen=True)
class PublishedTower:
    """One size of a family's tower, and the published checkpoints that have it."""

    family: Family
    config: Any
    """The encoder's config."""
    models: tuple[PublishedModel, ...]

    @property
    def layouts(self) -> list[str]:
        """The layouts in which the checkpoints name the tower's tensors."""
        return list(dict.fromkeys(model.layout for model in self.models))

    @property
    def images_only(self) -> bool:
        """Whether the checkpoints encode no videos, as those of timm's Qwen towers."""
        limits = {layout.name: layout.images_only for layout in self.family.layouts}
        return all(limits[name] for name in self.layouts)

    @property
    def repo_ids(self) -> list[str]:
        """The repo ids of the checkpoints, sorted."""
        return sorted(model.repo_id for model in self.models)

    def row(self) -> tuple[str, ...]:
        """Return the cells of the tower's row in a table with the titles ``TOWERS_HEADER``."""
        return (
            self.family.title,
            f"{self.models[0].parameters / 1e6:.1f}",
            f"{self.models[0].projector_parameters / 1e6:.1f}",
            "no" if self.images_only else self.family.video,
            self.family.replays["image"],
            "no" if self.images_only else self.family.replays["video"],
            ", ".join(self.layouts),
            ", ".join(self.repo_ids),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the tower as plain data, for JSON."""
        return {
            "family": self.family.name,
            "verified": self.family.verified,
            "encoder": self.family.encoder.__name__,
            "parameters": self.models[0].parameters,
            "projector_parameters": self.models[0].projector_parameters,
            "images_only": self.images_only,
            "layouts": self.layouts,
            "repo_ids": self.repo_ids,
            "config": asdict(self.config),
        }


def list_models(pattern: str = "*") -> list[str]:
    """List the repo ids of the checkpoints that are known to load.

    Args:
        pattern: shell-style pattern, matched without case against the whole repo id and against
            the part after the slash, for example "qwen3*".

    Returns:
        Sorted repo ids; none if the pattern matches none.
    """
    from weights.published import PUBLISHED

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
        pattern: towers are listed if :func:`list_models` finds one of their repo ids by it.

    Returns:
        One entry per family, number of parameters and config, with every repo id that has it.
    """
    from weights.families import FAMILIES, build_config
    from weights.published import PUBLISHED

    wanted = set(list_models(pattern))
    towers: dict[tuple[str, int, Any], list[PublishedModel]] = {}
    for model in PUBLISHED:
        config = build_config(FAMILIES[model.family], model.config, None, model.repo_id)
        towers.setdefault((model.family, model.parameters, config), []).append(model)
    return [
        PublishedTower(FAMILIES[family], config, tuple(models))
        for (family, _, config), models in towers.items()
        if wanted.intersection(model.repo_id for model in models)
    ]


def add_list(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vitgraph list`` to the parser of the command."""
    parser.add_argument(
        "pattern",
        nargs="?",
        default="*",
        metavar="PATTERN",
        help="towers of repo ids like 'qwen3*' or 'opengvlab/*', case ignored; by default all",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def list_towers(options: argparse.Namespace) -> None:
    """Print one line per tower that the published checkpoints have.

    Raises:
        ValueError: the pattern matches no repo id; with ``--json`` the list is empty instead.
    """
    from weights.published import similar_names

    towers = published_towers(options.pattern)
    if options.json:
        print(json.dumps([tower.to_dict() for tower in towers], indent=2))
        return
    if not towers:
        raise ValueError(
            f"{options.pattern}: no published repo id matches{similar_names(options.pattern)}; a "
            "pattern is matched with the whole id and with the part after the slash: 'qwen3*'"
        )
    print(format_table(TOWERS_HEADER, [tower.row() for tower in towers]))
    unverified = sorted({tower.family.title for tower in towers if not tower.family.verified})
    if unverified:
        print(f"\n{', '.join(unverified)}: not verified against an upstream implementation.")
    limits = {
        layout.name: layout.images_only
        for tower in towers
        for layout in tower.family.layouts
        if layout.name in tower.layouts and layout.images_only
    }
    for name, why in limits.items():
        print(f"\nLayout {name}: {why}.")
    print(
        "\nOthers load too if config and tensors fit: folders, files, base models, and fine-tunes"
    )
    print(f"such as {FINE_TUNES}.")
