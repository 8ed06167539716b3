"""Notebooks stay small and readable; ``test_shell_bare.py`` runs them."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
import torch

from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

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


@torch.no_grad()
@pytest.mark.parametrize("family", ["step3_vl", "deepseek_vl2"])
def test_the_quickstart_says_how_towers_of_several_views_make_maps(
    tmp_path: Path, family: str
) -> None:
    quickstart = nbformat.read(NOTEBOOKS[0], as_version=4)
    (line,) = re.findall(r"the maps are `(.*?)`", quickstart.cells[-1].source)
    encoder = load_encoder(write_seeded_checkpoint(tmp_path, family, width=32, depth=1))
    inputs = encoder.preprocess([torch.zeros(3, 60, 50, dtype=torch.uint8)] * 2)
    known = {"torch": torch, "encoder": encoder, "inputs": inputs, "outputs": encoder(inputs)}
    maps = eval(line, known)
    assert [len(found.shape) for found in maps] == [4, 4]
