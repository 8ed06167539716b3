"""The checks of ``vitgraph embed`` before torch is imported."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path

from ..embedding.files import entries_below
from ..embedding.manifest import Manifest
from ..embedding.sources import Source, suffixes
from ..embedding.storage import open_storage
from ..embedding.workers import read_worker
from .arguments import check_checkpoint, check_names, check_source, is_video
from .embed import read_fields

_POSITIVE = (
    "min_pixels",
    "max_pixels",
    "max_tiles",
    "batch_tokens",
    "workers",
    "max_tokens_per_call",
    "shard_items",
)


def check_embed(options: argparse.Namespace) -> None:
    """Check the arguments of a job, and look for the checkpoint and the source.

    Raises:
        ValueError: options that make no sense, or a checkpoint or source that is not there.
    """
    check_names(options.dtype, options.device)
    for name in _POSITIVE:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if options.normalize and options.pool == "none":
        raise ValueError("--normalize: needs one vector per item; leave --pool none out")
    read_fields(options)
    read_worker(options.shard, os.environ)
    if not options.plan and "://" not in options.out:
        Manifest.find(open_storage(options.out))
    ending = ["--plan"] if options.plan else ["--out", options.out]
    right = ["vitgraph", "embed", "REPO_OR_FOLDER", options.repo, *ending]
    check_checkpoint(options.repo, shlex.join(right))
    check_source(options)
    _check_files(options)


def _check_files(options: argparse.Namespace) -> None:
    """Raise if the source is a path to nothing, or to a video; patterns and stores are not read."""
    source = options.files
    if source == "-" or "://" in source or re.search(r"[*?[]", source):
        return
    path = Path(source).expanduser()
    if is_video(path):
        right = shlex.join(["vitgraph", "encode", options.repo, "--video", source, "--out"])
        raise ValueError(
            f"{source}: is a video, and images are embedded: `{right} FILE.safetensors`"
        )
    if not path.exists():
        list(Source(source))  # raises the error that says what may be given
    if path.is_dir() and not any(_is_image(entry.name) for entry, _ in entries_below(str(path))):
        list(Source(source))


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in suffixes()
