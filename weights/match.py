"""Match a checkpoint's tensors with an encoder's, strictly, before a byte of them is read.

This file conducts: :func:`find_encoder` asks the snapshot for config and headers, the families for
the record and the config, the layout for names and shapes, and builds the encoder on the meta
device. None of those knows of another, and every function below is one step of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from encoders import Encoder

from .contents import Contents, adapter_error, adapter_names, read_contents
from .errors import CheckpointError, DamagedError, listed, shown
from .families import build_config, find_family
from .families.family import Family
from .layouts import Layout, Place, find_layout
from .snapshot import Piece, Published, Snapshot, Wanted
from .tower_folder import describe, transformers_class

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""The stored dtypes that a tower is loaded from."""

MOST_IN_LIST = 1024
"""Limit for the entries of a list in a config; each may stand for a module of the tower."""

_QUANTISED = re.compile(
    "qweight|qzeros|scales|g_idx|weight_scale(_inv|_2)?|input_scale|weight_(packed|shape|zero_point)"
    "|SCB|absmax|quant_map"
)
"""Last parts of the names of tensors that quantised weights come with."""


@dataclass(frozen=True)
class Tower:
    """The tower that a checkpoint holds: what it is, and every tensor of it."""

    contents: Contents
    family: Family
    layout: Layout
    place: Place
    config: Any
    wanted: Wanted

    @property
    def described(self) -> dict[str, Any]:
        """The ``config.json`` of a folder that holds the tower alone, in its stored dtype."""
        dtype = str(self.dtype).removeprefix("torch.")
        beside = bool(self.beside)
        return describe(self.contents.config, self.family, self.layout, dtype, projector=beside)

    @property
    def beside(self) -> set[str]:
        """Local names of the tensors that such a folder has in a file beside the tower's."""
        if transformers_class(self.contents.config, self.family, self.layout) is None:
            return set()
        local = (piece.local for piece in self.wanted.pieces)
        return {name for name in local if name.startswith(self.layout.projector)}

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the tensors by stored dtype, most first."""
        counter: Counter[str] = Counter()
        for piece in self.wanted.pieces:
            counter[piece.entry.dtype] += piece.entry.nbytes
        return dict(counter.most_common())

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype; of several, the one with most bytes."""
        return next(map(DTYPES.__getitem__, self.bytes_by_dtype), torch.get_default_dtype())


def find_encoder(snapshot: Snapshot, family: str | None = None) -> tuple[Tower, Encoder]:
    """Return the tower of a checkpoint and its encoder on the meta device, which fit each other."""
    contents = read_contents(snapshot)
    fits = partial(_fits, contents)
    found = find_family(
        contents.config, contents.files, snapshot.label, family, fits, saved=contents.family
    )
    tower = find_tower(contents, found)
    return tower, build_encoder(tower)


def _fits(contents: Contents, family: Family) -> bool:
    """Return whether the config and the tensors of a checkpoint make a tower of a family."""
    try:
        build_encoder(find_tower(contents, family))
    except DamagedError:
        raise
    except CheckpointError:
        return False
    return True


def find_tower(contents: Contents, family: Family) -> Tower:
    """Find the tower of a family, and read the headers of the files that hold it."""
    label = contents.snapshot.label
    layout, place = find_layout(family.name, family.layouts, contents.files, label)
    local = layout.tower_names(place, contents.files, label)
    if adapter_names(local.values()):
        raise adapter_error(label)
    _refuse_quantised(local, label)
    pieces, shards = _pieces(contents, layout, place, local)
    _refuse_dtypes(pieces, label)
    slots = [(piece.slot, piece.entry.shape) for piece in pieces]
    joined = {slot.name: slot.joined_shape(shape) for slot, shape in slots if slot}
    shapes = {
        name: layout.published_shape(name, shape, inverse=True) for name, shape in joined.items()
    }
    config = build_config(family, contents.config, shapes, label)
    published = contents.snapshot.published or Published(place.prefix, len(contents.files), shards)
    wanted = Wanted(pieces, published, contents.small_files)
    return Tower(contents, family, layout, place, config, wanted)


