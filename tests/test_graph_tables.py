"""Saved prices: written, read back, and refused where they belong to something else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_cases import pixels_for, static, toy
from test_graph_packing import ladder, measured
from toy_encoder import ToyEncoder
from torch import nn

from encoders import Qwen3VLEncoder
from encoders.qwen3_vl import Qwen3VLConfig
from graphwrap import GraphedEncoder
from graphwrap.budgets import Ladder, Load, plan_ladder
from graphwrap.forward import Asked
from graphwrap.measure import levelled
from graphwrap.session import Capturer, Session
from graphwrap.tables import SavedTable, fingerprint

BUDGETS = ladder("qwen2_5_vl")
MADE_ON = {"encoder": "Tower", "weights": "12ab", "device": "H200"}


def saved(path: Path, budgets: Any = BUDGETS, **changes: Any) -> Path:
    """A table on disk, with entries of its JSON changed, or (None) left out."""
    table = measured(budgets)
    replay_ms = {budget: 2 * ms for budget, ms in table.empty_ms.items()}
    SavedTable(str(path), dict(MADE_ON), table, replay_ms).write()
    body = {**json.loads(path.read_text()), **changes}
    left_out = [name for name, value in changes.items() if value is None]
    path.write_text(json.dumps({k: v for k, v in body.items() if k not in left_out}))
    return path


def test_a_table_saved_and_read_prices_alike(tmp_path: Path) -> None:
    table, read = measured(BUDGETS), SavedTable.read(saved(tmp_path / "table.json"))
    prices = read.prices(BUDGETS)
    for budget in BUDGETS:
        load = Load(1, budget.tokens, budget.rows, 1, budget.rows, 0, budget.rows**2)
        assert prices.replay(budget, load) == table.replay(budget, load)
        assert prices.eager(load) == table.eager(load)
        assert read.replay_ms[budget] == 2 * table.empty_ms[budget]
    assert prices == table


# --- files that are no tables ---------------------------------------------------------------------

ROW = {**BUDGETS[0]._asdict(), "ms": 1.0}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no fingerprint": ({"fingerprint": None}, "it has no fingerprint"),
    "no budgets": ({"empty_ms": []}, "it has no budgets"),
    "no list": ({"empty_ms": 3}, "it has no empty_ms"),
    "no kernels, as before there were any": ({"kernels": None}, "it has no kernels"),
    "kernels in words": ({"kernels": "auto"}, "kernels is 'auto', not the choices"),
    "a price left out": ({"row_ms": None}, "row_ms is None"),
    "a price in words": ({"row_ms": "x"}, "row_ms is 'x', not a number of milliseconds"),
    "a negative price": ({"eager_gap_ms": -1.0}, "eager_gap_ms is -1.0"),
    "an infinite price": ({"area_ms": float("inf")}, "area_ms is inf"),
    "a NaN": ({"empty_ms": [{**ROW, "ms": float("nan")}]}, r"ms of 64 \(8x256\) is nan"),
    "a true": ({"empty_ms": [{**ROW, "ms": True}]}, r"ms of 64 \(8x256\) is True"),
    "half a budget": ({"empty_ms": [{"tokens": 3, "ms": 1.0}]}, "is no budget with tokens"),
    "a budget in words": ({"empty_ms": [{**ROW, "tokens": "64"}]}, "is no budget with tokens"),
    "a row of none": ({"empty_ms": [4]}, "4 is no budget"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_table_is_refused_with_its_path_and_what_is_wrong(
    tmp_path: Path, case: str
) -> None:
    changes, wrong = BAD[case]
    path = saved(tmp_path / "table.json", **changes)
    with pytest.raises(ValueError, match=rf"table.json is no table .*{wrong}.*save_table again"):
        toy().load_table(path)


@pytest.mark.parametrize("text", ["", "nope", "\udcff"])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"table.json cannot be read as a table \("):
        toy().load_table(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"table.json is no table .*it has no fingerprint"):
        toy().load_table(path)


def test_a_file_that_is_not_there_is_refused_when_it_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read .*give a file that save_table wrote"):
            toy().load_table(path)


# --- tables of something else ---------------------------------------------------------------------


def prints(**changes: Any) -> dict[str, str]:
    """What a table of a Qwen3-VL tower on the meta device is marked with."""
    shape = {key: changes.pop(key) for key in ("depth", "hidden_size") if key in changes}
    config = Qwen3VLConfig.from_hf({"depth": 2, "deepstack_visual_indexes": [], **shape})
    with torch.device("meta"):
        encoder = Qwen3VLEncoder(config)
    dtype = changes.pop("dtype", torch.float32)
    outputs = changes.pop("outputs", ("pooler_output",))
    return fingerprint(encoder, torch.device("cpu"), dtype, outputs, Asked(**changes))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("weights", {"depth": 3}),
        ("weights", {"hidden_size": 1024}),
        ("dtype", {"dtype": torch.bfloat16}),
        ("compile", {"compiled": True}),
        ("kernels", {"kernels": "reference"}),
        ("precision", {"precision": "fp8"}),
        ("outputs", {"outputs": ("pooler_output", "last_hidden_state")}),
    ],
    ids=["depth", "width", "dtype", "compile", "kernels", "precision", "outputs"],
)
def test_each_thing_that_times_depend_on_tells_tables_apart(
    tmp_path: Path, key: str, change: dict[str, Any]
) -> None:
    ours, theirs = prints(), prints(**change)
    assert {name for name in ours if ours[name] != theirs[name]} == {key}
    table = SavedTable("table.json", dict(theirs), measured(BUDGETS), {})
    with pytest.raises(ValueError, match=rf"table.json was measured with {key}='"):
        table.check(ours)
    table.check(theirs)


def test_torch_and_the_gpu_tell_tables_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = prints()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert prints() == {**ours, "torch": "9.9.9"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    names = [
        fingerprint(ToyEncoder(), torch.device("cuda", number), torch.float32, (), Asked())[
            "device"
        ]
        for number in range(2)
    ]
    assert names == ["GPU 0", "GPU 1"]


def test_order_of_outputs_and_values_of_weights_tell_no_tables_apart() -> None:
    fields = ("pooler_output", "last_hidden_state")
    assert prints(outputs=fields) == prints(outputs=fields[::-1])
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    one.row_shape = other.row_shape = (2,)
    cpu = torch.device("cpu")
    marks = [fingerprint(each, cpu, torch.float32, (), Asked()) for each in (one, other)]
    assert marks[0] == marks[1]


# --- which budgets --------------------------------------------------------------------------------


def test_a_table_without_a_budgets_time_is_refused_by_its_name(tmp_path: Path) -> None:
    table = SavedTable.read(saved(tmp_path / "table.json", BUDGETS[1:]))
    for inferred in (True, False):
        with pytest.raises(ValueError, match=r"no times for budgets \['64 \(8x256\)'\]: use the"):
            table.timed(Ladder(tuple(BUDGETS), 8, inferred))


def test_an_inferred_ladder_ends_where_the_table_does(tmp_path: Path) -> None:
    """Memory had lowered it there; budgets that the user gave are never left out silently."""
    few = [budget for budget in BUDGETS if budget.tokens <= 1024]
    table = SavedTable.read(saved(tmp_path / "table.json", few))
    assert table.timed(Ladder(tuple(BUDGETS), 8, inferred=True)).budgets == tuple(few)
    with pytest.raises(ValueError, match="no times for budgets"):
        table.timed(Ladder(tuple(BUDGETS), 8, inferred=False))


def test_budgets_are_compared_before_anything_is_captured(tmp_path: Path) -> None:
    encoder = ToyEncoder()
    table = SavedTable.read(saved(tmp_path / "table.json"))
    capturer = Capturer(
        encoder, pytest.fail, torch.device("cpu"), torch.float32, ("pooler_output",), graphs=True,
        progress=False, table=table,
    )  # fmt: skip
    with pytest.raises(ValueError, match="has no times for budgets"):
        capturer.run(plan_ladder(encoder, [4]))


def test_a_loaded_table_prices_and_says_the_milliseconds_of_a_replay(tmp_path: Path) -> None:
    budgets = toy().ladder.budgets
    table = SavedTable.read(saved(tmp_path / "table.json", budgets))
    session = toy().capture(progress=False)._session
    assert session is not None
    capturer = Capturer(
        ToyEncoder(), pytest.fail, torch.device("cpu"), torch.float32, (), graphs=True,
        progress=False, table=table,
    )  # fmt: skip
    session.stats.reverse()  # as capture leaves them until it ends
    capturer._price(session, None)
    assert session.costs == table.costs
    replay_ms = [entry.replay_ms for entry in session.stats]
    assert replay_ms == [table.replay_ms[budget] for budget in session.runners]


# --- the life of a table --------------------------------------------------------------------------


def priced(graphed: GraphedEncoder) -> Session:
    """A session as a capture on CUDA leaves it: with prices."""
    session = graphed.capture(progress=False)._session
    assert session is not None
    session.costs = dataclasses.replace(measured(list(session.runners)))
    for entry in session.stats:
        entry.replay_ms = 3.5
    return session


def test_save_table_writes_what_load_table_reads(tmp_path: Path) -> None:
    graphed = toy()
    session = priced(graphed)
    graphed.save_table(tmp_path / "table.json")
    other = toy()
    other.load_table(tmp_path / "table.json")
    assert other._table is not None
    assert other._table.costs == session.costs
    assert set(other._table.replay_ms) == set(session.runners)
    other._table.check(other._fingerprint())


def test_nothing_measured_cannot_be_saved_and_captured_cannot_be_loaded(tmp_path: Path) -> None:
    graphed = toy()
    for _ in range(2):
        with pytest.raises(ValueError, match="there are no measured times"):
            graphed.save_table(tmp_path / "table.json")
        graphed.capture(progress=False)
    with pytest.raises(ValueError, match=r"already captured: release\(\) first"):
        graphed.load_table(tmp_path / "table.json")
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_read_once_outlives_release_and_is_forgotten_on_demand(tmp_path: Path) -> None:
    graphed = toy()
    path = saved(tmp_path / "table.json", graphed.ladder.budgets)
    graphed.load_table(path)
    path.unlink()
    table = graphed._table
    graphed.capture(progress=False)
    graphed.release()
    assert graphed._table is table is not None
    graphed.load_table(None)
    assert graphed._table is None


def test_static_never_routes_by_a_table(tmp_path: Path) -> None:
    """It packs and pads every item within capacity, whatever a table says."""
    graphed, dear = static(ToyEncoder(), [4]), [{**b._asdict(), "ms": 1e9} for b in BUDGETS]
    graphed.load_table(saved(tmp_path / "table.json", empty_ms=dear))
    graphed(pixels_for(graphed.encoder, [[1, 1, 6]]), [[1, 1, 6]])
    assert graphed.stats().eager_items == 0


# --- measuring ------------------------------------------------------------------------------------


def clock(samples: dict[int, list[float]]) -> Callable[[int], float]:
    return lambda rows: samples[rows].pop(0)


def test_neighbours_timed_the_wrong_way_round_are_timed_again() -> None:
    samples = {1: [9.0], 2: [], 3: [11.0], 4: [10.5]}
    times = levelled({1: 5.0, 2: 8.0, 3: 12.0, 4: 10.0}, clock(samples))
    assert times == {1: 5.0, 2: 8.0, 3: 11.0, 4: 10.0}
    assert samples == {1: [9.0], 2: [], 3: [], 4: []}


def test_what_is_lowered_is_compared_with_its_smaller_neighbour_again() -> None:
    samples = {1: [4.0], 2: [7.0, 7.5], 3: [9.0]}
    assert levelled({1: 9.5, 2: 10.0, 3: 8.0}, clock(samples)) == {1: 4.0, 2: 7.0, 3: 8.0}


def test_times_in_order_are_not_taken_again() -> None:
    times = {4: 1.0, 1: 0.5, 9: 1.0}
    assert levelled(times, pytest.fail) == times
