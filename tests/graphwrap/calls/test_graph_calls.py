"""One call: one face whatever ran, empty calls, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder
from tests.oracles import Grids
from tests.support.graphs.cases import (
    LARGE,
    OURS,
    ROUTES,
    SMALL,
    budgets_of,
    executor_of,
    mixes,
    pixels_for,
    single,
    static,
    tower,
    toy,
    unit_of,
)
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, fields, worst_distance
from tests.support.towers.toy_encoder import ToyEncoder

# --- one face -------------------------------------------------------------------------------------


def face(output: EncoderOutput) -> list[Any]:
    """All that a caller may see of an output but its numbers and its length."""
    return [
        (name, type(output), x.dtype, x.device, x.shape[1:], x.is_contiguous(), x.requires_grad)
        for name, x in fields(output).items()
    ]


@pytest.mark.parametrize("clone", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OURS)
def test_replay_split_and_eager_show_one_face(name: str, clone: bool) -> None:
    encoder = tower(name)
    graphed = static(encoder, budgets_of(name), outputs=EVERY_FIELD, clone=clone)
    eager = GraphedEncoder(
        encoder, [unit_of(name)], outputs=EVERY_FIELD, backend="eager", clone=clone
    )
    faces = []
    for grids in mixes(name).values():
        pixels = pixels_for(encoder, grids)
        for wrapped in (graphed, eager):
            output = wrapped(pixels, grids)
            faces.append(face(output))
            assert type(output.deepstack_features) is tuple
            parts = encoder.split(output, grids)
            assert all(face(part) == faces[0] for part in parts)
        assert output.last_hidden_state.shape == encoder(pixels, grids).last_hidden_state.shape
    assert all(other == faces[0] for other in faces)
    assert graphed.stats().eager_items > 0


def prune(output: EncoderOutput, keep: float) -> EncoderOutput:
    """Keep the tokens of a video that differ most from the frame before, as EVS does."""
    tokens = output.pooler_output
    change = (tokens - tokens.roll(len(tokens) // 2, 0)).norm(dim=1)
    kept = change.topk(max(int(len(tokens) * keep), 1)).indices.sort().values
    return EncoderOutput(None, tokens[kept], tuple(x[kept] for x in output.deepstack_features))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_pruning_a_videos_tokens_works_the_same_after_replay_and_eager(name: str) -> None:
    encoder, clip = tower(name), [[2, 6, 8]]
    pixels = pixels_for(encoder, clip)
    replayed, overflow = static(encoder, [48]), static(encoder, [16])
    pruned = [prune(graphed(pixels, clip), 0.4) for graphed in (replayed, overflow)]
    assert (replayed.stats().eager_items, overflow.stats().eager_items) == (0, 1)
    assert face(pruned[0]) == face(pruned[1])
    assert worst_distance(*pruned) <= 2e-6


# --- nothing, and one -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("name", OURS)
def test_no_items_give_no_tokens_of_the_right_width(name: str, backend: str) -> None:
    encoder = tower(name)
    graphed = GraphedEncoder(encoder, [unit_of(name)], backend=backend, outputs=EVERY_FIELD)
    full = graphed(pixels_for(encoder, single(name)[:1]), single(name)[:1])
    for grid in ([], torch.zeros(0, 3, dtype=torch.int64)):
        output = graphed(torch.zeros(0, *encoder.row_shape), grid)
        assert face(output) == face(full)
        assert all(len(value) == 0 for value in fields(output).values())
        assert encoder.split(output, []) == []


def test_tensor_grids_of_any_integer_type_are_read() -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, LARGE)
    expected = graphed(pixels, LARGE)
    for dtype in (torch.int64, torch.int32):
        assert_same_bits(graphed(pixels, torch.tensor(LARGE, dtype=dtype)), expected)
    assert_same_bits(graphed(pixels, [tuple(grid) for grid in LARGE]), expected)


@pytest.mark.parametrize("name", OURS)
def test_one_flat_grid_is_one_item_as_it_is_for_the_encoder(name: str) -> None:
    encoder, grid = tower(name), single(name)[0]
    graphed, pixels = static(encoder, budgets_of(name)), pixels_for(encoder, [grid])
    expected = graphed(pixels, [grid])
    for flat in (grid, tuple(grid), torch.tensor(grid)):
        assert_same_bits(graphed(pixels, flat), expected)


def test_encode_of_nothing_is_nothing() -> None:
    assert static(tower("qwen2_vl")).encode() == []


# --- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_wrong_pixels_are_refused_with_what_is_wrong(name: str) -> None:
    encoder, grids = tower(name), single(name)[:1]
    graphed = static(encoder, budgets_of(name))
    pixels = pixels_for(encoder, grids)
    with pytest.raises(ValueError, match=r"torch.uint8 .*: the graphs take normalised floating"):
        graphed(pixels.to(torch.uint8), grids)
    with pytest.raises(
        ValueError, match=r"the graphs take normalised floating-point rows of shape"
    ):
        graphed(pixels[..., :-1], grids)
    with pytest.raises(
        ValueError, match=rf"{len(pixels) - 1} rows but the grid makes {len(pixels)}"
    ):
        graphed(pixels[:-1], grids)
    with pytest.raises(ValueError, match=r"on meta: the graphs take .* on the CPU or cpu"):
        graphed(pixels.to("meta"), grids)
    assert (
        worst_distance(graphed(pixels, grids), static(encoder, budgets_of(name))(pixels, grids))
        == 0
    )
    with pytest.raises(ValueError, match="rows but the grid makes"):  # of a grid seen before, too
        graphed(pixels[:-1], grids)


@pytest.mark.parametrize("name", OURS)
def test_a_bad_grid_is_refused_as_the_encoder_refuses_it(name: str) -> None:
    graphed = static(tower(name), budgets_of(name))
    pixels = pixels_for(tower(name), single(name)[:1])
    count = single(name)[0][0]
    for grid in ([[count, 3, 8]], [[0, 8, 8]], [[1, -8, 8]], [[8, 8]], [[1, 8, 8, 8]]):
        with pytest.raises(ValueError, match=r"grid"):
            graphed(pixels, grid)


@pytest.mark.parametrize("side", [10**7, 10**200], ids=["large", "absurd"])
@pytest.mark.parametrize("backend", ["static", "eager"])
def test_a_grid_of_more_rows_than_given_is_refused(backend: str, side: int) -> None:
    """Before packing, whose arrays have no such numbers."""
    graphed = GraphedEncoder(ToyEncoder(), [8], backend=backend)
    for grids in ([[side, side, 2 * side]], [[1, 1, 2], [1, side, 4]]):
        with pytest.raises(ValueError, match=r"^pixel_values has 6 rows but the grid makes \d+00"):
            graphed(torch.zeros(6, 3), grids)


def test_weights_cast_before_the_first_call_serve_as_they_are() -> None:
    graphed = toy()
    graphed.encoder.double()
    pixels = pixels_for(graphed.encoder, SMALL).double() / 3
    assert_same_bits(graphed(pixels, SMALL), graphed.encoder(pixels, SMALL))


def test_gradients_wanted_are_refused_and_grad_mode_alone_is_not() -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, SMALL)
    with torch.enable_grad():
        graphed(pixels, SMALL)
    with pytest.raises(ValueError, match=r"pixel_values require grad .* torch.no_grad\(\)"):
        graphed(pixels.clone().requires_grad_(), SMALL)
    with torch.no_grad():
        output = graphed(pixels.clone().requires_grad_(), SMALL)
    assert not any(value.requires_grad for value in fields(output).values())


def test_parameters_that_require_grad_are_refused_while_grad_mode_is_on() -> None:
    encoder = ToyEncoder().requires_grad_(True)
    graphed = static(encoder, [8])
    pixels = pixels_for(encoder, SMALL)
    with pytest.raises(ValueError, match="encoder parameters require grad"):
        graphed(pixels, SMALL)
    with torch.no_grad():
        assert not graphed(pixels, SMALL).pooler_output.requires_grad


def test_inference_mode_around_capture_or_calls_changes_nothing() -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, SMALL)
    expected = graphed.encoder(pixels, SMALL)
    with torch.inference_mode():
        assert_same_bits(graphed(pixels, SMALL), expected)
    assert_same_bits(graphed(pixels, SMALL), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_pixels_of_another_dtype_are_cast_as_the_encoder_casts(
    route: str, dtype: torch.dtype
) -> None:
    graphed, grids = toy(), ROUTES[route]
    pixels = pixels_for(graphed.encoder, grids).to(dtype)
    output = graphed(pixels, grids)
    assert_same_bits(output, graphed.encoder(pixels.float(), grids))


def test_pixels_need_not_be_contiguous() -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, LARGE)
    wide = torch.stack((pixels, pixels * 7), dim=2)[..., 0]
    assert not wide.is_contiguous()
    assert_same_bits(graphed(wide, LARGE), graphed.encoder(pixels, LARGE))


# --- the way to a launch --------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Notes every operation on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("grids", [[[1, 1, 6]], [[1, 2, 4]]], ids=["padded", "whole"])
def test_a_grid_seen_before_costs_one_copy_before_the_launch(grids: Grids) -> None:
    graphed = toy()
    pixels = pixels_for(graphed.encoder, grids)
    graphed(pixels, grids)
    launched: list[list[str]] = []

    class Graph:
        def replay(self) -> None:
            launched.append(list(operations.names))

    for runner in executor_of(graphed).graphs.by_budget.values():
        runner.captured = Graph()  # type: ignore[assignment]
    with Operations() as operations:
        graphed(pixels, grids)
    assert [name for name in launched[0] if name != "slice"] == ["copy_"]  # a slice is a view
