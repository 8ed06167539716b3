"""Methods of all encoders for feature maps and block outputs; P patches, D tower width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, cast, overload

from torch import Tensor, nn

from ..data import FeatureRows, GridLike, Tiling, VisionInputs
from .intermediates import BlockTower, check_arguments, rows_of_all, states_of_blocks


class MapsFeatures(nn.Module, ABC):
    """Base class that gives encoders ``feature_maps`` and ``forward_intermediates``."""

    @property
    @abstractmethod
    def paths(self) -> Mapping[str, BlockTower]:
        """The encoder of each input path by name: "image" first, then for example "tiles"."""

    def _check_inputs(self, inputs: VisionInputs) -> None:
        """Raise a ValueError unless ``inputs`` have the input paths that this encoder has."""
        inputs.check(self.paths)

    def _maps_of_grids(
        self, features: Tensor, grid_thw: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]:
        """Return one map [t, h, w, D] per item from the rows of all items of one input path.

        With ``tiles``, (columns, rows, thumbnail) per item, tiles are stitched to one map.
        """
        raise self._bare_tensors_error("feature_maps")

    def _bare_tensors_error(self, method: str) -> ValueError:
        """Return the error that ``method`` raises for tensors if there are several input paths."""
        dotted = "" if method == "forward" else f".{method}"
        arguments = "features, inputs" if method == "feature_maps" else "inputs"
        return ValueError(
            f"{type(self).__name__} has the paths {', '.join(self.paths)}, and tensors do not say "
            f"which is meant: call encoder{dotted}({arguments}) with inputs = "
            f"encoder.preprocess(..), or one path: encoder.paths[name]{dotted}(..)"
        )

    @abstractmethod
    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Return for each item a dict of maps [t, h, w, D] by the name of the input path.

        ``features`` are ``last_hidden_state`` or ``pooler_output`` of all items of ``inputs``.
        """

    @overload
    def feature_maps(
        self, features: FeatureRows, inputs: VisionInputs
    ) -> list[dict[str, Tensor]]: ...
    @overload
    def feature_maps(
        self, features: Tensor, inputs: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]: ...

    def feature_maps(
        self,
        features: FeatureRows,
        inputs: VisionInputs | GridLike,
        tiles: Sequence[Tiling] | None = None,
    ) -> list[dict[str, Tensor]] | list[Tensor]:
        """Arrange features in space: the maps [t, h, w, D] of each item in raster order.

        Args:
            features: ``last_hidden_state``, ``pooler_output`` or a DeepStack feature of all items
                in one tensor, or a list with one per item. If it is a list of outputs, as
                ``encoder(inputs)`` returns it, ``last_hidden_state`` is used.
            inputs: the result of ``preprocess``, whose grids and ``tiles`` are read. An encoder of
                one input path also takes ``grid_thw`` [items, 3].
            tiles: (columns, rows, thumbnail) per item, only with a ``grid_thw``: tiles to stitch.

        Returns:
            For each item a dict of maps by input path, such as "image" and "tiles"; tiles are
            stitched, thumbnails and class tokens are left out. With a ``grid_thw``, a list with one
            map per item.

        Raises:
            ValueError: ``features`` are no tensors, or do not have the rows of ``inputs``.
        """
        if isinstance(inputs, VisionInputs):
            if tiles is not None:
                raise ValueError("tiles was given with the result of preprocess: leave it out")
            self._check_inputs(inputs)
            return self._maps_of_items(rows_of_all(features), inputs)
        return self._maps_of_grids(rows_of_all(features), inputs, tiles)

    @overload
    def forward_intermediates(
        self,
        pixel_values: VisionInputs,
        *,
        indices: int | Sequence[int] | None = None,
        output_fmt: Literal["NLC"] = "NLC",
    ) -> dict[str, list[Tensor]]: ...
    @overload
    def forward_intermediates(
        self,
        pixel_values: VisionInputs,
        *,
        indices: int | Sequence[int] | None = None,
        output_fmt: Literal["NCHW"],
    ) -> dict[str, list[list[Tensor]]]: ...
    @overload
    def forward_intermediates(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike,
        indices: int | Sequence[int] | None = None,
        output_fmt: Literal["NLC"] = "NLC",
    ) -> list[Tensor]: ...
    @overload
    def forward_intermediates(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike,
        indices: int | Sequence[int] | None = None,
        *,
        output_fmt: Literal["NCHW"],
    ) -> list[list[Tensor]]: ...

    def forward_intermediates(
        self,
        pixel_values: Tensor | VisionInputs,
        grid_thw: GridLike | None = None,
        indices: int | Sequence[int] | None = None,
        output_fmt: Literal["NLC", "NCHW"] = "NLC",
    ) -> object:
        """Return outputs of inner blocks, before any merger, in input order.

        Args:
            pixel_values: the result of ``preprocess`` or, with one input path, rows of all items.
            grid_thw: [items, 3], (t, h, w) per item; only with rows.
            indices: n for the last n blocks, block numbers (negatives from the end), None for all.
            output_fmt: "NLC" for the rows of the tower, "NCHW" for maps in raster order.

        Returns:
            One entry per block, in the order of ``indices``. With "NLC" it is a tensor [P, D], or
            [tiles, 1+h*w, D] of InternViT. With "NCHW" it is a list of one map [t, D, h, w] per
            item, without class tokens. From the result of ``preprocess``, a dict of such lists by
            the name of the input path, such as "image".

        Raises:
            ValueError: a block or format that does not exist, and the errors of ``forward``.
        """
        check_arguments(pixel_values, grid_thw, output_fmt)
        if isinstance(pixel_values, VisionInputs):
            self._check_inputs(pixel_values)
            return {
                name: states_of_blocks(tower, *path[:2], indices, output_fmt)
                for name, tower in self.paths.items()
                if (path := pixel_values.paths[name]).items
            }
        tower, itself = self.paths["image"], cast("object", self)
        if tower is not itself:
            raise self._bare_tensors_error("forward_intermediates")
        assert grid_thw is not None  # check_arguments rejects tensors without a grid
        return states_of_blocks(tower, pixel_values, grid_thw, indices, output_fmt)
