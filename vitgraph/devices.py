"""Devices and dtypes by their names in options, and errors for full memory, disk or dtypes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from encoders.stored_tensors import STORED_DTYPES
from weights.load import default_device

from .terminal import counted

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES.values()}
"""Name of a dtype in options such as ``--dtype`` ("float32") -> the dtype."""


def read_device(name: str | None) -> torch.device:
    """Return the torch device that the value of the option ``--device`` names.

    Args:
        name: name of a device such as "cuda:0"; "auto", as None, means the accelerator if there is
            one, and else the CPU.

    Raises:
        ValueError: torch knows no such device, or this machine does not have it.
    """
    try:
        device = default_device() if name in (None, "auto") else torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: must be auto, cpu, cuda, cuda:0, mps, ...") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"--device {name}: torch {torch.__version__} sees {counted(count, 'CUDA device')} "
            + (f"here; use cuda:0 to cuda:{count - 1}" if count else "here; use --device cpu")
        )
    if not _can_compute(device):
        raise ValueError(
            f"--device {name}: torch {torch.__version__} cannot compute on it here; "
            "use --device cpu"
        )
    return device


def device_text(device: torch.device) -> str:
    """Return a device as text for the user, such as "cuda (NVIDIA H100 80GB HBM3)"."""
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name}"


def _can_compute(device: torch.device) -> bool:
    """Return whether tensors can be made on a device, to replace torch's page-long error."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError):
        return False
    return device.type != "meta"


def cast_in_range(tensor: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    """Cast ``tensor`` to ``dtype`` (None: as it is); ``name`` says whose features it holds.

    Raises:
        ValueError: a finite value of ``tensor`` is too large for ``dtype``.
    """
    converted = tensor if dtype is None else tensor.to(dtype)
    overflows = converted.isinf() & tensor.isfinite()
    if overflows.any():
        raise range_error(name, float(tensor[overflows].abs().max()), converted.dtype)
    return converted


def range_error(name: str, largest: float, dtype: torch.dtype) -> ValueError:
    """Return the error for features that are too large for a dtype.

    Args:
        name: the features that have such a value.
        largest: their greatest magnitude.
        dtype: the dtype that was asked for.
    """
    return ValueError(
        f"{name}: has features of up to {largest:g}, and {str(dtype).removeprefix('torch.')} ends "
        f"at {torch.finfo(dtype).max:g}: write a wider dtype (--out-dtype)"
    )


@contextmanager
def enough_memory(subject: str, fix: str) -> Iterator[None]:
    """Raise an error of one line if the block runs out of memory, on the device or on the host.

    Args:
        subject: the subject of the error, such as the name of a checkpoint.
        fix: the advice at the end of the error.

    Raises:
        ValueError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            memory = "the device"
        elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            # When the host's memory is full, torch raises RuntimeError and not OutOfMemoryError.
            memory = "this machine"
        else:
            raise
        raise ValueError(f"{subject}: {memory} ran out of memory; {fix}") from error


@contextmanager
def enough_disk(file: Path, fix: str = "") -> Iterator[None]:
    """Raise an error that says what to do if the block finds the disk full.

    Args:
        file: the file that is written.
        fix: text that ends the error.

    Raises:
        OSError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"the disk is full: free some space, or write to another one{fix}"
        raise OSError(error.errno, message, str(file)) from error
