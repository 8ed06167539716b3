"""``vitgraph bench features``: what probes read off each block of one or several towers.

The images of a folder have the names of its subfolders as classes. They are listed and read as by
``vitgraph embed``.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from ..packages import require_matplotlib, require_sklearn
from ..terminal import counted, format_table, printable
from .arguments import (
    DTYPE_HELP,
    SIZES,
    add_sizes,
    check_names,
    check_repo,
    read_blocks,
    read_hub,
    read_source,
    shows_bars,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..analysis.probes import BlockScores
    from ..embedding.sources.reading import File

COLUMNS = ("measure", "repo", "block", "other_repo", "other_block", "value", "low", "high")
"""The columns of the table that ``--csv`` writes."""


def add_features(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench features`` to its parser."""
    parser.add_argument(
        "--data",
        required=True,
        metavar="FOLDER",
        help="folder with a subfolder of images per class, or another source of `vitgraph embed` "
        "whose keys begin with CLASS/",
    )
    parser.add_argument(
        "--blocks", metavar="N,N,...", help="blocks, negative ones from the end; by default all"
    )
    parser.add_argument(
        "--per-class", type=int, metavar="N", help="take N random images of each class"
    )
    parser.add_argument(
        "--folds",
        type=int,
        default=5,
        metavar="N",
        help="folds of the cross-validation; by default 5",
    )
    parser.add_argument(
        "--neighbours",
        type=int,
        default=5,
        metavar="N",
        help="nearest images that vote; by default 5",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the folds and of --per-class")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all numbers to a table")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the accuracies per block")
    parser.add_argument("--dtype", help=DTYPE_HELP)
    add_sizes(parser)
    parser.set_defaults(command=print_features)


def print_features(options: argparse.Namespace) -> None:
    """Run ``bench features``: print a table of accuracies, and how similar two towers are.

    Raises:
        ValueError: an option has an invalid value, the folder has no classes of enough images, an
            image cannot be read, or a checkpoint cannot be loaded.
        OSError: the table or the plot cannot be written.
    """
    files, labels = _check(options)
    from ..analysis.similarity import FEWEST, cka_of_vectors

    scores: dict[str, Sequence[BlockScores]] = {}
    vectors: list[Sequence[Tensor]] = []
    for repo in options.repos:
        scores[repo], of_repo = _measure(options, repo, files, labels)
        vectors.append(of_repo)
    two = len(vectors) == 2 and len(labels) >= FEWEST
    similarity = cka_of_vectors(vectors[0], vectors[1]) if two else None
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(_lines(scores, similarity))
    if options.plot:
        from ..plots import write_figure
        from ..plots.probes import plot_probes

        chance = 1 / len(set(labels))
        write_figure(plot_probes(scores, similarity=similarity, chance=chance), options.plot)
    about = _about(options, labels)
    if options.json:
        print(json.dumps(_json(about, scores, similarity), indent=2))
    else:
        print(_table(about, scores, similarity))


def _check(options: argparse.Namespace) -> tuple[list[File], list[str]]:
    """Check the options, and list the images with their classes.

    Raises:
        ValueError: as :func:`print_features` says.
    """
    require_sklearn()
    if options.plot:
        require_matplotlib()
    check_names(options.dtype, options.device)
    read_blocks(options.blocks)
    for name in ("per_class", "neighbours", *SIZES):
        value = vars(options)[name]
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be positive")
    for path in filter(None, (options.csv, options.plot)):
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{path}: must be a file in a folder that exists")
    if repeated := [repo for repo, count in Counter(options.repos).items() if count > 1]:
        raise ValueError(f"{repeated[0]}: is named twice; name each checkpoint once")
    from ..analysis.probes import check_classes

    by_class, notes = _list_classes(options)
    labels = [name for name, files in by_class.items() for _ in files]
    check_classes(labels, options.folds)
    for repo in options.repos:
        check_repo(repo, read_hub(options), options.family)
    for line in notes:
        print(f"vitgraph: {line}", file=sys.stderr)
    return [file for files in by_class.values() for file in files], labels


def _list_classes(options: argparse.Namespace) -> tuple[dict[str, list[File]], list[str]]:
    """Return the images of each class, by its name, and lines about files that were skipped.

    Raises:
        ValueError: an image lies in no folder of a class.
    """
    from ..embedding.sources.listing import Source

    source = Source(options.data)
    by_class: dict[str, list[File]] = defaultdict(list)
    for file in source:
        name, slash, _ = file.key.partition("/")
        if not slash:
            raise ValueError(
                f"{options.data}: {file.key} lies in no subfolder; put the images of each class "
                "into a subfolder with the name of the class"
            )
        by_class[name].append(file)
    if options.per_class is not None:
        for name, files in by_class.items():
            chance = Random(f"{options.seed}:{name}")
            by_class[name] = chance.sample(files, min(options.per_class, len(files)))
    return by_class, list(source.left_out.describe())


