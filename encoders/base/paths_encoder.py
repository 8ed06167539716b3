"""The base classes of encoders of several input paths, such as whole images and tiles.

Each path is encoded alone, by its own tower or by one that all paths share (for images and
tiles of different sizes). The paths run one after another; their outputs are joined per item.

Shapes: P patches of all paths of an item, N tokens of all paths of an item, D tower width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from ..data import (
    PREFIX,
    EncoderOutput,
    GridLike,
    Metadata,
    Output,
    VisionInputs,
    output_like,
)
from ..layers.torch_internals import share_modules
from .block_records import check_names
from .encoder import Encoder
from .raster import maps_of_views
from .vision_encoder import VisionEncoder

if TYPE_CHECKING:
    from ..contract import Kernels, Precision, Preprocessor

Self = TypeVar("Self", bound="PathsEncoder")


class PathsEncoder(Encoder):
    """An :class:`Encoder` of several input paths, such as "image" and "tiles".

    Each path is a :class:`VisionEncoder`. Subclasses set ``config``, ``preprocessor`` and
    ``paths``, and ``join`` the outputs of the paths to one output per item.
    """

    paths: Mapping[str, VisionEncoder] = MappingProxyType({})
    """The paths by name, "image" first. Each is an encoder of its own: ``paths[name](pixel_values,
    grid_thw)`` takes what ``preprocess(...).paths[name]`` holds; a path has its own CUDA graphs."""

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Raise a ValueError: this encoder takes the result of ``preprocess``, not tensors."""
        raise self._bare_tensors_error("forward")

    def split_paths(
        self, outputs: Mapping[str, Output], inputs: VisionInputs
    ) -> list[dict[str, Output]]:
        """Split the batched outputs of the paths into the outputs of each item, as views.

        Args:
            outputs: the batched output of each path that an item uses, by the name of the path.
            inputs: the result of ``preprocess``.

        Returns:
            For each item the outputs of the paths that it uses, by the names of the paths.

        Raises:
            ValueError: an output has fewer rows than the grids of its path in ``inputs``.
        """
        items: list[dict[str, Output]] = [{} for _ in inputs.grid_thw]
        for name, output in outputs.items():
            _, grid_thw, numbers = inputs.paths[name]
            entries = self.paths[name].split(output, grid_thw)
            for item, entry in zip(numbers, entries, strict=True):
                items[item][name] = entry
        return items

    def _share_modules(self, tower: nn.Module, *, tensors: bool = False) -> None:
        """Take a tower's submodules as this module's own; with ``tensors``, its parameters, too."""
        share_modules(self, tower, tensors=tensors)

    def train(self: Self, mode: bool = True) -> Self:
        """Set ``training`` of this encoder, its paths and all layers; ``eval()`` calls it, too."""
        super().train(mode)
        for path in self.paths.values():  # not submodules, so torch skips them
            path.train(mode)
        return self

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks that encode whole images, ``paths["image"].blocks``."""
        return self.paths["image"].blocks

    @property
    def _named_blocks(self) -> dict[str, list[nn.Module]]:
        """The blocks that each path runs, by the beginning of the names of their outputs."""
        return {
            _with_path(path, stack): blocks
            for path, tower in self.paths.items()
            for stack, blocks in tower._named_blocks.items()
        }

    def with_extras(self: Self, names: Sequence[str]) -> Self:
        prefixed = [_with_path(path, "") for path, tower in self.paths.items() if tower.prefix_rows]
        check_names(names, self._named_blocks, prefixed)
        giving = copy.copy(self)  # the copy shares modules, parameters and hooks
        own: dict[str, list[str]] = {path: [] for path in self.paths}
        for name in names:
            path = next((path for path in self.paths if name.startswith(f"{path}.")), "image")
            own[path].append(name.removeprefix(_with_path(path, "")))
        giving.paths = {path: tower.with_extras(own[path]) for path, tower in self.paths.items()}
        return giving

    def accelerated(self: Self, kernels: Kernels = "auto", precision: Precision = "bf16") -> Self:
        accelerated = copy.copy(self)
        accelerated.paths = {
            name: path.accelerated(kernels, precision) for name, path in self.paths.items()
        }
        return accelerated

    def kernel_choices(self) -> dict[str, object]:
        return {name: path.kernel_choices() for name, path in self.paths.items()}

    def load_kernel_choices(self, choices: Mapping[str, object]) -> None:
        if choices.keys() != self.paths.keys():
            raise ValueError(
                f"kernel choices for {', '.join(map(str, choices))}: this encoder has the paths "
                f"{', '.join(self.paths)}"
            )
        for name, path in self.paths.items():
            if not isinstance(chosen := choices[name], Mapping):
                raise ValueError(
                    f"{chosen!r} are not kernel choices: pass the result of kernel_choices()"
                )
            path.load_kernel_choices(chosen)


def tilings_of(
    inputs: VisionInputs, tiles_alone: bool = False, clips: bool = False
) -> list[tuple[int, int]]:
    """Return the arrangement of the tiles of each item, (columns, rows).

    Args:
        inputs: inputs with the whole image of an item in the path "image", its tiles in "tiles".
        tiles_alone: whether an item without a whole image has its tiles in the path "image".
        clips: whether an item may have several frames, all tiled in the same way.

    Raises:
        ValueError: a path has another number of views of an item than ``inputs.tiles`` implies.
    """
    tilings = [tuple(tiling) for tiling in inputs.tiles or [(1, 1, False)] * len(inputs.grid_thw)]
    views = inputs.grid_thw[:, 0].tolist()
    counts = [0] * len(views)
    if "tiles" in inputs.paths:
        _, grid_thw, items = inputs.paths["tiles"]
        for item, (count, _, _) in zip(items, grid_thw.tolist(), strict=True):
            counts[item] = count
    items_found = zip(counts, views, tilings, strict=True)
    for item, (*view_counts, (columns, rows, tiled)) in enumerate(items_found):
        frames = views[item] if clips else 1
        image_views = columns * rows if tiles_alone else frames
        expected = [columns * rows * frames, frames] if tiled else [0, image_views]
        if view_counts != expected:
            raise ValueError(
                f"item {item} has {view_counts[0]} view{'s' * (view_counts[0] != 1)} in path "
                f"'tiles' and {view_counts[1]} in path 'image', and its tiles make {expected[0]} "
                f"and {expected[1]}: pass what preprocess returned, in its order"
            )
    return [(columns, rows) for columns, rows, _ in tilings]


def extras_of_paths(outputs: Mapping[str, Output]) -> dict[str, Tensor]:
    """Return the outputs of blocks of several paths, named as :meth:`Encoder.with_extras` does.

    Args:
        outputs: the output of each path by its name, such as "tiles".
    """
    return {
        _with_path(path, name): rows
        for path, output in outputs.items()
        for name, rows in output.extras.items()
        if name != PREFIX
    }


def _with_path(path: str, name: str) -> str:
    """Return the name of an output of an input path; "image" is not mentioned."""
    return name if path == "image" else f"{path}.{name}"


class TilesThenImage(PathsEncoder):
    """Encodes tiles and whole images with one tower; an item's tiles come first in its output.

    The path "image" has the whole image of each item. The path "tiles" has the tiles, row by row,
    of each item that is divided into tiles.

    Args:
        image: the tower for whole images.
        tiles: the same tower, with the same parameters and modules, for tiles.
        preprocessor: makes the inputs of both paths; None for the default of the family.
    """

    _tiles_alone = False
    """Whether an item may have tiles but no whole image; its tiles are then in the path "image"."""
    _image_first = False
    """Whether the rows of the whole image come before those of its tiles."""
    _takes_clips = False
    """Whether an item may be a clip: the rows of each frame come after those of the one before."""

    def __init__(
        self, image: VisionEncoder, tiles: VisionEncoder, preprocessor: Preprocessor | None
    ) -> None:
        super().__init__()
        self.config, self._preprocessor = image.config, preprocessor
        self._share_modules(image, tensors=True)
        self.paths = {"image": image, "tiles": tiles}

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Return one output per item: the rows of its tiles, then the rows of the whole image.

        Returns:
            Per item ``last_hidden_state`` [P, D], only the rows of patches, and ``pooler_output``
            [N, out].
        """
        self._tilings(inputs)
        results, order = [], ("image", "tiles") if self._image_first else ("tiles", "image")
        for parts, (views, _, _) in zip(
            self.split_paths(outputs, inputs), inputs.grid_thw.tolist(), strict=True
        ):
            frames = views if self._takes_clips else 1
            ordered = [parts[name] for name in order if name in parts]
            hidden = [x.last_hidden_state for x in ordered if x.last_hidden_state is not None]
            pooled = [x.pooler_output for x in ordered if x.pooler_output is not None]
            first = self.paths["image"].prefix_rows  # rows before it, such as class tokens, go
            patches = [x[:, first:].flatten(0, -2) for x in hidden]
            rows = _by_frame(patches, frames) if patches else None
            tokens = _by_frame(pooled, frames) if pooled else None
            prefixes = [part.extras[PREFIX] for part in ordered if PREFIX in part.extras]
            extras = extras_of_paths(parts)
            if prefixes:
                extras[PREFIX] = torch.cat(prefixes)
            deepstack = ordered[0].deepstack_features
            results.append(output_like(ordered[0], rows, tokens, deepstack, extras))
        return results

    def _check_inputs(self, inputs: VisionInputs) -> None:
        super()._check_inputs(inputs)
        self._tilings(inputs)

    def _tilings(self, inputs: VisionInputs) -> list[tuple[int, int]]:
        return tilings_of(inputs, self._tiles_alone, self._takes_clips)

    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Return the feature maps of each item by name: "image" and, if it has tiles, "tiles".

        A view of h*w patches or tokens makes [1, h, w, D]; tiles make [1, rows*h, columns*w, D].
        The maps of the frames of a clip are one tensor per name, [frames, ...].
        """
        return maps_of_views(
            *(features, self.paths, inputs, self._tilings(inputs)),
            image_first=self._image_first,
            clips=self._takes_clips,
        )


def _by_frame(parts: Sequence[Tensor], frames: int) -> Tensor:
    """Join the rows [n, D] of several views of an item, frame by frame."""
    if frames == 1 or len(parts) == 1:
        return torch.cat(list(parts))
    return torch.cat([part.unflatten(0, (frames, -1)) for part in parts], 1).flatten(0, 1)
