"""The pixels and grids in the output of a Hugging Face processor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def pixels_and_grid(features: Mapping[str, object]) -> tuple[Tensor, Tensor]:
    """Return the pixels and the grids of a processor's output, images first, then videos.

    Args:
        features: the output of the processor, a mapping with ``pixel_values`` and
            ``image_grid_thw``, or ``pixel_values_videos`` and ``video_grid_thw``, or all four.

    Returns:
        The pixels, one flattened patch per row, and int64 [items, 3] on the CPU.

    Raises:
        ValueError: ``features`` have neither pair of pixels and grid, or half of a pair.
    """
    if not isinstance(features, Mapping):
        raise ValueError(
            f"the processor gave a {type(features).__name__}: pass its output, which has "
            "pixel_values and image_grid_thw, or pixel_values_videos and video_grid_thw"
        )
    pairs = []
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grid = f"{kind}_grid_thw"
        are_given = [features.get(name) is not None for name in (pixels, grid)]
        if all(are_given):
            rows = torch.as_tensor(features[pixels]).flatten(1)  # Kimi's are [P, 3, p, p]
            pairs.append((rows, torch.as_tensor(features[grid])))
        elif any(are_given):
            present, missing = (pixels, grid) if are_given[0] else (grid, pixels)
            raise ValueError(f"the processor gave {present} without {missing}: pass both")
    if not pairs:
        raise ValueError(
            f"the processor gave {sorted(features)}: pass the output that has pixel_values "
            "and image_grid_thw, or pixel_values_videos and video_grid_thw"
        )
    pixel_rows, grids = zip(*pairs, strict=True)
    return torch.cat(pixel_rows), torch.cat(grids).to("cpu", torch.int64)
