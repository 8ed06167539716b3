"""Whose memory results are: the caller's own, views on request, or tensors that the caller gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders.contract import EncoderOutput, Metadata
from graphwrap import GraphedEncoder
from tests.oracles import Grids
from tests.support.graphs.cases import LARGE, OVER, ROUTES, SMALL, SPLIT, pixels_for, toy
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


# --- out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_out_is_written_and_returned_whatever_ran(route: str, clone: bool) -> None:
    graphed, grids = toy(clone=clone), ROUTES[route]
    pixels = pixels_for(graphed.encoder, grids)
    expected = graphed.encoder(pixels, grids)
    nan = [torch.full_like(value, float("nan")) for value in fields(expected).values()]
    out = EncoderOutput(nan[0], nan[1], tuple(nan[2:]))
    output = graphed(pixels, grids, out=out)
    assert_same_bits(out, expected)
    assert spaces(output) == spaces(out)


def test_out_may_be_a_view_of_a_larger_tensor() -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, SMALL)
    expected = graphed.encoder(pixels, SMALL)
    stores = [torch.zeros(20, 3) for _ in range(4)]
    out = EncoderOutput(stores[0][4:10], stores[1][4:7], (stores[2][4:7], stores[3][4:7]))
    graphed(pixels, SMALL, out=out)
    assert_same_bits(out, expected)
    assert sum(float(store[:4].abs().sum() + store[10:].abs().sum()) for store in stores) == 0


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x.double()], ids=["rows", "dtype"])
def test_out_that_does_not_fit_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, SMALL)
    hidden, pooled, deep, *_ = graphed.encoder(pixels, SMALL)
    with pytest.raises(ValueError, match=r"out.pooler_output is .*: must be torch.float32 \(3, 3"):
        graphed(pixels, SMALL, out=EncoderOutput(hidden, change(pooled), deep))
    with pytest.raises(ValueError, match="out has no last_hidden_state"):
        graphed(pixels, SMALL, out=EncoderOutput(None, pooled, deep))


def sharing(good: EncoderOutput, pooled: Tensor, layer: Tensor) -> EncoderOutput:
    return good._replace(
        pooler_output=pooled, deepstack_features=(good.deepstack_features[0], layer)
    )


BAD_OUT: dict[str, tuple[Callable[[EncoderOutput, int], object], str]] = {
    "too few layers": (
        lambda good, n: good._replace(deepstack_features=good.deepstack_features[:1]),
        "out has no deepst",
    ),
    "too many layers": (
        lambda good, n: good._replace(
            deepstack_features=(*good.deepstack_features, *torch.zeros(2, n, 3))
        ),
        r"out.deepstack_features.2 would not be written: outputs are .* None for others",
    ),
    "one twice": (
        lambda good, n: good._replace(
            deepstack_features=(good.pooler_output, good.deepstack_features[0])
        ),
        r"out.deepstack_features.0 shares memory with out.pooler_output",
    ),
    "half of one": (
        lambda good, n: sharing(good, (both := torch.zeros(2 * n - 1, 3))[:n], both[-n:]),
        r"out.deepstack_features.1 shares memory with out.pooler_output",
    ),
    "columns of one that lie apart": (
        lambda good, n: sharing(good, (wide := torch.zeros(n, 8))[:, :3], wide[:, 5:]),
        r"out.deepstack_features.1 shares memory with out.pooler_output",
    ),
    "expanded": (
        lambda good, n: good._replace(pooler_output=torch.zeros(3).expand(n, 3)),
        r"out.pooler_output .* is expanded",
    ),
    "unfolded": (
        lambda good, n: good._replace(pooler_output=torch.zeros(n + 2).unfold(0, 3, 1)),
        r"out.pooler_output .* is expanded or unfolded",
    ),
    "of inference mode": (
        lambda good, n: good._replace(pooler_output=torch.inference_mode()(torch.zeros)(n, 3)),
        r"out.pooler_output was made in inference mode",
    ),
    "a tuple": (lambda good, n: tuple(good), r"out is a tuple: pass PartialOutput\("),
    "a tensor": (lambda good, n: good.pooler_output, r"out is a Tensor: pass PartialOutput\("),
}
"""Functions that make a bad ``out`` of a good one of n tokens, and the error about it."""


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", BAD_OUT)
def test_out_is_checked_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, case: str, route: str
) -> None:
    """Whatever would fail, or be overwritten or left unwritten: no number is computed."""
    graphed, grids = toy().capture(progress=False), ROUTES[route]
    monkeypatch.setattr(graphed.encoder, "forward", lambda *args, **kwargs: pytest.fail("it ran"))
    pixels = pixels_for(graphed.encoder, grids)
    tokens = sum(spec.output_tokens for spec in graphed.encoder.item_specs(grids))
    hidden, pooled, *deep = (torch.zeros(n, 3) for n in (len(pixels), *[tokens] * 3))
    change, message = BAD_OUT[case]
    with pytest.raises(ValueError, match=message):
        graphed(pixels, grids, out=change(EncoderOutput(hidden, pooled, tuple(deep)), tokens))


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("route", ROUTES)
def test_out_has_no_field_that_was_not_asked_for(route: str, backend: str) -> None:
    encoder, grids = ToyEncoder(), ROUTES[route]
    graphed = GraphedEncoder(encoder, [4, 32], outputs=("pooler_output",), backend=backend)
    pixels = pixels_for(encoder, grids)
    out = copy_of(encoder(pixels, grids))
    with pytest.raises(ValueError, match="would not be written: outputs are pooler_output"):
        graphed(pixels, grids, out=out)
    target = torch.zeros_like(out.pooler_output)
    for empty in (None, ()):
        graphed(pixels, grids, out=EncoderOutput(None, target, empty))
        assert torch.equal(target, out.pooler_output)


def test_out_over_the_pixels_of_a_later_group_is_refused() -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, SPLIT)
    hidden, pooled, deep, *_ = copy_of(graphed.encoder(pixels, SPLIT))
    for over in (EncoderOutput(pixels, pooled, deep), EncoderOutput(hidden, pixels[:49], deep)):
        if len(over.pooler_output) == len(pooled):
            with pytest.raises(ValueError, match="shares memory with the pixels or buffers"):
                graphed(pixels, SPLIT, out=over)


def test_out_over_earlier_results_that_are_views_is_refused() -> None:
    """They lie where a replay writes: one field's copy would be taken from another's."""
    graphed = toy(clone=False)
    seen = graphed(pixels_for(graphed.encoder, LARGE), LARGE)
    pixels = pixels_for(graphed.encoder, SMALL)
    hidden, _, deep, *_ = copy_of(graphed.encoder(pixels, SMALL))
    for view in (seen.pooler_output[1:4], seen.deepstack_features[0][:3]):
        with pytest.raises(ValueError, match=r"pooler_output shares memory with the pixels or buf"):
            graphed(pixels, SMALL, out=EncoderOutput(hidden, view, deep))


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
