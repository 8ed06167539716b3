"""What all GPU tests share: between tests, a process keeps no memory that it does not use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def no_tables_of_other_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep tables of measured times in a folder of each test's own."""
    monkeypatch.setenv("VITGRAPH_TABLES", str(tmp_path / "kept-tables"))


@pytest.fixture(autouse=True)
def unused_memory_is_free() -> Iterator[None]:
    """Return the memory that a test has freed to the GPU, which several test processes share."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
