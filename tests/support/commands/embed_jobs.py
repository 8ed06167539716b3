"""Helpers of the tests of ``vitgraph embed``: jobs in this process, comparisons and uploads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vitgraph.cli import main
from vitgraph.embedding.sources.listing import Source
from vitgraph.embedding.sources.reading import File, SourceOptions


def run_job(repo: Path, source: object, out: object, *options: object) -> int:
    """Run ``vitgraph embed`` with float32 weights; returns its exit code."""
    command = ["embed", repo, source, "--out", out, "--dtype", "float32", "--no-progress"]
    return main([str(each) for each in (*command, *options)])


def run_in_twos(repo: Path, source: object, out: object, *options: object) -> int:
    """Run ``vitgraph embed`` with two images per shard; returns its exit code."""
    return run_job(repo, source, out, "--shard-items", 2, *options)


def find_files(source: str, options: SourceOptions | None = None) -> list[File]:
    """Return all images of a source as a list, with the arguments of ``Source``."""
    return list(Source(source, options))


def close(one: Any, other: Any) -> bool:
    """Return whether two arrays are equal but for the rounding of float32."""
    difference = np.linalg.norm(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    return bool(difference <= 2e-6 * np.linalg.norm(np.asarray(other, np.float64)))


def upload(store: Any, photos: Path, folder: str) -> None:
    """Copy the files of a local folder to a folder of a remote store."""
    for path in photos.iterdir():
        store.put_file(str(path), f"{folder}/{path.name}")
