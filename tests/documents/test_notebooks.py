"""Notebooks are readable, with outputs of their code; ``test_bare_environment.py`` runs them."""

from __future__ import annotations

import ast
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from benchmarks.table.results import theirs
from tests.support.notebooks import NOTEBOOKS, PICTURES, code, pictures, sources
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

ROOT = Path(__file__).parents[2]
each = pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])


@each
def test_outputs_of_a_notebook_are_those_of_its_code(path: Path) -> None:
    """A cell has changed? ``make outputs`` executes the notebooks, and writes what they show."""
    notebook = nbformat.read(path, as_version=4)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert notebook.metadata["sources_executed"] == sources(notebook)
    assert (PICTURES / f"{path.stem}.png").read_bytes() in map(b64decode, pictures(notebook))


@each
def test_outputs_hold_no_path_warning_or_progress_bar(path: Path) -> None:
    outputs = [one for cell in code(nbformat.read(path, as_version=4)) for one in cell.outputs]
    assert {one.output_type for one in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [one for one in outputs if one.get("name") == "stderr"]
    for one in outputs:
        text = one.get("text") or one.data.get("text/plain", "")
        assert not re.search(r"[\r\x1b]|(?<![\w.])/\w+/|\b[A-Z]:\\|127\.0\.0\.1", text), text


@each
def test_notebook_uses_nothing_private(path: Path) -> None:
    for cell in code(nbformat.read(path, as_version=4)):
        assert not re.search(r"\._(?!_init__)", cell.source)
        assert "import _" not in cell.source


@each
def test_notebook_imports_nothing_that_only_a_clone_has(path: Path) -> None:
    for cell in code(nbformat.read(path, as_version=4)):
        assert not re.search(r"^\s*(from|import) (benchmarks|tests)\b", cell.source, re.M)
        assert "sys.path" not in cell.source


@torch.no_grad()
@pytest.mark.parametrize("family", ["step3_vl", "deepseek_vl2"])
def test_the_quickstart_makes_maps_of_towers_of_several_views_unchanged(
    tmp_path: Path, family: str
) -> None:
    quickstart = nbformat.read(NOTEBOOKS[0], as_version=4)
    (lines,) = [cell.source for cell in code(quickstart) if "encoder.feature_maps" in cell.source]
    encoder = load_encoder(write_seeded_checkpoint(tmp_path, family, width=32, depth=1))
    known = {"encoder": encoder, "photographs": [torch.zeros(3, 60, 50, dtype=torch.uint8)] * 2}
    exec(lines, known)
    assert [one["image"].ndim for one in known["maps"]] == [4, 4]


def test_figures_in_the_notebook_of_graphs_are_those_measured() -> None:
    """Measured anew? Write the new figures into the cells that begin with these names."""
    cells = [cell.source for cell in code(nbformat.read(NOTEBOOKS[1], as_version=4))]
    told: dict[str, dict[str, list[list[float]]]] = {}
    for name in ("measured", "memory"):
        (cell,) = [source for source in cells if f"\n{name} = {{" in source]
        told[name] = ast.literal_eval(re.search(rf"^{name} = (\{{.*?^\}})", cell, re.M | re.S)[1])
    assert {name: [list(one) for one in rows] for name, rows in told["measured"].items()} == speed()
    assert {name: [list(one) for one in rows] for name, rows in told["memory"].items()} == memory()


def speed() -> dict[str, list[list[float]]]:
    """Tokens, and milliseconds of three forms of each tower, with three digits."""
    found = {}
    for tower in results("speed_h100")["towers"]:
        rows = [row for row in tower["workloads"] if not row["drawn"] and "hf_ms" in row]
        rows.sort(key=lambda row: row["tokens"])
        lines = [[theirs(row) for row in rows], [row["accelerated_ms"]["median"] for row in rows]]
        lines.append([row["graphed_ms"]["auto"]["median"] for row in rows])
        digits = [[float(f"{ms:.3g}") for ms in line] for line in lines]
        if rows:
            found[tower["tower"]] = [[row["tokens"] for row in rows], *digits]
    return found


def memory() -> dict[str, list[list[float]]]:
    """Budgets, and MiB of arena and pool, of each tower."""
    return {
        tower["tower"]: [
            [row["budgets"] for row in tower["memory_by_budgets"]],
            [round(row["pool_mib"] + row["arena_mib"]) for row in tower["memory_by_budgets"]],
        ]
        for tower in results("graphs_h200")["towers"]
    }


def results(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()))
