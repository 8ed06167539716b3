"""The base class of encoders that take several inputs per item, each encoded by a path of its own.

A path is a single-path encoder: a view of one tower for tiles of another size, or another tower.
The paths run one after another, and their outputs are joined per item.

Shapes: D tower width.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from torch import Tensor, nn

from ..contract import EncoderOutput, VisionInputs
from ..streams import Encoding
from ..vision_encoder import Encoder, VisionEncoder

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

    paths: Mapping[str, VisionEncoder]
    """The paths by name, "image" first. Each is an encoder of its own: ``paths[name](pixel_values,
    grid_thw)`` takes what ``preprocess(...).paths[name]`` holds, and CUDA graphs capture a path."""

    @abstractmethod
    def join(
        self, outputs: Mapping[str, EncoderOutput], inputs: VisionInputs
    ) -> list[EncoderOutput]:
        """Return one output per item from the outputs of the paths.

        Args:
            outputs: by the names of ``paths``; paths without entries in ``inputs`` are left out.
            inputs: what ``preprocess`` returned.

        Raises:
            ValueError: entries that cannot be assigned to items.
        """

    @abstractmethod
    def feature_maps(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """Arrange features in space: the maps [t, h, w, D] of each item by the name of the path.

        Args:
            features: ``last_hidden_state`` or ``pooler_output`` of all items, one after another.
            inputs: what ``preprocess`` returned; only the grids and ``tiles`` are read.

        Returns:
            For each item one map of the whole image and one that is stitched from its tiles.

        Raises:
            ValueError: no tensor, or features that are not of these inputs.
        """

    def forward(self, inputs: VisionInputs) -> list[EncoderOutput]:
        """Encode items: every path that has entries runs once, then the outputs are joined.

        Args:
            inputs: what ``preprocess`` returned.

        Returns:
            One output per item.

        Raises:
            ValueError: inputs of other paths, and what the paths raise.
        """
        self._check(inputs)
        outputs = {
            name: self.paths[name](*path)
            for name, path in inputs.paths.items()
            if len(path.grid_thw)
        }
        return self.join(outputs, inputs)

    @overload
    def forward_intermediates(
        self,
        inputs: VisionInputs,
        indices: int | Sequence[int] | None = None,
        output_fmt: Literal["NLC"] = "NLC",
    ) -> dict[str, list[Tensor]]: ...

    @overload
    def forward_intermediates(
        self,
        inputs: VisionInputs,
        indices: int | Sequence[int] | None = None,
        *,
        output_fmt: Literal["NCHW"],
    ) -> dict[str, list[list[Tensor]]]: ...

    def forward_intermediates(
        self,
        inputs: VisionInputs,
        indices: int | Sequence[int] | None = None,
        output_fmt: Literal["NLC", "NCHW"] = "NLC",
    ) -> dict[str, Any]:
        """Outputs of inner blocks of every path that has entries, before any merger.

        Args:
            inputs: what ``preprocess`` returned.
            indices: n for the last n blocks, block numbers (negatives from the end), None for all.
            output_fmt: "NLC" for the rows of the paths, "NCHW" for maps in raster order.

        Returns:
            By the name of the path, one entry per block, in the order of ``indices``, as the
            ``forward_intermediates`` of the path returns it: a tensor, or with "NCHW" a list of
            maps [t, D, h, w], one per item that uses the path.

        Raises:
            ValueError: a block or format that does not exist, and the errors of ``forward``.
        """
        self._check(inputs)
        return {
            name: self.paths[name].forward_intermediates(*path, indices, output_fmt=output_fmt)
            for name, path in inputs.paths.items()
            if len(path.grid_thw)
        }

    def split_paths(
        self, outputs: Mapping[str, EncoderOutput], inputs: VisionInputs
    ) -> list[dict[str, EncoderOutput]]:
        """Cut the outputs of the paths into those of each item, as views.

        Args:
            outputs: of the paths, as ``join`` takes them.
            inputs: what ``preprocess`` returned.

        Returns:
            For each item the outputs of the paths that it uses, by the names of the paths.

        Raises:
            ValueError: entries that cannot be assigned to items.
        """
        items: list[dict[str, EncoderOutput]] = [{} for _ in inputs.grid_thw]
        users = {name: inputs.users(name) for name in inputs.paths}  # of paths left out, too
        for name, output in outputs.items():
            entries = iter(self.paths[name].split(output, inputs.paths[name].grid_thw))
            for item, used in zip(items, users[name], strict=True):
                if used:
                    item[name] = next(entries)
        return items

    def _check(self, inputs: object) -> None:
        if not isinstance(inputs, VisionInputs):
            raise ValueError(
                f"inputs is of type {type(inputs).__name__}: this encoder has the paths "
                f"{', '.join(self.paths)}, so pass the whole inputs = encoder.preprocess(..), or "
                "call one path: encoder.paths[name](pixel_values, grid_thw)"
            )
        if inputs.paths.keys() != self.paths.keys():
            raise ValueError(
                f"the inputs have the paths {', '.join(inputs.paths)}, this encoder has "
                f"{', '.join(self.paths)}: pass what its own preprocess returns"
            )
        for name in self.paths:
            inputs.users(name)  # before a path runs

    def encoding(self) -> Encoding:
        """This encoder, and how ``encode`` and ``encode_many`` call its paths."""
        return Encoding(self, self.paths, self.device)

    def share(self, tower: VisionEncoder) -> None:
        """Have the parameters and modules of ``tower`` under the same names, each of them once.

        The tower is seen by two objects then: as a path, and as this encoder.
        """
        self._parameters, self._modules = tower._parameters, tower._modules
        self._buffers = tower._buffers

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the path "image"."""
        return self.paths["image"].blocks

    def accelerated(self: Self, kernels: str = "auto", precision: str = "bf16") -> Self:
        """A faster form of this encoder for inference on a GPU, over the same weights.

        Args:
            kernels: as ``VisionEncoder.accelerated`` takes it.
            precision: as ``VisionEncoder.accelerated`` takes it.

        Returns:
            An encoder whose paths are accelerated, each with kernels for its own shapes.

        Raises:
            ValueError: an unknown kernel or precision, or this encoder is accelerated already.
        """
        view = copy.copy(self)
        view.paths = {
            name: path.accelerated(kernels, precision) for name, path in self.paths.items()
        }
        return view

    def kernel_choices(self) -> dict[str, Any]:
        """Return the kernels that each path chose, and why, by the name of the path."""
        return {name: path.kernel_choices() for name, path in self.paths.items()}

    def load_kernel_choices(self, choices: Mapping[str, Any]) -> None:
        """Use the kernels that another process chose, instead of timing them here.

        Args:
            choices: the result of ``kernel_choices()`` in that process.

        Raises:
            ValueError: choices of other paths, and what a path raises.
        """
        if choices.keys() != self.paths.keys():
            raise ValueError(
                f"kernel choices for {', '.join(map(str, choices))}: this encoder has the paths "
                f"{', '.join(self.paths)}"
            )
        for name, path in self.paths.items():
            path.load_kernel_choices(choices[name])

    def gradient_checkpointing_enable(self) -> None:
        """Recompute blocks in the backward instead of keeping their activations."""
        for path in self.paths.values():
            path.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations of blocks for the backward."""
        for path in self.paths.values():
            path.gradient_checkpointing_disable()
