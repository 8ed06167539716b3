"""The published checkpoints that are known to load, as ``published.json`` lists them.

The file holds configs and processor files as the Hub has them, cut down to the fields that describe
the tower. Checkpoints that differ in one width share a config, with ``"WIDTH"`` in its place. The
lists, messages, tests and small checkpoints are made from it; loading takes no size from it. This
module needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

LONGEST_COMPARED = 200
"""Characters of a name that are compared; the time grows with their square."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """The vision tower of one published checkpoint."""

    repo_id: str
    family: str
    layout: str
    prefix: str
    parameters: int
    """Parameters of the tower, merger included."""
    projector_parameters: int = 0
    """Parameters of a projector that lies outside the tower, if they are counted apart; else 0."""
    config: Mapping[str, Any]
    """The published ``config.json``, cut down to the fields that describe the tower."""


@dataclass(frozen=True)
class SmallCheckpoint:
    """The published repo that a small checkpoint with random weights imitates.

    The demo, the notebooks and the tests use such checkpoints; ``vitgraph.seeded`` writes them.
    """

    repo_id: str
    title: str = ""
    """Name in the demo; the demo leaves a checkpoint without a title out."""
    layout: str = ""
    """Name of the layout to write if it is not the published one."""


def _models(groups: list[dict[str, Any]]) -> Iterator[PublishedModel]:
    for group in groups:
        models, config = group.pop("models"), json.dumps(group.pop("config"))
        for model in models:
            own = json.loads(config.replace('"WIDTH"', str(model.pop("width", None))))
            yield PublishedModel(**group, **model, config=own)


_DATA = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

PUBLISHED = tuple(_models(_DATA["checkpoints"]))
"""Every published checkpoint that is known to load."""

SMALL = {name: SmallCheckpoint(**small) for name, small in _DATA["small"].items()}
"""Small checkpoints by the name that ``write_seeded_checkpoint`` takes."""

PROCESSORS: Mapping[str, Mapping[str, Any]] = _DATA["processors"]
"""Processor files, by file name without ``.json``, by the name that layouts give such a set."""


def similar_names(repo_id: str) -> str:
    """Return what an error adds about published repo ids that are spelt like an unknown one.

    Args:
        repo_id: what was asked for, with or without the owner; case does not matter.

    Returns:
        A clause that begins with a semicolon; nothing if no id is near or it is one of them.
    """
    ids = sorted(model.repo_id for model in PUBLISHED)
    spelt = {name: x for x in ids for name in (x.lower(), x.partition("/")[2].lower())}
    text = repo_id[:LONGEST_COMPARED].lower()
    longer = sorted((name for name in spelt if text and name.startswith(text)), key=len)
    near = [*longer, *get_close_matches(text, spelt, n=6)]
    found = list(dict.fromkeys(spelt[name] for name in near))[:3]
    return f"; published names like it: {', '.join(found)}" if found and repo_id not in ids else ""


def check_family(name: str | None) -> None:
    """Raise a ValueError that names the families if ``name`` is neither one of them nor None."""
    families = dict.fromkeys(model.family for model in PUBLISHED)
    if name is not None and name not in families:
        raise ValueError(f"family={name!r}: must be one of {', '.join(families)}")
