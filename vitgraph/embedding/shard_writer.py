"""Writes shards in threads of its own, while the encoder makes the results of the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType

SHARDS_AT_ONCE = 2
"""The most shards that are being written, and so are in memory beside the next one."""
WRITTEN_AT_ONCE = 4
"""The most files of a shard that are written at once."""


class ShardWriter:
    """Writes shards in threads; as a context manager it waits for them at the end."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shards")
        at_once = SHARDS_AT_ONCE * WRITTEN_AT_ONCE
        self._files = ThreadPoolExecutor(at_once, thread_name_prefix="files")
        self._running: deque[Future[None]] = deque()

    def begin(self, write: Callable[[Executor], None]) -> None:
        """Begin to write a shard once few enough others are being written.

        Args:
            write: writes the shard; it gets the threads for its files.

        Raises:
            OSError: a shard before this one could not be written.
        """
        while len(self._running) >= SHARDS_AT_ONCE:
            self._running.popleft().result()
        self._running.append(self._pool.submit(write, self._files))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for all shards; without another error, raise the first one of theirs.

        Raises:
            OSError: a shard could not be written.
        """
        self._pool.shutdown(wait=True)
        self._files.shutdown(wait=True)
        while self._running and error is None:
            self._running.popleft().result()
