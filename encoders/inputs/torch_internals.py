"""Private functions of torch, each with the reason why no public one can be used."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

import torch
from torch import Tensor


def empty_images(sizes: Sequence[tuple[int, int]], device: torch.device) -> Sequence[Tensor]:
    """Return memory for images, in one tensor; each begins at a multiple of 256 bytes.

    Each call of torch lets other threads take Python's lock, and ``torch.empty`` or ``Tensor.view``
    would be called once per image.

    Args:
        sizes: the height and width of each in pixels.
        device: the device of the images.

    Returns:
        uint8 [H, W, 3] for each size, contiguous.
    """
    if len(sizes) == 1:
        return [torch.empty(*sizes[0], 3, dtype=torch.uint8, device=device)]
    parts = [part for size in sizes for part in _image_and_gap(*size)]
    whole = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device=device)
    return torch._C._nn.unflatten_dense_tensors(whole, parts)[::2]


def copy_together(targets: tuple[Tensor, ...], sources: list[Tensor]) -> None:
    """Copy tensors of one dtype on the CPU, by torch's threads.

    Other threads wait for Python's lock once, and not once per tensor. One thread calls torch for
    all: it makes as many threads as there are cores for each thread that computes with it.
    """
    if torch.get_num_threads() == 1:
        torch._foreach_copy_(targets, sources)
    else:
        _copier().submit(torch._foreach_copy_, targets, sources).result()


@cache
def _copier() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="copies")


@lru_cache(maxsize=4096)
def _image_and_gap(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return tensors without memory that have the shapes of an image and of the gap after it."""
    image = torch.empty(height, width, 3, dtype=torch.uint8, device="meta")
    return image, torch.empty(-image.numel() % 256, dtype=torch.uint8, device="meta")
