"""Saved tables: written, read back, and refused where they belong to something else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encoders import Qwen3VLEncoder
from encoders.qwen3_vl import Qwen3VLConfig
from graph_cases import pixels_for, static, toy
from graph_outputs import assert_same_bits
from graphwrap import Budget, GraphedEncoder
from graphwrap.budgets import Batch, BudgetSet, choose_budgets
from graphwrap.capture import Capturer, Graphs
from graphwrap.prices import Meter, Prices, Table, fingerprint, full_grids
from graphwrap.runner import FormSettings, Target
from test_graph_packing import default_budgets_of, measured
from toy_encoder import ToyEncoder

BUDGETS = default_budgets_of("qwen2_5_vl")
MADE_ON = {"encoder": "Tower", "weights": "12ab", "device": "H200"}


def saved(path: Path, timed: Sequence[Budget] = BUDGETS, **changes: Any) -> Path:
    """A table on disk, with entries of its JSON changed, or (None) left out."""
    prices = measured(timed)
    full_ms = {budget: 2 * ms for budget, ms in prices.replay_ms.items()}
    Table(str(path), MADE_ON, prices, full_ms, None).write()
    body = {**json.loads(path.read_text()), **changes}
    left_out = [name for name, value in changes.items() if value is None]
    path.write_text(json.dumps({k: v for k, v in body.items() if k not in left_out}))
    return path


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    prices = measured(BUDGETS)
    full_ms = {budget: 2 * ms for budget, ms in prices.replay_ms.items()}
    for kernels in (None, {"kernels": "auto", "rows": [16]}):
        table = Table(str(tmp_path / "table.json"), MADE_ON, prices, full_ms, kernels)
        table.write()
        assert Table.read(tmp_path / "table.json") == table


# --- files that are no tables ---------------------------------------------------------------------

ROW = {**BUDGETS[0]._asdict(), "ms": 1.0, "full_ms": 2.0}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no fingerprint": ({"fingerprint": None}, "it has no fingerprint"),
    "empty budgets": ({"budgets": []}, "it has no budgets"),
    "no list of budgets": ({"budgets": 3}, "it has no budgets"),
    "no kernels": ({"kernels": None}, "it has no kernels"),
    "kernels in words": ({"kernels": "auto"}, "kernels is 'auto', not choices"),
    "no eager line": ({"eager_row_ms": None}, "eager_row_ms is None"),
    "a price in words": ({"eager_ms": "x"}, "eager_ms is 'x', not a number of milliseconds"),
    "a negative slope": ({"eager_row_ms": -1.0}, "eager_row_ms is -1.0"),
    "an infinite price": ({"eager_ms": float("inf")}, "eager_ms is inf"),
    "a NaN": ({"budgets": [{**ROW, "ms": float("nan")}]}, r"ms of 64 \(8x256\) is nan"),
    "a true": ({"budgets": [{**ROW, "ms": True}]}, r"ms of 64 \(8x256\) is True"),
    "no full replay": ({"budgets": [{**ROW, "full_ms": None}]}, r"full_ms of 64 \(8x256\) is None"),
    "half a budget": ({"budgets": [{"tokens": 3, "ms": 1.0}]}, "is no budget with tokens"),
    "a budget in words": ({"budgets": [{**ROW, "tokens": "64"}]}, "is no budget with tokens"),
    "a number": ({"budgets": [4]}, "4 is no budget"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_table_is_refused_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    changes, wrong = BAD[case]
    path = saved(tmp_path / "table.json", **changes)
    with pytest.raises(ValueError, match=rf"table.json is no table .*{wrong}.*save_table again"):
        toy().load_table(path)


@pytest.mark.parametrize(
    "text", ["", "nope", "\udcff", "[" * 100_000], ids=["empty", "a word", "no text", "nested"]
)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"table.json cannot be read as a table \("):
        toy().load_table(path)


def test_a_file_without_a_table_in_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"table.json is no table .*it has no fingerprint"):
        toy().load_table(path)


def test_a_file_that_is_not_there_is_refused_when_it_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read .*give a file that save_table wrote"):
            toy().load_table(path)


# --- tables of something else ---------------------------------------------------------------------


def fingerprint_of(**changes: Any) -> dict[str, str]:
    """What a table of a Qwen3-VL tower on the meta device is marked with."""
    shape = {key: changes.pop(key) for key in ("depth", "hidden_size") if key in changes}
    config = Qwen3VLConfig.from_hf({"depth": 2, "deepstack_visual_indexes": [], **shape})
    with torch.device("meta"):
        encoder = Qwen3VLEncoder(config)
    dtype = changes.pop("dtype", torch.float32)
    outputs = changes.pop("outputs", ("pooler_output",))
    cpu, settings = torch.device("cpu"), FormSettings(**changes)
    return fingerprint(encoder, Target(encoder, None, cpu, dtype, outputs, "static", settings))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("weights", {"depth": 3}),
        ("weights", {"hidden_size": 1024}),
        ("dtype", {"dtype": torch.bfloat16}),
        ("compile", {"compile": True}),
        ("kernels", {"kernels": "reference"}),
        ("precision", {"precision": "fp8"}),
        ("outputs", {"outputs": ("pooler_output", "last_hidden_state")}),
    ],
    ids=["depth", "width", "dtype", "compile", "kernels", "precision", "outputs"],
)
def test_each_thing_that_times_depend_on_tells_tables_apart(
    tmp_path: Path, key: str, change: dict[str, Any]
) -> None:
    ours, theirs = fingerprint_of(), fingerprint_of(**change)
    assert {name for name in ours if ours[name] != theirs[name]} == {key}
    table = Table("table.json", theirs, measured(BUDGETS), {}, None)
    with pytest.raises(ValueError, match=rf"table.json was measured with {key}='"):
        table.check(ours)
    table.check(theirs)


def test_torch_and_the_gpu_tell_tables_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fingerprint_of()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert fingerprint_of() == {**ours, "torch": "9.9.9"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    gpus = [torch.device("cuda", number) for number in range(2)]
    target = toy()._locate()
    marks = [fingerprint(ToyEncoder(), dataclasses.replace(target, device=gpu)) for gpu in gpus]
    assert [mark["device"] for mark in marks] == ["GPU 0", "GPU 1"]


def test_order_of_outputs_and_values_of_weights_tell_no_tables_apart() -> None:
    fields = ("pooler_output", "last_hidden_state")
    assert fingerprint_of(outputs=fields) == fingerprint_of(outputs=fields[::-1])
    one, other = (fingerprint(nn.Linear(2, 3), toy()._locate()) for _ in range(2))
    assert one == other


# --- which budgets --------------------------------------------------------------------------------


def test_a_table_without_a_budgets_time_is_refused_by_its_name(tmp_path: Path) -> None:
    table = Table.read(saved(tmp_path / "table.json", BUDGETS[1:]))
    for inferred in (True, False):
        with pytest.raises(ValueError, match=r"no times for budgets \['64 \(8x256\)'\]: use the"):
            table.restrict(BudgetSet(BUDGETS, 8, inferred))


def test_inferred_budgets_end_where_the_table_does(tmp_path: Path) -> None:
    few = [budget for budget in BUDGETS if budget.tokens <= 1024]
    table = Table.read(saved(tmp_path / "table.json", few))
    assert table.restrict(BudgetSet(BUDGETS, 8, inferred=True)).budgets == tuple(few)
    with pytest.raises(ValueError, match="no times for budgets"):
        table.restrict(BudgetSet(BUDGETS, 8, inferred=False))


def capturer_with(table: Table) -> Capturer:
    cpu = torch.device("cpu")
    target = Target(
        ToyEncoder(), None, cpu, torch.float32, ("pooler_output",), "cudagraph", FormSettings()
    )
    return Capturer(target, pytest.fail, table=table)


def test_budgets_are_compared_before_anything_is_captured(tmp_path: Path) -> None:
    capturer = capturer_with(Table.read(saved(tmp_path / "table.json")))
    with pytest.raises(ValueError, match="has no times for budgets"):
        capturer.run(choose_budgets(ToyEncoder(), [4]))


def graphs_of(graphed: GraphedEncoder) -> Graphs:
    """What a capture without a GPU makes."""
    captured = graphed.capture(progress=False)._captured
    assert captured is not None
    return captured.graphs


def test_a_loaded_table_prices_and_says_the_milliseconds_of_a_replay(tmp_path: Path) -> None:
    table = Table.read(saved(tmp_path / "table.json", toy().budgets))
    graphs = graphs_of(toy())
    capturer_with(table)._price(graphs)
    assert graphs.prices == table.prices
    replay_ms = {budget: stats.replay_ms for budget, stats in graphs.stats.items()}
    assert replay_ms == table.full_ms


# --- the life of a table --------------------------------------------------------------------------


def priced(graphed: GraphedEncoder) -> Graphs:
    """Graphs as a capture on CUDA leaves them: with prices."""
    graphs = graphs_of(graphed)
    graphs.prices = measured(list(graphs.runners))
    for stats in graphs.stats.values():
        stats.replay_ms = 3.5
    return graphs


def test_save_table_writes_what_load_table_reads(tmp_path: Path) -> None:
    graphed = toy()
    graphs = priced(graphed)
    graphed.save_table(tmp_path / "table.json")
    other = toy()
    other.load_table(tmp_path / "table.json")
    assert other._table is not None
    assert other._table.prices == graphs.prices
    assert other._table.full_ms == dict.fromkeys(graphs.runners, 3.5)
    other._table.check(fingerprint(other.encoder, other._locate()))


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
    path = saved(tmp_path / "table.json", graphed.budgets)
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
    graphed = static(ToyEncoder(), [4])
    dear = [{**budget._asdict(), "ms": 1e9, "full_ms": 1e9} for budget in BUDGETS]
    graphed.load_table(saved(tmp_path / "table.json", budgets=dear))
    graphed(pixels_for(graphed.encoder, [[1, 1, 6]]), [[1, 1, 6]])
    assert graphed.stats().eager_items == 0


# --- measuring ------------------------------------------------------------------------------------


def test_measured_prices_are_a_time_per_budget_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay takes 2 ms and 0.1 ms per row, an eager run 9 ms more; attention is left out."""
    graphs = graphs_of(toy([4, 16, 64]))
    meter = Meter(ToyEncoder(), graphs.runners, torch.device("cpu"))

    def replay(self: Meter, budget: Budget, grids: Any, pixels: Tensor) -> float:
        attention = 5.0 * len(grids)
        return 2.0 + 0.1 * budget.rows + attention

    def eager(self: Meter, grids: Any, pixels: Tensor) -> float:
        attention = 5.0 * len(grids) if len(grids) > 1 else 0.0
        return 11.0 + 0.1 * self._rows(grids) + attention

    monkeypatch.setattr(Meter, "_replay_ms", replay)
    monkeypatch.setattr(Meter, "_eager_ms", eager)
    prices, full_ms = meter.measure()
    for budget in graphs.runners:
        assert prices.replay_ms[budget] == pytest.approx(2.0 + 0.1 * budget.rows)
        grids = full_grids(meter.encoder, budget)
        assert full_ms[budget] == pytest.approx(prices.replay_ms[budget] + 5.0 * len(grids))
    for rows in (8, 40, 128, 1000):
        assert prices.eager(rows) == pytest.approx(11.0 + 0.1 * rows)


def test_measuring_times_every_budget_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    graphed = toy([4, 16, 64])
    runners, dice = graphs_of(graphed).runners, torch.get_rng_state()
    prices, full_ms = Meter(graphed.encoder, runners, torch.device("cpu")).measure()
    assert set(prices.replay_ms) == set(full_ms) == set(runners)
    assert min(*prices.replay_ms.values(), *full_ms.values(), prices.eager(8)) > 0
    assert torch.equal(torch.get_rng_state(), dice)
    grids = [[1, 1, 6]]
    pixels = pixels_for(graphed.encoder, grids)
    assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))


def test_full_batches_fit_their_budget() -> None:
    for budget in choose_budgets(ToyEncoder()).budgets:
        batch = Batch.of(ToyEncoder().item_specs(full_grids(ToyEncoder(), budget)))
        assert budget.fits(batch)
        assert batch.tokens > 0.5 * budget.tokens


def test_unmeasured_prices_never_choose_eager() -> None:
    prices = Prices.unmeasured(BUDGETS)
    assert prices.eager(1) == float("inf")
    assert prices.replay_ms[BUDGETS[0]] < prices.replay_ms[BUDGETS[-1]]
