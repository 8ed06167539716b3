"""Describes the machine of a measurement: GPU, driver, clocks, versions, commit and date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
EXTRAS = {"flash-attn-4": "flash_attn.cute"}
"""Optional packages that change speeds, and a module of each that shows that it is installed."""
QUERY = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "sm_clock_limit_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.limit": "power_limit_watts",
}
"""The fields to query from ``nvidia-smi``, with their names in result files."""


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine: hardware, driver, versions, commit and date, by name.

    A value is None if this machine has no such part, for example no GPU.
    """
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **query_gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": version_of("triton", "triton"),
        "transformers": transformers.__version__,
        "extras": {name: version_of(name, module) for name, module in EXTRAS.items()},
        "commit": read_commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def about(runs: int) -> dict[str, Any]:
    """Return the description of this machine, and the dtype and number of runs of a benchmark."""
    return {**describe_machine(), "dtype": "bfloat16", "runs": runs}


def cpu_name() -> str:
    """Return the name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def query_gpu() -> dict[str, Any]:
    """Return driver, clocks and power limit from ``nvidia-smi``; None for values that it lacks."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        cells = [cell.strip() for cell in done.stdout.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        cells = []
    cells += [""] * (len(QUERY) - len(cells))
    return {name: _number(cell) for name, cell in zip(QUERY.values(), cells, strict=False)}


def _number(cell: str) -> float | str | None:
    """Convert a value of ``nvidia-smi`` to a number, or keep its text, such as "570.86.15"."""
    try:
        return float(cell)
    except ValueError:
        return cell if cell[:1].isdigit() else None


def version_of(package: str, module: str) -> str | None:
    """Return the version of a package; None if its module ``module`` is not installed."""
    try:
        if find_spec(module) is None:
            return None
    except ImportError:
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # the package was copied here without its metadata
        found = getattr(import_module(module.split(".")[0]), "__version__", "unknown")
        return str(found)


def read_commit() -> str | None:
    """Return the variable ``VITGRAPH_COMMIT`` if it is set, else the commit of the git checkout."""
    if "VITGRAPH_COMMIT" in os.environ:
        return os.environ["VITGRAPH_COMMIT"]
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
