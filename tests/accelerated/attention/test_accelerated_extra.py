"""The optional extra that brings one more attention kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch
from zipfile import ZipFile

import pytest
import torch

from encoders.accelerated.attention.candidates import KERNELS
from encoders.accelerated.attention.flash_attn_4 import KEYWORDS, flash4_forward

ROOT = Path(__file__).parents[3]


def write_wheel(folder: Path, version: str) -> None:
    """Write an empty package named flash-attn-4, as a package index would offer it."""
    info = f"flash_attn_4-{version}.dist-info"
    with ZipFile(folder / f"flash_attn_4-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="flash-attn-4 is for Linux alone")
def test_the_flash_extra_takes_the_newest_version_before_4_1(tmp_path: Path) -> None:
    """``pip`` is offered four versions in a folder; it asks no index and installs nothing."""
    for version in ("4.0.0b35", "4.0.0b36", "4.0.0b40", "4.1.0"):
        write_wheel(tmp_path, version)
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index"]
    command = [*pip, "--find-links", str(tmp_path), "--no-build-isolation", f"{ROOT}[flash]"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"flash-attn-4-(\S+)", result.stdout) == ["4.0.0b40"]


def test_only_one_kernel_needs_the_extra() -> None:
    needed = {name for name, kernel in KERNELS.items() if kernel.package.startswith("flash_attn")}
    assert needed == {"flash4"}


ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
PACKAGE = f"""
import os
read = [os.environ["{ENABLED}"], os.environ["{FOLDER}"]]
def _flash_attn_fwd(q, k, v, PARAMETERS):
    return read
"""
"""Stands for flash-attn-4, which reads the two variables when it is imported."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes a package of one module importable as flash-attn-4, as if it had not been imported."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]
        monkeypatch.syspath_prepend(tmp_path)
        flash4_forward.cache_clear()
        yield (package / "interface.py").write_text
    flash4_forward.cache_clear()


@pytest.mark.parametrize(
    ("own", "read"),
    [
        ({}, ["1", "CACHE/vitgraph/flash-attn-4"]),
        ({FOLDER: "/mine"}, ["1", "/mine"]),
        ({ENABLED: "0"}, ["0", "CACHE/vitgraph/flash-attn-4"]),
    ],
    ids=["nothing_set", "own_folder", "switched_off"],
)
def test_the_cache_of_flash_attn_4_is_set_during_its_import_alone(
    install: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    own: dict[str, str],
    read: list[str],
) -> None:
    install(PACKAGE.replace("PARAMETERS", ", ".join(f"{name}=None" for name in KEYWORDS)))
    for name in (ENABLED, FOLDER):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"XDG_CACHE_HOME": "CACHE", **own}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    nothing = torch.empty(0)
    assert flash4_forward()(nothing, nothing, nothing) == read
    assert dict(os.environ) == before


def test_a_flash_attn_4_whose_forward_lacks_a_keyword_is_refused(
    install: Callable[[str], None],
) -> None:
    install("def _flash_attn_fwd(q, k, v, out=None):\n    pass\n")
    words = "the forward of this flash-attn-4 takes no cu_seqlens_k,"
    with pytest.raises(ImportError, match=f"^{words}"):
        flash4_forward()
