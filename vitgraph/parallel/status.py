"""The status of a call (fine, bad input or failed), which the ranks of a group exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .torch_internals import timeout_of

Value = TypeVar("Value")
_FINE, _BAD_INPUT, _FAILED = range(3)
_DIGEST = 16
_STATUS = 1024
"""The size of a status in bytes: one byte that says fine, bad input or failed, a digest of the
call's arguments, and the text of an error."""


class StatusExchange:
    """Raises an error of one rank on all ranks.

    The status of a rank is sent by gloo on the CPU, while the GPU may still be working. gloo raises
    an error if a rank has ended, where NCCL would end the process. If the group has no gloo for the
    CPU, making the object makes a second group, so all ranks must make it.

    Args:
        group: the process group; None is the default one.
        backends: type of device -> name of the group's backend for it.

    Raises:
        RuntimeError: another rank has ended, or comes later than the timeout of the group allows.
    """

    def __init__(self, group: dist.ProcessGroup | None, backends: dict[str, str]) -> None:
        process_group = group or dist.group.WORLD
        assert process_group is not None  # the caller has started a process group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        kind = "cpu" if "cpu" in backends else next(iter(backends))
        self.timeout = timeout_of(process_group, kind)
        self._group = group
        if backends.get("cpu") != "gloo":
            try:
                gloo_group = dist.new_group(
                    dist.get_process_group_ranks(process_group),
                    timeout=self.timeout,
                    backend="gloo",
                    use_local_synchronization=True,
                )
            except RuntimeError as error:  # a rank that has ended does not connect
                raise self.silence_error() from error
            assert isinstance(gloo_group, dist.ProcessGroup)  # this process is one of its ranks
            self._group = gloo_group

    def attempt(self, work: Callable[[], Value], describe: Callable[[Value], str]) -> Value:
        """Run this rank's part of a call, and return its value if no rank has failed.

        Args:
            work: this rank's part.
            describe: takes the value; returns a text that has to be equal on all ranks.

        Raises:
            BaseException: the error that ``work`` raised on this rank.
            ValueError: another rank's input was bad, or the ranks' descriptions differ.
            RuntimeError: ``work`` failed on another rank, or another rank no longer answers.
        """
        failure: BaseException | None = None
        try:
            value = work()
            description = describe(value).encode()
            status = bytes([_FINE]) + hashlib.blake2b(description, digest_size=_DIGEST).digest()
        except BaseException as error:  # noqa: BLE001  # raised again below, after the exchange
            failure = error
            kind = _BAD_INPUT if isinstance(error, ValueError) else _FAILED
            text = str(error) if kind == _BAD_INPUT else f"{type(error).__name__}: {error}"
            status = (
                bytes([kind])
                + bytes(_DIGEST)
                + text.encode(errors="replace")[: _STATUS - _DIGEST - 1]
            )
        try:
            statuses = self._exchange(status)
        except RuntimeError as error:
            if failure is None:
                failure = self.silence_error()
                failure.__cause__ = error
        if failure is not None:
            raise failure
        self._compare(statuses)
        return value

    def gather(self, value: Value) -> list[Value]:
        """Return the value of every rank, in the order of the ranks.

        Args:
            value: the value of this rank, any object that can be pickled.

        Raises:
            RuntimeError: another rank no longer answers.
        """
        values = [value] * self.size  # every entry is replaced by the value of that rank
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self.silence_error() from error
        return values

    def silence_error(self) -> RuntimeError:
        """Return the error that says that another rank no longer answers."""
        return RuntimeError(
            f"rank {self.rank} of {self.size} heard nothing from another rank: one has ended, or "
            f"took {self.timeout.total_seconds():g} seconds longer than this one, the timeout of "
            "the group; look for the first error in the logs of all"
        )

    def _exchange(self, status: bytes) -> list[bytes]:
        own_status = torch.frombuffer(bytearray(status.ljust(_STATUS, b"\0")), dtype=torch.uint8)
        statuses: list[Tensor] = [torch.empty_like(own_status) for _ in range(self.size)]
        dist.all_gather(statuses, own_status, group=self._group)
        return [bytes(rank_status.tolist()) for rank_status in statuses]

    def _compare(self, statuses: list[bytes]) -> None:
        for rank, status in enumerate(statuses):
            if status[0] != _FINE:
                text = status[1 + _DIGEST :].rstrip(b"\0").decode(errors="replace")
                kind = ValueError if status[0] == _BAD_INPUT else RuntimeError
                raise kind(f"rank {rank} of {self.size}: {text}")
        digests = [status[1 : 1 + _DIGEST] for status in statuses]
        if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise ValueError(
                f"ranks 0 and {differing[0]} made different calls: every rank must pass the same "
                "items to the same encoder in the same order, or scatter=False its own"
            )
