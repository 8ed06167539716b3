"""Executes the notebooks, and writes their outputs in place:

    python -m tests.support.notebooks    (all of them, or those whose files are named)

The committed notebooks hold outputs, so that a page of the repository and the site show pictures.
Each says in its metadata which sources were executed, so that a test sees outputs of older ones
without executing anything.
"""

from __future__ import annotations

import json
import os
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = ROOT / "docs" / "notebooks"
"""The picture of each notebook that docs/notebooks.md shows."""
KERNEL = {
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm's, where ipywidgets is not installed
}
"""Environment of the kernel: a progress bar has no place in a file."""


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def sources(notebook: nbformat.NotebookNode) -> str:
    """Return the SHA-256 of the sources of all code cells."""
    return sha256(json.dumps([cell.source for cell in code(notebook)]).encode()).hexdigest()


def pictures(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the pictures among the outputs, PNG in base64."""
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def execute(
    path: Path,
    folder: Path,
    kernel: str = "python3",
    environment: Mapping[str, str] = os.environ,
) -> nbformat.NotebookNode:
    """Execute a notebook with ``folder`` as its working folder, and return it with outputs."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name=kernel,
        resources={"metadata": {"path": folder}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=environment)
    return notebook


def smaller(picture: str) -> str:
    """Return a picture, PNG in base64, with 256 colours: a third of its bytes."""
    file = BytesIO()
    image = Image.open(BytesIO(b64decode(picture))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return b64encode(file.getvalue()).decode()


def write_outputs(path: Path) -> None:
    """Execute a notebook, write its outputs into it, and the picture of its page beside the docs.

    That picture is the last one of the cell with the tag "picture".
    """
    metadata = nbformat.read(path, as_version=4).metadata
    with TemporaryDirectory() as folder:
        settings = Path(folder, "matplotlibrc")
        settings.write_text("figure.dpi: 70\n")
        environment = os.environ | KERNEL | {"MATPLOTLIBRC": str(settings)}
        notebook = execute(path, Path(folder), environment=environment)
    notebook.metadata = metadata | {"sources_executed": sources(notebook)}
    for cell in code(notebook):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    nbformat.write(notebook, path)
    (shown,) = [cell for cell in code(notebook) if "picture" in cell.metadata.get("tags", ())]
    *_, picture = pictures(nbformat.v4.new_notebook(cells=[shown]))
    (PICTURES / f"{path.stem}.png").write_bytes(b64decode(picture))


if __name__ == "__main__":
    for one in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        write_outputs(one)
