"""The commands and notebooks run where nothing is installed but what their extras name.

Installing torch anew would take minutes and gigabytes. So the environment is empty but for the
wheel of this tree, without its dependencies, and links to the packages that the metadata of the
wheel names for an extra, followed from package to package: what pip would install. A package that
is missing where the tests run is left out, so that the environment holds at most what pip installs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from tests.support.notebooks import NOTEBOOKS, execute, pictures

ROOT = Path(__file__).parents[2]
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="the environment is made of links"),
]


class Environment(NamedTuple):
    python: Path
    packages: Path

    def run(self, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=CLEAN, capture_output=True, text=True)


def closure(package: Distribution, extra: str) -> dict[str, Distribution]:
    """Return the installed packages that ``package[extra]`` needs, by name."""
    found: dict[str, Distribution] = {}
    waiting, seen = [(package, extra)], set()
    while waiting:
        current, wanted = waiting.pop()
        for text in current.requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is not None and not marker.evaluate({"extra": wanted}):
                continue
            try:
                own = requirement.name == package.name
                needed = package if own else distribution(requirement.name)
            except PackageNotFoundError:
                continue
            if not own:
                found[needed.name] = needed
            step = [(needed, name) for name in ("", *requirement.extras)]
            waiting += [one for one in step if (one[0].name, one[1]) not in seen]
            seen |= {(one[0].name, one[1]) for one in step}
    return found


def link(package: Distribution, target: Path) -> None:
    """Link the top-level files and folders of an installed package into ``target``."""
    tops = {path.parts[0] for path in package.files or []} - {"..", "__pycache__"}
    for top in tops:
        source, place = Path(str(package.locate_file(top))), target / top
        if source.exists() and not place.is_symlink():
            place.symlink_to(source)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def build(folder: Path, wheel: Path, extra: str) -> Environment:
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([python, "-c", ask], text=True).strip())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(packages), str(wheel)], check=True, capture_output=True)
    (info,) = packages.glob("vitgraph-*.dist-info")
    for package in closure(Distribution.at(info), extra).values():
        link(package, packages)
    return Environment(python, packages)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    return build(tmp_path_factory.mktemp("demo") / "venv", wheel, "demo")


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    return build(tmp_path_factory.mktemp("notebooks") / "venv", wheel, "notebooks")


def test_bare_environment_holds_no_test_package(demo: Environment, tmp_path: Path) -> None:
    for name in ("pytest", "transformers", "timm", "torchvision", "nbclient"):
        assert demo.run("-c", f"import {name}", cwd=tmp_path).returncode == 1, name
    where = demo.run("-c", "import vitgraph; print(vitgraph.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(demo.packages))


def test_demo_runs_in_a_bare_environment(demo: Environment, tmp_path: Path) -> None:
    run = demo.run("-m", "vitgraph", "demo", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "demo" / "feature_maps.png").stat().st_size > 10_000


def test_bench_speed_runs_in_a_bare_environment(demo: Environment, tmp_path: Path) -> None:
    write = "from vitgraph.seeded import write_seeded_checkpoint as w; w('tower', 'qwen3_vl')"
    assert demo.run("-c", write, cwd=tmp_path).returncode == 0
    run = demo.run("-m", "vitgraph", "bench", "speed", "tower", "--runs", 1, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "accelerated" in run.stdout


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of the kernel's own machinery
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_notebook_runs_alone_in_a_bare_environment_and_leaves_nothing(
    path: Path, notebooks: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel runs there; the client that feeds it cells runs with the tests."""
    argv = [str(notebooks.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "bare", "language": "python"}
    (tmp_path / "kernels" / "bare").mkdir(parents=True)
    (tmp_path / "kernels" / "bare" / "kernel.json").write_text(json.dumps(spec))
    alone, temporary = tmp_path / "alone", tmp_path / "temporary"
    alone.mkdir()
    temporary.mkdir()
    shutil.copy(path, alone)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert pictures(execute(alone / path.name, alone, kernel="bare"))
    assert [left.name for left in alone.iterdir()] == [path.name]
    assert [left.name for left in temporary.iterdir() if any(left.rglob("*.safetensors"))] == []
