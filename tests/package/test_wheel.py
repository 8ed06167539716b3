"""The wheel holds the four packages, the measured figures and the licence, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

import vitgraph

ROOT = Path(__file__).parents[2]
PACKAGES = {"encoders", "graphwrap", "weights", "vitgraph"}
OTHERS = {"tests", "benchmarks", "docs", "examples", "notebooks", ".ci", ".github"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(folder),
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_string(wheel.read(name).decode())


def test_wheel_holds_exactly_the_four_packages(wheel: ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops - PACKAGES == {f"vitgraph-{vitgraph.__version__}.dist-info"}
    assert tops >= PACKAGES


def test_wheel_holds_every_source_file_and_nothing_else(wheel: ZipFile) -> None:
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".json", ".css", ".js") or path.name == "py.typed"
    }
    assert {name for name in wheel.namelist() if name.split("/")[0] in PACKAGES} == sources


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_each_package_is_marked_as_typed(wheel: ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_wheel_carries_licence_notice_readme_and_command(wheel: ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    for file in ("LICENSE", "NOTICE"):
        assert any(name.endswith(f"licenses/{file}") for name in wheel.namelist()), file
    assert str(metadata.get_payload()).startswith("# vitgraph")
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "vitgraph = vitgraph.cli:main" in wheel.read(name).decode()


@pytest.mark.slow
def test_sdist_carries_what_a_wheel_is_built_of(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)  # wheel from the sdist
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        modes = {member.name.partition("/")[2]: member.mode for member in archive.getmembers()}
    names = set(modes)
    assert names >= {"LICENSE", "NOTICE", "README.md", "SECURITY.md", "Makefile"}
    assert names >= {f"{package}/py.typed" for package in PACKAGES}
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == PACKAGES | OTHERS
    assert names >= {"constraints.txt", "constraints-oldest.txt", "mkdocs.yml"}
    assert names >= {".pre-commit-config.yaml", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert modes[".ci/run"] & 0o100  # the shipped tests of make ask that CI can run it
    (built,) = tmp_path.glob("*.whl")
    assert "vitgraph/embedding/planning/scale_h200.json" in ZipFile(built).namelist()


def test_transformers_is_a_dependency_of_the_extra_for_texts_alone(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist") or []
    towers = [line for line in requirements if line.startswith(("transformers", "torchvision"))]
    assert [line.replace('"', "'") for line in towers] == ["transformers>=5.20.2; extra == 'text'"]
    required = {line.split(";")[0].split(">")[0] for line in requirements if "extra ==" not in line}
    assert required == {
        "torch",
        "einops",
        "safetensors",
        "huggingface-hub",
        "fsspec",
        "pillow",
        "numpy",
        "tqdm",
    }
