"""The files of a checkpoint in a folder of this disk, and where tensors lie in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from ..errors import AbsentError, CheckpointError, DamagedError, legible
from ..layouts import Slot
from ..strict_json import JsonDict, parse_json
from .tensor_file import Header, TensorEntry, read_header

MAX_JSON_BYTES = 100_000_000
"""The most bytes of an index file, of which the largest published one has about 20 MB, or of a file
of a tokenizer (SigLIP2: 34 MB)."""
MAX_CONFIG_BYTES = 16_000_000
"""The most bytes of any other JSON file; published ones have less than 1 MB."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
"""The names of the files that a tokenizer of transformers reads, where a repo has them."""
LONGEST_PART = 255
"""The most bytes in the name of a file or folder; ``encoders`` has the same limit for saving."""


@dataclass(frozen=True)
class TowerTensor:
    """One tensor of the tower: the file that holds it, and the encoder's tensor that it fills."""

    name: str
    local: str
    """The name without the prefix of the tower."""
    file: str
    entry: TensorEntry
    slot: Slot | None = None
    """The encoder's tensor that it fills; None if the layout has none."""
    scale: TowerTensor | None = None
    """The scales of a weight in FP8."""


@dataclass(frozen=True)
class PublishedCheckpoint:
    """Facts about a whole published checkpoint, recorded with a tower that was fetched alone."""

    prefix: str
    """The prefix of the names of the tower's tensors."""
    tensors: int
    """The number of tensors in all files."""
    shards: Mapping[str, int]
    """The bytes of each file that holds a part of the tower, by the name of the file."""


@dataclass(frozen=True)
class TowerFiles:
    """The tensors and JSON files of a tower that have to be on this disk to load it."""

    tensors: Sequence[TowerTensor]
    published: PublishedCheckpoint
    files: Callable[[], Mapping[str, bytes]]
    """A function that returns the published config and processor files: name -> bytes."""


@dataclass(frozen=True)
class TensorLocation:
    """The place of a tensor's bytes on this disk: the file, and the first byte in it (from 0).

    ``crc32`` of the bytes is known if this package fetched them by byte ranges, else None.
    """

    path: Path
    offset: int
    crc32: int | None = None


Route: TypeAlias = Literal["ranges", "shards", "nothing"]
"""The part that loading a tower would fetch: its byte ranges, whole shards, or nothing."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that fetching a tower would transfer, and what is on this disk already."""

    cached: str
    """"local" for a folder; else "tower", "shards", "some shards" or "nothing"."""
    route: Route
    ranges: int
    """The bytes to fetch if the tower is fetched as byte ranges."""
    unfinished: bool = False
    """Whether an earlier fetch of byte ranges was interrupted and would be continued."""


