"""The features file that ``vitgraph encode`` writes: a safetensors file, a few tensors an item.

For item i (0-based; images in the order given, then videos):

- ``item{i}.pooler_output`` [tokens, out]: merged tokens, what a language model is fed;
- ``item{i}.last_hidden_state`` [patches, D]: before the merger, in merge-block order
  (InternViT [tiles, 1+h*w, D]);
- ``item{i}.deepstack.{j}`` [tokens, out]: of DeepStack merger j (Qwen3-VL and Qwen3-Omni only);
- ``item{i}.grid_thw`` [3] int64: t, h, w in patches (InternViT: tiles, h, w).

The header's metadata has one key, ``vitgraph``: JSON with ``version``, ``repo``, ``revision``,
``encoder`` and ``items``, a list of what :class:`Item` holds. Tensors keep the encoder's dtype.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from encoders.contract import EncoderOutput

from . import __version__


class Item(NamedTuple):
    """Where the features of one image or video come from."""

    name: str
    """As given on the command line."""
    kind: str
    """"image" or "video"."""
    size: tuple[int, int]
    """(width, height) in pixels, before any resizing."""
    frames: int
    """Frames of the file; 1 for an image."""
    grid_thw: tuple[int, int, int]
    tiles: tuple[int, int, bool] | None
    """(columns, rows, thumbnail) for tiled families."""


class Features(NamedTuple):
    """A features file, read back."""

    repo: str
    revision: str | None
    encoder: str
    items: list[Item]
    outputs: list[EncoderOutput]


def save_features(path: str | Path, features: Features) -> None:
    """Write ``features`` to ``path``, whole or not at all.

    Raises:
        OSError: the folder cannot be written to.
    """
    tensors: dict[str, Tensor] = {}
    for number, (item, output) in enumerate(zip(features.items, features.outputs, strict=True)):
        fields = {
            "grid_thw": torch.tensor(item.grid_thw),
            "last_hidden_state": output.last_hidden_state,
            "pooler_output": output.pooler_output,
            **{f"deepstack.{j}": x for j, x in enumerate(output.deepstack_features or ())},
        }
        for name, tensor in fields.items():
            if tensor is not None:
                tensors[f"item{number}.{name}"] = tensor.detach().cpu().contiguous()
    about = {
        "version": __version__,
        "repo": features.repo,
        "revision": features.revision,
        "encoder": features.encoder,
        "items": [item._asdict() for item in features.items],
    }
    _write_atomically(Path(path), tensors, {"vitgraph": json.dumps(about)})


def load_features(path: str | Path) -> Features:
    """Read a file that :func:`save_features` wrote.

    A field that was left out is None again; of DeepStack features, an empty tuple.

    Raises:
        ValueError: not a features file, or a damaged one.
        OSError: no such file.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file, or a damaged one ({error})") from error
    if "vitgraph" not in metadata:
        raise ValueError(f"{path}: not a features file; `vitgraph encode` writes them")
    try:
        about = json.loads(metadata["vitgraph"])
        items = [_read_item(fields) for fields in about["items"]]
        source = about["repo"], about["revision"], about["encoder"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the header is damaged ({error!r}); encode again") from error
    outputs = [_read_output(tensors, f"item{number}") for number in range(len(items))]
    return Features(*source, items, outputs)


def load_embeddings(folder: str | Path) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Read all vectors that ``vitgraph embed`` wrote into a folder.

    Args:
        folder: what ``--out`` named.

    Returns:
        Keys, and a matrix [keys, D]. Keys are the paths of the images relative to the source, with
        forward slashes, in the order of the source; images that could not be encoded are left out.

    Raises:
        ValueError: the job is not finished, wrote no vectors, or its files disagree.
    """
    from .shards import read_embeddings

    return read_embeddings(Path(folder))


def is_features_file(path: Path) -> bool:
    """Whether :func:`save_features` wrote it; only the header is read."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return "vitgraph" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _read_item(fields: dict[str, object]) -> Item:
    lists = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Item(**lists)  # type: ignore[arg-type]


def _read_output(tensors: dict[str, Tensor], item: str) -> EncoderOutput:
    deepstack = [tensors[name] for name in _deepstack_names(tensors, item)]
    return EncoderOutput(
        tensors.get(f"{item}.last_hidden_state"),
        tensors.get(f"{item}.pooler_output"),
        tuple(deepstack),
    )


def _deepstack_names(tensors: dict[str, Tensor], item: str) -> Sequence[str]:
    prefix = f"{item}.deepstack."
    return sorted(
        (name for name in tensors if name.startswith(prefix)),
        key=lambda name: int(name.removeprefix(prefix)),
    )


def _write_atomically(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Beside the target first, then renamed: a reader sees the old file or the new, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()  # an OSError that names the folder, where safetensors has its own kind
        save_file(tensors, str(temporary), metadata)
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)
