"""Files and folders of the user's that have the names of our packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USE = "import vitgraph, sys; print('torch' in sys.modules, vitgraph.list_models('*8b-instruct')[0])"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with the library found behind what lies there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["encoders", "graphwrap", "weights"])
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_what_hides_a_package_is_named_with_the_way_out(
    tmp_path: Path, name: str, form: str
) -> None:
    theirs = tmp_path / form.format(name)
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("")
    done = run(tmp_path, "-c", USE)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    hiding = theirs if theirs.parent == tmp_path else theirs.parent
    assert said.startswith(f"ImportError: {hiding} hides the package {name!r} of vitgraph")
    assert str(ROOT / name) in said
    assert "rename yours" in said


def test_scripts_and_the_command_line_name_what_hides(tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_text("")
    (tmp_path / "script.py").write_text(USE)
    for arguments in (("script.py",), ("-m", "vitgraph", "list")):
        done = run(tmp_path, *arguments)
        assert done.returncode == 1
        assert f"{tmp_path / 'weights.py'} hides the package 'weights'" in done.stderr


def test_a_folder_of_checkpoints_called_weights_hides_nothing(tmp_path: Path) -> None:
    for name in ("encoders", "graphwrap", "weights"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("")
    done = run(tmp_path, "-c", USE)
    assert done.stdout.split() == ["False", "Qwen/Qwen3-VL-8B-Instruct"], done.stderr


def test_a_module_of_the_users_that_was_imported_before_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "encoders.py").write_text("")
    code = "import sys; sys.path.insert(0, 'mine'); import encoders; del sys.path[0]; " + USE
    assert "encoders.py hides the package 'encoders'" in run(tmp_path, "-c", code).stderr


def test_what_hides_a_package_only_after_the_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "weights.py").write_text("")
    code = "import os, vitgraph; os.chdir('mine'); vitgraph.load_encoder"
    said = run(tmp_path, "-c", code).stderr.splitlines()[-1]
    assert f"{tmp_path / 'mine' / 'weights.py'} hides the package 'weights'" in said