def _measure(
    options: argparse.Namespace, repo: str, files: Sequence[File], labels: Sequence[str]
) -> tuple[list[BlockScores], list[Tensor]]:
    """Return the accuracies of each block of a checkpoint, and the vectors of the images."""
    from encoders.base.intermediates import block_indices
    from encoders.contract import Limits
    from weights import load_encoder

    from ..analysis.probes import score_vectors, vectors_of_blocks
    from ..devices import enough_memory, read_device
    from ..embedding.sources.reading import ImageReader, Readable, SourceOptions

    reader = ImageReader(SourceOptions())
    limits = Limits(*(vars(options)[name] for name in SIZES))
    bars = shows_bars(options)
    with enough_memory(repo, "give another --device or fewer --blocks"):
        encoder = load_encoder(
            repo,
            **read_source(options),
            dtype=options.dtype or "auto",
            device=read_device(options.device),
        )
        blocks = block_indices(read_blocks(options.blocks), encoder.paths["image"].config.depth)
        images = [Readable(reader, file) for file in files]
        vectors = vectors_of_blocks(encoder, images, blocks, limits, bars)
    keywords = {"folds": options.folds, "neighbours": options.neighbours, "seed": options.seed}
    scores = [
        score_vectors(block, rows, labels, **keywords)
        for block, rows in zip(blocks, vectors, strict=True)
    ]
    return scores, vectors


def _about(options: argparse.Namespace, labels: Sequence[str]) -> dict[str, object]:
    """Return the settings of a measurement and the number of its images, by name."""
    return {
        "data": options.data,
        "images": len(labels),
        "classes": len(set(labels)),
        "chance": 1 / len(set(labels)),
        "folds": options.folds,
        "neighbours": options.neighbours,
        "seed": options.seed,
    }


def _lines(
    scores: Mapping[str, Sequence[BlockScores]], similarity: Tensor | None
) -> list[tuple[object, ...]]:
    """Return the rows of the table that ``--csv`` writes, in the order of :data:`COLUMNS`."""
    rows: list[tuple[object, ...]] = [
        (measure, repo, one.block, "", "", *accuracy)
        for repo, blocks in scores.items()
        for one in blocks
        for measure, accuracy in (("knn", one.neighbours), ("linear", one.probe))
    ]
    if similarity is not None:
        (first, its_blocks), (second, other_blocks) = scores.items()
        rows += [
            ("cka", first, one.block, second, other.block, value, "", "")
            for one, values in zip(its_blocks, similarity.tolist(), strict=True)
            for other, value in zip(other_blocks, values, strict=True)
        ]
    return rows


def _json(
    about: dict[str, object],
    scores: Mapping[str, Sequence[BlockScores]],
    similarity: Tensor | None,
) -> dict[str, object]:
    """Return all numbers for ``--json``."""
    return {
        "about": about,
        "scores": {
            repo: [
                {
                    "block": one.block,
                    "knn": one.neighbours._asdict(),
                    "linear": one.probe._asdict(),
                }
                for one in blocks
            ]
            for repo, blocks in scores.items()
        },
        "cka": None if similarity is None else similarity.tolist(),
    }


def _table(
    about: Mapping[str, object],
    scores: Mapping[str, Sequence[BlockScores]],
    similarity: Tensor | None,
) -> str:
    """Return the text that is printed without ``--json``."""
    head = ("repo", "block", "k-NN", "95 %", "linear probe", "95 %")
    rows = []
    for repo, blocks in scores.items():
        for one in blocks:
            knn, probe = one.neighbours, one.probe
            cells = [f"{knn.value:.3f}", f"{knn.low:.3f}-{knn.high:.3f}"]
            cells += [f"{probe.value:.3f}", f"{probe.low:.3f}-{probe.high:.3f}"]
            rows.append((repo, str(one.block), *cells))
    parts = [
        f"{counted(int(str(about['images'])), 'image')} of {about['classes']} classes, "
        f"{about['folds']} folds, {about['neighbours']} neighbours, seed {about['seed']}; chance "
        f"{about['chance']:.3f}",
        format_table(head, rows),
    ]
    if similarity is not None:
        (first, its_blocks), (second, other_blocks) = scores.items()
        best = similarity.nan_to_num(-1).max(1)
        nearest = [
            (str(one.block), str(other_blocks[index].block), f"{value:.3f}")
            for one, index, value in zip(
                its_blocks, best.indices.tolist(), best.values.tolist(), strict=True
            )
        ]
        parts.append(printable(f"The block of {second} that is most similar to each of {first}:"))
        parts.append(format_table(("block", "most similar", "CKA"), nearest))
    return "\n\n".join(parts)
