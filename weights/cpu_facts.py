"""Facts about the CPU of this machine."""

from __future__ import annotations

from pathlib import Path

_INFO = Path("/proc/cpuinfo")
_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""The flags of Linux for instructions that multiply bfloat16: of x86, and the last of Arm."""


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions that multiply bfloat16; True if nothing says so."""
    if not _INFO.is_file():
        return True
    lines = [line.partition(":") for line in _INFO.read_text(errors="replace").splitlines()]
    lists = [value for name, _, value in lines if name.strip().lower() in ("flags", "features")]
    return not lists or bool(_FLAGS & set(lists[0].split()))
