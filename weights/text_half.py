"""The text half of a CLIP or SigLIP checkpoint: its tensors, its config, its tokenizer's files.

Only the text half is downloaded, as byte ranges or as the shards that hold it, and stored beside
the vision towers in the cache. Transformers runs it (``vitgraph.search.texts``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from encoders.stored_tensors import STORED_DTYPES

from .cache.store import Part
from .errors import CheckpointError, legible, problem_line
from .files.checkpoint import (
    TOKENIZER_FILES,
    Checkpoint,
    PublishedCheckpoint,
    TowerFiles,
    TowerTensor,
)
from .files.index import Contents, read_contents
from .hub.repo import HubOptions
from .layouts import Slot
from .load import fill_tensor, parse_device
from .magnitudes import check_magnitudes
from .opening import read_repaired
from .strict_json import JsonObject

TEXT_TYPES = ("clip", "metaclip_2", "siglip", "siglip2")
"""The model types of ``config.json`` whose repos hold a text half that is read."""
WITH_TEXT = (
    "CLIP, MetaCLIP, SigLIP and SigLIP2 repos, such as openai/clip-vit-large-patch14 and "
    "google/siglip2-base-patch16-224"
)
"""The repos whose images can be compared with words, for messages."""
_PREFIXES = ("text_model.", "text_projection.")
_BUFFER = ".position_ids"
"""The end of the name of a buffer that old checkpoints hold; it counts the positions from 0."""
_VOCABULARIES = frozenset(
    ("tokenizer.json", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
)
"""The files of a tokenizer of which a repo has one at least."""
_TEXT: Part = "text half"


@dataclass(frozen=True)
class TextHalf:
    """The text half of a checkpoint, as published."""

    label: str
    """The repo and revision of the checkpoint, or its folder."""
    config: JsonObject
    """The published config of the whole model, whose ``model_type`` is one of ``TEXT_TYPES``."""
    tensors: Mapping[str, Tensor]
    """The tensors in float32, by their published names."""
    files: Mapping[str, bytes]
    """The config and the files of the tokenizer, by their names."""


def read_text_half(
    repo_id_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    progress: bool = True,
    device: torch.device | str | None = None,
) -> TextHalf:
    """Read the text half of a checkpoint, and nothing else of it.

    Args:
        repo_id_or_path: repo id or folder; all keywords mean the same as for
            :func:`weights.load_encoder`.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, or has no text half of a model type
            in ``TEXT_TYPES``.
        ValueError: this machine has no such device.
    """
    source = (revision, subfolder, cache_dir, token, local_files_only)
    options = HubOptions(*source, progress=progress, part=_TEXT)
    read = partial(_read, parse_device(device))
    with torch.inference_mode(mode=False):  # else the tensors would be inference tensors
        return read_repaired(repo_id_or_path, options, read)


def _read(device: torch.device, checkpoint: Checkpoint) -> TextHalf:
    """Read the text half of an opened checkpoint."""
    kind = (checkpoint.read_json("config.json") or {}).get("model_type")
    if kind not in TEXT_TYPES:
        raise CheckpointError(
            f"{checkpoint.label}: has no text half (model_type {legible(repr(kind))}), which "
            f"{WITH_TEXT} have"
        )
    contents = read_contents(checkpoint)
    files = checkpoint.contents(("config.json", *TOKENIZER_FILES))
    if not _VOCABULARIES.intersection(files):  # transformers would make an empty tokenizer
        raise CheckpointError(
            f"{checkpoint.label}: has no tokenizer beside the weights (none of "
            f"{', '.join(sorted(_VOCABULARIES))}): copy the files of the original repo there"
        )
    tensors, shards = _find_tensors(contents)
    published = checkpoint.published or PublishedCheckpoint("", len(contents.files), shards)
    locations = checkpoint.locate(TowerFiles(tensors, published, lambda: files))
    empty = partial(torch.empty, dtype=torch.float32, device=device)
    state = {tensor.name: empty(tensor.entry.shape) for tensor in tensors}
    read = partial(fill_tensor, checkpoint.label, locations)
    largest = [read(tensor, state[tensor.name]) for tensor in tensors]
    check_magnitudes(zip(tensors, largest, strict=True), torch.float32, checkpoint.label)
    return TextHalf(checkpoint.label, contents.config, state, files)


def _find_tensors(contents: Contents) -> tuple[Sequence[TowerTensor], Mapping[str, int]]:
    """Return the tensors of the text half, and the bytes of each file that holds some of them."""
    label = contents.checkpoint.label
    names = [
        name for name in contents.files if name.startswith(_PREFIXES) and not name.endswith(_BUFFER)
    ]
    if not names:
        raise CheckpointError(
            f"{label}: has no text half, because none of its {len(contents.files)} tensors is "
            f"named text_model.*; take a whole repo: {WITH_TEXT} have one"
        )
    headers = contents.headers({contents.files[name] for name in names})
    tensors = []
    for name in names:
        file = contents.files[name]
        entry = headers[file].tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{label}: {file} has no tensor {legible(name)}, which the index announces: "
                f"download both again from one revision{contents.checkpoint.advice}"
            )
        tensors.append(TowerTensor(name, name, file, entry, Slot(name)))
    odd = [f"{t.name} is {t.entry.dtype}" for t in tensors if t.entry.dtype not in STORED_DTYPES]
    if odd:
        raise CheckpointError(
            f"{label}: the text half is quantised: {problem_line('wrong dtype', odd)}: use the "
            "original repo"
        )
    return tensors, {file: header.file_bytes for file, header in headers.items()}
