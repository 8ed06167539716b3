"""What a call and a setting may be: grids, pixels, settings, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from encoders import Qwen3VLEncoder
from graphwrap import GraphedEncoder
from tests.support.graphs.cases import SMALL, pixels_for, static, tower, toy
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, worst_distance
from tests.support.towers.toy_encoder import WIDTH, ToyEncoder
from vitgraph.commands.graph_options import read_graph_options

# --- grids ----------------------------------------------------------------------------------------

GRIDS: dict[str, Any] = {
    "fractions": [[1.9, 8.5, 8.5], [1, 4, 6]],
    "text": [["1", "8", "8"], ["1", "4", "6"]],
    "one text": ["188", "146"],
    "numpy": np.array([[1, 8, 8], [1, 4, 6]]),
    "numpy rows": [np.array([1, 8, 8]), np.array([1, 4, 6])],
    "flat numpy": np.array([1, 8, 8]),
    "flat of numpy": [np.int64(1), np.int64(8), np.int64(8)],
    "numpy numbers": [[np.int64(1), np.int64(8), 8], [1, 4, np.int32(6)]],
    "whole floats": [[1.0, 8, 8.0], [1, 4, 6]],
    "a float tensor": torch.tensor([[1.0, 8.0, 8.0], [1.0, 4.0, 6.0]]),
    "a fractional tensor": torch.tensor([[1.0, 8.5, 8.0], [1.0, 4.0, 6.0]]),
    "row tensors": [torch.tensor([1, 8, 8]), torch.tensor([1, 4, 6])],
    "true": [[True, 8, 8], [1, 4, 6]],
    "one too deep": [[[1, 8, 8]], [[1, 4, 6]]],
    "two numbers": [[8, 8], [4, 6]],
    "zeros": [[0, 8, 8], [1, 4, 6]],
    "odd": [[1, 8, 8], [1, 3, 8]],
}


def answer_of(run: Any, pixels: Tensor, grid: Any) -> Any:
    """The output, or what the refusal says."""
    try:
        return run(pixels, grid)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("seen", [True, False], ids=["seen", "new"])
@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_taken_or_refused_as_the_encoder_does(
    name: str, seen: bool, backend: str
) -> None:
    """Also where an equal one was seen before, and found by its numbers."""
    encoder, grid = tower("qwen2_vl"), GRIDS[name]
    graphed = GraphedEncoder(encoder, [16, 48], backend=backend, outputs=EVERY_FIELD)
    proper = [[1, 8, 8], [1, 4, 6]]
    if "flat" in name:
        proper = proper[:1]
    pixels = pixels_for(encoder, proper)
    if seen:
        graphed(pixels, proper)
    expected, answer = (answer_of(run, pixels, grid) for run in (encoder, graphed))
    if isinstance(expected, str):
        assert answer == expected
    else:
        assert worst_distance(answer, expected) <= 2e-6


def test_a_generator_of_grids_is_read_and_none_is_refused() -> None:
    graphed, grids = toy(), [[1, 1, 6], [1, 2, 4]]
    pixels = pixels_for(graphed.encoder, grids)
    for _ in range(2):
        output = graphed(pixels, (row for row in grids))
        assert_same_bits(output, graphed.encoder(pixels, grids))
    with pytest.raises(ValueError, match=r"grid_thw is None: pass \[items, 3\]"):
        graphed(pixels, None)


# --- pixels, settings, copies ---------------------------------------------------------------------


@pytest.mark.parametrize("convert", [Tensor.numpy, Tensor.tolist])
def test_pixels_that_are_no_tensor_are_refused_with_the_fix(convert: Any) -> None:
    graphed = toy()
    with pytest.raises(ValueError, match=r"not a tensor: the graphs .*torch.as_tensor"):
        graphed(convert(pixels_for(graphed.encoder, SMALL)), SMALL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"outputs": "pooler_output"},
            r"outputs='pooler_output': give a tuple of one or more of last_hidden_state",
        ),
        ({"outputs": None}, "outputs=None: give a tuple of"),
        ({"outputs": 5}, "outputs=5: give a tuple of"),
        ({"outputs": ()}, r"outputs=\(\): give a tuple of one or more"),
        ({"outputs": iter(())}, "outputs=<.*: give a tuple of one or more"),
        (
            {"outputs": ("pooler",)},
            r"outputs=\('pooler',\): give a tuple of one or more of last_hidden_state",
        ),
        ({"outputs": (3,)}, r"outputs=\(3,\): give a tuple of"),
        ({"clone": "no"}, "clone='no': must be one of True, False"),
        ({"clone": 1}, "clone=1: must be one of True, False"),
        ({"backend": None}, "backend=None: must be one of auto"),
        ({"on_overflow": True}, "on_overflow=True: must be one of eager, raise"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphedEncoder(ToyEncoder(), [4], **settings)


def test_more_budgets_than_graphs_are_refused_naming_the_options() -> None:
    """Which has no ``max_graphs``."""
    most = ",".join(map(str, range(64, 64 + 48)))
    options = read_graph_options(graph=True, budgets=f"{most},64")
    assert options is not None
    assert len(set(options.budgets)) == 48
    with pytest.raises(ValueError, match=r"--budgets names 49, .* 48 graphs are captured: leave"):
        read_graph_options(graph=True, budgets=f"{most},7")


@pytest.mark.parametrize("make", [list, iter, dict.fromkeys])
def test_fields_may_come_from_any_iterable(make: Callable[..., Iterable[Any]]) -> None:
    assert static(ToyEncoder(), [4], outputs=make(EVERY_FIELD)).outputs == EVERY_FIELD


def test_a_field_named_twice_is_one() -> None:
    graphed = GraphedEncoder(ToyEncoder(), [4], outputs=["pooler_output", "pooler_output"])
    assert graphed.outputs == ("pooler_output",)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("captured", [True, False])
def test_a_copy_is_refused_and_the_error_says_how(how: Any, captured: bool) -> None:
    graphed = toy()
    if captured:
        graphed.capture(progress=False)
    with pytest.raises(TypeError, match=r"GraphedEncoder\(copy.deepcopy\(graphed.encoder\)"):
        how(graphed)
    copied = static(copy.deepcopy(graphed.encoder), [4], outputs=EVERY_FIELD)
    pixels = pixels_for(copied.encoder, SMALL)
    assert_same_bits(copied(pixels, SMALL), graphed(pixels, SMALL))


class BufferToy(ToyEncoder):
    """Its weight is a buffer, after one of integers; its rows are given as a list."""

    row_shape = [WIDTH]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        weight = self.weight.data
        del self.weight
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("weight", weight)


def test_a_module_of_buffers_with_a_listed_row_shape_serves() -> None:
    graphed = static(BufferToy().double(), [4], outputs=EVERY_FIELD)
    pixels = torch.rand(6, WIDTH, dtype=torch.float64)
    assert_same_bits(graphed(pixels, SMALL), graphed.encoder(pixels, SMALL))
    assert graphed.dtype == torch.float64


def test_a_module_without_weights_is_refused() -> None:
    class Weightless(ToyEncoder):
        def __init__(self) -> None:
            super().__init__()
            del self.weight

    with pytest.raises(ValueError, match="Weightless has no floating-point parameters or buffers"):
        static(Weightless(), [4])


@pytest.mark.parametrize("kind", [ToyEncoder, Qwen3VLEncoder, nn.Module])
def test_a_class_is_called_a_class_before_it_is_used(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}'> is a class, .*pass an instance"):
        GraphedEncoder(kind)
