"""Encode preprocessed items in one call of an encoder or in several, with one result per item.

Nothing here imports an encoder: an :class:`ItemEncoder` holds the few members that are needed, so
that encoders and their wrappers, such as ``GraphedEncoder``, share this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..contract import Preprocess
from ..data import (
    OUTPUT_FIELDS,
    EncoderItemSpec,
    EncoderOutput,
    Grid,
    GridLike,
    Limits,
    Output,
    PartialOutput,
    PathInputs,
    VisionInputs,
)
from ..grids import read_grid
from ..inputs.intake import ImagesLike, VideosLike
from ..inputs.staging import StagedPreprocessor
from .finite import tensors_of
from .item_errors import advising_limit
from .item_parts import join_outputs, plan_calls
from .pooling import Pool, PoolingHead, check_fields, check_pool, pool_batch


class ItemPath(Protocol):
    """The methods that ``encode`` needs of the encoder of an input path, such as "tiles"."""

    def grid_for(self, tokens: int) -> Grid: ...

    def item_specs(self, grid_thw: GridLike) -> list[EncoderItemSpec]: ...

    def split(self, output: Output, grid_thw: GridLike) -> list[Output]: ...


class JoinsOutputs(Protocol[Output]):
    """The methods that ``encode`` needs of an encoder of one or several input paths."""

    @property
    def preprocess(self) -> Preprocess: ...

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]: ...


PathCall: TypeAlias = Callable[[Tensor, GridLike], Output]
MakeInputs: TypeAlias = Callable[[], VisionInputs]
"""Preprocesses items. A function, because its errors are those of the call that encodes them."""


class ResultSettings(NamedTuple):
    """How results are made: as whole outputs or vectors, and the most output tokens per call."""

    pool: Pool = "none"
    normalize: bool = False
    max_tokens_per_call: int | None = None


@dataclass(frozen=True)
class ItemEncoder(Generic[Output]):
    """All that ``encode`` needs of an encoder: its input paths, and a function that runs each."""

    encoder: JoinsOutputs[Output]
    """The encoder that preprocesses items and joins the outputs of its input paths."""
    paths: Mapping[str, ItemPath]
    calls: Mapping[str, PathCall[Output]]
    """The function that encodes the inputs of each path, by name, such as "image" or "tiles"."""
    device: torch.device
    fields: tuple[str, ...] = OUTPUT_FIELDS
    """The fields that the outputs of ``calls`` have; a wrapper may leave some out."""
    stager: StagedPreprocessor | None = None
    """The preprocessor, if it can make pixels on any device, else None."""
    owns_results: bool = True
    """Whether a result keeps its values when the next call runs. It does not if ``calls`` return
    views of the static buffers of a CUDA graph."""
    head: PoolingHead | None = None
    """The encoder's learned head (of SigLIP), which ``pool="head"`` needs; None without one."""
    pixel_dtype: torch.dtype = torch.float32
    """The dtype of the pixels that ``stager`` makes: that of the weight that reads them if it has
    16 bits, since the encoder would round float32 to it."""
    class_token: bool = False
    """Whether the first row of ``"prefix"`` is a class token, which ``pool="cls"`` needs."""

    def check(self, results: ResultSettings) -> None:
        """Check that the encoder can make the kind of results that ``results`` describe.

        Raises:
            ValueError: a wrong setting, or a pool that needs a field or head that is missing.
        """
        if results.pool != "none":
            check_pool(results.pool, results.normalize)
        elif results.normalize:
            raise ValueError(
                "normalize needs one vector per item: also set the pool to mean, max, cls or head"
            )
        limit = results.max_tokens_per_call
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(
                f"max_tokens_per_call={limit!r}: must be a positive number of output tokens, or "
                "None for one call"
            )
        check_fields(results.pool, self.fields, self.head, self.class_token)

    def preprocess(self, images: ImagesLike, videos: VideosLike, limits: Limits) -> VisionInputs:
        """Turn images and videos into the inputs of the encoder, on its device if that is CUDA.

        Args:
            images: images in any form that ``preprocess`` accepts.
            videos: videos in any form that ``preprocess`` accepts.
            limits: the keywords of ``preprocess``.

        Raises:
            ValueError: a bad image or video, or a keyword without meaning for this family.
        """
        if self.stager is None or self.device.type != "cuda":
            return self.encoder.preprocess(images, videos, **limits._asdict())
        staged = self.stager.stage(images, videos, limits, self.device)
        return self.stager.finish(staged, self.pixel_dtype)

    def tokens(self, inputs: VisionInputs) -> int:
        """Return the number of output tokens of preprocessed items, over all input paths."""
        return sum(
            spec.output_tokens
            for name, path in self.paths.items()
            for spec in path.item_specs(inputs.paths[name].grid_thw)
        )

    def agree(self, batch: Callable[[], str]) -> None:
        """Check that other processes have the same batch, if they share the work.

        ``batch`` returns what identifies it.

        Raises:
            ValueError: another process has another batch.
        """

    def encode(self, make_inputs: MakeInputs, limit: int | None = None) -> list[Output]:
        """Encode items to whole outputs.

        Args:
            make_inputs: returns the preprocessed inputs of any number of items.
            limit: the largest number of output tokens per call of the encoder; None for one call.

        Returns:
            One :class:`EncoderOutput` per item, in its own memory, unless ``owns_results`` is
            False and one call gave all outputs.

        Raises:
            ValueError: a wrong limit, or inputs that do not fit the encoder.
            torch.OutOfMemoryError, MemoryError: memory ran out; the message advises to set
                ``max_tokens_per_call``.
        """
        self.check(ResultSettings(max_tokens_per_call=limit))
        outputs = self._outputs(make_inputs(), limit)
        return [_in_own_memory(output) if self.owns_results else output for output in outputs]

    def views(self, inputs: VisionInputs, limit: int | None = None) -> Iterator[Output]:
        """Yield the outputs of items as :meth:`encode` returns them, but without copying them.

        They may be views of the output of a whole call, and of static buffers, which the next call
        overwrites.

        Args:
            inputs: the preprocessed inputs of any number of items.
            limit: the largest number of output tokens per call of the encoder; None for one call.
        """
        self.check(ResultSettings(max_tokens_per_call=limit))
        return self._outputs(inputs, limit)

    def embed(self, make_inputs: MakeInputs, results: ResultSettings) -> Tensor:
        """Encode items to one vector each.

        Args:
            make_inputs: returns the preprocessed inputs of any number of items.
            results: the pool and the most output tokens per call.

        Returns:
            [items, D] in float32, or in float64 where the encoder is float64.

        Raises:
            ValueError, torch.OutOfMemoryError, MemoryError: as :meth:`encode` raises them, and for
                a pool that the encoder cannot make.
        """
        check_pool(results.pool, results.normalize)
        self.check(results)
        outputs = self._outputs(make_inputs(), results.max_tokens_per_call)
        vectors = pool_batch(outputs, results.pool, results.normalize, self.head)
        if vectors is not None:
            return vectors
        # Only an output says how wide vectors are: a head or a join of paths may change the width.
        blank = torch.zeros(3, 64, 64, dtype=torch.uint8, device="cpu")
        return self.embed(lambda: self.preprocess([blank], (), Limits()), results)[:0]

    def _outputs(self, inputs: VisionInputs, limit: int | None) -> Iterator[Output]:
        """Yield the output of each item, which may be a view of the output of a whole call.

        ``limit`` is the largest number of output tokens per call of the encoder, or None.
        """
        paths = inputs.paths.items()
        if limit is None:
            outputs = {name: self._whole(name, path) for name, path in paths if path.items}
            yield from self.encoder.join(outputs, inputs)
            return
        entries = {name: self._entries(name, path, limit) for name, path in paths}
        for item in split_inputs(inputs, self.paths):
            path_names = [name for name, path in item.paths.items() if path.items]
            yield self.encoder.join({name: next(entries[name]) for name in path_names}, item)[0]

    def _whole(self, name: str, inputs: PathInputs) -> Output:
        """Run the encoder of input path ``name`` once, on all items that use it."""
        grids, path = read_grid(inputs.grid_thw), self.paths[name]
        with advising_limit(
            lambda: sum(spec.output_tokens for spec in path.item_specs(grids)), self.device
        ):
            output = self.calls[name](inputs.pixel_values, grids)
        return output if self.owns_results or len(self.paths) == 1 else output.clone()

    def _entries(self, name: str, inputs: PathInputs, limit: int) -> Iterator[Output]:
        """Run the encoder of input path ``name`` and yield the output of each item that uses it."""
        path, call = self.paths[name], self.calls[name]
        grids: list[Grid] = [(t, h, w) for t, h, w in inputs.grid_thw.tolist()]
        calls = plan_calls(grids, path.item_specs, limit)
        keeps_values = self.owns_results or (len(calls) == 1 and len(self.paths) == 1)
        outputs: list[Output] = []
        row = 0
        for parts in calls:
            rows, part_grids = sum(part.rows for part in parts), [part.grid for part in parts]
            tokens = sum(part.tokens for part in parts)
            with advising_limit(partial(int, tokens), self.device):
                output = call(inputs.pixel_values[row : row + rows], part_grids)
            for part, result in zip(parts, path.split(output, part_grids), strict=True):
                outputs.append(result if keeps_values else result.clone())
                if part.last:
                    yield join_outputs(outputs)
                    outputs = []
            row += rows


