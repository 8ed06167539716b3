"""The optional extra that brings one more attention kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from encoders.accelerated.attention.candidates import KERNELS
from encoders.accelerated.attention.flash_attn_4 import KEYWORDS

ROOT = Path(__file__).parents[2]


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
SCRIPT = """
import os
from encoders.accelerated.attention.flash_attn_4 import flash4_forward
before = dict(os.environ)
print(*flash4_forward()(None, None, None))
assert dict(os.environ) == before
"""


@pytest.mark.parametrize(
    ("own", "read"),
    [
        ({}, "1 CACHE/vitgraph/flash-attn-4"),
        ({FOLDER: "/mine"}, "1 /mine"),
        ({ENABLED: "0"}, "0 CACHE/vitgraph/flash-attn-4"),
    ],
    ids=["nothing_set", "own_folder", "switched_off"],
)
def test_the_cache_of_flash_attn_4_is_set_during_its_import_alone(
    tmp_path: Path, own: dict[str, str], read: str
) -> None:
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    keywords = ", ".join(f"{name}=None" for name in KEYWORDS)
    (package / "interface.py").write_text(PACKAGE.replace("PARAMETERS", keywords))
    inherited = {name: os.environ[name] for name in os.environ if name not in (ENABLED, FOLDER)}
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "XDG_CACHE_HOME": "CACHE"}
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(
        command, env={**inherited, **paths, **own}, capture_output=True, text=True
    )
    assert result.stdout.strip() == read, result.stderr
    assert result.returncode == 0, result.stderr


def test_a_flash_attn_4_whose_forward_lacks_a_keyword_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "interface.py").write_text("def _flash_attn_fwd(q, k, v, out=None):\n    pass\n")
    script = (
        "from encoders.accelerated.attention.flash_attn_4 import flash4_forward\nflash4_forward()"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert "ImportError: the forward of this flash-attn-4 takes no cu_seqlens_k," in result.stderr
