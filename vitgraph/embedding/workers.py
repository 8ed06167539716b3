"""Finds out the rank of this worker process, from ``--shard`` or variables of torchrun or SLURM."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MOST_THREADS = 16
"""The most threads that decode images in one worker process."""
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
}
"""The environment variables of each launcher: the rank of a process, the number of processes, and
the same two among the processes on this host."""


class Worker(NamedTuple):
    """One of the processes that work on an embedding job.

    ``rank`` is its number from 0, ``size`` the number of workers, ``local_size`` the number of
    workers on this host.
    """

    rank: int = 0
    size: int = 1
    said_by: str = ""
    """The source of the rank: "--shard", "torchrun" or "SLURM"; empty for a single worker."""
    local_rank: int | None = None
    """The rank among the workers on this host; None if it is not known."""
    local_size: int = 1

    def __str__(self) -> str:
        return f"worker {self.rank} of {self.size} ({self.said_by})"

    def shards_of_worker(self, shards: Iterable[int]) -> list[int]:
        """Return the shard numbers that this worker has to write: number modulo ``size`` is
        ``rank``."""
        return [number for number in shards if number % self.size == self.rank]

    def device_for(self, device: torch.device) -> torch.device:
        """Return the device that this worker uses.

        Args:
            device: the value of ``--device``. For "cuda" without a number, the GPU with the number
                of the local rank is returned; any other device is returned unchanged.
        """
        if str(device) != "cuda" or self.local_rank is None:
            return device
        import torch

        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    def threads(self) -> int:
        """Return the number of decoding threads: this worker's share of the cores, at most 16."""
        cores = os.cpu_count() or 1
        if sys.platform == "linux":
            cores = len(os.sched_getaffinity(0))  # SLURM may bind a process to some of the cores
        return min(max(cores // self.local_size, 1), MOST_THREADS)


def read_worker(shard: str | None, environment: Mapping[str, str]) -> Worker:
    """Return the rank of this process among the workers of a job.

    Args:
        shard: the value of ``--shard``, ``"I/N"`` for rank I (from 0) of N workers; None without
            the option, in which case ``environment`` gives the rank.
        environment: the environment variables; variables of torchrun take precedence over those of
            SLURM.

    Raises:
        ValueError: the rank or the number of workers is not valid.
    """
    if shard is not None:
        return _check(*shard.partition("/")[::2], "--shard")
    for name, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
        if rank in environment and size in environment:
            worker = _check(environment[rank], environment[size], name)
            return worker._replace(
                local_rank=_number(environment.get(local_rank)),
                local_size=_number(environment.get(local_size)) or 1,
            )
    return Worker()


def _check(rank: str, size: str, said_by: str) -> Worker:
    first, count = _number(rank), _number(size)
    if first is None or count is None or first >= count:
        raise ValueError(
            f"{said_by} says worker {rank!r} of {size!r}: a job of N workers has workers 0 to "
            "N - 1; give --shard I/N, such as --shard 0/4"
        )
    return Worker(first, count, said_by)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
