"""What can be read off the features of each block: a nearest-neighbour vote, and a linear probe.

scikit-learn scores both by cross-validation, in which every image is tested once.

Shapes: n images, D width of a tower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from encoders import Encoder
from encoders.base.intermediates import block_indices
from encoders.contract import Limits
from encoders.inputs import ImageLike
from encoders.streams import Progress

from ..packages import require_sklearn

IMAGES_AT_ONCE = 8
"""The number of images in one call of an encoder."""
NORMAL_95 = 1.96
"""The standard normal quantile of a two-sided interval of 95 %."""


class Accuracy(NamedTuple):
    """The share of images that were classified correctly, with its 95 % interval (Wilson)."""

    value: float
    low: float
    high: float


class BlockScores(NamedTuple):
    """The accuracy with which the classes of images are read off the features of one block."""

    block: int
    neighbours: Accuracy
    """Of a vote of the nearest images, by the cosine of their features."""
    probe: Accuracy
    """Of a logistic regression on standardised features."""


def probe_blocks(
    encoder: Encoder,
    images: Sequence[ImageLike],
    labels: Sequence[object],
    *,
    blocks: int | Sequence[int] | None = None,
    folds: int = 5,
    neighbours: int = 5,
    seed: int = 0,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_tiles: int | None = None,
    max_soft_tokens: int | None = None,
    progress: bool = True,
) -> list[BlockScores]:
    """Measure how well the classes of images can be read off after each block.

    The vector of an image is the mean over its patches. It is classified by its nearest neighbours
    and by a linear probe (logistic regression), in a stratified cross-validation. The interval
    covers the choice of the images, not that of the folds.

    Args:
        encoder: an encoder; with several input paths, only "image" counts.
        images: as ``preprocess`` takes them, in a list.
        labels: the class of each image.
        blocks: n for the last n blocks, numbers (negatives from the end), None for all.
        folds: the number of parts of the cross-validation; each class has at least as many images.
        neighbours: the number of images that vote.
        seed: determines the folds.
        min_pixels, ..., max_soft_tokens: as ``preprocess`` takes them.
        progress: whether a progress bar shows how many images are done.

    Returns:
        The accuracies of each block, in the order of ``blocks``.

    Raises:
        ValueError: scikit-learn is missing, labels and images differ in number, there are fewer
            than two classes, a class has fewer images than folds, or a block does not exist.
    """
    require_sklearn()
    if len(images) != len(labels):
        raise ValueError(f"{len(labels)} labels for {len(images)} images: pass one each")
    check_classes(labels, folds)
    limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens)
    numbers = block_indices(blocks, encoder.paths["image"].config.depth)
    vectors = vectors_of_blocks(encoder, images, numbers, limits, progress)
    return [
        score_vectors(number, rows, labels, folds=folds, neighbours=neighbours, seed=seed)
        for number, rows in zip(numbers, vectors, strict=True)
    ]


def check_classes(labels: Sequence[object], folds: int) -> None:
    """Check that images of several classes can be divided into folds.

    Raises:
        ValueError: fewer than two folds or classes, or a class with fewer images than folds.
    """
    if folds < 2:
        raise ValueError(f"folds={folds}: must be at least 2")
    counts = Counter(labels)
    if len(counts) < 2:
        raise ValueError(f"there is {len(counts)} class: a probe needs images of at least two")
    name, fewest = min(counts.items(), key=lambda entry: entry[1])
    if fewest < folds:
        raise ValueError(
            f"class {name}: has {fewest} images, fewer than {folds} folds; add images, or take "
            "fewer folds"
        )


@torch.no_grad()
def vectors_of_blocks(
    encoder: Encoder,
    images: Sequence[ImageLike],
    blocks: Sequence[int],
    limits: Limits,
    progress: bool = True,
) -> list[Tensor]:
    """Return the mean over the patches of each image after each block, [n, D] per block.

    Args:
        encoder: an encoder; with several input paths, only "image" counts.
        images: as ``preprocess`` takes them.
        blocks: block numbers.
        limits: the keywords of ``preprocess``.
        progress: whether a progress bar shows how many images are done.

    Returns:
        Per block the vectors in float64 on the CPU.
    """
    vectors: list[list[Tensor]] = [[] for _ in blocks]
    with Progress(len(images), progress) as bar:
        for start in range(0, len(images), IMAGES_AT_ONCE):
            part = images[start : start + IMAGES_AT_ONCE]
            inputs = encoder.preprocess(part, **limits._asdict())
            states = encoder.forward_intermediates(inputs, indices=blocks, output_fmt="NCHW")
            for kept, maps in zip(vectors, states["image"], strict=True):
                kept += [features.double().mean((0, 2, 3)).cpu() for features in maps]
            for _ in part:
                bar.update()
    return [torch.stack(rows) for rows in vectors]


def score_vectors(
    block: int,
    vectors: Tensor,
    labels: Sequence[object],
    *,
    folds: int,
    neighbours: int,
    seed: int,
) -> BlockScores:
    """Return the accuracies on vectors [n, D] of one block; see :func:`probe_blocks`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    names = np.array([str(label) for label in labels])
    parts = StratifiedKFold(folds, shuffle=True, random_state=seed)
    count = min(neighbours, len(names) - -(-len(names) // folds))
    models = (
        KNeighborsClassifier(count, metric="cosine"),
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000)),
    )
    found = [cross_val_predict(model, vectors.numpy(), names, cv=parts) for model in models]
    scores = [interval(int((predicted == names).sum()), len(names)) for predicted in found]
    return BlockScores(block, *scores)


def interval(correct: int, count: int) -> Accuracy:
    """Return the share of correct ones with its 95 % interval of Wilson (1927)."""
    share, z = correct / count, NORMAL_95
    middle = share + z**2 / (2 * count)
    half = z * sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    low, high = (middle - half) / scale, (middle + half) / scale
    return Accuracy(share, min(max(low, 0.0), share), max(min(high, 1.0), share))
