"""The features file that ``vitgraph encode`` writes: safetensors, a few tensors per item.

For item i (counted from 0; images in the order of the command line, then videos):

- ``item{i}.pooler_output`` [tokens, out]: the merged tokens that a language model is fed;
- ``item{i}.last_hidden_state`` [patches, D]: the features before the merger, in merge-block order
  (towers over tiles [tiles, rows, D]);
- ``item{i}.deepstack.{j}`` [tokens, out]: the output of DeepStack merger j (Qwen3-VL and Qwen3-Omni
  only);
- ``item{i}.prefix`` [segments, r, D]: the class token and registers, where the tower has some;
- ``item{i}.grid_thw`` [3] int64: t, h, w in patches (towers over tiles: tiles, h, w).

If items are pooled, each has ``item{i}.vector`` [D] instead of the first four.

The header's metadata has one key, ``vitgraph``: JSON with ``version``, ``repo``, ``revision``,
``encoder``, ``pool``, ``normalize`` and ``items``, a list of the fields of :class:`Item`. Unless
the caller chooses a dtype, vectors are float32 and all else keeps the encoder's dtype.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from encoders.contract import EncoderOutput, PartialOutput, named_tensors
from encoders.stored_tensors import STORED_DTYPES
from encoders.streams import Pool
from weights import JsonObject
from weights.files import TensorEntry, header_bytes, writing_atomic

from . import __version__
from .devices import cast_in_range, enough_disk

if TYPE_CHECKING:
    from encoders.inputs import AnyArray

__all__ = [
    "FeatureFormat",
    "Features",
    "Item",
    "load_embeddings",
    "load_features",
    "save_features",
    "writing_features",
]


class Item(NamedTuple):
    """The description of one image or video whose features are in a features file."""

    name: str
    """The path of the image or video file, as typed on the command line."""
    kind: Literal["image", "video"]
    size: tuple[int, int]
    """The size in pixels, (width, height), before any resizing."""
    frames: int
    """The number of frames of the file; 1 for an image."""
    grid_thw: tuple[int, int, int]
    """Steps, rows and columns of the patches; for towers over tiles the number of tiles, and rows
    and columns of one tile."""
    tiles: tuple[int, int, bool] | None
    """The arrangement of an image's tiles: (columns, rows, whether a thumbnail of the whole image
    follows); None for encoders that take no tiles."""


class Features(NamedTuple):
    """The outputs of one encoder for several images and videos, as :func:`load_features` returns
    them.

    ``repo`` is the repo id or folder of the checkpoint, ``revision`` its commit (None for a
    folder), ``encoder`` the name of the encoder's class, and ``items`` has a description of each
    image or video.
    """

    repo: str
    revision: str | None
    encoder: str
    items: list[Item]
    outputs: list[PartialOutput]
    """The output of each item; empty if the items were pooled to vectors."""
    pool: Pool = "none"
    """The kind of pooling: "mean", "max", "cls" or "head"; "none" for whole outputs."""
    normalize: bool = False
    """Whether the vectors have length 1."""
    vectors: Sequence[Tensor] = ()
    """The vector [D] of each item; empty if items were not pooled."""


class FeatureFormat(NamedTuple):
    """The form in which features are written: pooled or whole, normalised or not, and the dtype."""

    pool: Pool = "none"
    """The kind of pooling that made the vectors, "none" for whole outputs."""
    normalize: bool = False
    dtype: torch.dtype | None = None
    """The dtype to which features and vectors are cast; None writes them as they are."""


def save_features(path: str | Path, features: Features) -> None:
    """Write features to a file, whole or not at all.

    Args:
        path: the file to write or to replace.
        features: whole outputs, or pooled vectors. Fields of outputs that are None are not written.

    Raises:
        ValueError: there is not one output, or if ``pool`` is not "none" one vector, per item.
        OSError: the folder cannot be written to, or the disk is full.
    """
    items, outputs, vectors = len(features.items), len(features.outputs), len(features.vectors)
    is_whole = features.pool == "none"
    if (outputs, vectors) != ((items, 0) if is_whole else (0, items)):
        raise ValueError(
            f"{outputs} outputs and {vectors} vectors for {items} items with "
            f"pool={features.pool!r}: pass one {'output' if is_whole else 'vector'} per item, and "
            "nothing else"
        )
    source = features.repo, features.revision, features.encoder
    file_format = FeatureFormat(features.pool, features.normalize)
    results: list[EncoderOutput | PartialOutput | Tensor] = [*features.outputs, *features.vectors]
    with writing_features(path, *source, file_format) as add:
        for item, result in zip(features.items, results, strict=True):
            add(item, result)


@contextmanager
def writing_features(
    path: str | Path,
    repo: str,
    revision: str | None,
    encoder: str,
    file_format: FeatureFormat = FeatureFormat(),  # noqa: B008  # a tuple
) -> Iterator[Callable[[Item, EncoderOutput | PartialOutput | Tensor], None]]:
    """Write a features file one item at a time, without holding the items in memory.

    The file appears under its name when the block ends without an error. Until then the tensors lie
    in unnamed files in the same folder, because a safetensors header stands before the data.

    Args:
        path: the file to write or to replace.
        repo: the checkpoint's repo id or folder.
        revision: the commit of the repo; None for a folder.
        encoder: the class name of the encoder.
        file_format: pooling, normalising and dtype of the values that are written.

    Yields:
        A function that adds one item, called with its description, and its output or vector.

    Raises:
        ValueError: a value is too large for the dtype in ``file_format``.
        OSError: the folder cannot be written to, or the disk is full.
    """
    path, items = Path(path), list[Item]()
    fix = "; one vector per item (--pool mean) takes much less"
    with enough_disk(path, fix), ExitStack() as stack:
        spool = _Spool(path.parent, stack)

        def add(item: Item, result: EncoderOutput | PartialOutput | Tensor) -> None:
            spool.add(f"item{len(items)}.grid_thw", torch.tensor(item.grid_thw))
            tensors = {"vector": result} if isinstance(result, Tensor) else named_tensors(result)
            for name, tensor in tensors.items():
                stored_tensor = cast_in_range(tensor, file_format.dtype, item.name)
                spool.add(f"item{len(items)}.{name}", stored_tensor)
            items.append(item)

        yield add
        header = {
            "version": __version__,
            "repo": repo,
            "revision": revision,
            "encoder": encoder,
            "pool": file_format.pool,
            "normalize": file_format.normalize,
            "items": [item._asdict() for item in items],
        }
        # A reader sees the old file or the new one, never half of one.
        with writing_atomic(path) as temporary, temporary.open("wb") as file:
            spool.write(file, {"vitgraph": json.dumps(header)})


_DTYPES = {dtype: name for name, dtype in STORED_DTYPES.items()} | {torch.int64: "I64"}
"""The dtypes that a features file can hold, and their names in a safetensors header."""


class _Spool:
    """Collects the tensors of a safetensors file in unnamed files, one per element size in bytes.

    A tensor must begin at a multiple of its element size, and the format allows no gaps. Both rules
    hold if the tensors with the widest elements come first. The end of ``stack`` deletes the files.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._files: dict[int, IO[bytes]] = {}
        self._entries: dict[int, list[tuple[str, TensorEntry]]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.itemsize
        if size not in self._files:
            self._files[size] = self._stack.enter_context(TemporaryFile(dir=self._folder))  # noqa: SIM115
            self._entries[size] = []
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        self._files[size].write(data.numpy().data)
        entry = TensorEntry(_DTYPES[tensor.dtype], tuple(tensor.shape), 0, len(data))
        self._entries[size].append((name, entry))

    def write(self, file: IO[bytes], metadata: dict[str, str]) -> None:
        widest_first = sorted(self._files, reverse=True)
        entries = [entry for size in widest_first for entry in self._entries[size]]
        file.write(header_bytes(entries, metadata))
        for size in widest_first:
            self._files[size].seek(0)
            shutil.copyfileobj(self._files[size], file, 1 << 20)


def load_features(path: str | Path) -> Features:
    """Read a features file that ``vitgraph encode`` or :func:`save_features` wrote.

    Returns:
        The items, in the order of the file, and the output of each on the CPU, in the dtypes of the
        file. A field that the file does not have is None, or an empty tuple for DeepStack.

    Raises:
        ValueError: there is no such file, or it is no features file or damaged.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such file; `vitgraph encode` writes features files")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a safetensors file, or a damaged one ({error}); pass a file "
            "that `vitgraph encode` wrote"
        ) from error
    if "vitgraph" not in metadata:
        raise ValueError(f"{path}: not a features file; `vitgraph encode` writes them")
    try:
        header = json.loads(metadata["vitgraph"])
        items = [_read_item(fields) for fields in header["items"]]
        pool, normalize = header.get("pool", "none"), header.get("normalize", False)
        source = header["repo"], header["revision"], header["encoder"]
        numbers = range(len(items))
        if pool != "none":
            vectors = [tensors[f"item{number}.vector"] for number in numbers]
            return Features(*source, items, [], pool, normalize, vectors)
        outputs = [_read_output(tensors, f"item{number}") for number in numbers]
        return Features(*source, items, outputs)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the file is damaged ({error!r}); encode again") from error


def load_embeddings(folder: str | Path, field: str | None = None) -> tuple[list[str], AnyArray]:
    """Read all that ``vitgraph embed`` wrote into a folder, in any of its formats.

    Args:
        folder: the folder that ``--out`` named, local or on a remote store.
        field: for a job with ``--pool none``, the output field to read: "pooler_output",
            "last_hidden_state", "deepstack.0", ...; None means the first that ``--fields`` named.
            For a job with pooled vectors, None.

    Returns:
        Keys, and a matrix [keys, D] or, with ``--pool none``, an object array [keys] that holds an
        array [rows, D] per image; arrays in npy files are mapped into memory, not read. Keys are
        the paths of the images relative to the source, with forward slashes, in the order of the
        source; images that could not be encoded are skipped.

    Raises:
        ValueError: the job is not finished, it wrote no such field, or the table of an image's rows
            does not fit the arrays.
    """
    from .embedding.shards import read_embeddings

    return read_embeddings(folder, field)


def _read_item(fields: JsonObject) -> Item:
    """Return the item that ``fields`` describe; a missing or unknown field raises a KeyError."""
    if unknown := sorted(set(fields) - set(Item._fields)):
        raise KeyError(unknown[0])
    values = (fields[name] for name in Item._fields)
    return Item._make(tuple(v) if isinstance(v, list) else v for v in values)


def _read_output(tensors: dict[str, Tensor], item: str) -> PartialOutput:
    start = f"{item}."
    own = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
    layers = [name for name in own if name.startswith("deepstack.")]
    layers.sort(key=lambda name: int(name.removeprefix("deepstack.")))
    deepstack = tuple(own.pop(name) for name in layers)
    own.pop("grid_thw", None)
    fields = own.pop("last_hidden_state", None), own.pop("pooler_output", None)
    return PartialOutput(*fields, deepstack, own)
