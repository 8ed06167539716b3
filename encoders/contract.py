"""The contract of every encoder: what ``graphwrap`` and accelerators use of it.

The data of a call, which families import from ``encoders.data``, are parts of the contract too.

Words: an *encoder* makes features of images, and a *tower* is a network in it, *blocks* (its
layers, in order) over rows of ``pixel_values``. An input *path* is one input of an encoder, which
is encoded alone; most have one, named "image". (Where a function reads or writes a file, its
parameter ``path`` is the path of that file.) An *item* is one image or one video as the user passed
it; a *view* is a picture of an item that a tower sees, the whole or a *tile* of it. A *row* is one
entry of ``pixel_values``, a *patch* or a tile; a *segment* is the rows that attend to each other
(of an image, a frame pair or a tile); a *token* is one output row after the merge, and
``pooler_output`` has a row per token, not one per item. A *sequence* is what a language model
reads: tokens, and newlines that the tower learned. ``grid_thw`` has a row (t, h, w) per item: t
frames or frame pairs, or t tiles, of h x w patches each. A *budget* is the number of tokens that a
captured graph holds, as users give it; the class ``Budget`` of ``graphwrap`` has all capacities of
that graph. A *form* of an encoder is the way it runs: as it is or accelerated.

Shapes, with one meaning per letter in all files: P patches (rows of ``pixel_values``), T rows of
attention (the patches of all segments, packed, and what a tower adds to them, such as class
tokens), N tokens, B views or tiles, D width or columns, H heads, K head size or width, S segments,
F frames, C channels, I images, M patches of the longest image, G cells of patches, L layers, W
windows, R relative positions, Q groups of queries. In lower case: n rows of a view, or what a file
counts; r rows before the patches of a segment (class tokens and registers); (t, h, w) a grid, p
patch size, m merge size, s side of a square. An image is [C, H, W].
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, overload, runtime_checkable

import torch
from torch import Tensor, nn

from .data import (
    OUTPUT_FIELDS,
    DeviceOrDtype,
    EncoderItemSpec,
    EncoderOutput,
    FeatureRows,
    Grid,
    GridLike,
    Limits,
    Metadata,
    Output,
    OutputField,
    PartialOutput,
    PathInputs,
    Tiling,
    VisionInputs,
    is_of_prefix,
    named_tensors,
    output_like,
)

if TYPE_CHECKING:
    from .inputs.intake import ImagesLike, VideosLike

__all__ = [
    "OUTPUT_FIELDS",
    "Accelerable",
    "AcceleratesItself",
    "Accelerator",
    "CallBlock",
    "DeviceOrDtype",
    "EncoderConfig",
    "EncoderItemSpec",
    "EncoderOutput",
    "FeatureMaps",
    "FeatureRows",
    "GivesExtras",
    "GraphableEncoder",
    "Grid",
    "GridLike",
    "KernelName",
    "Kernels",
    "Limits",
    "Metadata",
    "MultiPathEncoder",
    "Output",
    "OutputField",
    "PartialOutput",
    "PathInputs",
    "Precision",
    "Preprocess",
    "Preprocessor",
    "Step",
    "VisionInputs",
    "is_library",
    "is_of_prefix",
    "named_tensors",
    "output_like",
    "warn_caller",
]

KernelName: TypeAlias = Literal["triton", "flash2", "cudnn", "flash4", "tma"]
"""The name of an attention kernel."""
Kernels: TypeAlias = Literal["auto", "torch", KernelName]
"""The attention kernels to choose from: all, those that come with torch, or one."""
Precision: TypeAlias = Literal["bf16", "fp8"]
"""The precision of matrix products: the encoder's own half or full precision, or e4m3."""
BETWEEN = {"encoders", "graphwrap", "weights", "vitgraph", "torch"}
"""The packages whose stack frames :func:`warn_caller` skips to find the line of the user: this
library's and torch."""

CallBlock: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
"""Calls one block of an encoder as a module, on the rows that it reads."""
Step: TypeAlias = Callable[[Tensor], Tensor]
"""One block as a function of only the hidden state, as a ``forward`` calls it."""