EitherItemEncoder: TypeAlias = ItemEncoder[EncoderOutput] | ItemEncoder[PartialOutput]
"""An :class:`ItemEncoder` with whole outputs, or with outputs that may lack fields."""


def _in_own_memory(output: Output) -> Output:
    """Return the output, copied if one of its tensors is a view of a larger storage."""
    fills_storage = all(x.untyped_storage().nbytes() == x.nbytes for x in tensors_of(output))
    return output if fills_storage else output.clone()


def split_inputs(inputs: VisionInputs, paths: Mapping[str, ItemPath]) -> list[VisionInputs]:
    """Split the inputs of several items into the inputs of each item, as views.

    Args:
        inputs: the inputs of any number of items.
        paths: the input paths of the encoder by name, such as "image" and "tiles".

    Raises:
        ValueError: input paths of another encoder, or a path whose grids make another number of
            rows than its pixels have.
    """
    inputs.check(paths)
    path_items: dict[str, list[PathInputs]] = {}
    for name, (pixels, grid_thw, items) in inputs.paths.items():
        sizes = [spec.input_size for spec in paths[name].item_specs(read_grid(grid_thw))]
        if len(pixels) != sum(sizes):
            raise ValueError(
                f"path {name!r} has {len(pixels)} rows of pixels, its grid_thw describes "
                f"{sum(sizes)}: pass what preprocess returned"
            )
        path_items[name] = [PathInputs(pixels[:0], grid_thw[:0], ()) for _ in inputs.grid_thw]
        parts = zip(items, pixels.split(sizes), grid_thw.split(1), strict=True) if sizes else ()
        for item, rows, grid in parts:
            path_items[name][item] = PathInputs(rows, grid, (0,))
    return [
        VisionInputs(
            *path_items["image"][item][:2],
            inputs.tiles and inputs.tiles[item : item + 1],
            {name: parts[item] for name, parts in path_items.items() if name != "image"},
            inputs.image_sizes and inputs.image_sizes[item : item + 1],
        )
        for item in range(len(inputs.grid_thw))
    ]


