"""Similarity of the features of two blocks: linear CKA with the unbiased estimator of HSIC.

Sources: Kornblith et al. 2019 (arXiv 1905.00414) for centred kernel alignment; Song et al. 2012
(Journal of Machine Learning Research 13, equation 5) for the estimator; Nguyen et al. 2021 (arXiv
2010.15327) for its mean over batches.

Shapes: L layers (blocks) of a tower and L' of another, n samples, D width of a tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from encoders import Encoder
from encoders.inputs import read_images
from encoders.streams import ImagesLike, Progress

FEWEST = 4
"""The fewest samples (n) that can be compared, because the estimator of HSIC divides by n - 3."""
NUMBERS_AT_ONCE = 1 << 24
"""The most values of n x n kernel matrices in memory at a time: 128 MiB of float64."""


@torch.no_grad()
def similarity_of_blocks(
    a: Encoder,
    b: Encoder,
    images: ImagesLike,
    *,
    samples: Literal["images", "patches"] = "images",
    progress: bool = True,
) -> Tensor:
    """Compare every block of one tower with every block of another, by linear CKA.

    1 means that the features of two blocks are equal up to a rotation and a scale, 0 that they have
    nothing in common. The estimator is unbiased, so values of unrelated blocks lie around 0 and may
    be negative. The images are encoded one by one; only the mean features of an image's patches
    stay in memory, or with ``samples="patches"`` only its contribution to the average.

    Args:
        a: an encoder.
        b: another encoder, or ``a`` again to compare its blocks with one another.
        images: at least 4 images, or 1 with ``samples="patches"``, as ``preprocess`` takes them;
            hundreds give a stable result.
        samples: "images": each image is one sample, the mean over its patches (of several input
            paths, such as "image" and "tiles", only "image" counts). "patches": each patch is a
            sample, and the estimates of all images are averaged; ``a`` must be ``b``.
        progress: whether a progress bar shows how many images are done.

    Returns:
        CKA [L, L'] in float64 on the CPU; NaN for a block whose samples are all equal.

    Raises:
        ValueError: fewer than 4 samples, an unknown ``samples``, or "patches" of two encoders.
    """
    if samples not in ("images", "patches"):
        raise ValueError(f'samples={samples!r}: must be "images" or "patches"')
    if samples == "patches" and a is not b:
        raise ValueError(
            "samples='patches' compares the blocks of one encoder, whose patches are the same "
            "places: pass it twice, or samples='images'"
        )
    pixels = read_images(images)
    fewest = FEWEST if samples == "images" else 1
    if len(pixels) < fewest:
        raise ValueError(f"{len(pixels)} images: {_needs(fewest)}; pass more of them")
    towers = [a] if a is b else [a, b]
    tower_means: list[list[list[Tensor]]] = [[] for _ in towers]
    total = torch.zeros((), dtype=torch.float64)
    with Progress(len(pixels), progress) as bar:
        for image in pixels:
            for means, tower in zip(tower_means, towers, strict=True):
                states = _patches_of_blocks(tower, image)
                if samples == "patches":
                    total = total + _hsic(states) / len(pixels)
                else:
                    means.append([state.mean(0) for state in states])
            bar.update()
    if samples == "patches":
        return _cka(total)
    stacked = [[torch.stack(block) for block in zip(*means, strict=True)] for means in tower_means]
    return cka_of_vectors(stacked[0], stacked[-1])


def cka_of_vectors(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return linear CKA between the blocks of two towers, from one vector per image.

    Args:
        a: the vectors [n, D] after each block of a tower, in float64.
        b: the vectors [n, D'] after each block of another, of the same images.

    Returns:
        CKA [L, L'] in float64.

    Raises:
        ValueError: fewer than 4 images.
    """
    if len(a[0]) < FEWEST:
        raise ValueError(f"{len(a[0])} images: {_needs(FEWEST)}; pass more of them")
    if a is b:
        return _cka(_hsic(a))
    return _cka(_hsic([*a, *b]))[: len(a), len(a) :]


def _needs(fewest: int) -> str:
    return f"CKA needs at least {fewest}"


def _cka(hsic: Tensor) -> Tensor:
    """Normalise the HSIC of every pair of blocks."""
    return hsic / torch.outer(hsic.diagonal(), hsic.diagonal()).clamp(min=0).sqrt()


def _patches_of_blocks(encoder: Encoder, image: Tensor) -> list[Tensor]:
    """Return the features of an image after each block, in float64 on the CPU."""
    inputs = encoder.preprocess([image])
    states = encoder.forward_intermediates(inputs, output_fmt="NCHW")["image"]
    return [maps.movedim(1, -1).flatten(0, 2).double().cpu() for (maps,) in states]


def _hsic(features: Sequence[Tensor]) -> Tensor:
    """Estimate the HSIC of every pair of L feature matrices, without bias, from linear kernels."""
    count = len(features[0])
    if count < FEWEST:
        raise ValueError(f"an image of {count} patches: {_needs(FEWEST)}; pass larger images")
    # Subtracting the mean sample does not change HSIC, and makes rounding errors smaller.
    centred = [rows - rows.mean(0) for rows in features]
    sums = torch.zeros(len(centred), count, dtype=torch.float64)
    products = torch.zeros(len(centred), len(centred), dtype=torch.float64)
    step = max(NUMBERS_AT_ONCE // (count * len(centred)), 1)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        kernels = torch.stack([rows[part] @ rows.T for rows in centred])
        kernels[:, torch.arange(part.stop - start), torch.arange(start, part.stop)] = 0
        sums[:, part] = kernels.sum(2)
        products += kernels.flatten(1) @ kernels.flatten(1).T
    together = torch.outer(sums.sum(1), sums.sum(1)) / ((count - 1) * (count - 2))
    rows = 2 * sums @ sums.T / (count - 2)
    return (products + together - rows) / (count * (count - 3))
