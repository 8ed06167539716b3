"""The machine that figures are measured on: GPU, driver, clocks, versions, commit and date."""

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
"""Optional packages that change the figures, and the module that each brings."""
QUERY = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "sm_clock_limit_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.limit": "power_limit_watts",
}
"""Names of the fields of ``nvidia-smi``, and the names of them in result files."""


def describe_machine() -> dict[str, Any]:
    """Return the facts that a figure depends on, by name; None where this machine has none."""
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
    """Return a description of the machine, with the dtype and the number of runs."""
    return {**describe_machine(), "dtype": "bfloat16", "runs": runs}


def cpu_name() -> str:
    """Return the name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def query_gpu() -> dict[str, Any]:
    """Return driver, clocks and power limit from ``nvidia-smi``; None for what it does not tell."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        cells = [cell.strip() for cell in done.stdout.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        cells = []
    cells += [""] * (len(QUERY) - len(cells))
    return {name: _number(cell) for name, cell in zip(QUERY.values(), cells, strict=False)}


def _number(cell: str) -> float | str | None:
    """Return a cell as a number if it is one, else as text, such as a version with two dots."""
    try:
        return float(cell)
    except ValueError:
        return cell if cell[:1].isdigit() else None


def version_of(package: str, module: str) -> str | None:
    """Return the version of a package, None if its module cannot be imported."""
    try:
        if find_spec(module) is None:
            return None
    except ImportError:
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # copied to this machine without its metadata
        found = getattr(import_module(module.split(".")[0]), "__version__", "unknown")
        return str(found)


def read_commit() -> str | None:
    """Return the variable ``VITGRAPH_COMMIT`` if it is set, else the commit of this checkout."""
    if "VITGRAPH_COMMIT" in os.environ:
        return os.environ["VITGRAPH_COMMIT"]
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
