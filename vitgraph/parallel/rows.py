"""The exchange of output rows between ranks, after which each rank has the rows of all items."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .rank_result import RankResult
from .status import StatusExchange


def find_channel(device: torch.device, backends: Mapping[str, str]) -> torch.device:
    """Return the device whose backend sends rows: the rows' own, or the CPU if only gloo can.

    Args:
        device: the device that the rows are on.
        backends: type of device -> name of the group's backend for it.

    Raises:
        ValueError: no backend of the group can send tensors of the device.
    """
    direct = backends.get(device.type)
    if direct is not None and direct != "gloo":
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    raise ValueError(
        f"the encoder is on {device}, and the group reaches only {', '.join(backends)}: "
        "move the encoder there, or call init_process_group('gloo')"
    )


class RowExchange:
    """Gathers the rows of all items on every rank.

    Args:
        group: the process group; None is the default one.
        channel: the device to send rows from, the result of :func:`find_channel`.
        status: makes the error that is raised if another rank no longer answers.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, channel: torch.device, status: StatusExchange
    ) -> None:
        self._group, self._channel, self._status = group, channel, status

    def gather(self, result: RankResult) -> list[Tensor]:
        """Return the outputs of all ranks: per field, a tensor of the rows of all items in order.

        Args:
            result: the rows that this rank computed, and the number of rows of every item.

        Raises:
            RuntimeError: a rank has ended (with gloo; with NCCL the process ends at the timeout).
        """
        indices: dict[tuple[int, ...], Tensor] = {}
        gathered = []
        for (_, rows), counts in zip(result.fields, result.counts, strict=True):
            if (key := tuple(counts)) not in indices:
                indices[key] = result.shares.row_indices(counts).to(rows.device, non_blocking=True)
            gathered.append(self._gather_rows(rows, result.shares.max_rows(counts), indices[key]))
        return gathered

    def _gather_rows(self, rows: Tensor, max_rows: int, indices: Tensor) -> Tensor:
        """Return the rows of all items in one field, on the device of ``rows``."""
        if not max_rows:
            return rows
        padded = rows.new_empty((max_rows, *rows.shape[1:]), device=self._channel)
        padded[: len(rows)] = rows
        gathered = padded.new_empty((self._status.size * max_rows, *rows.shape[1:]))
        # Rows are sent as bytes, so that the backend need not support the dtype.
        sent, received = (tensor.flatten().view(torch.uint8) for tensor in (padded, gathered))
        try:
            dist.all_gather_into_tensor(received, sent, group=self._group)
        except RuntimeError as error:
            raise self._status.silence_error() from error
        return gathered.to(rows.device).index_select(0, indices)
