"""The start of a call: torch's modes, the lock, and checks of the call and of its pixels."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

AS_IT_IS = nullcontext()
"""A context that changes nothing, which :func:`settle_modes` returns if no mode has to change."""


def settle_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that sets torch's modes for captures and calls on ``device``.

    Gradients, inference mode and autocast are off (a replay could not follow autocast, so eager
    runs do not either), tensors are made on the CPU unless told otherwise, and the encoder's GPU is
    the current one. Only modes that differ are changed: a whole replay takes the host only tens of
    microseconds.
    """
    modes: list[AbstractContextManager[object]] = []
    if torch.is_inference_mode_enabled():
        modes.append(torch.inference_mode(False))
    if modes or torch.is_grad_enabled():  # leaving inference mode turns gradients on
        modes.append(torch.no_grad())
    on_cuda = device.type == "cuda"
    for kind in ("cpu", "cuda") if on_cuda else ("cpu",):
        if torch.is_autocast_enabled(kind):
            modes.append(torch.autocast(kind, enabled=False))
    if torch.get_default_device().type != "cpu":
        modes.append(torch.device("cpu"))
    if on_cuda and torch.cuda.current_device() != device.index:
        modes.append(torch.cuda.device(device))
    if not modes:
        return AS_IT_IS
    stack = ExitStack()
    for mode in modes:
        stack.enter_context(mode)
    return stack


class CallLock:
    """A lock that a thread may take several times, and that says whether this thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._times, self._holder = 0, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._times += 1
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._times -= 1
        if not self._times:
            self._holder = 0
        self._lock.release()

    def is_held_here(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return self._holder == threading.get_ident()


def check_alone(lock: CallLock, device: torch.device) -> None:
    """Raise a RuntimeError if a call may not start now.

    Args:
        lock: the lock of the graphed encoder; this thread holds it if it is inside a call already.
        device: the device of the encoder, on which the user may be capturing a graph.
    """
    if lock.is_held_here():
        raise RuntimeError(
            "a GraphedEncoder was called from inside its own encoder (a forward, a hook): that "
            "would overwrite the buffers of the call under way; call the encoder itself there"
        )
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a GraphedEncoder was called while a CUDA graph is being captured, which cannot hold "
            "its replays: call it before, or capture encoder(pixel_values, encoder_metadata=...)"
        )


def check_pixels(pixel_values: Tensor, row_shape: tuple[int, ...], device: torch.device) -> None:
    """Raise a ValueError unless pixels are floating-point rows of ``row_shape``, [P, *row_shape].

    They may be on the CPU or on ``device``, the device of the encoder.
    """
    if isinstance(pixel_values, Tensor):
        device_fits = pixel_values.device == device or pixel_values.is_cpu
        shape = tuple(pixel_values.shape)  # slicing a torch.Size takes longer
        shape_fits = shape and shape[1:] == row_shape
        if device_fits and shape_fits and pixel_values.is_floating_point():
            return
    raise ValueError(
        f"pixel_values is {_kind_of(pixel_values)}: the graphs take normalised floating-point rows "
        f"of shape {row_shape}, on the CPU or {device}; pass what encoder.preprocess returns, or a "
        "tensor like that (torch.as_tensor, .to)"
    )


def _kind_of(value: object) -> str:
    """Describe a value for a message: dtype, shape and device of a tensor, else its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return f"a {type(value).__name__}, not a tensor"