def select_items(
    inputs: VisionInputs, paths: Mapping[str, ItemPath], items: Sequence[int]
) -> VisionInputs:
    """Return the inputs of some items, with all input paths.

    Args:
        inputs: the inputs of any number of items.
        paths: the input paths of the encoder by name, such as "image" and "tiles".
        items: numbers of the items to keep, from 0, in the order of the result; may be empty.

    Raises:
        ValueError: what :func:`split_inputs` raises.
    """
    item_inputs = split_inputs(inputs, paths)
    if list(items) == list(range(len(item_inputs))):
        return inputs
    if items:
        return join_inputs([item_inputs[item] for item in items])
    nothing = {
        name: PathInputs(pixels[:0], grid_thw[:0], ())
        for name, (pixels, grid_thw, _) in inputs.paths.items()
    }
    return VisionInputs(*nothing.pop("image")[:2], None, nothing)


def join_inputs(parts: Sequence[VisionInputs]) -> VisionInputs:
    """Concatenate the inputs of several items, which must have the same input paths.

    Args:
        parts: the inputs to join, at least one.
    """
    if len(parts) == 1:
        return parts[0]
    starts = list(accumulate((len(part.grid_thw) for part in parts[:-1]), initial=0))
    joined_paths = {}
    for name in parts[0].paths:
        pixels, grids, numbers = zip(*(part.paths[name] for part in parts), strict=True)
        items = [
            start + item
            for start, own_items in zip(starts, numbers, strict=True)
            for item in own_items
        ]
        joined_paths[name] = PathInputs(torch.cat(pixels), torch.cat(grids), tuple(items))
    tiles = [tiling for part in parts for tiling in part.tiles or ()]
    sizes = [size for part in parts for size in part.image_sizes or ()]
    return VisionInputs(*joined_paths.pop("image")[:2], tiles or None, joined_paths, sizes or None)
