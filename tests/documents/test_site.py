"""The site of the documentation: strict links, every public name, nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]
PACKAGES = ("vitgraph", "encoders", "graphwrap", "weights")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_has_an_entry_for_every_public_name(site: Path, package: str) -> None:
    pages = "".join(path.read_text() for path in (site / "reference").rglob("*.html"))
    entries = set(re.findall(r'id="([\w.]+)"', pages))
    for name in set(import_module(package).__all__) - {"__version__"}:
        assert any(f"{home}.{name}" in entries for home in PACKAGES), f"{package}.{name}"


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
