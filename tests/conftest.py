"""What all tests share: which tier runs by default, and how hypothesis behaves."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("vitgraph", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("vitgraph")


def pytest_configure(config: pytest.Config) -> None:
    """A plain ``pytest`` is the fast tier; ``-m slow`` and ``-m gpu`` ask for the others."""
    if not config.option.markexpr:
        config.option.markexpr = "not slow and not gpu"
