"""The ``GraphedEncoder`` objects that code under test makes."""

from __future__ import annotations

from typing import Any

import pytest

from graphwrap import GraphedEncoder


def note_graphed_encoders(monkeypatch: pytest.MonkeyPatch, name: str) -> list[GraphedEncoder]:
    """Return a list to which each object is added that is made by ``name``, a dotted name."""
    made: list[GraphedEncoder] = []

    class Noted(GraphedEncoder):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            made.append(self)

    monkeypatch.setattr(name, Noted)
    return made
