"""The base class of all encoders: one call, feature maps and inner blocks for every family.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor

from ..contract import (
    EncoderOutput,
    GraphableEncoder,
    GridLike,
    Metadata,
    Output,
    PartialOutput,
    Preprocessor,
    VisionInputs,
)
from ..streams.items import EncodesItems
from .checks import require_features
from .saving import SavedEncoder

if TYPE_CHECKING:
    from ..streams.calls import Encoding

Self = TypeVar("Self", bound="Encoder")
Features: TypeAlias = Tensor | Sequence[Tensor] | Sequence[EncoderOutput] | Sequence[PartialOutput]
"""The rows of all items in one tensor, or those of each item in a list."""


class Encoder(SavedEncoder, EncodesItems[EncoderOutput], ABC):
    """The base class of all encoders: one call, feature maps and inner blocks for every family.

    Subclasses take one kind of input per item (:class:`VisionEncoder`) or several
    (:class:`encoders.PathsEncoder`).
    """

    config: Any
    _preprocessor: Preprocessor | None = None

    @property
    def preprocessor(self) -> Preprocessor:
        """Turns images and videos into inputs; by default with the published rules of the family.

        It is made at the first use, so that importing an encoder imports no image library.
        """
        if self._preprocessor is None:
            self._preprocessor = self._default_preprocessor()
        return self._preprocessor

    @preprocessor.setter
    def preprocessor(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor

    def _default_preprocessor(self) -> Preprocessor:
        """The preprocessor with the published rules of the family and the sizes of the config."""
        raise NotImplementedError

    @property
    @abstractmethod
    def paths(self) -> Mapping[str, Encoder]:
        """The paths by name, "image" first; each is an encoder of one kind of input."""

    @abstractmethod
    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Return one output per item from the outputs of the paths.

        Args:
            outputs: by the names of ``paths``; paths without entries in ``inputs`` are left out.
            inputs: what ``preprocess`` returned.

        Raises:
            ValueError: entries that cannot be assigned to items.
        """

    @abstractmethod
    def _maps_of_grids(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        """The maps [t, h, w, D] of items in raster order, with ``tiles`` stitched."""

    @abstractmethod
    def _states_of_blocks(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike,
        indices: int | Sequence[int] | None,
        output_fmt: str,
    ) -> list[Tensor] | list[list[Tensor]]:
        """The states that ``forward_intermediates`` returns of one path."""

    @abstractmethod
    def _maps_of_items(self, features: Tensor, inputs: VisionInputs) -> list[dict[str, Tensor]]:
        """The maps [t, h, w, D] of each item by the name of the path, from the rows of all."""

    @overload
    def __call__(self, pixel_values: VisionInputs) -> list[EncoderOutput]: ...

    @overload
    def __call__(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput: ...

    def __call__(
        self,
        pixel_values: Tensor | VisionInputs,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput | list[EncoderOutput]:
        """Encode items: the whole result of ``preprocess``, or the tensors of the only path.

        The result of ``preprocess`` becomes one call of ``forward`` with tensors per path, so hooks
        see tensors in both forms.

        Args:
            pixel_values: what ``preprocess`` returned, which every encoder takes; or the rows
                [P, *row_shape] of all items, which encoders of one path take.
            grid_thw: [items, 3]; not with the result of ``preprocess``, which has it.
            encoder_metadata: what ``prepare_encoder_metadata`` returned; not with the result of
                ``preprocess``.

        Returns:
            From the result of ``preprocess``, a list with one :class:`EncoderOutput` per item.
            From tensors, the output of all items.

        Raises:
            ValueError: inputs of another encoder, tensors where there are several paths, and the
                errors of ``forward``.
        """
        if not isinstance(pixel_values, VisionInputs):
            output: EncoderOutput = super().__call__(
                pixel_values, grid_thw, encoder_metadata=encoder_metadata
            )
            return output
        if grid_thw is not None or encoder_metadata is not None:
            raise ValueError(
                "the result of preprocess was given with grid_thw or encoder_metadata: pass it "
                "alone, or pass inputs.pixel_values with them"
            )
        self._check_inputs(pixel_values)
        calls = pixel_values.paths.items()
        outputs = {name: self.paths[name](*path[:2]) for name, path in calls if path.items}
        return self.join(outputs, pixel_values)

    def encoding(self) -> Encoding[EncoderOutput]:
        """This encoder, and how ``encode`` and ``encode_many`` call its paths."""
        from ..inputs.images import StagedPreprocessor
        from ..streams.calls import Encoding

        stager = self.preprocessor if isinstance(self.preprocessor, StagedPreprocessor) else None
        paths = cast("Mapping[str, GraphableEncoder]", self.paths)
        return Encoding(self, paths, paths, self.device, stager=stager)

    def _check_inputs(self, inputs: VisionInputs) -> None:
        """Raise a ValueError unless inputs are those of this encoder's paths."""
        inputs.check(self.paths)

    @overload
    def feature_maps(self, features: Features, inputs: VisionInputs) -> list[dict[str, Tensor]]: ...

    @overload
    def feature_maps(
        self,
        features: Tensor,
        inputs: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]: ...

    def feature_maps(
        self,
        features: Features,
        inputs: VisionInputs | GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[dict[str, Tensor]] | list[Tensor]:
        """Arrange features in space: the maps [t, h, w, D] of each item in raster order.

        Args:
            features: ``last_hidden_state``, ``pooler_output`` or a DeepStack feature of all items
                in one tensor, or a list with one per item. Of a list of outputs, as
                ``encoder(inputs)`` returns it, ``last_hidden_state`` is taken.
            inputs: what ``preprocess`` returned; only the grids and ``tiles`` are read. With one
                path also the ``grid_thw`` [items, 3] alone.
            tiles: of :class:`VisionInputs`, beside a ``grid_thw``: stitches the tiles of an image.

        Returns:
            For each item a dict from the names of the paths that it uses to its map; tiles are
            stitched, thumbnails and class tokens are left out. From a ``grid_thw``, a list with one
            map per item.

        Raises:
            ValueError: no tensor, or features that are not of these inputs.
        """
        if isinstance(inputs, VisionInputs):
            if tiles is not None:
                raise ValueError("tiles was given with the result of preprocess, which has it")
            self._check_inputs(inputs)
            return self._maps_of_items(_rows_of_all(features), inputs)
        return self._maps_of_grids(_rows_of_all(features), inputs, tiles)

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
        output_fmt: str = "NLC",
    ) -> Any:
        """Outputs of inner blocks, before any merger, in input order.

        Args:
            pixel_values: what ``preprocess`` returned, or as ``forward`` takes them.
            grid_thw: [items, 3]; left out with the result of ``preprocess``.
            indices: n for the last n blocks, block numbers (negatives from the end), None for all.
            output_fmt: "NLC" for the rows of the tower, "NCHW" for maps in raster order.

        Returns:
            One entry per block, in the order of ``indices``. With "NLC" it is a tensor [P, D], or
            [tiles, 1+h*w, D] of InternViT. With "NCHW" it is a list of one map [t, D, h, w] per
            item, without class tokens. From the result of ``preprocess``, a dict that has this for
            each path with entries, by the name of the path.

        Raises:
            ValueError: a block or format that does not exist, and the errors of ``forward``.
        """
        if output_fmt not in ("NLC", "NCHW"):
            raise ValueError(f'output_fmt={output_fmt!r}: must be "NLC" or "NCHW"')
        if not isinstance(pixel_values, VisionInputs):
            if grid_thw is None:
                raise ValueError(
                    f"pixel_values is of type {type(pixel_values).__name__}, without grid_thw: "
                    "pass the result of preprocess, or pixel_values with grid_thw"
                )
            return self._states_of_blocks(pixel_values, grid_thw, indices, output_fmt)
        self._check_inputs(pixel_values)
        if grid_thw is not None:  # the place of the indices in a call with whole inputs
            indices = cast("int | Sequence[int]", grid_thw)
        return {
            name: self.paths[name]._states_of_blocks(*path[:2], indices, output_fmt)
            for name, path in pixel_values.paths.items()
            if path.items
        }

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    @property
    def num_features(self) -> int:
        """Columns of ``last_hidden_state``."""
        return int(self.config.hidden_size)

    @property
    def out_features(self) -> int:
        """Columns of ``pooler_output``: the width of the language model."""
        return int(self.config.out_hidden_size)

    def preprocess(
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
        """Resize, normalise and cut images and videos as the checkpoint's own processor does.

        Args:
            images: one image or several, in any mix. An image is a path, bytes or an open file
                (read upright, by EXIF), a dict with "bytes" or "path", a PIL image (as it is), or
                a numpy array [H, W, C] or tensor [C, H, W] of uint8 or of floats from 0 to 1.
            videos: one video or several. A video is the path of a video file, a :class:`Video`, a
                sequence of images, a numpy array [F, H, W, C] or a tensor [F, C, H, W].
            min_pixels: smallest area in pixels (Qwen towers; a whole clip's for Qwen3-VL).
            max_pixels: largest area in pixels (Qwen towers; a whole clip's for Qwen3-VL).
            max_tiles: most tiles an image is cut into, thumbnail not counted (InternViT,
                DeepSeek-OCR, DeepSeek-VL2).
            fps: sample videos at this many frames per second; by default every frame is used.
            num_frames: sample videos to this many frames.

        Returns:
            :class:`VisionInputs`; images first, then videos, each in the order given.

        Raises:
            ValueError: an image that cannot be encoded, or a keyword this family has no use for.
        """
        return self.preprocessor(
            images,
            videos,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_tiles=max_tiles,
            fps=fps,
            num_frames=num_frames,
        )

    @abstractmethod
    def accelerated(self: Self, kernels: str = "auto", precision: str = "bf16") -> Self:
        """A faster form of this encoder for inference on a GPU, over the same weights.

        An encoder of the same class with the same metadata, outputs and bounds, which fuses the
        element-wise steps and takes the fastest attention kernel for each shape. It shares modules,
        parameters and hooks with this one and sees updates of weights in place. Forwards that
        record gradients run the reference.

        Args:
            kernels: attention kernels to choose from: "auto" for all that are installed, "torch"
                for those that torch brings (Triton included), or the name of one kernel.
            precision: "bf16" keeps the encoder's own half or full precision.

        Returns:
            The accelerated encoder; of several paths, each has kernels for its own shapes. Where it
            cannot accelerate (no CUDA, float64, a GPU older than compute capability 8.0, no Triton)
            it runs the reference, and ``kernel_choices()`` says why.

        Raises:
            ValueError: an unknown kernel or precision, or this encoder is accelerated already.

        Warns:
            UserWarning: a CUDA device that cannot be accelerated, or a kernel asked for by name
                that cannot run here.
        """

    def kernel_choices(self) -> dict[str, Any]:
        """Return the kernels that an accelerated encoder chose, and why, as plain data for JSON.

        An encoder that is not accelerated returns ``{"kernels": "reference"}``. With several
        paths, each has an entry of its own under its name.
        """
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


def _rows_of_all(features: object) -> Tensor:
    """Return the features of all items as one tensor, from one tensor or a list with one per item.

    Raises:
        ValueError: neither of these.
    """
    if isinstance(features, list | tuple) and not isinstance(features, EncoderOutput):
        rows = [x[0] if isinstance(x, EncoderOutput | PartialOutput) else x for x in features]
        tensors = [x for x in rows if isinstance(x, Tensor)]
        if tensors and len(tensors) == len(rows):
            return torch.cat(tensors)
    require_features(features)
    assert isinstance(features, Tensor)
    return features
