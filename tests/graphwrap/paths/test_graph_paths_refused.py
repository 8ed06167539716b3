"""What graphs of several paths refuse: budgets, inputs and encoders that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphwrap import GraphedEncoder
from tests.support.graphs.cases import static, toy
from tests.support.graphs.path_cases import MIXED, ONE_OVER, graphed_of
from tests.support.towers.toy_encoder import ToyEncoder
from tests.support.towers.toy_paths import TwoPaths, inputs_of


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ([8], r"budgets=\[8\]: this encoder has the paths image, tiles.*give a mapping"),
        ({"image": [8]}, "give a mapping from the name of each"),
        ({"image": [8], "pieces": [4]}, "give a mapping from the name of each"),
        ({"image": [8], "tiles": []}, "budgets is empty"),
        ({"image": [8], "tiles": [0]}, "budget=0: must be a positive integer"),
    ],
)
def test_budgets_of_other_paths_are_refused(budgets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graphed_of(budgets=budgets)


def test_a_mapping_of_budgets_may_leave_paths_to_defaults() -> None:
    tokens = {budget.tokens for budget in graphed_of(budgets={"image": [8], "tiles": None}).budgets}
    assert {8, 2, 32} <= tokens
    assert {b.tokens for b in static(ToyEncoder(), {"image": [8]}).budgets} == {8}


def test_inputs_of_another_encoder_are_refused() -> None:
    inputs, graphed = inputs_of(MIXED), graphed_of()
    with pytest.raises(ValueError, match="has the paths image, tiles: pass the whole result"):
        graphed(inputs.pixel_values, inputs.grid_thw)
    with pytest.raises(
        ValueError, match="inputs have the paths image, and this encoder has image, t"
    ):
        graphed(inputs._replace(other_paths={}))
    with pytest.raises(
        ValueError, match="inputs have the paths image, tiles, and this encoder has im"
    ):
        toy()(inputs)
    with pytest.raises(ValueError, match="given with grid_thw: pass it alone"):
        graphed(inputs, grid_thw=inputs.grid_thw)


def test_a_wrong_path_is_refused_before_any_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphed, inputs = graphed_of(on_overflow="raise").capture(progress=False), inputs_of(MIXED)
    short = inputs.other_paths["tiles"]._replace(pixel_values=torch.zeros(3, 3))
    for wrong, message in (
        (inputs._replace(other_paths={"tiles": short}), "3 rows but the grid makes 14"),
        (inputs_of(ONE_OVER), r"grid \(1, 10, 10\) is over every budget"),
    ):
        monkeypatch.setattr(graphed.encoder.whole, "forward", lambda *_, **__: pytest.fail("ran"))
        with pytest.raises(ValueError, match=message):
            graphed(wrong)


def test_a_path_that_keeps_no_contract_is_refused() -> None:
    class Half(TwoPaths):
        @property
        def paths(self) -> Any:
            return {"image": self.whole, "tiles": torch.nn.Linear(3, 3)}

    with pytest.raises(TypeError, match=r"Linear.* has no attribute 'budget_range'"):
        GraphedEncoder(Half())