class Checkpoint:
    """The files of one checkpoint: in a folder of this disk or, in subclasses, on the Hub."""

    commit: str | None = None
    """The commit of every file; None for a folder."""
    offline = False
    """Whether files that are not on this disk count as absent."""
    cached = "local"
    """The value of :attr:`Traffic.cached`."""
    published: PublishedCheckpoint | None = None
    """Facts about the published checkpoint, only for a tower in the cache of this package."""
    advice = ""
    """How to repair the files, added at the end of errors about their content."""

    def __init__(self, folder: Path, weights: str | None = None, label: str = "") -> None:
        """Open the folder of a checkpoint.

        Args:
            folder: the folder.
            weights: name of the one safetensors file to read; None to read the files that the
                index lists or, without an index, the only safetensors file.
            label: name of the checkpoint in messages; by default its path.
        """
        self.folder = folder
        self.weights = weights
        self.label = label or str(folder / (weights or ""))
        # Links may lead to files inside the folder. In the cache of the Hub's client they also lead
        # from snapshots/<commit> to the folder "blobs" beside "snapshots".
        real = folder.resolve()
        commits = [path for path in (real, *real.parents) if path.parent.name == "snapshots"]
        self._allowed_folders = [real, *(path.parents[1] / "blobs" for path in commits)]

    def content(self, name: str) -> bytes | None:
        """Return the bytes of the JSON file ``name``, or None if there is no such file."""
        path = self._path(name)
        if path is None:
            return None
        label = f"{self.label}: {name}"
        try:
            if (size := path.stat().st_size) > json_limit(name):
                raise CheckpointError(f"{label}: {size} bytes, at most {json_limit(name)} are read")
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{label}: cannot be read ({error})") from error

    def contents(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes of each JSON file in ``names`` that exists, by name."""
        content_of = {name: self.content(name) for name in names}
        return {name: content for name, content in content_of.items() if content is not None}

    def read_json(self, name: str) -> JsonDict | None:
        """Return the JSON object in the file ``name``, or None if there is no such file."""
        content = self.content(name)
        try:
            return None if content is None else parse_json(content, f"{self.label}: {name}")
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self.advice}") from error

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a safetensors file ``name``, without fetching it."""
        return self._path(name) is not None

    def names(self) -> list[str]:
        """Return the names of the checkpoint's files, sorted, without fetching one of them."""
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def headers(self, guesses: Mapping[str, int]) -> dict[str, Header]:
        """Return the headers of safetensors files by name, reading no tensors where possible.

        Args:
            guesses: name of each file -> about how many bytes its header has, 0 if unknown.

        Raises:
            AbsentError: the checkpoint has no such file.
            CheckpointError: a file or its header is damaged.
        """
        paths = {name: self._path(name) for name in guesses}
        if missing := [name for name, path in paths.items() if path is None]:
            missing_names = ", ".join(missing[:6]) + (" and more" if len(missing) > 6 else "")
            raise AbsentError(f"{self.label}: the folder has no file {missing_names}")
        try:
            return {n: read_header(path, f"{self.label}: {n}") for n, path in paths.items() if path}
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self.advice}") from error

    def locate(self, tower_files: TowerFiles) -> dict[str, TensorLocation]:
        """Fetch the tensors of ``tower_files`` unless on this disk, and return each one's place.

        A DamagedError says that a copy on this disk is damaged or was removed: the caller opens the
        checkpoint again.
        """
        locations: dict[str, TensorLocation] = {}
        for file in dict.fromkeys(tensor.file for tensor in tower_files.tensors):
            path, label = self._path(file), f"{self.label}: {file}"
            if path is None:
                raise DamagedError(f"{label}: removed while it was being loaded")
            header = read_header(path, label)
            for tensor in (tensor for tensor in tower_files.tensors if tensor.file == file):
                if header.tensors.get(tensor.name) != tensor.entry:
                    raise CheckpointError(f"{label}: changed while it was being loaded; load again")
                locations[tensor.name] = TensorLocation(
                    path, header.data_start + tensor.entry.begin
                )
        return locations

    def traffic(self, tower_files: TowerFiles) -> Traffic:
        """Return how many bytes :meth:`locate` would transfer to get ``tower_files``."""
        return Traffic(
            self.cached, "nothing", sum(tensor.entry.nbytes for tensor in tower_files.tensors)
        )

    def _path(self, name: str) -> Path | None:
        """Return the path of the file ``name``, or None if it is not on this disk.

        A link that leads out of the checkpoint raises a CheckpointError.
        """
        path = self.folder / check_name(name, self.label)
        if not path.is_file():
            return None
        real = path.resolve()
        if name != self.weights and not any(map(real.is_relative_to, self._allowed_folders)):
            raise CheckpointError(
                f"{self.label}: {name} is a link that leaves the checkpoint (to {real}); nothing "
                "was read: put the file itself there, or pass the folder it is in"
            )
        return path


def json_limit(name: str) -> int:
    """Return the most bytes that a small file of this name may have."""
    large = name.endswith(".index.json") or name in TOKENIZER_FILES
    return MAX_JSON_BYTES if large else MAX_CONFIG_BYTES


def check_name(name: str, label: str) -> str:
    """Return ``name`` if it is a relative path of a file inside the checkpoint.

    Any other name, or one that no disk takes because it is too long, raises a CheckpointError that
    names the checkpoint by ``label``.
    """
    parts = PurePosixPath(name).parts
    climbs = name.startswith("/") or ".." in parts or "\\" in name or ":" in name
    if climbs or not parts or not name.isprintable() or len(name) > 255:
        raise CheckpointError(
            f"{label}: the file name {name[:200]!r} leaves the checkpoint or is not a plain "
            "relative name; nothing was read"
        )
    if any(len(part.encode()) > LONGEST_PART for part in parts):
        raise CheckpointError(
            f"{label}: names the file {legible(name)!r}; no file system allows names over "
            f"{LONGEST_PART} bytes"
        )
    return name
