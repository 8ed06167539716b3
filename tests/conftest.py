"""What tests share: which tier runs by default, how hypothesis behaves, a hub and a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from fetching import point_client_at
from hub_server import HubServer
from vitgraph.seeded import write_seeded_checkpoint

settings.register_profile("vitgraph", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("vitgraph")


def pytest_configure(config: pytest.Config) -> None:
    """A plain ``pytest`` is the fast tier; ``-m slow`` and ``-m gpu`` ask for the others."""
    if not config.option.markexpr:
        config.option.markexpr = "not slow and not gpu"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub on loopback that the Hub client talks to."""
    with HubServer() as server:
        point_client_at(server, monkeypatch, tmp_path)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A ``cache_dir`` with nothing in it."""
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint: shards that hold the tower, and one that does not."""
    return write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, decoy_shards=1)
