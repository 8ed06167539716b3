"""The function of torch that this package calls although it is not public, and why."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup, kind: str) -> timedelta:
    """Return how long a group waits for its ranks; ``kind`` is a type of device, such as "cpu".

    The caller of ``init_process_group`` sets the timeout, and no public function returns it. Our
    second group of the same ranks has to wait as long.
    """
    timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
    return timeout