def build_encoder(tower: Tower) -> Encoder:
    """Return the tower's encoder on the meta device, once the tensors are known to fit it."""
    label = tower.contents.snapshot.label
    for name, value in asdict(tower.config).items():
        if isinstance(value, (list, tuple)) and len(value) > MOST_IN_LIST:
            raise CheckpointError(
                f"{label}: config.json: {name} has {len(value)} entries, at most "
                f"{MOST_IN_LIST} are read: use the config.json of the original repo"
            )
    try:
        encoder = tower.family.on_meta(tower.config)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{label}: config.json: {error}") from error
    _check_fit(tower, {name: tuple(value.shape) for name, value in encoder.state_dict().items()})
    return encoder


def _check_fit(tower: Tower, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a :class:`CheckpointError` that lists all tensors that do not fit ``expected``."""
    layout, place, snapshot = tower.layout, tower.place, tower.contents.snapshot
    present = {piece.name: piece for piece in tower.wanted.pieces}
    wanted: dict[str, tuple[int, ...]] = {}
    for ours, ours_shape in expected.items():
        parts, shape = layout.to_published(ours), layout.published_shape(ours, ours_shape)
        for local in parts:
            rows = (shape[0] // len(parts), *shape[1:]) if shape else shape
            wanted[layout.full_name(place, local)] = rows
    extra = [name for name in present if name not in wanted]
    missing = [name for name in wanted if name not in present]
    wrong = [
        f"{name} is {list(piece.entry.shape)}, the config makes {list(wanted[name])}"
        for name, piece in present.items()
        if name in wanted and piece.entry.shape != wanted[name]
    ]
    problems = [
        listed("missing", missing, extra or list(tower.contents.files), "nearest present"),
        listed("unexpected", extra, missing or list(wanted), "nearest expected"),
        listed("wrong shape", wrong),
    ]
    if found := [problem for problem in problems if problem]:
        raise CheckpointError(
            f"{snapshot.label}: the tensors do not fit the {tower.family.title} tower of its "
            f"config.json (layout {layout.name}, prefix {place.prefix!r}):\n  "
            + "\n  ".join(found)
            + "\nUse the config.json and weights of one and the same repo, downloaded whole"
            + (snapshot.advice or ".")
        )


def _pieces(
    contents: Contents, layout: Layout, place: Place, local: Mapping[str, str]
) -> tuple[list[Piece], dict[str, int]]:
    """Return each tower tensor and the bytes of each file, if index and headers agree."""
    pieces: dict[str, Piece] = {}
    headers = contents.headers({contents.files[name] for name in local})
    for file, header in headers.items():
        named = {name for name in local if contents.files[name] == file}
        inside = set(layout.tower_names(place, header.tensors, contents.snapshot.label))
        if strays := sorted(named ^ inside):
            found = "is there, unannounced" if strays[0] in inside else "is announced, not there"
            raise CheckpointError(
                f"{contents.snapshot.label}: the index and {file} disagree about {len(strays)} "
                f"tensors, the first {shown(strays[0])} ({found}): download both again from one "
                f"revision{contents.snapshot.advice}"
            )
        for name in named:
            slot = layout.to_ours(local[name])
            pieces[name] = Piece(name, local[name], file, header.tensors[name], slot)
    sizes = {file: header.file_bytes for file, header in headers.items()}
    return [pieces[name] for name in local], sizes


def _refuse_quantised(local: Mapping[str, str], label: str) -> None:
    found = [name for name, rest in local.items() if _QUANTISED.fullmatch(rest.rpartition(".")[2])]
    if found:
        raise CheckpointError(
            f"{label}: the tower is quantised ({len(found)} tensors like {shown(found[0])}): load "
            "the original repo, or a quantised one that leaves the vision tower in bf16"
        )


def _refuse_dtypes(pieces: Iterable[Piece], label: str) -> None:
    odd = [piece for piece in pieces if piece.entry.dtype not in DTYPES]
    if wrong := [f"{piece.name} is {piece.entry.dtype}" for piece in odd]:
        raise CheckpointError(
            f"{label}: the tower is quantised or not made of weights:\n  "
            + listed("wrong dtype", wrong)
            + f"\nTowers are loaded from {', '.join(DTYPES)}: use the original repo."
        )
