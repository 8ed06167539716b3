"""The base classes of encoders: preprocessing, metadata, splitting, checks of pixels.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .block_runner import BlockRunner
from .contract import EncoderItemSpec, EncoderOutput, Grid, GridLike, Metadata, VisionInputs
from .inputs import (
    Preprocessor,
    StagedPreprocessor,
    block_indices,
    check_pixels,
    missing_grid,
    read_grid,
    require_metadata,
    require_output,
    require_tensor,
    split_rows,
)
from .saving import SavedEncoder
from .segments import segment_metadata
from .streams import EncodesItems, Encoding


class Encoder(SavedEncoder, EncodesItems, ABC):
    """What every encoder has: a config, preprocessing, and weights that have a device and a dtype.

    Subclasses take one kind of input per item (:class:`VisionEncoder`) or several
    (:class:`encoders.paths.PathsEncoder`).
    """

    config: Any
    preprocessor: Preprocessor

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


class VisionEncoder(Encoder, BlockRunner):
    """The base class of encoders of one input path: metadata, splitting, checks of pixels.

    Subclasses hold the architecture: ``config``, ``blocks`` and ``forward``.
    """

    _last_metadata: tuple[object, Metadata] | None = None

    @property
    def paths(self) -> Mapping[str, VisionEncoder]:
        """This encoder by the name of its only path, "image"."""
        return {"image": self}

    @property
    @abstractmethod
    def budget_range(self) -> tuple[int, int]:
        """Smallest and largest number of output tokens that a graph is worth capturing for."""

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, ...]:
        """Trailing shape of ``pixel_values``: the shape of one input row."""

    @abstractmethod
    def grid_for(self, tokens: int) -> Grid:
        """The ``(t, h, w)`` of one item of at least ``tokens`` tokens with the fewest rows."""

    @abstractmethod
    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """The sizes of each item: rows, tokens, segments, longest segment and windows."""

    def prepare_encoder_metadata(
        self,
        grid_thw: GridLike,
        *,
        max_batch_size: int | None = None,
        max_frames_per_batch: int | None = None,
        max_seqlen_override: int | None = None,
        max_input_size: int | None = None,
        max_windows_per_batch: int | None = None,
        device: torch.device | str | None = None,
    ) -> Metadata:
        """Return what ``forward`` needs to know about the grid, as tensors; runs on the host.

        Args:
            grid_thw: [items, 3]; empty is valid.
            max_batch_size: segments to pad ``cu_seqlens`` for where ``max_frames_per_batch`` is
                not given.
            max_frames_per_batch: segments (frame pairs, tiles) to pad ``cu_seqlens`` for.
            max_seqlen_override: longest segment to plan for, at least the true one.
            max_input_size: rows of every per-patch or per-token entry; the added ones are finite.
            max_windows_per_batch: attention windows to pad for (Qwen2.5-VL).
            device: defaults to the encoder's.

        Returns:
            Plain tensors. Every family has ``cu_seqlens`` int32 [S+1] and ``max_seqlen`` 0-dim
            int32 on the CPU; the family says what else.

        Raises:
            ValueError: a bad grid, or one that does not fit a capacity.
        """
        grids = self._read(grid_thw)
        weight = next(self.parameters())
        entries = self._grid_metadata(grids, max_input_size, max_windows_per_batch)
        segments = segment_metadata(
            [spec.longest_segment for spec in self.item_specs(grids) for _ in range(spec.segments)],
            max_batch_size=max_batch_size,
            max_frames_per_batch=max_frames_per_batch,
            max_seqlen_override=max_seqlen_override,
        )
        device = device or weight.device
        return {  # the host reads the 0-dim entries, the device all others
            name: entry.to(device) if entry.ndim else entry
            for name, entry in (entries | segments).items()
        }

    @abstractmethod
    def _read(self, grid_thw: GridLike) -> list[Grid]:
        """The grid as a list of ``(t, h, w)``, checked by the rules of the family."""

    @abstractmethod
    def _grid_metadata(
        self, grids: list[Grid], max_input_size: int | None, max_windows_per_batch: int | None
    ) -> Metadata:
        """The metadata of a family besides ``cu_seqlens`` and ``max_seqlen``, on the CPU."""

    @abstractmethod
    def block_outputs(
        self, pixel_values: Tensor, grid_thw: GridLike, wanted: Sequence[int]
    ) -> Iterator[Tensor]:
        """The hidden state after each block in ``wanted`` (ascending), in input order."""

    @abstractmethod
    def feature_maps(
        self,
        features: Tensor,
        grid_thw: GridLike,
        tiles: Sequence[tuple[int, int, bool]] | None = None,
    ) -> list[Tensor]:
        """Arrange features in space: a list of [t, h, w, D] in raster order, one per item.

        Args:
            features: ``last_hidden_state``, ``pooler_output`` or a DeepStack feature.
            grid_thw: [items, 3].
            tiles: of :class:`VisionInputs`, to stitch an image's tiles (InternViT).

        Raises:
            ValueError: no tensor, or features that are not of this grid.
        """

    def encoding(self) -> Encoding:
        """This encoder, and how ``encode`` and ``encode_many`` call it."""
        stager = self.preprocessor if isinstance(self.preprocessor, StagedPreprocessor) else None
        return Encoding(self, self, self.device, stager=stager)

    def split(self, output: EncoderOutput, grid_thw: GridLike) -> list[EncoderOutput]:
        """Cut a batched output into one output per item.

        The outputs are views that keep the whole batch in memory; ``clone()`` copies one of them.

        Raises:
            ValueError: not a whole output, a bad grid, or a grid of more rows or tokens than the
                output has.
        """
        require_output(output)
        specs = self.item_specs(grid_thw)
        rows, tokens = [s.input_size for s in specs], [s.output_tokens for s in specs]
        hidden = split_rows(output.last_hidden_state, rows)
        pooled = split_rows(output.pooler_output, tokens)
        deepstack: list[tuple[Tensor, ...] | None] = [None] * len(specs)
        if output.deepstack_features is not None:
            layers = [layer[: sum(tokens)].split(tokens) for layer in output.deepstack_features]
            deepstack = [tuple(layer[item] for layer in layers) for item in range(len(specs))]
        return list(map(EncoderOutput, hidden, pooled, deepstack))

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
        pixel_values: Tensor,
        grid_thw: GridLike,
        indices: int | Sequence[int] | None = None,
        output_fmt: str = "NLC",
    ) -> list[Tensor] | list[list[Tensor]]:
        """Outputs of inner blocks, before any merger, in input order.

        Args:
            pixel_values: as ``forward`` takes them.
            grid_thw: [items, 3].
            indices: n for the last n blocks, block numbers (negatives from the end), None for all.
            output_fmt: "NLC" for the rows of the tower, "NCHW" for maps in raster order.

        Returns:
            One entry per block, in the order of ``indices``. With "NLC" it is a tensor [P, D], or
            [tiles, 1+h*w, D] of InternViT. With "NCHW" it is a list of one map [t, D, h, w] per
            item, without class tokens.

        Raises:
            ValueError: a block or format that does not exist, and the errors of ``forward``.
        """
        if output_fmt not in ("NLC", "NCHW"):
            raise ValueError(f'output_fmt={output_fmt!r}: must be "NLC" or "NCHW"')
        wanted = block_indices(indices, self.config.depth)
        numbers = sorted(set(wanted))
        states = self.block_outputs(pixel_values, grid_thw, numbers)
        kept = dict(zip(numbers, states, strict=True))
        if output_fmt == "NLC":
            return [kept[number] for number in wanted]
        maps = {number: self._channels_first(kept[number], grid_thw) for number in numbers}
        return [maps[number] for number in wanted]

    def _channels_first(self, features: Tensor, grid_thw: GridLike) -> list[Tensor]:
        return [x.permute(0, 3, 1, 2) for x in self.feature_maps(features, grid_thw)]

    def resolve_metadata(
        self, pixel_values: Tensor, grid_thw: GridLike | None, encoder_metadata: Metadata | None
    ) -> Metadata:
        """Return the given metadata, or make metadata from the grid if there is none.

        Raises:
            ValueError: neither was given, or no tensor of pixels.
        """
        require_tensor(pixel_values)
        if encoder_metadata is not None:
            require_metadata(encoder_metadata)
            return encoder_metadata
        if grid_thw is None:
            raise ValueError(missing_grid(pixel_values, self.config.patch_size))
        if self.accelerator is None:
            return self.prepare_encoder_metadata(grid_thw)
        return self._prepare_once(grid_thw)

    def _prepare_once(self, grid_thw: GridLike) -> Metadata:
        """Return the metadata of a grid, made once for consecutive calls with the same grid.

        With 32 images of 448x448 an accelerated call took 57.9 ms when every call made its
        metadata, and a replay 51.3 ms (H200).
        """
        weight = next(self.parameters())
        on_cuda = weight.device.type == "cuda"
        stream = torch.cuda.current_stream(weight.device).stream_id if on_cuda else 0
        key = (tuple(read_grid(grid_thw)), weight.device, weight.dtype, stream)
        if self._last_metadata is None or self._last_metadata[0] != key:
            self._last_metadata = key, self.prepare_encoder_metadata(grid_thw)
        return self._last_metadata[1]

    def admit_pixels(
        self, pixel_values: Tensor, weight: Tensor, hint: str = "", shape: tuple[int, ...] = ()
    ) -> Tensor:
        """Check ``pixel_values`` and bring them to the dtype and device of ``weight``.

        Raises:
            ValueError: no tensor, integer pixels, a wrong trailing shape, or pixels on another
                accelerator.
        """
        rows = f"{type(self).__name__} takes rows of shape {self.row_shape}{hint}"
        check_pixels(pixel_values, shape or self.row_shape, rows, weight.device)
        return pixel_values.to(device=weight.device, dtype=weight.dtype)