class EncoderConfig(Protocol):
    """The sizes that the config of every encoder has."""

    @property
    def hidden_size(self) -> int:
        """The number of columns of ``last_hidden_state``: the width of the tower."""
        ...

    @property
    def out_hidden_size(self) -> int | None:
        """The number of columns of ``pooler_output``; None for a tower that has no projector."""
        ...


class Preprocess(Protocol):
    """The method ``preprocess`` of an encoder, and the call of its preprocessor."""

    def __call__(
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
        """Turn images, then videos, into pixels and a grid; see ``Encoder.preprocess``."""
        ...


class Preprocessor(Preprocess, Protocol):
    """The methods that an encoder calls on its preprocessor."""

    def with_files(
        self,
        files: Mapping[str, Mapping[str, object]],
        error: Callable[[str], ValueError] = ValueError,
    ) -> Preprocessor:
        """Return a preprocessor with the defaults that a model repo's processor files set.

        Args:
            files: contents of the files by name without ``.json``, as "preprocessor_config".
            error: makes the exception for a bad value from a message. If the value is for
                videos, it is raised by the first call that passes a video.
        """
        ...

    def without_videos(self, error: ValueError) -> Preprocessor:
        """Return a copy of the preprocessor that raises ``error`` when it is called with videos."""
        ...

    def say_defaults(self, config: Mapping[str, object]) -> tuple[str, str]:
        """Return two strings for a checkpoint without processor files: settings, and a keyword.

        The first lists the defaults that then apply and that ``config``, the ``config.json``, does
        not set. The second is the keyword of ``preprocess`` that changes one of them, or "".
        """
        ...


class FeatureMaps(Protocol):
    """The method ``feature_maps`` of an encoder."""

    @overload
    def __call__(self, features: FeatureRows, inputs: VisionInputs) -> list[dict[str, Tensor]]: ...

    @overload
    def __call__(
        self, features: Tensor, inputs: GridLike, tiles: Sequence[Tiling] | None = None
    ) -> list[Tensor]: ...


class GraphableEncoder(Protocol):
    """All methods that ``graphwrap`` calls of an encoder; a toy of a few lines can have them."""

    @property
    def budget_range(self) -> tuple[int, int]:
        """The smallest and the largest number of output tokens for which to capture CUDA graphs."""
        ...

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of ``pixel_values``: all of its axes but the first."""
        ...

    def grid_for(self, tokens: int) -> Grid:
        """Return the smallest grid (t, h, w) of one item that makes at least ``tokens`` tokens."""
        ...

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]:
        """Return input rows, tokens and segments per item of ``grid_thw`` [items, 3]."""
        ...

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
        """Return the tensors that ``forward`` takes with the pixels, padded to capacities if given.

        Args:
            grid_thw: [items, 3], one ``(t, h, w)`` in patches per item.
            max_batch_size: capacity in attention segments, if each item is one segment.
            max_frames_per_batch: capacity in segments, which replaces ``max_batch_size``.
            max_seqlen_override: rows of the longest segment to plan for.
            max_input_size: capacity in rows of ``pixel_values``.
            max_windows_per_batch: capacity in attention windows.
            device: device of the tensors; None means the device of the weights.
        """
        ...

    def __call__(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        """Encode rows ``pixel_values`` [P, *row_shape] of items with the grids ``grid_thw``.

        With ``encoder_metadata``, the grid is not read, and the host does not wait for the device.
        """
        ...

    def split(self, output: Output, grid_thw: GridLike) -> list[Output]:
        """Return one output per item, as views of ``output`` without the padding at its end."""
        ...


@runtime_checkable
class MultiPathEncoder(Protocol):
    """An encoder of several input paths, "image" and others, that joins outputs per item."""

    @property
    def paths(self) -> Mapping[str, GraphableEncoder]:
        """One encoder per input path by its name, "image" first; they share parameters."""
        ...

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Return one output per item of ``inputs``, joined from the outputs of all ``paths``."""
        ...


class Accelerator(Protocol):
    """Runs the blocks of an encoder with fused kernels, over the weights of that encoder."""

    @property
    def nbytes(self) -> int:
        """Bytes of the padded and quantised copies of weights that the accelerator keeps."""
        ...

    @property
    def kernels_used(self) -> str:
        """Names of the attention kernels of the last forward, or "reference" if it used none."""
        ...

    def settle(self) -> bool:
        """Choose the kernels that captures since the last call had to guess.

        Returns:
            Whether they guessed right; if not, the encoder has to run and be captured again.
        """
        ...

    def steps(
        self,
        stack: nn.ModuleList,
        blocks: Sequence[nn.Module],
        hidden: Tensor,
        metadata: Metadata,
        read_after: Collection[int],
        call_block: CallBlock,
        start: int = 0,
    ) -> Iterable[Step] | None:
        """Return ``blocks`` as functions that a ``forward`` calls one after the other.

        Args:
            stack: all blocks of one stack of the encoder.
            blocks: those to run, which follow one another in ``stack``.
            hidden: the rows that the first block reads, [T, D] or views [B, .., D].
            metadata: the result of the encoder's ``prepare_encoder_metadata``.
            read_after: indices into ``blocks``: the functions of these blocks and of the last one
                return the hidden state. The others may return whatever the next function takes.
            call_block: calls a block as a module if the accelerator cannot run it.
            start: the number in ``stack`` of the first of ``blocks``.

        Returns:
            One function per block, or None if the blocks have to run as modules.
        """
        ...

    def add_weighted_rows(
        self, rows: Tensor, table: nn.Embedding, index: Tensor, weight: Tensor
    ) -> Tensor | None:
        """Return rows [P, D] plus the table's rows at ``index`` [P, taps] times ``weight``.

        The result is None if no kernel can compute this.
        """
        ...

    def metadata_of(self, grids: list[Grid], weight: Tensor, encoder: GraphableEncoder) -> Metadata:
        """Return the encoder's metadata of ``grids``: the last again, or computed anew.

        Metadata of the library's classes are computed anew for other grids, another CUDA stream, or
        another device or dtype of ``weight``. Those of other classes are computed in every call,
        because it is not known what they depend on.
        """
        ...

    def refresh(self) -> bool:
        """Update copies of changed weights in place, and return whether any had changed.

        Every forward does so itself; before you replay a CUDA graph that you captured yourself,
        call this.
        """
        ...

    def choices(self) -> dict[str, object]:
        """Return the kernel chosen for each shape, with times, as plain data for JSON."""
        ...

    def load_choices(self, choices: Mapping[str, object]) -> None:
        """Use the result of :meth:`choices` in another process, instead of timing kernels here."""
        ...


@runtime_checkable
class AcceleratesItself(Protocol):
    """An encoder class with the method ``accelerated``, which ``issubclass`` can check for."""

    def accelerated(
        self, kernels: Kernels = "auto", precision: Precision = "bf16"
    ) -> GraphableEncoder:
        """Return an encoder over the same weights that runs fused blocks and fast kernels."""
        ...


@runtime_checkable
class GivesExtras(Protocol):
    """An encoder class with the method ``with_extras``, which ``issubclass`` can check for."""

    def with_extras(self, names: Sequence[str]) -> nn.Module:
        """Return an encoder over the same weights whose outputs have the extras ``names``.

        An extra has one entry per row of ``pixel_values``, as the hidden state after a block has,
        or per attention segment if its name ends in ".prefix".

        Raises:
            ValueError: this encoder has no such extra; the message lists those that it has.
        """
        ...


@runtime_checkable
class Accelerable(AcceleratesItself, Protocol):
    """An encoder whose blocks its ``accelerator`` runs, unless that is None."""

    accelerator: Accelerator | None


def is_library(module: object) -> bool:
    """Return whether a module is of a class of this package, and not of a user's subclass.

    The metadata of the library's encoders depend on no value of a weight, and nothing writes to
    them; an encoder of another class may do both.
    """
    return type(module).__module__.partition(".")[0] == __name__.partition(".")[0]


def warn_caller(message: str) -> None:
    """Give a UserWarning that names the user's line: the innermost one outside of ``BETWEEN``.

    No fixed ``stacklevel`` works: calls through an encoder, an input path or a graphed encoder have
    different numbers of frames before the same warning.
    """
    frame, level = inspect.currentframe(), 1
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
