"""Budgets and settings that are refused, each with the rule that it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from graphwrap import GraphedEncoder, fit_budgets
from graphwrap.budgets import choose_budgets
from tests.support.graphs.cases import NUMBERS, at_true_size, static
from tests.support.towers.toy_encoder import ToyEncoder


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "8", True, float("nan")], ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_must_be_a_positive_integer(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*must be a positive integer"):
        static(ToyEncoder(), None, **{name: value})


@pytest.mark.parametrize("value", [0, -3, 2.5, 8.0, "8", None, False], ids=repr)
def test_every_budget_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(ValueError, match=r"budget=.*must be a positive integer"):
        static(ToyEncoder(), [8, value])


@pytest.mark.parametrize("name", ["max_budget", "max_frames_per_batch", "min_budget"])
def test_numbers_beyond_32_bit_offsets_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=1000.*at most 2147483647"):
        choose_budgets(ToyEncoder(), **{name: 10**400})
    with pytest.raises(ValueError, match=r"budget=1000.*at most 2147483647"):
        choose_budgets(ToyEncoder(), [8, 10**30])


@pytest.mark.parametrize("empty", [[], ()], ids=repr)
def test_an_empty_list_of_budgets_is_refused(empty: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="budgets is empty"):
        static(ToyEncoder(), empty)


@pytest.mark.parametrize("number", [64, np.int64(64), np.array(64), torch.tensor(64)], ids=repr)
def test_a_lone_number_is_refused_and_shown_as_a_list(number: Any) -> None:
    with pytest.raises(ValueError, match=r"^budgets=.*64.*: must be a list: write \[.*64.*\]"):
        static(ToyEncoder(), number)
    with pytest.raises(ValueError, match=r"^token_counts=.*64.*: must be a list: write \["):
        fit_budgets(number)


def test_more_items_than_the_smallest_budget_names_both_numbers_and_the_fix() -> None:
    with pytest.raises(ValueError, match=r"max_batch_size=9 .* 8 tokens .*<=8 or budgets>=9"):
        static(ToyEncoder(), [16, 8], max_batch_size=9)
    static(ToyEncoder(), [16, 8], max_batch_size=8)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (
            {"min_budget": 20, "max_budget": 10},
            r"^max_budget=10 is too small: min_budget=20; use max_budget>=20, or lower",
        ),
        (
            {"max_batch_size": 20, "max_budget": 10},
            r"^max_budget=10 is too small: max_batch_size=20, .* use max_budget>=20, or lower",
        ),
        ({"max_budget": 2}, r"^max_budget=2 .* the encoder's range starts at 4; use max_budget>=4"),
        (
            {"min_budget": 3, "max_batch_size": 5},
            r"^max_batch_size=5 items do not fit .* 3 tokens .*<=3 or min_budget>=5$",
        ),
    ],
    ids=str,
)
def test_bounds_that_cross_name_the_numbers_the_user_gave(given: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        static(ToyEncoder(), None, **given)


def test_bounds_beside_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="min_budget and max_budget only bound inferred ones"):
        static(ToyEncoder(), [8], max_budget=16)


def test_more_budgets_than_max_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 budgets and max_graphs=2"):
        static(ToyEncoder(), [4, 8, 16], max_graphs=2)


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("backend", "graphs", "must be one of auto, cudagraph, static, eager"),
        ("on_overflow", "drop", "must be one of eager, raise"),
        ("outputs", ("pooled",), "one or more of last_hidden_state, pooler_output"),
        ("outputs", (), "one or more of last_hidden_state"),
        ("backend", "cudagraph", "needs the encoder on CUDA, it is on cpu"),
    ],
)
def test_other_settings_name_their_choices(setting: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        GraphedEncoder(ToyEncoder(), [8], **{setting: value})


def test_nothing_is_allocated_before_the_configuration_is_checked() -> None:
    """A tower on meta has no memory to give; its configuration is refused all the same."""
    with pytest.raises(ValueError, match="positive integer"):
        static(at_true_size("qwen3_vl"), [-1])
