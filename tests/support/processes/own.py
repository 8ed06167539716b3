"""Processes for tests that kill some of them, or that need several at a time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vitgraph.cli import main

_IMPORTED_ONCE = [
    "pytest",
    "torch.distributed",
    "vitgraph.embedding.verify",
    "vitgraph.embedding.job",
    "vitgraph.parallel",
    "vitgraph.seeded",
]


def started_once() -> Any:
    """Return a context to start processes that imports torch once for all, if the system can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def start(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """Start a process that runs ``vitgraph`` with arguments and extra environment variables."""
    process = started_once().Process(target=_run, args=(list(arguments), environment or {}))
    process.start()
    return process


def _run(arguments: list[str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    sys.exit(main(arguments))
