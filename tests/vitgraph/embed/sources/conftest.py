"""Shared by the tests of a job's sources: a remote store."""

from __future__ import annotations

import sys

import pytest

from tests.support.fakes.google_store import Buckets


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Buckets:
    """A file system that the command reaches as ``gs://``."""
    for name in Buckets.protocol:
        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, name, Buckets)
    monkeypatch.setattr(Buckets, "store", {})
    monkeypatch.setattr(Buckets, "pseudo_dirs", [""])
    return Buckets()
