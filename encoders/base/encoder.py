"""The base class of all encoders: one call, feature maps and inner blocks for every family.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, overload

import torch
from torch import Tensor

from ..data import EncoderOutput, GridLike, Limits, Metadata, Output, VisionInputs
from ..streams.items import EncodesItems
from .feature_maps import MapsFeatures

if TYPE_CHECKING:
    from ..contract import EncoderConfig, Kernels, Precision, Preprocessor
    from ..inputs.intake import ImagesLike, VideosLike
    from ..streams.calls import ItemEncoder
    from .map_settings import MapSettings
    from .saving import Publication

Self = TypeVar("Self", bound="Encoder")


class Encoder(MapsFeatures, EncodesItems[EncoderOutput]):
    """Any encoder of this library: the class that ``load_encoder`` returns and annotations name.

    Each is either a :class:`VisionEncoder`, which has one input path, or a
    :class:`PathsEncoder`, which has several.
    """

    config: EncoderConfig
    published: Publication | None = None
    """The configs and tensor names of the checkpoint that was loaded; None without a checkpoint."""
    _preprocessor: Preprocessor | None = None

    @property
    def pooling_head(self) -> Callable[[Sequence[Tensor]], Tensor] | None:
        """The learned head that pools each item's tokens to [items, D]; None if there is none."""
        return None

    @property
    def preprocessor(self) -> Preprocessor:
        """Turns images and videos into inputs; by default with the published rules of the family.

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
        """Return the preprocessor with the published rules of the family and the config's sizes.

        Raises:
            ValueError: this encoder is an input path of another encoder, which prepares the items.
        """
        raise ValueError(
            "this is one path of an encoder: call preprocess or encode of the encoder that has it "
            "in paths, whose inputs.paths[name] this path takes"
        )

    @abstractmethod
    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Return one output per item from the outputs of the paths.

        Args:
            outputs: the output of each path by its name, without paths that have no entries.
            inputs: the result of ``preprocess``.

        Raises:
            ValueError: entries that cannot be assigned to items.
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
        """Encode items: the whole result of ``preprocess``, or the tensors of the only path.

        The result of ``preprocess`` becomes one call of ``forward`` with tensors per path, so hooks
        see tensors either way.

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
            ValueError: inputs of another encoder, tensors for an encoder of several input paths,
                and the errors of ``forward``.
        """
        if not isinstance(pixel_values, VisionInputs):
            return super().__call__(pixel_values, grid_thw, encoder_metadata=encoder_metadata)
        if grid_thw is not None or encoder_metadata is not None:
            raise ValueError(
                "the result of preprocess was given with grid_thw or encoder_metadata: pass it "
                "alone, or pass inputs.pixel_values with them"
            )
        self._check_inputs(pixel_values)
        calls = pixel_values.paths.items()
        outputs = {name: self.paths[name](*path[:2]) for name, path in calls if path.items}
        return self.join(outputs, pixel_values)

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
            max_frames_per_batch: segments (frame pairs, tiles) to pad ``cu_seqlens`` for.
            max_seqlen_override: longest segment to plan for, at least the true one.
            max_input_size: rows of every per-patch or per-token entry; the added ones are finite.
            max_windows_per_batch: attention windows to pad for (Qwen2.5-VL).
            device: defaults to the encoder's.

        Returns:
            Plain tensors. Every family has ``cu_seqlens`` int32 [S+1] and ``max_seqlen`` 0-dim
            int32 on the CPU; the family says what else.

        Raises:
            ValueError: a bad grid, a grid over a capacity, or an encoder of several input paths.
        """
        raise ValueError(
            f"{type(self).__name__} has the paths {', '.join(self.paths)}, each with metadata of "
            "its own: call encoder.paths[name].prepare_encoder_metadata(inputs.paths[name][1])"
        )

    def item_encoder(self) -> ItemEncoder[EncoderOutput]:
        """Return this encoder as ``encode`` uses it: ``paths``, device and staging of pixels."""
        from ..inputs.images import StagedPreprocessor
        from ..streams.calls import ItemEncoder

        stager = self.preprocessor if isinstance(self.preprocessor, StagedPreprocessor) else None
        paths, head = self.paths, self.pooling_head
        return ItemEncoder(self, paths, paths, self.device, stager=stager, head=head)

    def _attention_maps(
        self, images: ImagesLike, videos: VideosLike, settings: MapSettings
    ) -> list[list[Tensor]]:
        return self._maps_of_inputs(self.preprocess(images, videos), settings)

    def _maps_of_inputs(self, inputs: VisionInputs, settings: MapSettings) -> list[list[Tensor]]:
        """Return one attention map per item and block, from the result of ``preprocess``."""
        from .attention_maps import ObservedPath, attention_maps

        paths = {
            name: ObservedPath(tower, tower._inner_stacks, tower._outputs_for)
            for name, tower in self.paths.items()
        }
        return attention_maps(self, paths, inputs, settings)

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
    ) -> VisionInputs:
        """Resize, normalise and cut images and videos as the checkpoint's own processor does.

        Args:
            images: one image or several, in any mix. An image is a path, bytes or an open file
                (read upright, by EXIF), a dict with "bytes" or "path", a PIL image (as it is), or
                a numpy array [H, W, C] or tensor [C, H, W] of uint8 or of floats from 0 to 1.
            videos: one video or several. A video is the path of a video file, a :class:`Video`, a
                sequence of images, a numpy array [F, H, W, C] or a tensor [F, C, H, W].
            min_pixels: smallest area of an image in pixels (Qwen3-VL: of a whole clip).
            max_pixels: largest area of an image in pixels. ``docs/families.md`` lists the families
                that take each of these keywords.
            max_tiles: most tiles an image is cut into, thumbnail not counted.
            max_soft_tokens: most tokens per image or frame: 70, 140, 280, 560 or 1120.
            fps: sample videos at this many frames per second; by default every frame is used.
            num_frames: sample videos to this many frames.

        Returns:
            :class:`VisionInputs`; images first, then videos, each in the order given.

        Raises:
            ValueError: an image that cannot be encoded, or a keyword that means nothing here.
        """
        limits = Limits(min_pixels, max_pixels, max_tiles, max_soft_tokens, fps, num_frames)
        return self.preprocessor(images, videos, **limits._asdict())

    @abstractmethod
    def accelerated(self: Self, kernels: Kernels = "auto", precision: Precision = "bf16") -> Self:
        """Return a faster form of this encoder for inference on a GPU, over the same weights.

        It has the same class, metadata, shapes of outputs and bounds on errors, but fuses the
        element-wise steps and takes the fastest attention kernel for each shape. It shares modules,
        parameters and hooks with this one and sees updates of weights in place. Forwards that
        record gradients run the blocks of this encoder.

        Args:
            kernels: attention kernels to choose from: "auto" for all that are installed, "torch"
                for those that torch brings (Triton included), or the name of one kernel.
            precision: "bf16" keeps the encoder's own dtype, which may also be float16 or float32;
                "fp8" computes matrix products of the blocks in e4m3 where a timing finds that
                faster.

        Returns:
            The accelerated encoder; each of several input paths has kernels for its own shapes.
            Where none can run (no CUDA, float64, a GPU older than compute capability 8.0, no
            Triton), it runs the blocks of this encoder, and ``kernel_choices()`` says why.

        Raises:
            ValueError: an unknown kernel or precision, an encoder that is accelerated already, or
                "fp8" unless the encoder is bfloat16 on an H100 or newer GPU and Triton is there.

        Warns:
            UserWarning: a CUDA device that cannot be accelerated, or a kernel asked for by name
                that cannot run here.
        """

    @abstractmethod
    def kernel_choices(self) -> dict[str, object]:
        """Return the kernels that an accelerated encoder chose, and why, as plain data for JSON.

        An encoder that is not accelerated returns ``{"kernels": "reference"}``. With several
        paths, each has an entry of its own under its name.
        """

    @abstractmethod
    def load_kernel_choices(self, choices: Mapping[str, object]) -> None:
        """Use the kernels that another process chose, instead of timing them here.

        Args:
            choices: the result of ``kernel_choices()`` in that process.

        Raises:
            ValueError: this encoder is not accelerated, the data are no kernel choices or are those
                of other input paths, or they name a kernel that cannot run here.
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
        """Write the encoder as a checkpoint that ``load_encoder`` reads back to the bit.

        The folder has the configs of the checkpoint that the encoder was loaded from, its tensors
        under their published names in the dtype that they have now (over 5 GB in several shards),
        and a model card unless there is one. transformers' class of the tower alone reads it, and
        timm does if the checkpoint was in timm's layout.

        Args:
            save_directory: the folder; it may hold an earlier save, which is replaced.

        Returns:
            ``save_directory``.

        Raises:
            ValueError: the encoder was not loaded from a checkpoint, its tensors are not those of
                one (an adapter that is not merged, quantised or mixed dtypes), the folder's name is
                longer than disks take, or the folder holds other weights, such as those of the
                whole model.
        """
        from .saving import save_encoder

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
        """Upload what :meth:`save_pretrained` writes to a repo of the Hub, in one commit.

        A model card that the repo has already is left as it is.

        Args:
            repo_id: ``owner/name``; the repo is made if it is not there.
            commit_message: first line of the commit.
            private: whether a new repo is private; None takes the owner's default.
            token: access token, as the Hub client takes it.
            branch: branch to commit to; None is the main one.
            create_pr: open a pull request instead of committing to the branch.

        Returns:
            The address of the commit.

        Raises:
            ValueError: what :meth:`save_pretrained` raises.
        """
        from .saving import push_encoder

        return push_encoder(self, repo_id, commit_message, private, token, branch, create_pr)
