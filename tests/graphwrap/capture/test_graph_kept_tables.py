"""Kept tables: a second process measures nothing, and no file can do harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder, list_tables, remove_tables
from graphwrap.kept_tables import PACKAGES, tables_folder
from graphwrap.measuring import MOST_CALLS
from tests.support.graphs.cases import executor_of
from tests.support.graphs.fake_gpu import FakeGpu
from tests.support.towers.toy_accelerated import FakeAccelerator, FastToy
from tests.support.towers.toy_encoder import ToyEncoder

CHECKED = 3 * MOST_CALLS
"""How many calls are timed for the three times of a kept table that are measured again."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    """A made-up GPU, and a folder of this test's own for its tables."""
    fake = FakeGpu()
    fake.install(monkeypatch)
    monkeypatch.setenv("VITGRAPH_TABLES", str(tmp_path / "tables"))
    return fake


def captured(encoder: Any = None, budgets: Any = (4, 8, 16), **settings: Any) -> GraphedEncoder:
    """A new process's encoder, captured."""
    graphed = GraphedEncoder(encoder or ToyEncoder(), budgets, **settings)
    return graphed.capture(progress=False)


def timed_by(gpu: FakeGpu, **settings: Any) -> int:
    """How many calls a capture times."""
    before = gpu.timed
    captured(**settings)
    return gpu.timed - before


def kept() -> list[Path]:
    folder = tables_folder()
    return sorted(folder.iterdir()) if folder is not None and folder.exists() else []


def test_a_second_process_times_three_entries(gpu: FakeGpu) -> None:
    first = captured()
    assert gpu.timed > CHECKED
    (file,) = kept()
    written = file.stat().st_mtime_ns
    before, gpu.ms = gpu.timed, 1.1
    second = captured()
    assert gpu.timed - before == CHECKED
    costs = [executor_of(graphed).graphs.packer.costs for graphed in (first, second)]
    assert costs[0] == costs[1]
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("ms", [0.7, 1.3])
def test_a_table_that_is_off_is_measured_and_kept_anew(gpu: FakeGpu, ms: float) -> None:
    captured()
    gpu.ms = ms
    assert timed_by(gpu) > CHECKED
    assert timed_by(gpu) == CHECKED


def test_release_measures_anew_and_keeps_that(gpu: FakeGpu) -> None:
    graphed = captured()
    graphed.release()
    before, gpu.ms = gpu.timed, 1.1  # within what a kept table may be off
    graphed.capture(progress=False)
    assert gpu.timed - before > CHECKED
    costs = executor_of(captured()).graphs.packer.costs
    assert set(costs.replays.values()) == {1.1}


def test_kernel_choices_are_kept_with_the_times(gpu: FakeGpu) -> None:
    captured(FastToy())
    accelerator = captured(FastToy())._forms["image"].accelerator
    assert isinstance(accelerator, FakeAccelerator)
    assert accelerator.loaded is not None


# --- what is told apart ---------------------------------------------------------------------------


def test_other_budgets_encoders_and_settings_have_their_own_tables(gpu: FakeGpu) -> None:
    for number, settings in enumerate(
        (
            {},
            {"budgets": (4, 8)},
            {"outputs": ("last_hidden_state",)},
            {"encoder": FastToy()},
            {"encoder": FastToy(), "kernels": "flash4"},
        )
    ):
        assert timed_by(gpu, **settings) > CHECKED
        assert len(kept()) == number + 1


