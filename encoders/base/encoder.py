"""The base class of all encoders: calls, preprocessing, acceleration and saving.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

import torch
from torch import Tensor

from ..data import EncoderOutput, GridLike, Limits, Metadata, Output, VisionInputs
from ..streams.items import EncodesItems
from ..streams.pooling import PoolingHead
from .feature_maps import MapsFeatures
from .saving import Publication, push_encoder, save_encoder

if TYPE_CHECKING:
    from ..contract import EncoderConfig, Kernels, Precision, Preprocessor
    from ..inputs.intake import ImagesLike, VideosLike
    from ..streams.calls import ItemEncoder
    from .vision_encoder import VisionEncoder

Self = TypeVar("Self", bound="Encoder")


class Encoder(MapsFeatures, EncodesItems[EncoderOutput]):
    """Any encoder of this library; ``load_encoder`` returns one, and annotations can name it.

    Each is either a :class:`VisionEncoder` with one input path, "image", or a
    :class:`PathsEncoder` with several, such as "image" and "tiles".
    """

    config: EncoderConfig
    published: Publication | None = None
    """The configs and tensor names of the checkpoint that was loaded; None without a checkpoint."""
    class_token: bool = False
    """Whether the first row before the patches of each segment is a class token."""
    _preprocessor: Preprocessor | None = None

    @property
    def pooling_head(self) -> PoolingHead | None:
        """The head that makes one vector per item, such as SigLIP's; None where there is none."""
        return None

    @property
    def preprocessor(self) -> Preprocessor:
        """Turns images and videos into pixels, by default as the family's own processor does.

        The preprocessor is made when first used, so that importing an encoder imports no image
        library.
        """
        if self._preprocessor is None:
            self._preprocessor = self._default_preprocessor()
        return self._preprocessor

    @preprocessor.setter
    def preprocessor(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor

    def _default_preprocessor(self) -> Preprocessor:
        """Return the preprocessor that works as the family's own, with the sizes in the config.

        Raises:
            ValueError: this encoder is one input path, such as "tiles", of another encoder.
        """
        raise ValueError(
            "this is one path of an encoder: call preprocess or encode of the encoder that has it "
            "in paths, whose inputs.paths[name] this path takes"
        )

    @property
    @abstractmethod
    def paths(self) -> Mapping[str, VisionEncoder]:
        """The encoder of each input path by name: "image" first, then for example "tiles"."""

    @abstractmethod
    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Join the batched outputs of the input paths, such as "image" and "tiles", per item.

        Args:
            outputs: the batched output of each path by name, without paths that no item uses.
            inputs: the result of ``preprocess``.

        Raises:
            ValueError: the paths do not have the views that ``inputs.tiles`` says.
        """

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
        """Encode items, given as the result of ``preprocess`` or as tensors.

        For the result of ``preprocess``, ``forward`` of each input path is called with tensors, so
        forward hooks see tensors either way.

        Args:
            pixel_values: the result of ``preprocess`` or, if the encoder has one input path, the
                rows [P, *row_shape] of all items (patches or tiles).
            grid_thw: [items, 3], (t, h, w) per item; only with rows.
            encoder_metadata: the result of ``prepare_encoder_metadata``; only with rows.

        Returns:
            From the result of ``preprocess``, a list with one :class:`EncoderOutput` per item.
            From rows, one output of all items.

        Raises:
            ValueError: inputs of another encoder, tensors for an encoder of several input paths,
                and the errors of ``forward``.
        """
        if not isinstance(pixel_values, VisionInputs):
            return self._call(pixel_values, grid_thw, encoder_metadata)
        if grid_thw is not None or encoder_metadata is not None:
            raise ValueError(
                "the result of preprocess was given with grid_thw or encoder_metadata: pass it "
                "alone, or pass inputs.pixel_values with them"
            )
        self._check_inputs(pixel_values)
        calls = pixel_values.paths.items()
        outputs = {name: self.paths[name](*path[:2]) for name, path in calls if path.items}
        return self.join(outputs, pixel_values)

    def _call(
        self, pixel_values: Tensor, grid_thw: GridLike | None, encoder_metadata: Metadata | None
    ) -> EncoderOutput:
        """Call ``forward`` and the hooks of this module with tensors."""
        output: EncoderOutput = super().__call__(
            pixel_values, grid_thw, encoder_metadata=encoder_metadata
        )
        return output

    @abstractmethod
    def with_extras(self: Self, names: Sequence[str]) -> Self:
        """Return this encoder, over the same weights, with outputs of blocks in ``extras``.

        Args:
            names: the outputs to give. ``"blocks.6"`` is the hidden state (the residual) after
                block 6, in input order and in the shape of ``last_hidden_state``;
                ``"blocks.6.attn"`` and ``"blocks.6.mlp"`` are what its attention and MLP return. An
                input path besides "image" comes first, as in ``"tiles.blocks.6"``, and then a stack
                of ``inner_stacks``, as in ``"sam.blocks.2"``, in rows [B, h, w, D]. In towers with
                class tokens or registers, ``".prefix"`` at the end of a name, but for inner stacks,
                is these rows of that output, [segments, r, D].

        Returns:
            The encoder; its outputs are the same, with one more entry in ``extras`` per name. An
            accelerated encoder calls the blocks of branches as modules, and fuses the others.

        Raises:
            ValueError: there is no such output; the message lists the outputs of blocks.
        """

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
        """Compute the tensors that ``forward`` needs beside the pixels, on the host, from the grid.

        Args:
            grid_thw: [items, 3]; empty is valid.
            max_batch_size: most items per call; without ``max_frames_per_batch``, ``cu_seqlens`` is
                padded for this many segments, which suffices if each item is one segment.
            max_frames_per_batch: attention segments (frame pairs, tiles) to pad ``cu_seqlens`` for.
            max_seqlen_override: ``max_seqlen`` to return, at least the rows of the longest segment.
            max_input_size: rows of ``pixel_values`` to pad the tensors for; padding is finite.
            max_windows_per_batch: attention windows to pad offsets for (Qwen2.5-VL).
            device: device of the tensors; None means the device of the encoder.

        Returns:
            Tensors by name: ``cu_seqlens`` int32 [S+1], the offsets of segments, ``max_seqlen``
            0-dim int32 on the CPU, and those that ``_grid_metadata`` of the family describes.

        Raises:
            ValueError: a bad grid, one that exceeds a size above, or several input paths.
        """
        raise ValueError(
            f"{type(self).__name__} has the paths {', '.join(self.paths)}, each with metadata of "
            "its own: call encoder.paths[name].prepare_encoder_metadata(inputs.paths[name][1])"
        )

    def item_encoder(self) -> ItemEncoder[EncoderOutput]:
        """Return the object through which ``encode`` calls the paths of this encoder."""
        from ..inputs.staging import StagedPreprocessor
        from ..streams.calls import ItemEncoder

        stager = self.preprocessor if isinstance(self.preprocessor, StagedPreprocessor) else None
        weights = [path._pixel_weight for path in self.paths.values()]
        dtype = weights[0].dtype
        is_short = dtype.itemsize == 2 and all(weight.dtype == dtype for weight in weights)
        return ItemEncoder(
            self,
            self.paths,
            self.paths,
            weights[0].device,
            stager=stager,
            head=self.pooling_head,
            pixel_dtype=dtype if is_short else torch.float32,
            class_token=self.class_token,
        )

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
        """The number of columns of ``last_hidden_state``."""
        return self.config.hidden_size

    @property
    def out_features(self) -> int:
        """The number of columns of ``pooler_output``: the width of the language model."""
        width = self.config.out_hidden_size
        assert width is not None  # a tower without a projector overrides this property
        return width

    def preprocess(
        self,
        images: ImagesLike = (),
        videos: VideosLike = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
        device: torch.device | str | None = None,
    ) -> VisionInputs:
        """Turn images and videos into pixels and grids as the checkpoint's own processor does.

        Args:
            images: one image or several, in any mix. An image is a path, bytes or an open file
                (read upright, by EXIF), a dict with "bytes" or "path", a PIL image (as it is), or
                a numpy array [H, W, C] or tensor [C, H, W] of uint8 or of floats from 0 to 1.
            videos: one video or several. A video is the path of a video file, a :class:`Video`, a
                sequence of images, a numpy array [F, H, W, C] or a tensor [F, C, H, W].
            min_pixels: smallest area of an image in pixels (Qwen3-VL: of all frames of a clip).
            max_pixels: largest area of an image in pixels. ``docs/families.md`` lists the families
                that take each of these keywords.
            max_tiles: most tiles an image is divided into, thumbnail not counted.
            max_soft_tokens: most tokens per image or frame: 70, 140, 280, 560 or 1120.
            fps: sample videos at this many frames per second; by default every frame is used.
            num_frames: sample videos to this many frames.
            device: the device of the pixels; None means the CPU. On CUDA, decoded images are sent
                there once, and resized, normalised and cut there: uint8 images give the same bits
                as on the CPU.

        Returns:
            :class:`VisionInputs`; images first, then videos, each in the order given.

        Raises:
            ValueError: an image that cannot be encoded, or a keyword of other families.
        """
        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        return self.preprocessor(images, videos, **limits._asdict(), device=device)

    @abstractmethod
    def accelerated(self: Self, kernels: Kernels = "auto", precision: Precision = "bf16") -> Self:
        """Return a faster form of this encoder for inference on a GPU, over the same weights.

        It has the same class, metadata, shapes of outputs and bounds on errors, but fuses the
        element-wise steps and takes the fastest attention kernel for each shape. It shares modules,
        parameters and hooks with this encoder, so it sees in-place updates of weights. Forwards
        that record gradients run the blocks of this encoder, unfused.

        Args:
            kernels: attention kernels to choose from: "auto" for all that are installed, "torch"
                for those that come with torch (Triton included), or the name of one kernel.
            precision: "bf16" keeps the encoder's own dtype, which may also be float16 or float32;
                "fp8" computes matrix products of the blocks in e4m3 where a timing finds that
                faster.

        Returns:
            The accelerated encoder; kernels are chosen for the shapes of each input path.
            Where no kernel can run (no CUDA, float64, a GPU older than compute capability 8.0, no
            Triton), it runs the blocks of this encoder, and ``kernel_choices()`` says why.

        Raises:
            ValueError: an unknown kernel or precision, an encoder that is accelerated already, or
                "fp8" unless the encoder is bfloat16 on an H100 or newer GPU and Triton is there.

        Warns:
            UserWarning: a CUDA device that cannot be accelerated, or a kernel chosen by name
                that cannot run here.
        """

    @abstractmethod
    def kernel_choices(self) -> dict[str, object]:
        """Return the kernels that an accelerated encoder chose, and why, as plain data for JSON.

        An encoder that is not accelerated returns ``{"kernels": "reference"}``. With several
        input paths, the dict has one such dict per path, under the name of the path.
        """

    @abstractmethod
    def load_kernel_choices(self, choices: Mapping[str, object]) -> None:
        """Use the kernels that another process chose, instead of timing them here.

        Args:
            choices: the result of ``kernel_choices()`` in that process.

        Raises:
            ValueError: this encoder is not accelerated, ``choices`` has another form or other input
                paths, or it names a kernel that cannot run here.
        """

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the activations of blocks in the backward pass instead of keeping them."""
        for path in self.paths.values():
            path.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations of blocks for the backward pass again, the default."""
        for path in self.paths.values():
            path.gradient_checkpointing = False

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> Path:
        """Write the encoder as a checkpoint that ``load_encoder`` reads back bit for bit.

        The folder gets the config files of the checkpoint that was loaded, the encoder's tensors
        under the names in that checkpoint and in their present dtype (over 5 GB in several shards),
        and a model card unless it has one. The class that transformers has for the tower reads it,
        and timm does if the checkpoint was in timm's layout.

        Args:
            save_directory: the folder; it may hold an earlier save, which is replaced: files of it
                that this save does not write, such as processor files, are removed.

        Returns:
            ``save_directory``.

        Raises:
            ValueError: the encoder was not loaded from a checkpoint, its tensors differ from that
                (adapters that are not merged, quantised or mixed dtypes), the folder's name is too
                long, or the folder holds other weights, such as those of the whole model.
        """
        return save_encoder(self, save_directory)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Push model using vitgraph.",
        private: bool | None = None,
        token: str | bool | None = None,
        branch: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload what :meth:`save_pretrained` writes to a repo of the Hugging Face Hub.

        It is one commit, which removes the repo's configs and weights that it does not replace. An
        existing model card is kept.

        Args:
            repo_id: ``owner/name``; the repo is created if it does not exist.
            commit_message: first line of the commit.
            private: whether a new repo is private; None takes the default of its owner.
            token: access token, as ``huggingface_hub.HfApi`` takes it.
            branch: branch to commit to; None is the main one.
            create_pr: open a pull request instead of committing to the branch.

        Returns:
            The address of the commit.

        Raises:
            ValueError: what :meth:`save_pretrained` raises, or the repo has an adapter of peft.
        """
        return push_encoder(self, repo_id, commit_message, private, token, branch, create_pr)
