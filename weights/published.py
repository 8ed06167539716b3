"""The published checkpoints that are known to load, read from ``families/facts/<family>.json``.

A family (an encoder and its checkpoints) is described in two places. Its record, in a Python file
of ``families``, says how its checkpoints are read: model types, layouts, rules for configs. Its
JSON file, which this module reads, says which checkpoints there are: facts for lists in documents
and messages, and configs and processor files as the Hub has them, reduced to the fields that
describe the tower. ``Family.facts`` leads from the record to the JSON file, and ``vitgraph.models``
groups the checkpoints by tower for ``vitgraph list``.

Checkpoints that differ in one width share a config, with ``"WIDTH"`` in place of that number.
Tests and small checkpoints with random weights are made from these files, too; loading takes no
size from them. A file is read when it is first needed. This module needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from .errors import LONGEST_COMPARED
from .strict_json import JsonDict, JsonObject

__all__ = [
    "NO_VIDEO",
    "PUBLISHED",
    "FamilyFacts",
    "PublishedModel",
    "check_family",
    "family_facts",
    "similar_names",
]

FOLDER = Path(__file__).parent / "families" / "facts"
"""The folder that holds a JSON file per family."""
NO_VIDEO = "no"
"""The value of ``FamilyFacts.video`` for a family that takes only images."""

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    PUBLISHED: tuple[PublishedModel, ...]
    """Every published checkpoint that is known to load, family by family."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """The vision tower of one published checkpoint."""

    repo_id: str
    family: str
    layout: str
    prefix: str
    parameters: int
    """The number of parameters of the tower, its merger included."""
    projector_parameters: int = 0
    """The number of parameters of the projector to the language model, if ``parameters`` does not
    include it; else 0."""
    config: JsonObject
    """The published ``config.json``, reduced to the fields that describe the tower."""


@dataclass(frozen=True)
class SmallCheckpoint:
    """The published repo that a small checkpoint with random weights imitates.

    The demo, the notebooks and the tests use such checkpoints; ``vitgraph.seeded`` writes them.
    """

    repo_id: str
    title: str = ""
    """The checkpoint's name in the demo, which shows only checkpoints that have a title."""
    layout: str = ""
    """The name of the layout to write, if it is not the published one."""
    around: Sequence[str] = ("language_model.model.", "language_model.lm_head.weight")
    """Tensor names to write outside the tower: the prefix of the language model's tensors, then
    whole names of further tensors."""


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """The facts about one family that its JSON file states."""

    name: str
    title: str
    examples: str
    """The checkpoints that the README names; the title, if nothing else is stated."""
    encoder: str
    """The name of the encoder class of the family."""
    replays: Mapping[str, str]
    """Whether items replay as CUDA graphs: "image" and "video" -> a text such as "yes"."""
    video: str = NO_VIDEO
    """How a video enters the tower; :data:`NO_VIDEO` if the family takes none."""
    verified: bool = True
    """Whether tests compare the tower with an upstream implementation, such as that of
    transformers. Where none can be installed, a second implementation written for the tests stands
    in."""
    images_only: Mapping[str, str]
    """Name of a layout whose towers take no videos -> the reason as a sentence."""
    processors: Mapping[str, Mapping[str, JsonObject]]
    """Name of a set of processor files -> file name without ``.json`` -> content of the file."""
    named_sizes: Mapping[str, JsonObject]
    """Name of a tower that a config may state in place of sizes -> the sizes of that tower."""
    small_widths: Mapping[str, float | Sequence[float]]
    """Field of the config that few families have -> its value in a small checkpoint as a multiple
    of the tower's width, or a list of multiples."""
    text_widths: Sequence[str]
    """The fields of the config that hold the width of the language model, where their names are
    particular to this family."""
    small: Mapping[str, SmallCheckpoint]
    """The small random checkpoints, by the name that ``write_seeded_checkpoint`` takes."""
    published: tuple[PublishedModel, ...]
    """The published checkpoints of the family that are known to load."""


