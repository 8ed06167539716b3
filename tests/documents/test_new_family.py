"""The skeleton of a new family runs before anything in it is edited."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.families.new import REFERENCES, ROOT, write_skeleton

CODE = """
from pathlib import Path

from weights import FAMILIES, build_config
from weights.files.checkpoint import Checkpoint
from weights.files.index import Contents
from weights.match import find_family

family = FAMILIES["acme_vl"]
model = family.facts.published[-1]
encoder = family.on_meta(build_config(family, model.config, None, model.repo_id))
print(type(encoder).__name__, sum(value.numel() for value in encoder.parameters()))
found = find_family(Contents(Checkpoint(Path("nowhere")), model.config, {}))
print(found.name, model.parameters + model.projector_parameters)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The packages of this repository, copied."""
    skip = shutil.ignore_patterns("__pycache__")
    for package in ("encoders", "graphwrap", "weights", "vitgraph"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / REFERENCES, tmp_path / REFERENCES, ignore=skip)
    return tmp_path


@pytest.mark.parametrize("like", ["idefics3", "minimax_m3"])
def test_a_skeleton_is_a_family_that_loads(tree: Path, like: str) -> None:
    write_skeleton(tree, "acme", "acme_vl", "AcmeVL", like)
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    run = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    name, made, family, stated = run.stdout.split()
    assert (name, family, made) == ("AcmeVLEncoder", "acme_vl", stated)
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint, "--no-cache"], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("acme", "acme-vl", "AcmeVL", "idefics3"), "'acme-vl': must be a name of Python"),
        (("acme", "acme_vl", "AcmeVL", "bert"), "--like bert: no file encoders/"),
        (("acme", "acme_vl", "AcmeVL", "qwen3_vl"), "qwen.py has several records"),
        (("idefics", "idefics3", "Idefics3", "idefics3"), "idefics3.py is there already"),
    ],
)
def test_a_skeleton_that_cannot_be_written_is_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        write_skeleton(ROOT, *names)
