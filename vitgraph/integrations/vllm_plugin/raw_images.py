"""Resizes, normalises and cuts whole images in vLLM's engine process, to the bit of its processor.

vLLM is not imported here. ``raw_processor`` sends what is read here: the bytes of all images of a
batch in one uint8 tensor, and a row of integers per image.

Shapes: I images, P patches.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from encoders.inputs import cut_frames, is_exact_on, normalize, resize

from . import LOGGER

IMAGE, NORM = "vitgraph_image", "vitgraph_norm"
"""The names of what is sent beside the bytes of images: a row of integers per image (int64 [I, 7]),
and mean and standard deviation as the bits of float32 (int32 [I, 2, 3]; vLLM rounds floats)."""


def describe_sizes(
    images: Sequence[Tensor],
    targets: Sequence[tuple[int, int]],
    patch_size: int,
    merge_size: int,
    frames: int,
) -> Tensor:
    """Return the entry :data:`IMAGE` for images [3, H, W].

    Args:
        images: the images as they are sent.
        targets: height and width in pixels to which each is resized.
        patch_size: side of a patch in pixels.
        merge_size: side of a token in patches.
        frames: frames of a patch; an image is repeated.
    """
    sizes = (patch_size, merge_size, frames)
    rows = zip(images, targets, strict=True)
    return torch.tensor([[*image.shape[1:], *target, *sizes] for image, target in rows])


def describe_norm(mean: object, std: object, count: int) -> Tensor:
    """Return the entry :data:`NORM` for ``count`` images.

    Args:
        mean: mean of each channel, of pixels from 0 to 1.
        std: standard deviation of each channel, of pixels from 0 to 1.
        count: number of images.
    """
    bits = torch.tensor([mean, std], dtype=torch.float32).view(torch.int32)
    return bits[None].expand(count, -1, -1)


def with_patches(inputs: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Return a batch of vLLM with patches in place of images that were sent as bytes.

    Other batches are returned as they are.

    Args:
        inputs: the inputs of a batch by their names in vLLM.
        dtype: dtype of normalised patches, which is that of vLLM's model.
    """
    made = dict(inputs)
    sizes, norms, pixels = made.pop(IMAGE, None), made.pop(NORM, None), made.get("pixel_values")
    if isinstance(sizes, Tensor) and isinstance(pixels, Tensor):
        made["pixel_values"] = cut_images(pixels, sizes, norms, dtype)
    return made


def cut_images(pixels: Tensor, sizes: Tensor, norms: object, dtype: torch.dtype) -> Tensor:
    """Resize and cut images on the device of their bytes, and normalise them if asked.

    Args:
        pixels: the bytes of I images, [H, W, 3] each, flat.
        sizes: the entry :data:`IMAGE` of the images.
        norms: the entry :data:`NORM`; without it patches stay uint8, and vLLM normalises them.
        dtype: dtype of normalised patches.

    Returns:
        [P, 3 * frames * patch_size * patch_size].
    """
    described = sizes.tolist()
    parts = pixels.split([3 * height * width for height, width, *_ in described])
    rows = []
    for number, (part, row) in enumerate(zip(parts, described, strict=True)):
        height, width, new_height, new_width, patch, merge, frames = row
        image = part.view(height, width, 3).permute(2, 0, 1)
        resized = resize(image, new_height, new_width).permute(1, 2, 0)[None]
        cells = cut_frames(resized[None], patch, merge, frames)
        if isinstance(norms, Tensor):
            (r, g, b), (s, t, u) = norms[number].contiguous().view(torch.float32).tolist()
            cells = normalize(cells, (r, g, b), (s, t, u)).to(dtype)
        rows.append(cells.flatten(1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def check_resizing(device: torch.device) -> None:
    """Log one line if images are resized on the CPU because the kernel differs on ``device``."""
    if device.type != "cuda":
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_exact_on(device)
    for warning in caught:
        LOGGER.warning("vitgraph: %s", warning.message)
