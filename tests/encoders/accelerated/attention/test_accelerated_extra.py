"""The optional extra that brings one more attention kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch
from zipfile import ZipFile

import pytest
import torch

from encoders.accelerated.attention.candidates import KERNELS
from encoders.accelerated.attention.flash_attn_4 import KEYWORDS, flash4_forward

ROOT = Path(__file__).parents[4]


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
PACKAGE = """
import os
import warnings
environment = dict(os.environ)
def _flash_attn_fwd(q, k, v, PARAMETERS):
    warnings.warn("compiled", stacklevel=1)
    return _flash_attn_fwd.compile_cache
_flash_attn_fwd.compile_cache = "its own"
"""
CACHE = """
def _compute_source_fingerprint():
    return "5eed"
def JITPersistentCache(path):
    if path.parts[0] == "locked":
        raise PermissionError(path)
    return str(path)
"""
"""Modules that stand for flash-attn-4, whose compiler warns and which has a cache of kernels."""


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
        (package / "cache_utils.py").write_text(CACHE)
        yield (package / "interface.py").write_text
    flash4_forward.cache_clear()


def call_without_rows() -> object:
    nothing = torch.empty(0)
    return flash4_forward()(nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("own", "kept_in"),
    [
        ({}, "CACHE/vitgraph/flash-attn-4/5eed/fwd"),
        ({FOLDER: "/mine"}, "/mine/5eed/fwd"),
        ({FOLDER: "locked"}, "its own"),
        ({ENABLED: "0"}, "its own"),
    ],
    ids=["nothing_set", "own_folder", "read_only_folder", "switched_off"],
)
def test_flash_attn_4_keeps_its_kernels_on_disk_unless_told_otherwise(
    install: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    own: dict[str, str],
    kept_in: str,
) -> None:
    install(PACKAGE.replace("PARAMETERS", ", ".join(f"{name}=None" for name in KEYWORDS)))
    for name in (ENABLED, FOLDER):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"XDG_CACHE_HOME": "CACHE", **own}.items():
        monkeypatch.setenv(name, value)
    assert call_without_rows() == kept_in
    # It is never changed, not even during the import: a thread in C may be reading it.
    assert sys.modules["flash_attn.cute.interface"].environment == dict(os.environ)


def test_warnings_of_flash_attn_4_alone_are_ignored(install: Callable[[str], None]) -> None:
    install(PACKAGE.replace("PARAMETERS", ", ".join(f"{name}=None" for name in KEYWORDS)))
    call_without_rows()
    with pytest.warns(UserWarning, match="of the user"):
        warnings.warn("of the user", stacklevel=1)


def test_a_flash_attn_4_whose_forward_lacks_a_keyword_is_refused(
    install: Callable[[str], None],
) -> None:
    install("def _flash_attn_fwd(q, k, v, out=None):\n    pass\n")
    words = "the forward of this flash-attn-4 takes no cu_seqlens_k,"
    with pytest.raises(ImportError, match=f"^{words}"):
        flash4_forward()