class _Model(TypedDict):
    """One checkpoint in the JSON file of a family, as :class:`PublishedModel` describes it."""

    repo_id: str
    parameters: int
    projector_parameters: NotRequired[int]
    width: NotRequired[int]
    """The number that replaces "WIDTH" in the config that the checkpoints of the group share."""


class _Group(TypedDict):
    """Checkpoints of one layout in the JSON file of a family, which share a config."""

    layout: str
    prefix: str
    config: JsonDict
    models: list[_Model]


class _Small(TypedDict):
    """The fields of a :class:`SmallCheckpoint` in the JSON file of a family."""

    repo_id: str
    title: NotRequired[str]
    layout: NotRequired[str]
    around: NotRequired[list[str]]


class _File(TypedDict):
    """The JSON file of a family, as :class:`FamilyFacts` describes its fields."""

    title: str
    examples: NotRequired[str]
    encoder: str
    replays: Mapping[str, str]
    video: NotRequired[str]
    verified: NotRequired[bool]
    images_only: NotRequired[Mapping[str, str]]
    processors: NotRequired[Mapping[str, Mapping[str, JsonObject]]]
    named_sizes: NotRequired[Mapping[str, JsonObject]]
    small_widths: NotRequired[Mapping[str, float | list[float]]]
    text_widths: NotRequired[list[str]]
    small: Mapping[str, _Small]
    checkpoints: list[_Group]


@cache
def family_names() -> tuple[str, ...]:
    """Return the name of every family, sorted; no file is read."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def family_facts(name: str) -> FamilyFacts:
    """Return the content of the JSON file of the family ``name``, read once per process."""
    data: _File = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return FamilyFacts(
        name=name,
        title=data["title"],
        examples=data.get("examples", data["title"]),
        encoder=data["encoder"],
        replays=data["replays"],
        video=data.get("video", NO_VIDEO),
        verified=data.get("verified", True),
        images_only=data.get("images_only", {}),
        processors=data.get("processors", {}),
        named_sizes=data.get("named_sizes", {}),
        small_widths=data.get("small_widths", {}),
        text_widths=data.get("text_widths", []),
        small={key: SmallCheckpoint(**value) for key, value in data["small"].items()},
        published=tuple(_models(name, data["checkpoints"])),
    )


def _models(family: str, groups: list[_Group]) -> Iterator[PublishedModel]:
    for group in groups:
        config = json.dumps(group["config"])
        for model in group["models"]:
            yield PublishedModel(
                repo_id=model["repo_id"],
                family=family,
                layout=group["layout"],
                prefix=group["prefix"],
                parameters=model["parameters"],
                projector_parameters=model.get("projector_parameters", 0),
                config=json.loads(config.replace('"WIDTH"', str(model.get("width")))),
            )


@cache
def _published() -> tuple[PublishedModel, ...]:
    families = sorted(map(family_facts, family_names()), key=lambda facts: facts.title)
    return tuple(model for facts in families for model in facts.published)


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> object:
        """Return :data:`PUBLISHED`, read from JSON files when it is first used (PEP 562)."""
        if name == "PUBLISHED":
            return _published()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def similar_names(repo_id: str) -> str:
    """Return a clause for an error that lists published repo ids spelt like an unknown one.

    The ``repo_id`` may lack its owner; case does not matter. The clause begins with a semicolon;
    it is empty if no id is spelt similarly, or if ``repo_id`` itself is a published one.
    """
    ids = sorted(model.repo_id for model in _published())
    spelt = {name: x for x in ids for name in (x.lower(), x.partition("/")[2].lower())}
    text = repo_id[:LONGEST_COMPARED].lower()
    longer = sorted((name for name in spelt if text and name.startswith(text)), key=len)
    candidates = [*longer, *get_close_matches(text, spelt, n=6)]
    suggestions = list(dict.fromkeys(spelt[name] for name in candidates))[:3]
    return (
        f"; published names like it: {', '.join(suggestions)}"
        if suggestions and repo_id not in ids
        else ""
    )


def check_family(name: str | None) -> None:
    """Raise a ValueError, which lists all families, unless ``name`` is a family's name or None."""
    if name is not None and name not in family_names():
        raise ValueError(f"family={name!r}: must be one of {', '.join(family_names())}")
