"""Graphs of the toy encoder of two paths: budgets, calls by name, and checks of outputs."""

from __future__ import annotations

from typing import Any

from encoders.contract import PartialOutput, VisionInputs
from graphwrap import GraphedEncoder
from graphwrap.settings import Backend

from ..towers.toy_paths import Item, TwoPaths
from .outputs import EVERY_FIELD, assert_same_bits

SMALL: list[Item] = [((1, 1, 6), None)]
MIXED: list[Item] = [((1, 1, 6), (3, 1, 4)), ((1, 2, 4), None), ((2, 1, 4), (1, 1, 2))]
ONE_OVER: list[Item] = [((1, 1, 6), (1, 10, 10)), ((1, 2, 4), (1, 1, 2))]
"""The pieces of the first item run eagerly, the rest replays."""
BOTH_OVER: list[Item] = [((1, 10, 10), (1, 10, 10)), ((1, 1, 2), None)]
CALLS = {"one path": SMALL, "both": MIXED, "one eager": ONE_OVER, "both eager": BOTH_OVER}
BUDGETS = {"image": [4, 16, 32], "tiles": [2, 8]}


def graphed_of(backend: Backend = "static", **settings_: Any) -> GraphedEncoder:
    """Return the toy encoder of two paths with graphs, by default of every output field."""
    settings_ = {"budgets": BUDGETS, "outputs": EVERY_FIELD, **settings_}
    return GraphedEncoder(TwoPaths(), backend=backend, **settings_)


def assert_agrees(graphed: GraphedEncoder, inputs: VisionInputs) -> list[PartialOutput]:
    """Assert that graphs give the encoder's outputs bit for bit; return one output per item."""
    outputs = graphed(inputs)
    expected = graphed.encoder(inputs)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert_same_bits(ours, theirs)
    return outputs
