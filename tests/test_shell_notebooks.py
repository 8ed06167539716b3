"""Notebooks stay small and readable; ``test_shell_bare.py`` runs them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each
def test_notebook_is_numbered_and_its_outputs_are_stripped(path: Path) -> None:
    assert path.stem.split("_")[0].isdigit()
    for cell in code(nbformat.read(path, as_version=4)):
        assert cell.outputs == []
        assert cell.execution_count is None
    assert path.stat().st_size < 500_000


@each
def test_a_third_of_the_cells_is_prose(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    prose = [cell for cell in cells if cell.cell_type == "markdown"]
    assert 3 * len(prose) >= len(cells)


@each
def test_notebook_uses_nothing_private(path: Path) -> None:
    for cell in code(nbformat.read(path, as_version=4)):
        assert "._" not in cell.source
        assert "import _" not in cell.source
