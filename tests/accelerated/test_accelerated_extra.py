"""The optional extra that brings one more attention kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from encoders.accelerated.attention_kernels import KERNELS

ROOT = Path(__file__).parents[2]


@pytest.mark.integrations
@pytest.mark.skipif(sys.platform != "linux", reason="flash-attn-4 is for Linux alone")
def test_the_flash_extra_can_be_installed(tmp_path: Path) -> None:
    """``pip`` resolves it beside what is installed; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "--no-cache-dir", "--retries", "1"]
    command = ["install", "--dry-run", "--no-build-isolation", f"{ROOT}[flash]"]
    result = subprocess.run([*pip, *command], cwd=tmp_path, capture_output=True, text=True)
    if result.returncode and "onnection" in result.stderr + result.stdout:
        pytest.skip("no package index can be reached")
    assert result.returncode == 0, result.stderr
    assert "flash-attn-4" in result.stdout


def test_only_one_kernel_needs_the_extra() -> None:
    needed = {name for name, kernel in KERNELS.items() if kernel.package.startswith("flash_attn")}
    assert needed == {"flash4"}
