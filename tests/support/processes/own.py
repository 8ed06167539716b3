"""Processes for tests that kill some of them, or that need several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import torch

from vitgraph.cli import main
from vitgraph.embedding.storage import LocalFolder, RemoteFolder, Storage

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


def start_stopped(
    arguments: Sequence[str],
    creation: int,
    environment: Mapping[str, str] | None = None,
    sign: signal.Signals = signal.SIGKILL,
) -> Any:
    """Start a process that runs ``vitgraph embed`` and is stopped at a chosen moment of its job.

    Args:
        arguments: the arguments of ``vitgraph``.
        creation: the process gets the signal instead of creating the file with this number, from 0:
            a manifest or the statistics of a shard, which are the files that a job creates.
        environment: extra environment variables.
        sign: the signal.
    """
    task = (list(arguments), environment or {}, creation, sign)
    process = started_once().Process(target=_run_and_stop, args=task)
    process.start()
    return process


def _run_and_stop(
    arguments: list[str], environment: Mapping[str, str], creation: int, sign: signal.Signals
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores Ctrl-C
    count = iter(range(creation))
    for folder in (LocalFolder, RemoteFolder):
        folder.create = _stopping(folder.create, count, sign)  # type: ignore[method-assign]
    _run(arguments, environment)


def _stopping(create: Callable[..., bool], count: Iterator[int], sign: signal.Signals) -> Any:
    signs, turn = iter([sign]), Lock()

    def create_or_stop(self: Storage, name: str, content: bytes) -> bool:
        with turn:  # what another thread creates is whole, or never begun
            if next(count, None) is None:
                for once in signs:
                    os.kill(os.getpid(), once)
                raise KeyboardInterrupt  # a signal interrupts the main thread alone
            return create(self, name, content)

    return create_or_stop


def _run(arguments: list[str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    sys.exit(main(arguments))
