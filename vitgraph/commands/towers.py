"""``vitgraph list``: prints the supported vision towers, each with the repo ids that contain it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import chain, islice, zip_longest
from textwrap import fill, wrap
from typing import TYPE_CHECKING

from ..models import PublishedTower, published_towers
from ..terminal import format_table

if TYPE_CHECKING:
    from weights.published import FamilyFacts

TOWERS_HEADER = ("parameters", "projector", "layouts", "repo ids")
WIDTH = 100
"""The width in characters to which the remarks below the table are wrapped."""
_LAYOUTS, _IDS = 23, 52
"""The widths in characters of the table's columns "layouts" and "repo ids"."""
FINE_TUNES = "ColQwen3, Cosmos-Reason, Holo, Intern-S1, jina-reranker-m0, MiMo-VL, OpenCUA"
"""Models of other publishers that load because their vision towers have the config of a supported
one; each is tested."""


def add_list(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vitgraph list`` to ``parser``."""
    parser.add_argument(
        "pattern",
        nargs="?",
        default="*",
        metavar="PATTERN",
        help="only towers with a repo id like 'qwen3*' or 'opengvlab/*' (case is ignored)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def list_towers(options: argparse.Namespace) -> None:
    """Print one row per supported vision tower that has a repo id like ``options.pattern``.

    Raises:
        ValueError: the pattern matches no repo id; with ``--json``, an empty list is printed.
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
    print(_towers_text(towers))
    unverified = sorted({tower.family.title for tower in towers if not tower.family.verified})
    if unverified:
        _print(f"{', '.join(unverified)}: not verified against an upstream implementation.")
    limits = {
        name: tower.family.images_only[name]
        for tower in towers
        for name in tower.layouts
        if name in tower.family.images_only
    }
    for name, restriction in limits.items():
        _print(f"Layout {name}: {restriction}.")
    _print(
        "Parameters are in millions. Others load too if config and tensors fit: folders, files, "
        f"base models, and fine-tunes such as {FINE_TUNES}."
    )


def _print(text: str) -> None:
    print("\n" + fill(text, WIDTH, break_on_hyphens=False))


def _towers_text(towers: Sequence[PublishedTower]) -> str:
    """Return the table of towers as text, with a line about each family above its first tower."""
    rows = [_rows(tower) for tower in towers]
    header, rule, *lines = format_table(TOWERS_HEADER, list(chain(*rows))).splitlines()
    remaining, parts = iter(lines), [header, rule]
    for number, tower in enumerate(towers):
        if number == 0 or tower.family.name != towers[number - 1].family.name:
            parts.append(_heading(tower.family))
        parts += islice(remaining, len(rows[number]))
    return "\n".join(parts)


def _heading(family: FamilyFacts) -> str:
    from weights.published import NO_VIDEO

    graphs = f"graphs of images: {family.replays['image']}"
    if family.video == NO_VIDEO:
        return f"{family.title}: no video; {graphs}"
    video = f"of videos: {family.replays['video']}"
    return f"{family.title}: video as {family.video}; {graphs}; {video}"


def _rows(tower: PublishedTower) -> list[tuple[str, ...]]:
    """Return the table rows of one tower, each with a cell per title in :data:`TOWERS_HEADER`.

    Further rows follow the first if the layouts or repo ids are too wide for one cell; their cells
    for the parameter counts are empty.
    """
    model = tower.models[0]
    counts = (model.parameters, model.projector_parameters)
    limits = tower.family.images_only
    layouts = [f"{name} (no video)" if name in limits else name for name in tower.layouts]
    first_line, *other_lines = zip_longest(
        _wrap_names(layouts, _LAYOUTS), _wrap_names(tower.repo_ids, _IDS), fillvalue=""
    )
    numbers = tuple(f"{count / 1e6:.1f}" for count in counts)
    return [(*numbers, *first_line), *(("", "", *cells) for cells in other_lines)]


def _wrap_names(names: Sequence[str], width: int) -> list[str]:
    return wrap(", ".join(names), width, break_long_words=False, break_on_hyphens=False)
