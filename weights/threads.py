"""Run tasks in parallel threads, so that an error or Ctrl-C need not wait for hanging threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Lock, Thread, Timer
from time import monotonic
from typing import TypeVar

GRACE = 1.0
"""Seconds to wait for threads to end once they are told to. A thread whose read hangs for longer is
left running."""
SILENCE = 2.0
"""The seconds of waiting after which a log message says what is waited for."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class Stopped(Exception):
    """Raised in a thread whose work is of no use any more, after an error elsewhere or Ctrl-C."""


def in_parallel(task: Callable[[_T, Event], _R], items: Sequence[_T], max_workers: int) -> list[_R]:
    """Call ``task(item, stop)`` for every item in up to ``max_workers`` threads.

    The results are in the order of ``items``. The first failure sets ``stop`` and is raised. The
    threads are daemons: neither this call nor the end of the process waits for a connection that
    hangs. A task that changes anything must check the event ``stop`` right before the change.
    """
    stop, lock, numbers = Event(), Lock(), iter(range(len(items)))
    results: dict[int, _R] = {}
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    break
                results[number] = task(items[number], stop)
            ended.put(None)
        except BaseException as error:  # noqa: BLE001  # raised again in the calling thread
            ended.put(error)

    threads: list[Thread] = []
    try:
        for _ in range(min(max_workers, len(items))):
            thread = Thread(target=work, daemon=True)
            thread.start()
            threads.append(thread)
        for _ in threads:
            if (error := ended.get()) is not None:
                raise error
        return [results[number] for number in range(len(items))]
    finally:
        stop.set()
        end = monotonic() + GRACE
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))


@contextmanager
def log_if_slow(text: str) -> Iterator[Callable[[], None]]:
    """Log ``text`` (by default to stderr) if the block waits for over two seconds.

    Yields:
        A function to call once the wait is over; the end of the block calls it, too.
    """
    timer = Timer(SILENCE, lambda: logging.getLogger("vitgraph").warning("vitgraph: %s", text))
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()
