"""The data of a call of an encoder: the pixels that go in, and the features that come out.

Shapes: P patches (rows of ``pixel_values``), N tokens, D tower width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Literal,
    NamedTuple,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    get_args,
    overload,
)

import torch
from torch import Tensor

from .processor_outputs import pixels_and_grid

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]"
"""A NumPy array of any shape and dtype."""
Grid: TypeAlias = tuple[int, int, int]
"""The grid ``(t, h, w)`` of one item: frames or frame pairs, and patches down and across."""
GridLike: TypeAlias = Tensor | Sequence[Sequence[int]] | Sequence[int]
"""The grids of several items [items, 3], or the three numbers of one item."""
Tiling: TypeAlias = tuple[int, int, bool]
"""How an image is tiled: columns of tiles, rows of tiles, and whether a thumbnail follows them."""
Metadata: TypeAlias = dict[str, Tensor]
"""The tensors that an encoder computes from a grid, by name; ``forward`` takes them with pixels."""
DeviceOrDtype: TypeAlias = torch.device | str | torch.dtype | None
"""The argument of ``to``: the device to move tensors to, or the dtype to cast them to."""
_Slice: TypeAlias = "slice[SupportsIndex | None]"
OutputField: TypeAlias = Literal["last_hidden_state", "pooler_output", "deepstack_features"]
"""The name of a field of ``EncoderOutput``."""
OUTPUT_FIELDS: tuple[OutputField, ...] = get_args(OutputField)
"""The names of the fields of ``EncoderOutput``, in the order of the tuple."""
CLIP_SIZE = (0, 0)
"""What ``VisionInputs.image_sizes`` has for a clip."""
PREFIX = "prefix"
"""The name, or its last part after a dot, of extras with the rows before patches."""


def is_of_prefix(name: str) -> bool:
    """Return whether an extra has the rows before patches [segments, r, D], as "blocks.6.prefix".

    Other extras of blocks have the rows of ``last_hidden_state``.
    """
    return name.rpartition(".")[2] == PREFIX


class EncoderOutput(NamedTuple):
    """The features of one call; ``output["pooler_output"]`` reads a field by its name, too."""

    last_hidden_state: Tensor
    """Hidden states before the merger, in input order: [patches, D], or [tiles, rows, D]."""
    pooler_output: Tensor
    """Merged tokens [tokens, out_hidden_size], in the order that a language model reads them in."""
    deepstack_features: tuple[Tensor, ...]
    """Tokens [tokens, out_hidden_size] of each DeepStack block; empty if the family has none."""
    extras: Mapping[str, Tensor] = {}  # by _new a dict of its own in each output
    """Other features by name; ``output["prefix"]`` reads one, too. ``"prefix"`` [segments, r, D]
    are the rows before the patches of each segment, such as a class token, after the last norm."""

    @overload
    def __getitem__(
        self, key: Literal["last_hidden_state", "pooler_output", "prefix"]
    ) -> Tensor: ...
    @overload
    def __getitem__(self, key: Literal["deepstack_features"]) -> tuple[Tensor, ...]: ...
    @overload
    def __getitem__(self, key: str | SupportsIndex) -> Tensor | tuple[Tensor, ...]: ...
    @overload
    def __getitem__(self, key: _Slice) -> tuple[Tensor | tuple[Tensor, ...], ...]: ...
    def __getitem__(self, key: str | SupportsIndex | _Slice) -> object:
        return _field(self, key)

    def __repr__(self) -> str:
        return _describe(self)

    def numpy(self) -> dict[str, Array]:
        """Return all tensors as NumPy arrays on the CPU, by name; bfloat16 becomes float32.

        The names are those of the fields, and "deepstack.0" and so on, as in files of features.
        """
        return _to_arrays(self)

    def clone(self) -> EncoderOutput:
        """Copy all tensors; an output of ``split`` is a view that keeps a whole batch in memory."""
        return _map_tensors(self, Tensor.clone)

    def to(self, device: DeviceOrDtype = None, dtype: torch.dtype | None = None) -> EncoderOutput:
        """Move and cast all tensors of an output to a device, to a dtype, or to both."""
        return _map_tensors(self, lambda tensor: _move(tensor, device, dtype))


class PartialOutput(NamedTuple):
    """Outputs of a graph wrapper that returns only some fields; the other fields are None."""

    last_hidden_state: Tensor | None
    """Hidden states [patches, D] or [tiles, rows, D] before the merger; None: left out."""
    pooler_output: Tensor | None
    """Merged tokens [tokens, out_hidden_size]; None: left out."""
    deepstack_features: tuple[Tensor, ...] | None
    """Tokens [tokens, out_hidden_size] of each DeepStack block, if any; None: left out."""
    extras: Mapping[str, Tensor] = {}
    """Other features by name, such as ``"prefix"`` [segments, r, D]."""

    @overload
    def __getitem__(self, key: Literal["last_hidden_state", "pooler_output"]) -> Tensor | None: ...
    @overload
    def __getitem__(self, key: Literal["deepstack_features"]) -> tuple[Tensor, ...] | None: ...
    @overload
    def __getitem__(self, key: Literal["prefix"]) -> Tensor: ...
    @overload
    def __getitem__(self, key: str | SupportsIndex) -> Tensor | tuple[Tensor, ...] | None: ...
    @overload
    def __getitem__(self, key: _Slice) -> tuple[Tensor | tuple[Tensor, ...] | None, ...]: ...
    def __getitem__(self, key: str | SupportsIndex | _Slice) -> object:
        return _field(self, key)

    def __repr__(self) -> str:
        return _describe(self)

    def numpy(self) -> dict[str, Array]:
        """Return all tensors as NumPy arrays on the CPU, by name; bfloat16 becomes float32.

        The names are those of the fields, and "deepstack.0" and so on, as in files of features.
        """
        return _to_arrays(self)

    def clone(self) -> PartialOutput:
        """Copy all tensors; an output of ``split`` is a view that keeps a whole batch in memory."""
        return _map_tensors(self, Tensor.clone)

    def to(self, device: DeviceOrDtype = None, dtype: torch.dtype | None = None) -> PartialOutput:
        """Move and cast all tensors of an output to a device, to a dtype, or to both."""
        return _map_tensors(self, lambda tensor: _move(tensor, device, dtype))


FeatureRows: TypeAlias = Tensor | Sequence[Tensor | EncoderOutput | PartialOutput]
"""Features of several items: one tensor with the rows of all, or a list with one per item."""
Output = TypeVar("Output", EncoderOutput, PartialOutput)
"""The class of an output: ``EncoderOutput``, or ``PartialOutput`` if fields may be None."""


def _new(
    kind: type[Output],
    last_hidden_state: Tensor | None,
    pooler_output: Tensor | None,
    deepstack_features: tuple[Tensor, ...] | None,
    extras: Mapping[str, Tensor] | None = None,
) -> Output:
    """Make an output; without ``extras`` it has an empty dict that no other output shares.

    A MappingProxyType as default would do, but torch.export cannot return one.
    """
    fields = last_hidden_state, pooler_output, deepstack_features, {} if extras is None else extras
    return tuple.__new__(kind, fields)


EncoderOutput.__new__ = PartialOutput.__new__ = _new  # type: ignore[method-assign,assignment]


def output_like(
    output: Output,
    last_hidden_state: Tensor | None,
    pooler_output: Tensor | None,
    deepstack_features: tuple[Tensor, ...] | None,
    extras: Mapping[str, Tensor],
) -> Output:
    """Return an output of the same class as ``output`` with these fields."""
    return type(output)._make((last_hidden_state, pooler_output, deepstack_features, extras))


def _field(output: EncoderOutput | PartialOutput, key: str | SupportsIndex | _Slice) -> object:
    """Return the field or extra of ``output`` named ``key``, or the entry at an index or slice."""
    if not isinstance(key, str):
        return tuple.__getitem__(output, key)
    if key in output.extras:
        return output.extras[key]
    if key not in OUTPUT_FIELDS:
        names = ", ".join((*OUTPUT_FIELDS, *output.extras))
        raise KeyError(f"{key!r}: the fields of this output are {names}")
    return tuple.__getitem__(output, OUTPUT_FIELDS.index(key))


def _map_tensors(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """Return an output with ``change`` applied to every tensor; None stays None."""
    hidden, pooled, layers, extras = output
    return output_like(
        output,
        None if hidden is None else change(hidden),
        None if pooled is None else change(pooled),
        None if layers is None else tuple(map(change, layers)),
        {name: change(tensor) for name, tensor in extras.items()},
    )


def _to_arrays(output: EncoderOutput | PartialOutput) -> dict[str, Array]:
    """Return the tensors of an output as NumPy arrays by name, bfloat16 as float32."""
    arrays: dict[str, Array] = {}
    for name, tensor in named_tensors(output).items():
        on_host = tensor.detach().cpu()
        is_bf16 = on_host.dtype == torch.bfloat16  # a dtype that NumPy does not have
        arrays[name] = (on_host.float() if is_bf16 else on_host).numpy()
    return arrays


def named_tensors(output: EncoderOutput | PartialOutput) -> dict[str, Tensor]:
    """Return the tensors of an output by name, those of DeepStack as "deepstack.0" and so on.

    A field that is None has no entry.
    """
    hidden, pooled, layers, extras = output
    fields = {"last_hidden_state": hidden, "pooler_output": pooled}
    tensors = {name: tensor for name, tensor in fields.items() if tensor is not None}
    tensors |= {f"deepstack.{number}": layer for number, layer in enumerate(layers or ())}
    return {**tensors, **extras}


def _describe(value: object) -> str:
    """Return a short text about a value: of a tensor its dtype, shape and device, not its numbers.

    A named tuple or a dict is described entry by entry, and a list of over eight by its length.
    """
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{place}"
    if isinstance(value, EncoderOutput | PartialOutput | PathInputs | VisionInputs):
        fields = zip(value._fields, value, strict=True)
        shown = [pair for pair in fields if pair[1] != {} and pair != ("image_sizes", None)]
        texts = ", ".join(f"{name}={_describe(field)}" for name, field in shown)
        return f"{type(value).__name__}({texts})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_describe(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, tuple) and any(isinstance(entry, Tensor) for entry in value):
        return f"({', '.join(map(_describe, value))})"
    if isinstance(value, list | tuple) and len(value) > 8:
        return f"{len(value)} entries"
    return repr(value)


def _move(tensor: Tensor, device: DeviceOrDtype, dtype: torch.dtype | None) -> Tensor:
    """Move and cast ``tensor``; ``device`` may be a dtype, as in ``tensor.to(torch.float16)``."""
    if isinstance(device, torch.dtype):
        if dtype is not None:
            raise ValueError(
                f"to({device}, {dtype}): two dtypes; pass one, or a device and a dtype"
            )
        device, dtype = None, device
    return tensor.to(device=device, dtype=dtype)


class PathInputs(NamedTuple):
    """The pixels of one input path, such as "tiles", and the items that they belong to."""

    pixel_values: Tensor
    """Normalised pixels of all entries: patches [P, patch_dim], or views [B, C, H, W]."""
    grid_thw: Tensor
    """[entries, 3] int64 on the CPU: (t, h, w) of each item that uses the path, in item order."""
    items: tuple[int, ...]
    """The index (from 0) of the item that each entry of ``grid_thw`` belongs to, ascending."""

    def __repr__(self) -> str:
        return _describe(self)

    def to(self, device: DeviceOrDtype = None, dtype: torch.dtype | None = None) -> PathInputs:
        """Move and cast ``pixel_values``; ``grid_thw`` stays on the CPU, where encoders read it."""
        return self._replace(pixel_values=_move(self.pixel_values, device, dtype))


class VisionInputs(NamedTuple):
    """The pixels of several items, ready for an encoder, and the grid and tiles of each item.

    ``pixel_values`` and ``grid_thw`` are of the input path "image"; most families have no other.
    """

    pixel_values: Tensor
    """Normalised pixels of all items: patches [P, patch_dim], or views [B, C, H, W]."""
    grid_thw: Tensor
    """The grid (t, h, w) of each item in patches, [items, 3] int64 on the CPU."""
    tiles: list[Tiling] | None = None
    """(columns of tiles, rows of tiles, whether a thumbnail follows) per item; None: no tiles."""
    other_paths: Mapping[str, PathInputs] = MappingProxyType({})
    """The inputs of the paths besides "image", such as "tiles", in encoders that have such."""
    image_sizes: list[tuple[int, int]] | None = None
    """(height, width) in pixels of each image before it was resized, for families that cut the
    border around an image out of its tokens (LLaVA-1.6); ``CLIP_SIZE`` of a clip, whose frames have
    no border; None for other families."""

    def __repr__(self) -> str:
        return _describe(self)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle ``other_paths`` as a dict, because its default, a proxy, cannot be pickled."""
        return type(self), (*self[:3], dict(self.other_paths), self.image_sizes)

    @property
    def paths(self) -> dict[str, PathInputs]:
        """The inputs of each path by its name: "image" first, then for example "tiles"."""
        items = tuple(range(len(self.grid_thw)))
        return {"image": PathInputs(self.pixel_values, self.grid_thw, items), **self.other_paths}

    def to(self, device: DeviceOrDtype = None, dtype: torch.dtype | None = None) -> VisionInputs:
        """Move and cast the pixels of all paths; each ``grid_thw`` stays on the CPU."""
        return self.with_pixels(lambda pixels: _move(pixels, device, dtype))

    def with_pixels(self, change: Callable[[Tensor], Tensor]) -> VisionInputs:
        """Return new inputs with ``change`` applied to the pixels of each path, "image" first."""
        paths = {
            name: path._replace(pixel_values=change(path.pixel_values))
            for name, path in self.paths.items()
        }
        return self._replace(pixel_values=paths.pop("image").pixel_values, other_paths=paths)

    def check(self, paths: Collection[str]) -> None:
        """Check that these inputs fit an encoder whose input paths have the names ``paths``.

        Raises:
            ValueError: other paths than ``paths``, ``tiles`` of another number of items, or a path
                that neither all items use nor exactly those with a thumbnail in ``tiles``.
        """
        if self.paths.keys() != set(paths):
            raise ValueError(
                f"the inputs have the paths {', '.join(self.paths)}, and this encoder "
                f"has {', '.join(paths)}: pass what its own preprocess returned"
            )
        count, tiles = len(self.grid_thw), self.tiles or []
        tiled = tuple(item for item, (_, _, thumbnail) in enumerate(tiles) if thumbnail)
        for name, path in self.other_paths.items():
            entries, users = len(path.grid_thw), path.items
            if len(users) != entries or users not in (tiled, tuple(range(count))):
                raise ValueError(
                    f"path {name!r} has {entries} entries for {count} items, those of the items "
                    f"{users}, and tiles says that {tiled} use it: pass what preprocess returned"
                )
        for name, values in (("tiles", self.tiles), ("image_sizes", self.image_sizes)):
            if values is not None and len(values) != count:
                raise ValueError(
                    f"{name} has {len(values)} items, and grid_thw {count}: pass what "
                    "preprocess returned"
                )

    @classmethod
    def from_processor(cls, features: Mapping[str, object]) -> VisionInputs:
        """Make inputs from the output of a Hugging Face processor of Qwen: images, then videos.

        Args:
            features: has ``pixel_values`` [P, columns] with ``image_grid_thw`` [images, 3], or
                ``pixel_values_videos`` with ``video_grid_thw``, or both pairs. Other keys, such as
                ``input_ids``, are ignored.

        Raises:
            ValueError: neither pair is there, or half of a pair is missing.
        """
        return cls(*pixels_and_grid(features))


class Limits(NamedTuple):
    """The keywords of ``preprocess`` that bound sizes or sample videos; None: the default."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_tiles: int | None = None
    max_soft_tokens: int | None = None
    fps: float | None = None
    num_frames: int | None = None


class EncoderItemSpec(NamedTuple):
    """The sizes of one item (image or video), which decide how items are packed into batches."""

    input_size: int
    """The number of rows of ``pixel_values``: patches, or tiles for towers over tiles."""
    output_tokens: int
    """The number of rows of ``pooler_output``."""
    segments: int
    longest_segment: int
    """The most rows that attend to each other: patches, or 1+h*w for a tile of InternViT."""
    windows: int = 0
    """The number of attention windows (Qwen2.5-VL); 0 for towers without windows."""
    merged_rows: int = 0
    """The number of rows of ``last_hidden_state`` of a tower that merges rows between its blocks
    (MiniCPM-V); 0: as many as of ``pixel_values``."""

    @property
    def hidden_rows(self) -> int:
        """The number of rows of ``last_hidden_state``; of towers over tiles, of its first axis."""
        return self.merged_rows or self.input_size
