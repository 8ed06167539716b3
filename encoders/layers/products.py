"""Convolutions computed as matrix products, if calling the layers would compute the same.

A layer that is wrapped (LoRA), quantised, or has hooks or a ``forward`` of its own may compute
something else, and is called as a module; ``torch_internals.is_plain`` recognises such layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .torch_internals import is_plain

LARGE = 2**26
"""A convolution of at least this many weights is computed as a matrix product in every dtype:
:func:`convolve` has the reason."""


def patch_product(layer: nn.Conv2d | nn.Conv3d, rows: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Apply a convolution whose kernel equals its stride to flattened patches, one per row.

    A product of 4,096 patches of Qwen3-VL-8B in bfloat16 takes 22 ms, and torch's Conv3d 756 ms
    (torch 2.15, 4 CPU cores).

    Args:
        layer: Conv2d or Conv3d, or a module that wraps or replaces it.
        rows: [.., C*p*p] or [.., C*T*p*p], in the order of the kernel.
        patch: (C, p, p) or (C, T, p, p).

    Returns:
        [.., D], computed as one matrix product if the layer is plain.
    """
    if is_plain(layer):
        return F.linear(rows, layer.weight.flatten(1), layer.bias)
    out: Tensor = layer(rows.reshape(-1, *patch))
    return torch.unflatten(out.flatten(1), 0, rows.shape[:-1])


class FlatPatchEmbed(nn.Module):
    """Embeds flattened patches by a convolution whose kernel equals its stride, as one product.

    The stored weight is a Conv2d's or, for patches of several ``frames``, a Conv3d's.
    """

    def __init__(
        self, width: int, patch_size: int, channels: int, frames: int = 0, bias: bool = True
    ) -> None:
        super().__init__()
        self.proj: nn.Conv2d | nn.Conv3d
        if frames:
            kernel = (frames, patch_size, patch_size)
            self.proj = nn.Conv3d(channels, width, kernel, kernel, bias=bias)
        else:
            self.proj = nn.Conv2d(channels, width, patch_size, patch_size, bias=bias)
        self.patch = (channels, *self.proj.kernel_size)

    def forward(self, patches: Tensor) -> Tensor:
        """Embed patches [.., C*p*p], or [.., C*T*p*p] of T frames, as vectors [.., D]."""
        return patch_product(self.proj, patches, self.patch)


class PatchEmbed(FlatPatchEmbed):
    """Embeds the patches of views, as :class:`FlatPatchEmbed` embeds flattened ones."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed views [B, C, H, W] as patches [B, h, w, D]."""
        side = self.patch[-1]
        rows = rearrange(pixels, "b c (h p) (w q) -> b h w (c p q)", p=side, q=side)
        return super().forward(rows)


def convolve(layer: nn.Module, maps: Tensor) -> Tensor:
    """Apply a Conv2d to maps in the full precision of their dtype.

    cuDNN rounds the inputs of float32 convolutions to TF32 by default (torch 2.11,
    ``torch.backends.cudnn.conv.fp32_precision``), which makes errors of 1e-4. Matrix products are
    exact by default, so in float32 a plain layer is computed as a product. A plain layer of at
    least ``LARGE`` weights is so in every dtype: for maps in channels_last, a convolution would
    copy its weights, 324 MiB in Step3-VL, into that memory format in every call.

    Args:
        layer: Conv2d without groups and dilation, or a module that wraps or replaces it.
        maps: [B, C, H, W].

    Returns:
        [B, D, h, w].
    """
    if (
        not isinstance(layer, nn.Conv2d)
        or not is_plain(layer)
        or (maps.dtype != torch.float32 and layer.weight.numel() < LARGE)
    ):
        return layer(maps)
    kernel, pad, stride = layer.kernel_size[0], int(layer.padding[0]), layer.stride[0]
    columns = F.unfold(maps, kernel, padding=pad, stride=stride)
    # The batch is flattened to one matrix: for a transposed batch, torch calls another kernel if
    # weights require gradients, so that results with and without gradients would differ.
    rows = F.linear(columns.mT.flatten(0, 1), layer.weight.flatten(1), layer.bias)
    height, width = ((size + 2 * pad - kernel) // stride + 1 for size in maps.shape[2:])
    return torch.unflatten(rows, 0, (maps.shape[0], height, width)).permute(0, 3, 1, 2)


def upsample(layer: nn.Module, maps: Tensor) -> Tensor:
    """Apply a ConvTranspose2d whose kernel equals its stride, as :func:`convolve` does a Conv2d.

    Args:
        layer: the ConvTranspose2d, a module that wraps or replaces it, or any other module.
        maps: [B, C, h, w].

    Returns:
        [B, D, p*h, p*w] for a kernel of p x p; of another module, what it returns.
    """
    if (
        not isinstance(layer, nn.ConvTranspose2d)
        or not is_plain(layer, types=(nn.ConvTranspose2d,))
        or layer.kernel_size != layer.stride
        or maps.dtype != torch.float32
    ):
        out: Tensor = layer(maps)
        return out
    rows = F.linear(maps.permute(0, 2, 3, 1), layer.weight.flatten(1).t())
    p, q = layer.kernel_size
    out = rearrange(rows, "b h w (d p q) -> b d (h p) (w q)", p=p, q=q)
    return out if layer.bias is None else out + layer.bias[:, None, None]
