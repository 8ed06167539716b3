"""``vitgraph search --pairs``: lists the near-duplicates among the vectors of a job."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from torch import Tensor

from weights.files import write_atomic

from ..devices import enough_disk, enough_memory, read_device
from ..embedding.shard import csv_bytes
from ..search.page import Found, write_sets_page
from ..search.pairs import Duplicates, find_duplicates
from ..search.vectors import Vectors
from ..terminal import counted, format_table, printable
from .search_report import print_facts, reader_of

PICTURES = 8
"""The most pictures of a group on the page, and the most keys of it in the printed table."""


def print_pairs(options: argparse.Namespace, vectors: Vectors) -> None:
    """Find the near-duplicates of a job; print the first, and write the table and the page.

    Raises:
        ValueError: the job wrote no finite vectors, or the device has too little memory.
        OSError: the table or the page cannot be written.
    """
    device = read_device(options.device)
    with enough_memory(options.vectors, "give another --device"):
        found = find_duplicates(vectors, options.pairs, options.max_pairs, device)
    header, rows = _table(vectors, found, options.top)
    if rows:
        print(format_table(header, rows))
    pairs = f"{counted(found.found, 'pair')} with a cosine of at least {options.pairs:g}"
    if found.pairs is None:
        images = sum(map(len, found.groups))
        pairs += (
            f", more than --max-pairs {options.max_pairs:,}: {counted(len(found.groups), 'group')} "
            f"with {counted(images, 'image')}, in which a chain of pairs joins all"
        )
    score = f"plain cosine, over {counted(vectors.count, 'vector')}; {pairs}"
    facts = print_facts(options, vectors, "", score, device)
    if options.csv is not None:
        with enough_disk(options.csv):
            write_atomic(options.csv, csv_bytes(list(_lines(vectors, found))))
        print(f"wrote {printable(str(options.csv))}")
    if options.html:
        sets = list(_sets(vectors, found, options.top))
        title = f"{'Pairs' if found.pairs is not None else 'Groups'} of near-duplicates"
        write_sets_page(options.html, title, sets, facts, reader_of(vectors.settings))
        print(f"wrote {printable(str(options.html))}")


def _table(
    vectors: Vectors, found: Duplicates, top: int
) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Return header and rows of a table of the first pairs or groups."""
    sets = list(_sets(vectors, found, top))
    if found.pairs is not None:
        cosines = [f"{cosine:.4f}" for cosine in found.cosines[:top].tolist()]
        rows = [
            (str(n), cosine, *(key for key, _ in pair.images))
            for n, (cosine, pair) in enumerate(zip(cosines, sets, strict=True), 1)
        ]
        return ("rank", "cosine", "key", "key"), rows
    groups = zip(found.groups, sets, strict=False)
    return ("group", "images", "keys"), [
        (
            str(n),
            f"{len(group):,}",
            ", ".join(key for key, _ in images.images) + ", ..." * (len(group) > PICTURES),
        )
        for n, (group, images) in enumerate(groups, 1)
    ]


def _sets(vectors: Vectors, found: Duplicates, top: int) -> Iterator[Found]:
    """Yield the first pairs or groups, with keys and files of their images."""
    sets: list[Tensor] = (
        found.groups[:top] if found.pairs is None else list(found.pairs[:top].unbind())
    )
    shown = [rows[:PICTURES].tolist() for rows in sets]
    names = vectors.keys_and_files(row for rows in shown for row in rows)
    for number, rows in enumerate(shown):
        value = f"{len(sets[number]):,} images"
        if found.pairs is not None:
            value = f"{found.cosines[number]:.3f}"
        yield Found(f"#{number + 1} · {value}", [names[row] for row in rows])


def _lines(vectors: Vectors, found: Duplicates) -> Iterator[Sequence[object]]:
    """Yield the lines of the table of all pairs or groups."""
    sets = found.groups if found.pairs is None else [found.pairs.flatten()]
    names = vectors.keys_and_files(row for rows in sets for row in rows.tolist())
    if found.pairs is None:
        yield "group", "key"
        for number, rows in enumerate(found.groups, 1):
            yield from ((number, names[row][0]) for row in rows.tolist())
        return
    yield "cosine", "key", "other_key"
    for cosine, (one, other) in zip(found.cosines.tolist(), found.pairs.tolist(), strict=True):
        yield f"{cosine:.6f}", names[one][0], names[other][0]