@pytest.mark.parametrize("package", PACKAGES)
def test_another_version_of_the_kernels_is_measured(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    captured()
    monkeypatch.setattr(
        "graphwrap.kept_tables.version", lambda name: "9" if name == package else "1"
    )
    assert timed_by(gpu) > CHECKED


def test_budgets_that_memory_ruled_out_are_measured_later(gpu: FakeGpu) -> None:
    class Full(ToyEncoder):
        full = True

        def forward(self, pixel_values: Any, *args: Any, **kwargs: Any) -> EncoderOutput:
            if self.full and len(pixel_values) > 8:
                raise RuntimeError("CUDA out of memory")
            return super().forward(pixel_values, *args, **kwargs)

    with pytest.warns(UserWarning, match="is dropped"):
        captured(Full())
    encoder = Full()
    encoder.full = False
    assert {budget.tokens for budget in captured(encoder).stats().budgets} == {4, 8, 16}
    assert timed_by(gpu, encoder=encoder) == CHECKED


# --- files that are of no use ---------------------------------------------------------------------


def foreign(text: str) -> str:
    body = json.loads(text)
    body["image"]["fingerprint"]["device"] = "another"
    return json.dumps(body)


def without_kernel(text: str) -> str:
    body = json.loads(text)
    body["image"]["kernels"] = {"kernels": "nowhere"}
    return json.dumps(body)


@pytest.mark.parametrize(
    "damage",
    [lambda text: "", lambda text: text[:-9], lambda text: "[]", foreign, without_kernel],
    ids=["empty", "cut off", "another file", "foreign", "a kernel that is gone"],
)
def test_a_useless_file_is_measured_anew(gpu: FakeGpu, damage: Any) -> None:
    captured(FastToy())
    (file,) = kept()
    file.write_text(damage(file.read_text()))
    assert timed_by(gpu, encoder=FastToy()) > CHECKED
    assert timed_by(gpu, encoder=FastToy()) == CHECKED


def test_a_folder_that_cannot_be_made_is_no_error(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITGRAPH_TABLES", str(tmp_path / "file" / "tables"))
    for _ in range(2):
        assert timed_by(gpu) > CHECKED


def test_a_write_that_fails_leaves_what_was_kept(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured()
    (file,) = kept()
    before = file.read_text()

    def fail(source: object, target: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", fail)
    gpu.ms = 2.0
    captured()
    assert kept() == [file]
    assert file.read_text() == before


# --- where tables are -----------------------------------------------------------------------------


def test_tables_are_kept_in_the_hubs_home_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VITGRAPH_TABLES", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert tables_folder() == tmp_path / "vitgraph" / "tables"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables_folder() == tmp_path / "huggingface" / "vitgraph" / "tables"


def test_off_and_none_keep_and_read_nothing(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    captured()
    assert timed_by(gpu, table=None) > CHECKED
    (file,) = kept()
    monkeypatch.setenv("VITGRAPH_TABLES", "off")
    assert timed_by(gpu) > CHECKED
    assert list_tables() == []
    assert file.exists()


def test_a_named_file_is_written_then_read_as_it_is(gpu: FakeGpu, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "times.json"
    captured(table=file)
    gpu.ms = 9.0
    assert timed_by(gpu, table=str(file)) == 0
    assert kept() == []
    with pytest.raises(ValueError, match="was measured with encoder='ToyEncoder'"):
        captured(FastToy(), table=file)
    graphed = captured(table=file)
    graphed.release()
    graphed.capture(progress=False)
    assert set(executor_of(captured(table=file)).graphs.packer.costs.replays.values()) == {9.0}


def test_a_named_file_that_is_no_table_is_refused_and_left(gpu: FakeGpu, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    graphed = GraphedEncoder(ToyEncoder(), [4], table=file)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"notes.txt is not a table"):
            graphed.capture(progress=False)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("table", [3, "", True])
def test_a_table_that_is_no_path_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match=r"table=.*must be \"auto\", a file"):
        GraphedEncoder(ToyEncoder(), [4], table=table)


def test_a_loaded_table_counts_before_the_kept_one(gpu: FakeGpu, tmp_path: Path) -> None:
    captured().save_table(tmp_path / "table.json")
    remove_tables()
    graphed = GraphedEncoder(ToyEncoder(), [4, 8, 16])
    graphed.load_table(tmp_path / "table.json")
    before = gpu.timed
    graphed.capture(progress=False)
    assert (gpu.timed - before, kept()) == (0, [])


# --- listed and removed ---------------------------------------------------------------------------


def test_tables_are_listed_and_removed_by_name(gpu: FakeGpu) -> None:
    captured()
    captured(FastToy())
    damaged = kept()[0].with_name("damaged.json")
    damaged.write_text("{}")
    damaged.with_name("deep.json").write_text("[" * 100_000)
    listed = {table.name: table for table in list_tables()}
    assert sorted(table.encoder for table in listed.values()) == ["", "", "FastToy", "ToyEncoder"]
    (toy,) = [table for table in listed.values() if table.encoder == "ToyEncoder"]
    assert (toy.dtype, toy.device, toy.budgets > 0) == ("torch.float32", "cpu", True)
    with pytest.raises(ValueError, match="no table other is kept; there are: FastToy-"):
        remove_tables(["damaged", "other"])
    assert remove_tables(["damaged"]) == 2
    assert len(list_tables()) == 3
    remove_tables()
    assert list_tables() == kept() == []
