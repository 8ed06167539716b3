"""The site of the documentation: strict links, every public name, nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import vitgraph

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


def test_reference_has_one_entry_per_public_name_and_shows_one_root(site: Path) -> None:
    pages = "".join(path.read_text() for path in (site / "reference").rglob("*.html"))
    entries = re.findall(r'<h2 id="(\w+\.[\w.]+)"', pages)
    modules = {name for name in vitgraph.__all__ if isinstance(getattr(vitgraph, name), ModuleType)}
    names = {*vitgraph.__all__} - modules - {"__version__"}
    types = {f"types.{name}" for name in vitgraph.types.__all__}
    assert sorted(entries) == sorted(f"vitgraph.{name}" for name in names | types)
    members = {
        f"vitgraph.{module}.{name}"
        for module in modules - {"integrations", "types"}
        for name in {*getattr(vitgraph, module).__all__} - names
    }
    shown = re.findall(r'<h4 id="(vitgraph\.\w+\.\w+)"', pages)
    assert sorted(name for name in shown if "integrations" not in name) == sorted(members)


def test_site_loads_no_script_font_or_picture_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        foreign = r'<(?:script|img|link)\b[^>]*(?:src|href)="(?:https?:)?//[^"]+"'
        assert not re.findall(foreign, path.read_text()), path.name


def test_search_finds_a_name_and_a_page(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    titles = {entry["location"]: entry["title"] for entry in entries}
    assert "fit_budgets" in titles["reference/vitgraph/#vitgraph.fit_budgets"]
    assert titles["graphs/"] == "CUDA graphs"


def test_pages_name_no_role_of_restructured_text(site: Path) -> None:
    for path in (site / "reference").rglob("*.html"):
        assert not re.findall(r":(?:class|func|meth):", path.read_text()), path


def test_every_notebook_has_a_page_with_its_pictures(site: Path) -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / path.stem / "index.html").read_text()
        shown = re.findall(r'src="\.\./(\w+\.png)"', page)
        assert len(shown) == path.read_text().count('"image/png":')
        assert all((site / "notebooks" / name).stat().st_size > 1_000 for name in shown)
