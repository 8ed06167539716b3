"""The base classes of encoders that take several inputs per item, each by a path of its own.

A path is a single-path encoder: a view of one tower for tiles of another size, or another tower.
The paths run one after another, and their outputs are joined per item.

Shapes: P patches of all paths of an item, N tokens of all paths of an item, D tower width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from ..contract import (
    EncoderOutput,
    GridLike,
    Metadata,
    Output,
    VisionInputs,
)
from .encoder import Encoder
from .vision_encoder import VisionEncoder

Self = TypeVar("Self", bound="PathsEncoder")


class PathPreprocessor:
    """The preprocessor of a tower that is one path of an encoder: it says whose to call."""

    def __call__(
        self,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VisionInputs:
        """Raise a ValueError: one path alone cannot prepare an item."""
        raise ValueError(
            "this is one path of an encoder: call preprocess or encode of the encoder that has it "
            "in paths, whose inputs.paths[name] this path takes"
        )

    def with_files(
        self, files: Mapping[str, Any], error: Callable[[str], ValueError] = ValueError
    ) -> PathPreprocessor:
        """Return this preprocessor, which nothing in a file changes."""
        return self


class PathsEncoder(Encoder):
    """An encoder of several inputs per item.

    Subclasses set ``config``, ``preprocessor`` and ``paths``, and say how outputs are joined.
    """

    paths: Mapping[str, VisionEncoder] = MappingProxyType({})
    """The paths by name, "image" first. Each is an encoder of its own: ``paths[name](pixel_values,
    grid_thw)`` takes what ``preprocess(...).paths[name]`` holds, and CUDA graphs capture a path."""

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Raise a ValueError: tensors belong to one path, and a call takes whole inputs.

        Args:
            pixel_values: of one path.
            grid_thw: of one path.
            encoder_metadata: of one path.

        Raises:
            ValueError: always.
        """
        raise self._one_path_is_meant("encoder", "forward")

    def _maps_of_grids(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        raise self._one_path_is_meant("encoder.feature_maps", "feature_maps")

    def _states_of_blocks(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike,
        indices: int | Sequence[int] | None,
        output_fmt: str,
    ) -> list[Tensor] | list[list[Tensor]]:
        raise self._one_path_is_meant("encoder.forward_intermediates", "forward_intermediates")

    def _one_path_is_meant(self, call: str, method: str) -> ValueError:
        """The error for tensors or a grid, which belong to one path."""
        given = "features, inputs" if method == "feature_maps" else "inputs"
        one = "" if method == "forward" else f".{method}"
        return ValueError(
            f"{type(self).__name__} has the paths {', '.join(self.paths)}, and tensors do not say "
            f"which is meant: call {call}({given}) with inputs = encoder.preprocess(..), or one "
            f"path: encoder.paths[name]{one}(..)"
        )

    def split_paths(
        self, outputs: Mapping[str, Output], inputs: VisionInputs
    ) -> list[dict[str, Output]]:
        """Cut the outputs of the paths into those of each item, as views.

        Args:
            outputs: of the paths, as ``join`` takes them.
            inputs: what ``preprocess`` returned.

        Returns:
            For each item the outputs of the paths that it uses, by the names of the paths.

        Raises:
            ValueError: entries that cannot be assigned to items.
        """
        items: list[dict[str, Output]] = [{} for _ in inputs.grid_thw]
        for name, output in outputs.items():
            _, grid_thw, numbers = inputs.paths[name]
            entries = self.paths[name].split(output, grid_thw)
            for item, entry in zip(numbers, entries, strict=True):
                items[item][name] = entry
        return items

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the path "image"."""
        return self.paths["image"].blocks

    def accelerated(self: Self, kernels: str = "auto", precision: str = "bf16") -> Self:
        """See :meth:`encoders.Encoder.accelerated`: each path has kernels for its own shapes."""
        view = copy.copy(self)
        view.paths = {
            name: path.accelerated(kernels, precision) for name, path in self.paths.items()
        }
        return view


def tilings_of(inputs: VisionInputs) -> list[tuple[int, int]]:
    """Return how the views of the path "tiles" lie, as (columns, rows) of each item.

    The path "image" has one view of every item.

    Raises:
        ValueError: ``tiles`` says something else of an item than the path "tiles" holds of it, or
            the path "image" has several views of an item.
    """
    if any(count != 1 for count in inputs.grid_thw[:, 0].tolist()):
        raise ValueError(
            f"grid_thw {inputs.grid_thw.tolist()} has items of several views in path 'image', "
            "which takes one view of each: pass what preprocess returned"
        )
    counts = [0] * len(inputs.grid_thw)
    if "tiles" in inputs.paths:
        _, grid_thw, items = inputs.paths["tiles"]
        for item, (count, _, _) in zip(items, grid_thw.tolist(), strict=True):
            counts[item] = count
    tilings = [tuple(tiling) for tiling in inputs.tiles or [(1, 1, False)] * len(counts)]
    for item, (count, (columns, rows, tiled)) in enumerate(zip(counts, tilings, strict=True)):
        if count != (columns * rows if tiled else 0):
            said = f"{columns}x{rows}" if tiled else "none"
            raise ValueError(
                f"item {item} has {count} view{'s' * (count != 1)} in path 'tiles', and by tiles "
                f"its number is {said}: pass what preprocess returned, in its order"
            )
    return [(columns, rows) for columns, rows, _ in tilings]
