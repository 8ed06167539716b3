"""Checks of the arguments of ``vitgraph search``, before torch is imported or a folder read."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..embedding.sources.suffixes import is_media
from ..packages import require_transformers
from .arguments import check_names, is_video


def is_text(query: str) -> bool:
    """Return whether a query is words: it is no path that exists, and does not look like one."""
    looks_like_a_path = "/" in query or os.sep in query or is_media(query)
    return not looks_like_a_path and not os.path.exists(query)


def check_search(options: argparse.Namespace) -> None:
    """Check the options and the query; the folder of vectors is not needed.

    Raises:
        ValueError: an option has an invalid value, or the query is neither an image, nor a clip,
            nor words.
    """
    if options.top < 1:
        raise ValueError(f"--top {options.top}: must be at least 1")
    check_names(None, options.device)
    if options.html:
        from ..pages import check_page
        from ..search.page import KIND

        check_page(options.html, KIND)
    if (options.query is None) == (options.pairs is None):
        raise ValueError(
            "give either a query (an image, a clip or words) or --pairs, such as --pairs 0.95"
        )
    if options.pairs is not None:
        _check_pairs(options)
    elif options.csv is not None:
        raise ValueError(f"--csv {options.csv}: is written with --pairs only")
    else:
        _check_query(options)


def _check_query(options: argparse.Namespace) -> None:
    """Check the query, and options that sample it."""
    from .encode_checks import check_media

    words, path = is_text(options.query), Path(options.query)
    if words and not options.query.strip():
        raise ValueError("the query is empty: name an image or a clip, or give words")
    if words or not is_video(path):
        for name in ("fps", "num_frames"):
            if (value := vars(options)[name]) is not None:
                kind = "words" if words else "an image"
                raise ValueError(
                    f"--{name.replace('_', '-')} {value}: samples a clip, and {options.query} is "
                    f"{kind}; leave it out"
                )
    if words:
        require_transformers()
        return
    if "://" not in options.query and not os.path.exists(options.query):
        raise ValueError(
            f"{options.query}: there is no such file; check the path (a query in words has no / "
            "and does not end like an image)"
        )
    if os.path.isdir(query := options.query):
        raise ValueError(
            f"{query}: is a folder, and a query is an image, a clip or words: give a file in it, "
            f"or words of which there is no folder here, such as 'a {path.name}'"
        )
    images, videos = ([], [path]) if is_video(path) else ([path], [])
    names = {"images": images, "video": videos, "repo": "REPO_OR_FOLDER", "out": "OUT"}
    check_media(argparse.Namespace(**names))


def _check_pairs(options: argparse.Namespace) -> None:
    """Check ``--pairs``, ``--max-pairs`` and ``--csv``.

    Raises:
        ValueError: an option has an invalid value, or samples a clip.
    """
    if not 0 < options.pairs < 1:
        raise ValueError(
            f"--pairs {options.pairs}: must lie between 0 and 1; for equal vectors take 0.9999, "
            "because cosines are rounded"
        )
    if options.max_pairs < 0:
        raise ValueError(f"--max-pairs {options.max_pairs}: must not be negative")
    for name in ("fps", "num_frames"):
        if (value := vars(options)[name]) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: samples a query, and --pairs has none; leave "
                "it out"
            )
    path = options.csv
    if path is None:
        return
    if path.suffix.lower() != ".csv":
        raise ValueError(f"--csv {path}: the table is CSV; let its name end in .csv")
    if path.exists() or not path.parent.is_dir():
        raise ValueError(f"--csv {path}: must be a new file in a folder that exists")
