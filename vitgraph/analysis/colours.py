"""The colours of feature maps: three principal components as red, green and blue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Maps: TypeAlias = Sequence[Tensor] | Sequence[Mapping[str, Tensor]]
"""The feature maps of images: per image a map [t, h, w, D], or a dict with a map per input path of
the encoder ("image", "tiles")."""


def feature_rgb(maps: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Colour feature maps by their first three principal components, fitted over all maps at once.

    Equal colours therefore mean similar features, within a map and from one map to another.
    Principal components of two encoders are unrelated, so the same object has other colours in
    each. With ``like``, the three components are rotated until the colours agree best with those in
    ``like``.

    Args:
        maps: each [t, h, w, D], as ``encoder.feature_maps`` returns them.
        like: colours [t', h', w', 3] that this function returned for another encoder's maps of the
            same pictures, one per map; None for no rotation.

    Returns:
        One float32 [t, h, w, 3] per map, from 0 to 1, on the CPU; grey where all patches are equal,
        as in a single patch.

    Raises:
        ValueError: there is no map, maps differ in their width D, are not [t, h, w, D] or not
            finite, or ``like`` has another number of maps.
    """
    require_maps(maps)
    flat = [features.detach().float().cpu().flatten(0, -2) for features in maps]
    components = principal_components(torch.cat(flat), 3)
    if like is not None:
        if len(like) != len(maps):
            raise ValueError(f"like: {len(like)} coloured maps for {len(maps)}; pass one per map")
        grids = [(len(m), m.shape[1], m.shape[2]) for m in maps]
        target = torch.cat(list(map(_resample, like, grids)))
        components = rotate_to(components, target)
    low, high = components.quantile(torch.tensor([0.01, 0.99]), dim=0)
    spread = high - low
    colours = (components - low) / spread.clamp(min=1e-12) + 0.5 * (spread == 0)
    colours = colours.clamp(0, 1)
    parts = colours.split([len(rows) for rows in flat])
    return [part.view(*m.shape[:-1], 3) for part, m in zip(parts, maps, strict=True)]


def _resample(colours: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Resample a grid of colours to another size by averaging the colours in each new cell."""
    volume = torch.nn.functional.adaptive_avg_pool3d(colours.movedim(-1, 0), shape)
    return volume.flatten(1).T


def principal_components(rows: Tensor, count: int) -> Tensor:
    """Return the coordinates [P, count] of ``rows`` [P, D] along the axes of largest variance.

    Every feature is first brought to unit variance; otherwise the few outlier channels of vision
    transformers would dominate the result. The sign is fixed (largest loading positive), so the
    same features always give the same colours.
    """
    centred = rows - rows.mean(dim=0)
    centred = centred / centred.std(dim=0, correction=0).clamp(min=1e-12)
    eigen = torch.linalg.eigh(centred.T @ centred)
    axes: Tensor = eigen.eigenvectors[:, -count:].flip(1)
    strongest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    return centred @ (axes * strongest.sign())


def rotate_to(rows: Tensor, target: Tensor) -> Tensor:
    """Rotate principal components so that they agree best with a target (orthogonal Procrustes).

    Args:
        rows: [P, k], k uncorrelated columns; each is first brought to mean 0 and variance 1.
        target: [P, k].

    Returns:
        [P, k], the product of the standardised rows and an orthogonal k x k matrix.
    """
    rows = (rows - rows.mean(dim=0)) / rows.std(dim=0, correction=0).clamp(min=1e-12)
    left, _, right = torch.linalg.svd(rows.T @ (target - target.mean(dim=0)))
    rotation: Tensor = left @ right
    return rows @ rotation


def require_maps(maps: Sequence[Tensor]) -> None:
    """Check that there is a map, that all are of one width D, and each with :func:`require_map`.

    Raises:
        ValueError: no map, maps of several widths, or no map [t, h, w, D] of finite values.
    """
    for features in maps:
        require_map(features)
    widths = [features.shape[-1] for features in maps]
    if len(set(widths)) != 1:
        raise ValueError(f"maps of widths {widths}: pass at least one, all of one width")


def require_map(features: object) -> None:
    """Check that ``features`` is a map [t, h, w, D] that can be coloured: finite and with D >= 3.

    Raises:
        ValueError: another type or shape, or a value that is NaN or infinite.
    """
    if not isinstance(features, Tensor):
        raise ValueError(
            f"{type(features).__name__} where a map belongs: pass the images first, then their "
            "maps [t, h, w, D], as encoder.feature_maps gives them"
        )
    if features.ndim != 4 or features.shape[-1] < 3:
        raise ValueError(
            f"map of shape {tuple(features.shape)}: pass maps [t, h, w, D] with D >= 3, as "
            "encoder.feature_maps gives them"
        )
    if bad_values := int((~features.isfinite()).sum()):
        raise ValueError(
            f"map of shape {tuple(features.shape)} has NaN or infinite values ({bad_values}): all "
            "must be finite; encode in float32 or bfloat16, since float16 overflows at 65504"
        )
