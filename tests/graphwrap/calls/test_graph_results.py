"""Whose memory results are: the caller's own, or views on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from encoders.contract import EncoderOutput, Metadata
from graphwrap import GraphedEncoder
from tests.oracles import Grids
from tests.support.graphs.cases import OVER, ROUTES, SMALL, pixels_for, toy
from tests.support.graphs.outputs import (
    EVERY_FIELD,
    assert_same_bits,
    copy_of,
    fields,
    worst_distance,
)
from tests.support.towers.toy_encoder import ToyEncoder


def spaces(output: EncoderOutput) -> list[tuple[int, int]]:
    """First and last byte of every tensor."""
    return [(v.data_ptr(), v.data_ptr() + v.nbytes) for v in fields(output).values()]


def overlap(one: EncoderOutput, other: EncoderOutput) -> bool:
    return any(a < d and c < b for a, b in spaces(one) for c, d in spaces(other))


# --- clones and views -----------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_results_are_the_callers_own_and_survive_any_later_call(route: str) -> None:
    graphed = toy()
    grids = ROUTES[route]
    output = graphed(pixels_for(graphed.encoder, grids), grids)
    kept = copy_of(output)
    for later in (*ROUTES.values(), grids):
        other = graphed(pixels_for(graphed.encoder, later, seed=9), later)
        assert not overlap(output, other)
    graphed._poison()
    graphed.release()
    assert_same_bits(output, kept)


def test_without_clone_results_are_views_that_the_next_call_overwrites() -> None:
    graphed = toy(clone=False)
    first = graphed(pixels_for(graphed.encoder, SMALL, 1), SMALL)
    kept = copy_of(first)
    second = graphed(pixels_for(graphed.encoder, SMALL, 2), SMALL)
    assert overlap(first, second)
    assert_same_bits(first, second)
    assert worst_distance(first, kept) > 0.1


# --- encoders that return what they were given ----------------------------------------------------


class Through(ToyEncoder):
    """Hands its input back, and one tensor as two fields."""

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        return EncoderOutput(pixel_values, pixel_values[::2], (pixel_values[::2],))


class Lender(ToyEncoder):
    """Returns what it holds: an entry of its metadata, and its weight."""

    def prepare_encoder_metadata(self, *args: Any, **capacities: Any) -> Metadata:
        metadata = super().prepare_encoder_metadata(*args, **capacities)
        return {**metadata, "places": torch.ones(len(metadata["first"]), 3)}

    def forward(self, pixel_values: Tensor, *args: Any, encoder_metadata: Any) -> EncoderOutput:
        pooled = super().forward(pixel_values, encoder_metadata=encoder_metadata).pooler_output
        weight = self.weight[None] if len(pooled) == 1 else self.weight.expand(len(pooled), -1)
        return EncoderOutput(encoder_metadata["places"], pooled, (weight,))


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("grids", [[[1, 1, 2]], [[1, 1, 2], *OVER], OVER], ids=str)
def test_a_result_changed_by_the_caller_changes_nothing_of_the_encoders(
    grids: Grids, backend: str
) -> None:
    graphed = GraphedEncoder(Lender(), [4], outputs=EVERY_FIELD, backend=backend)
    pixels = pixels_for(graphed.encoder, grids)
    expected = copy_of(graphed(pixels, grids))
    for value in fields(graphed(pixels, grids)).values():
        value.fill_(7)
    assert_same_bits(graphed(pixels, grids), expected)
    assert torch.equal(graphed.encoder.weight, ToyEncoder().weight)


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("grids", [SMALL, OVER], ids=["replay", "eager"])
def test_results_are_the_callers_own_whatever_the_encoder_returns(
    grids: Grids, backend: str
) -> None:
    encoder = Through()
    graphed = GraphedEncoder(encoder, [4], outputs=EVERY_FIELD, backend=backend)
    pixels = pixels_for(encoder, grids)
    output = graphed(pixels, grids)
    assert_same_bits(output, encoder(pixels, grids))
    starts = [value.untyped_storage().data_ptr() for value in [*fields(output).values(), pixels]]
    assert len(set(starts)) == len(starts)
