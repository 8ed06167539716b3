"""What all GPU tests share: between tests, a process keeps no memory that it does not use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def unused_memory_is_free() -> Iterator[None]:
    """Return the memory that a test has freed to the GPU, which several test processes share."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
