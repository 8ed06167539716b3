"""Threads that prepare items before a consumer asks for them, within a bound on memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, TypeVar

Given = TypeVar("Given")
Prepared = TypeVar("Prepared")

_PATIENCE = 5.0
"""Seconds that ``Prefetch`` waits for its threads when it ends; a thread that is still blocked in
the caller's iterator is left running."""
_SMALL_TURN, _LARGE_TURNS = 8, 2
"""The most items of a small turn, and the most larger turns that are prepared at once. Items of a
large turn are prepared in no time: with more than two threads that do nothing but compute in
Python, the consumer would wait for Python's lock for longer than it computes."""


class _Failure:
    """An exception that the caller's iterator or ``prepare`` raised, kept as a result."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Prefetch(Generic[Given, Prepared]):
    """Prepares items in worker threads and returns the results in the order of the items.

    Each worker takes the next items itself, one worker at a time, so ``items`` needs no lock of its
    own. What it takes at once is its turn. Items are taken only if the total size of the results
    that are not released yet stays within ``limit``. An item that is being prepared is assumed to
    have the mean size of earlier ones, or a quarter of ``limit`` if there are none.

    Args:
        items: the items to prepare, which are read lazily.
        prepare: takes the number of an item, this item and those after it that a worker took;
            returns a result and its size for each.
        share: returns the part of a turn that an item fills. The parts of a turn add up to at most
            1, if it has more than one item.
        limit: largest total size of unreleased results; one item is taken even if it is larger.
        workers: number of threads.
    """

    def __init__(
        self,
        items: Iterator[Given],
        prepare: Callable[[int, Sequence[Given]], Sequence[tuple[Prepared, int]]],
        *,
        share: Callable[[Given], float],
        limit: int,
        workers: int,
    ) -> None:
        self._items, self._prepare, self._share = items, prepare, share
        self._limit = limit
        self._left: list[Given] = []
        """The item that did not fit into the last turn, if there is one."""
        self._source = threading.Lock()
        self._condition = threading.Condition()
        self._results: dict[int, Prepared | _Failure] = {}
        self._failure: _Failure | None = None
        self._held_size = 0
        """The total size of the results that the consumer has not released yet."""
        self._taken_count = self._large_turns = 0
        """The number of items that were taken, and of large turns that are being prepared."""
        self._prepared_count, self._prepared_size = 0, 0
        """The number of items that have been prepared, and the sum of their sizes."""
        self._wanted_number = -1
        """The number of the item that the consumer waits for, or that it got last."""
        self._ended = self._waits_for_room = False
        self.wait_seconds = 0.0
        """Seconds that the consumer has waited for results."""
        self._threads = [
            threading.Thread(target=self._work, name=f"prefetch-{n}", daemon=True)
            for n in range(workers)
        ]

    def __enter__(self) -> Prefetch[Given, Prepared]:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system has no more threads, or the user interrupts
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        """End the threads that run, and wait for them."""
        with self._condition:
            self._ended = True
            self._results.clear()
            self._condition.notify_all()
        deadline = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0))

    def __iter__(self) -> Iterator[Prepared]:
        """Yield results in order, up to the first item that raised; ``check`` raises its error."""
        while ready := self._next_ready():
            for result in ready:
                if isinstance(result, _Failure):
                    self._failure = result
                    return
                yield result

    def _next_ready(self) -> list[Prepared | _Failure]:
        """Wait for the next result, and return it with those after it that are there, too."""
        start_time = time.perf_counter()
        with self._condition:
            self._wanted_number += 1
            if self._wanted_number not in self._results:
                self._condition.notify_all()  # the consumer waits: one more item may be taken
                self._condition.wait_for(
                    lambda: self._wanted_number in self._results or self._is_over()
                )
            ready: list[Prepared | _Failure] = []
            while (number := self._wanted_number + len(ready)) in self._results:
                ready.append(self._results.pop(number))
            self._wanted_number += max(len(ready) - 1, 0)
        self.wait_seconds += time.perf_counter() - start_time
        return ready

    def check(self) -> None:
        """Raise the error that ended the iteration early, if one did.

        Raises:
            BaseException: what ``items`` or ``prepare`` raised.
        """
        if self._failure is not None:
            raise self._failure.error

    def release(self, size: int) -> None:
        """Subtract ``size`` from the total size of unreleased results, so that more are prepared.

        The consumer calls this when it has freed results of that size, as ``prepare`` returned it.
        """
        with self._condition:
            self._held_size -= size
            if self._waits_for_room and self._room():
                self._condition.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            number, items = taken
            results: Sequence[tuple[Prepared | _Failure, int]]
            try:
                results = self._prepare(number, items)
            except BaseException as error:  # noqa: BLE001  # `check` raises it again
                results = [(_Failure(error), 0)] * len(items)
            with self._condition:
                self._put(number, results)
            del taken, items, results  # free their memory before ``_take`` waits, maybe for long

    def _take(self) -> tuple[int, list[Given]] | None:
        """Wait until ``limit`` allows one more item; return the first one's number and the items.

        Returns None at the end.
        """
        with self._source:
            with self._condition:
                if not self._ended and not self._room():
                    self._waits_for_room = True
                    self._condition.wait_for(lambda: self._ended or self._room())
                    self._waits_for_room = False
                room = self._room()
            items: list[Given] = []
            share, failures, is_over = 0.0, list[tuple[_Failure, int]](), False
            try:
                while not self._ended and len(items) < room and share < 1:
                    item = self._left.pop() if self._left else next(self._items)
                    share += self._share(item)
                    if items and share > 1:
                        self._left.append(item)
                    else:
                        items.append(item)
            except StopIteration:
                is_over = True
            except BaseException as error:  # noqa: BLE001  # `check` raises it again
                failures, is_over = [(_Failure(error), 0)], True
            with self._condition:
                number = self._taken_count  # only a holder of ``_source`` changes it
                self._taken_count += len(items) + len(failures)
                self._large_turns += len(items) > _SMALL_TURN
                if is_over:
                    self._ended = True
                    self._put(number + len(items), failures)
                    self._condition.notify_all()
            return (number, items) if items else None

    def _put(self, number: int, results: Sequence[tuple[Prepared | _Failure, int]]) -> None:
        """Keep the results of items from ``number`` on, each with its size."""
        wakes = number <= self._wanted_number < number + len(results)
        for at, (result, size) in enumerate(results, number):
            self._results[at] = result
            self._held_size += size
            self._prepared_size += size
        self._prepared_count += len(results)
        self._large_turns -= len(results) > _SMALL_TURN
        # The mean size of items may leave room now, and the consumer may wait for one of these.
        if wakes or (self._waits_for_room and self._room()):
            self._condition.notify_all()

    def _is_over(self) -> bool:
        return self._ended and self._wanted_number >= self._taken_count

    def _room(self) -> int:
        """Return the number of further items for which there is room."""
        count, size = self._prepared_count, self._prepared_size
        if not count:
            count, size = 4, self._limit
        left = (self._limit - self._held_size) * count // (size or 1)
        room = left - (self._taken_count - self._prepared_count)
        if self._large_turns >= _LARGE_TURNS:
            room = 0
        # If the consumer waits for exactly the next item, it is taken.
        return max(room, int(self._wanted_number == self._taken_count))
