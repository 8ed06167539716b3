"""Find the nearest patches across photographs, in the features of one tower or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .colours import Maps, require_maps


class NearestPatch(NamedTuple):
    """A patch whose features are similar to those of a chosen patch of another photograph.

    ``photograph`` is the index of the photograph that the found patch lies in, ``row`` and
    ``column`` are the patch's place in the grid of patches, all from 0.
    """

    photograph: int
    row: int
    column: int
    cosine: float
    """The cosine between the features of the two patches, after the mean of all patches is
    subtracted.
    """


@overload
def nearest_patches(
    maps: Maps, points: Sequence[tuple[float, float]], *, source: int = 0, top: int = 1
) -> list[list[NearestPatch]]: ...


@overload
def nearest_patches(
    maps: Mapping[str, Maps],
    points: Sequence[tuple[float, float]],
    *,
    source: int = 0,
    top: int = 1,
) -> dict[str, list[list[NearestPatch]]]: ...


def nearest_patches(
    maps: Maps | Mapping[str, Maps],
    points: Sequence[tuple[float, float]],
    *,
    source: int = 0,
    top: int = 1,
) -> list[list[NearestPatch]] | dict[str, list[list[NearestPatch]]]:
    """For points in one photograph, find the most similar patches of the other photographs.

    Several towers are searched one by one, since features of different towers cannot be compared.
    The points are fractions of the photograph's height and width, so they fit every tower.

    Args:
        maps: one map [t, h, w, D] per photograph, as ``encoder.feature_maps`` returns them. If an
            encoder has several input paths, the map is a dict, of which "image" is used. For
            several towers, a dict: name of a tower -> its list of maps.
        points: (y, x) from 0 at the top left to 1, as fractions of the height and the width.
        source: index of the photograph that the points lie in, from 0.
        top: number of matches per point.

    Returns:
        For each point, a list of ``top`` matches in the other photographs, the best first; for
        several towers, a dict of the towers' results. Only the middle time step of a video counts.

    Raises:
        ValueError: fewer than two photographs, a source or point that does not exist, or maps that
            differ in their width D, are not [t, h, w, D] or not finite.
    """
    if isinstance(maps, Mapping):
        return {
            name: nearest_patches(column, points, source=source, top=top)
            for name, column in maps.items()
        }
    image_maps = [
        item_maps["image"] if isinstance(item_maps, Mapping) else item_maps for item_maps in maps
    ]
    require_maps(image_maps)
    if len(image_maps) < 2 or not 0 <= source < len(image_maps) or top < 1:
        raise ValueError(
            f"{len(image_maps)} maps, source={source}, top={top}: pass at least two maps, the "
            "number of one of them, and at least one match per point"
        )
    frames = [features[len(features) // 2].float().cpu() for features in image_maps]
    mean = torch.cat([frame.flatten(0, 1) for frame in frames]).mean(0)
    queries = normalize(_rows_at(frames[source], points) - mean)
    all_matches: list[list[NearestPatch]] = [[] for _ in queries]
    for number, frame in enumerate(frames):
        if number == source:
            continue
        width = frame.shape[1]
        cosines = queries @ normalize(frame.flatten(0, 1) - mean).T
        best = cosines.topk(min(top, cosines.shape[1]))
        for matches, *line in zip(
            all_matches, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            matches += [
                NearestPatch(number, index // width, index % width, cosine)
                for index, cosine in zip(*line, strict=True)
            ]
    return [sorted(matches, key=lambda match: -match.cosine)[:top] for matches in all_matches]


def _rows_at(frame: Tensor, points: Sequence[tuple[float, float]]) -> Tensor:
    """Return the features [points, D] of the patches of one map that contain the points."""
    height, width, _ = frame.shape
    for y, x in points:
        if not (0 <= y <= 1 and 0 <= x <= 1):
            raise ValueError(
                f"point ({y}, {x}): must be fractions of the height and the width, from 0 to 1"
            )
    rows = [min(int(y * height), height - 1) for y, _ in points]
    columns = [min(int(x * width), width - 1) for _, x in points]
    return frame[rows, columns]
