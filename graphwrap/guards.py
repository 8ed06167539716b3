"""What is checked before anything runs: pixels, gradients, weights that moved under a graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WeightGuard:
    """Remembers where every parameter and buffer lay when the graphs were captured.

    A graph reads addresses. Weights updated in place are seen by the next replay; weights rebound
    (``load_state_dict(assign=True)``, ``.to()``) are not, and would be answered with the old ones.
    The old storages are held, so that the check may run while a replay does.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self._slots = [
            (slots, name, tensor, tensor.data_ptr())
            for module in encoder.modules()
            for slots in (module._parameters, module._buffers)
            for name, tensor in slots.items()
            if tensor is not None
        ]
        self._held = [tensor.detach() for _, _, tensor, _ in self._slots]
        self._parameters = list(encoder.parameters())

    def check(self) -> None:
        """Raise if a weight is no longer where the graphs read it.

        Raises:
            RuntimeError: a parameter was replaced or moved after capture.
        """
        for slots, name, tensor, address in self._slots:
            if slots.get(name) is not tensor or tensor.data_ptr() != address:
                raise RuntimeError(
                    f"weight {name!r} was rebound or moved after capture (load_state_dict with "
                    "assign=True, .to(), .half()): its graphs still read the old one; call "
                    "release() and capture() again"
                )

    def check_gradients(self, pixel_values: Tensor) -> None:
        """Raise if somebody expects gradients: a graph records none.

        Raises:
            ValueError: a parameter or the pixels require grad while grad mode is on.
        """
        if not torch.is_grad_enabled():
            return
        wanted = pixel_values.requires_grad
        if wanted or any(parameter.requires_grad for parameter in self._parameters):
            what = "pixel_values" if wanted else "encoder parameters"
            raise ValueError(
                f"{what} require grad and grad mode is on, but a graph records no gradients: wrap "
                "the call in torch.no_grad(), or encoder.requires_grad_(False), or call the "
                "encoder itself"
            )


def check_pixels(pixel_values: Tensor, row_shape: tuple[int, ...], device: torch.device) -> None:
    """Raise on pixels that the graphs cannot take.

    Raises:
        ValueError: integer pixels, a wrong trailing shape, or pixels on another accelerator.
    """
    if not pixel_values.is_floating_point():
        raise ValueError(
            f"pixel_values are {pixel_values.dtype}: the encoder takes normalised floating-point "
            "pixels; call encoder.preprocess on the images"
        )
    if tuple(pixel_values.shape[1:]) != row_shape:
        raise ValueError(
            f"pixel_values of shape {tuple(pixel_values.shape)}: the graphs take rows of shape "
            f"{row_shape}; call encoder.preprocess on the images"
        )
    if pixel_values.device != device and pixel_values.device.type != "cpu":
        raise ValueError(
            f"pixel_values are on {pixel_values.device}, the graphs on {device}: pass them on the "
            "CPU or move them there"
        )
