"""Saved tables: written, read back, and refused where they belong to something else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tqdm.auto import tqdm

from encoders import Qwen3VLEncoder
from encoders.qwen.qwen3_vl import Qwen3VLConfig
from graphwrap import Budget
from graphwrap.budgets import BudgetSet, choose_budgets
from graphwrap.buffers import Memory
from graphwrap.capture import Capturer
from graphwrap.costs import CostTable, read_tables, write_tables
from graphwrap.encoder_forms import EncoderForm, FormSettings
from graphwrap.measuring import fingerprint
from tests.support.graphs.cases import executor_of, pixels_for, static, toy
from tests.support.graphs.packing import default_budgets_of, measured
from tests.support.towers.toy_encoder import ToyEncoder

BUDGETS = default_budgets_of("qwen2_5_vl")
MADE_ON = {"encoder": "Tower", "weights": "12ab", "device": "H200"}


def saved(path: Path, timed: Sequence[Budget] = BUDGETS, **changes: Any) -> Path:
    """A table on disk, with entries of its JSON changed, or (None) left out."""
    write_tables(path, {"image": CostTable(str(path), MADE_ON, measured(timed), None)})
    body = {**json.loads(path.read_text())["image"], **changes}
    left_out = [name for name, value in changes.items() if value is None]
    body = {name: value for name, value in body.items() if name not in left_out}
    path.write_text(json.dumps({"image": body}))
    return path


def read(path: Path) -> CostTable:
    return read_tables(path, ["image"])["image"]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for kernels in (None, {"kernels": "auto", "rows": [16]}):
        tables = {
            name: CostTable(str(path), MADE_ON, measured(BUDGETS[:count]), kernels)
            for name, count in (("image", 3), ("tiles", 2))
        }
        write_tables(path, tables)
        assert read_tables(path, ["image", "tiles"]) == tables


# --- files that are no tables ---------------------------------------------------------------------

ROW = {**BUDGETS[0]._asdict(), "ms": 1.0}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no fingerprint": ({"fingerprint": None}, "'fingerprint'"),
    "empty budgets": ({"budgets": []}, "it has no budgets"),
    "no list of budgets": ({"budgets": 3}, "not iterable"),
    "no kernels": ({"kernels": None}, "'kernels'"),
    "kernels in words": ({"kernels": "auto"}, "mapping"),
    "no list of eager runs": ({"eager_runs": None}, "'eager_runs'"),
    "no eager run": ({"eager_runs": []}, "it has no budgets, or no eager_runs"),
    "equal rows": ({"eager_runs": [{"rows": 8, "ms": 1.0}] * 2}, "no eager_runs by ascending rows"),
    "a cost in words": ({"eager_runs": [{"rows": 8, "ms": "x"}]}, "ms is 'x', not a number"),
    "negative rows": ({"eager_runs": [{"rows": -8, "ms": 1.0}]}, "rows is -8"),
    "an infinite cost": ({"eager_runs": [{"rows": 8, "ms": float("inf")}]}, "ms is inf"),
    "a NaN": ({"budgets": [{**ROW, "ms": float("nan")}]}, "ms is nan"),
    "a true": ({"budgets": [{**ROW, "ms": True}]}, "ms is True"),
    "no time": ({"budgets": [{**ROW, "ms": None}]}, "ms is None"),
    "half a budget": ({"budgets": [{"tokens": 3, "ms": 1.0}]}, "'rows'"),
    "a budget in words": ({"budgets": [{**ROW, "tokens": "64"}]}, "tokens is '64'"),
    "a number": ({"budgets": [4]}, "not subscriptable"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_table_is_refused_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    changes, wrong = BAD[case]
    path = saved(tmp_path / "table.json", **changes)
    with pytest.raises(ValueError, match=rf"table.json is not a table .*{wrong}.*save_table again"):
        toy().load_table(path)


@pytest.mark.parametrize(
    "text",
    ["", "nope", "\udcff", "[" * 100_000, "[]", "3", "null", '{"tiles": {}}'],
    ids=["empty", "a word", "no text", "nested", "a list", "a number", "null", "another path"],
)
def test_a_file_that_is_no_json_of_a_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"table.json is not a table that save_table wrote \("):
        toy().load_table(path)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_is_not_there_is_refused_when_it_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"is not a table .*Error: .*save_table again"):
        toy().load_table(tmp_path / name)


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
    return fingerprint(encoder, EncoderForm(encoder, None, cpu, dtype, outputs, "static", settings))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("weights", {"depth": 3}),
        ("weights", {"hidden_size": 1024}),
        ("dtype", {"dtype": torch.bfloat16}),
        ("kernels", {"kernels": "reference"}),
        ("precision", {"precision": "fp8"}),
        ("outputs", {"outputs": ("pooler_output", "last_hidden_state")}),
    ],
    ids=["depth", "width", "dtype", "kernels", "precision", "outputs"],
)
def test_each_thing_that_times_depend_on_tells_tables_apart(
    tmp_path: Path, key: str, change: dict[str, Any]
) -> None:
    ours, theirs = fingerprint_of(), fingerprint_of(**change)
    assert {name for name in ours if ours[name] != theirs[name]} == {key}
    table = CostTable("table.json", theirs, measured(BUDGETS), None)
    with pytest.raises(ValueError, match=rf"table.json was measured with {key}='"):
        table.apply(ours, None)
    table.apply(theirs, None)


def test_torch_and_the_gpu_tell_tables_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fingerprint_of()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert fingerprint_of() == {**ours, "torch": "9.9.9"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    gpus = [torch.device("cuda", number) for number in range(2)]
    form = toy()._forms["image"]
    marks = [fingerprint(ToyEncoder(), dataclasses.replace(form, device=gpu)) for gpu in gpus]
    assert [mark["device"] for mark in marks] == ["GPU 0", "GPU 1"]


def test_order_of_outputs_and_values_of_weights_tell_no_tables_apart() -> None:
    fields = ("pooler_output", "last_hidden_state")
    assert fingerprint_of(outputs=fields) == fingerprint_of(outputs=fields[::-1])
    one, other = (fingerprint(nn.Linear(2, 3), toy()._forms["image"]) for _ in range(2))
    assert one == other


# --- which budgets --------------------------------------------------------------------------------


def test_a_table_without_a_budgets_time_is_refused_by_its_name(tmp_path: Path) -> None:
    table = read(saved(tmp_path / "table.json", BUDGETS[1:]))
    for inferred in (True, False):
        with pytest.raises(ValueError, match=r"no times for budgets \['64 \(8x256\)'\]: use the"):
            table.restrict(BudgetSet(BUDGETS, 8, inferred))


def test_inferred_budgets_end_where_the_table_does(tmp_path: Path) -> None:
    few = [budget for budget in BUDGETS if budget.tokens <= 1024]
    table = read(saved(tmp_path / "table.json", few))
    assert table.restrict(BudgetSet(BUDGETS, 8, inferred=True)).budgets == tuple(few)
    with pytest.raises(ValueError, match="no times for budgets"):
        table.restrict(BudgetSet(BUDGETS, 8, inferred=False))


def capturer_with(table: CostTable, budgets: Sequence[int]) -> Capturer:
    encoder, cpu = ToyEncoder(), torch.device("cpu")
    form = EncoderForm(
        encoder, None, cpu, torch.float32, ("pooler_output",), "cudagraph", FormSettings()
    )
    return Capturer(form, choose_budgets(encoder, budgets), Memory(cpu, False), table)


def test_budgets_are_compared_before_anything_is_captured(tmp_path: Path) -> None:
    table = read(saved(tmp_path / "table.json"))
    with pytest.raises(ValueError, match="has no times for budgets"):
        capturer_with(table, [4])


def test_a_loaded_table_has_the_costs_of_what_was_captured(tmp_path: Path) -> None:
    table = read(saved(tmp_path / "table.json", toy().budgets))
    runners = dict(list(executor_of(toy()).graphs.by_budget.items())[1:])
    graphs = dataclasses.replace(executor_of(toy()).graphs, by_budget=runners)
    costs = capturer_with(table, [4, 8, 16, 32])._cost(graphs, tqdm(disable=True))
    assert costs.replays == {budget: table.costs.replays[budget] for budget in runners}
    assert (costs.eager_runs, costs.measured) == (table.costs.eager_runs, True)


# --- the life of a table --------------------------------------------------------------------------


def test_save_table_writes_what_load_table_reads(tmp_path: Path) -> None:
    graphed = toy()
    packer = executor_of(graphed).graphs.packer
    packer.costs = measured(graphed.budgets)  # as a capture on CUDA leaves it
    graphed.save_table(tmp_path / "table.json")
    other = toy()
    other.load_table(tmp_path / "table.json")
    table = other._tables["image"]
    assert table.costs == packer.costs
    table.apply(fingerprint(other.encoder, other._forms["image"]), None)


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
    tables = graphed._tables
    graphed.capture(progress=False)
    graphed.release()
    assert graphed._tables is tables
    assert list(tables) == ["image"]
    graphed.load_table(None)
    assert graphed._tables == {}


def test_static_never_routes_by_a_table(tmp_path: Path) -> None:
    """It packs and pads every item within capacity, whatever a table says."""
    graphed = static(ToyEncoder(), [4])
    dear = [{**budget._asdict(), "ms": 1e9} for budget in BUDGETS]
    graphed.load_table(saved(tmp_path / "table.json", budgets=dear))
    graphed(pixels_for(graphed.encoder, [[1, 1, 6]]), [[1, 1, 6]])
    assert graphed.stats().eager_items == 0
