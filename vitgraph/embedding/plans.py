"""Which files of a shard are encoded, and which are copies of another file."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from .shards import Shard
from .sources import File

HASHING = 8
"""Threads that look for copies, before the images of a shard are encoded."""


class Original(NamedTuple):
    """The first file with some content; a key may stand for several files of a tar file."""

    shard: int
    place: int
    """In the shard."""


@dataclass
class Plan:
    """Which files of a shard are encoded, and which have the content of another file."""

    files: Sequence[File]
    contents: list[str]
    """Digest of each file where another file has its size, else empty."""
    originals: list[int] = field(default_factory=list)
    """Places of the files to encode."""
    copies: dict[int, Original] = field(default_factory=dict)
    """Place of a copy to its original."""
    done: bool = False
    """Whether another process has written the shard before it was planned here."""


class Plans:
    """The plans of a job's shards, each made when it is first asked for and kept until it is done.

    Args:
        files: of the job, in order.
        shards: of the job; the tables of those that are done say what is encoded already.
        items_per_shard: files in each shard but the last.
        find_copies: whether images of equal content are encoded once.
    """

    def __init__(
        self,
        files: Sequence[File],
        shards: Sequence[Shard],
        items_per_shard: int,
        find_copies: bool,
    ) -> None:
        self._files, self._shards, self._items_per_shard = files, shards, items_per_shard
        sizes = Counter(file.size for file in files if find_copies)
        self._repeated = {size for size, count in sizes.items() if count > 1 and size >= 0}
        self._seen: dict[str, Original] = {}
        """Content to the first file that has it."""
        for shard in shards if self._repeated else []:
            if shard.is_done:
                for place, line in zip(shard.read_places(), shard.read_table(), strict=True):
                    if line["content"]:
                        self._seen.setdefault(line["content"], Original(shard.number, place))
        self._plans: dict[int, Plan] = {}
        self._planning = threading.Lock()

    def files_of(self, number: int) -> Sequence[File]:
        """Return the files of a shard."""
        count = self._items_per_shard
        return self._files[number * count : (number + 1) * count]

    def plan(self, number: int) -> Plan:
        """What to do for a shard; shards are planned in order, by whichever thread is first."""
        with self._planning:
            if number not in self._plans:
                self._plans[number] = self._make_plan(number)
            return self._plans[number]

    def forget(self, number: int) -> None:
        """Let go of the plan of a shard that is written."""
        del self._plans[number]

    def _make_plan(self, number: int) -> Plan:
        files = self.files_of(number)
        if self._shards[number].is_done:
            return Plan(files, [], done=True)
        with ThreadPoolExecutor(HASHING) as pool:
            plan = Plan(files, list(pool.map(self._content, files)))
        for place, content in enumerate(plan.contents):
            if content in self._seen:
                plan.copies[place] = self._seen[content]
            else:
                plan.originals.append(place)
                if content:
                    self._seen[content] = Original(number, place)
        return plan

    def _content(self, file: File) -> str:
        """A digest of the file if another one has its size, else nothing."""
        if file.size not in self._repeated:
            return ""
        try:
            return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
        except OSError:
            return ""  # encoding says what is wrong with it
