"""The manifest of an embedding job: its settings, and the name of the list of its image files.

Only one worker can create the manifest of a job. All others read it, compare its settings with
their own, and use its list of files, so a change of the source folder does not change the job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypedDict
from uuid import uuid4

from .sources.reading import File
from .storage import STORE, Storage, is_temporary

if TYPE_CHECKING:
    from .records import JobSettings

NAME = "manifest.json"
_LIST = "files."
"""The beginning of the name of the file in a job's folder that lists its images; a random part
follows."""


class ListedFiles(TypedDict):
    """The description, in a manifest, of the file that lists the images of a job."""

    name: str
    """The name of the list in the folder of the job."""
    index: int
    """The byte offset of the last line of the list, which says where the lines of each shard begin.
    """
    bytes: int
    """The sum of the sizes of the image files, without files whose size is not known."""
    said: list[str]
    """The lines that were printed for the user when the list was made."""


class Listed(NamedTuple):
    """The fields of a :class:`Manifest` that depend only on the image files."""

    items: int
    keys: str
    files: ListedFiles


class Manifest(NamedTuple):
    """The settings of an embedding job, which hold for all of its shards.

    ``items`` is the number of images of the job, ``items_per_shard`` the number of images in each
    shard except the last.
    """

    settings: JobSettings
    items: int
    items_per_shard: int
    keys: str
    """The SHA-256 of the keys (relative paths) of all images in order."""
    files: ListedFiles

    @property
    def shards(self) -> int:
        """The number of shards of the job."""
        return -(-self.items // self.items_per_shard)

    def create(self, storage: Storage) -> bool:
        """Write the manifest unless the folder has one; return whether it was written."""
        settings = json.dumps(self.settings, sort_keys=True)
        content = {**self._asdict(), "digest": hashlib.sha256(settings.encode()).hexdigest()}
        created = storage.create(NAME, (json.dumps(content, indent=1) + "\n").encode())
        if created:  # remove lists by workers that were killed before they wrote a manifest
            lists = storage.names(_LIST)
            storage.delete(name for name in lists if name != self.files["name"])
        return created

    def compare(self, settings: JobSettings, items_per_shard: int, folder: str) -> None:
        """Check that the settings on a command line are the same as those of this existing job.

        Args:
            settings: the settings that follow from the command line.
            items_per_shard: the images per shard that follow from the command line.
            folder: name of the job's folder, for the error message.

        Raises:
            ValueError: a setting differs; the message names the first one.
        """
        new_settings: dict[str, object] = {**settings, "items per shard": items_per_shard}
        job_settings: dict[str, object] = {**self.settings, "items per shard": self.items_per_shard}
        if new_settings.get("revision") == job_settings.get("commit"):
            new_settings["revision"] = job_settings.get("revision")
        for name in sorted(new_settings.keys() | job_settings.keys()):
            if new_settings.get(name) != job_settings.get(name):
                raise ValueError(
                    f"--out {folder}: was begun with {name} {job_settings.get(name)}, now it is "
                    f"{new_settings.get(name)}; give the same arguments to resume, or another "
                    "folder"
                )

    @classmethod
    def find(cls, storage: Storage) -> Manifest | None:
        """Return the manifest in a folder; None if none is written there yet.

        Raises:
            ValueError: the folder holds other files, or is a file, or the manifest is damaged.
        """
        if storage.exists(NAME):
            return cls.read(storage)
        try:
            names = storage.names()
        except NotADirectoryError:
            raise ValueError(f"--out {storage.name}: is a file; give a folder") from None
        own_names = (is_temporary(name) or name.startswith(_LIST) for name in names)
        if STORE not in names and not all(own_names):
            raise ValueError(
                f"--out {storage.name}: holds files, and no manifest of an embedding job; give "
                "another folder"
            )
        return None

    @classmethod
    def read(cls, storage: Storage) -> Manifest:
        """Return the manifest in a folder.

        Raises:
            ValueError: there is no manifest, or it is damaged.
        """
        try:
            fields = json.loads(storage.read(NAME))
            return cls(*(fields[name] for name in cls._fields))
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"{storage.name}: has no manifest.json; `vitgraph embed` writes one into its folder"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{storage.name}/{NAME}: is damaged ({error!r})") from error


def is_listed_in_manifest(storage: Storage, listed: Listed) -> bool:
    """Return whether the folder of a job has a manifest that names this list of files."""
    named = Manifest.read(storage).files["name"] if storage.exists(NAME) else None
    return named == listed.files["name"]


# --- the list of files ----------------------------------------------------------------------------


class FileList:
    """Reads the list of all image files of a job, one shard at a time.

    The list is a text file with one line of JSON per image, in the order of the source. Its last
    line has the byte offsets at which the lines of each shard begin.

    Args:
        storage: the folder of the job.
        manifest: the manifest that names the list.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage, self._items_per_shard = storage, manifest.items_per_shard
        self._name, self._index = manifest.files["name"], manifest.files["index"]

    @cached_property
    def _starts(self) -> list[int]:
        return [*json.loads(self._storage.read(self._name, self._index)), self._index]

    def shard(self, number: int) -> list[File]:
        """Return the image files of the shard with this number, counted from 0."""
        start, end = self._starts[number : number + 2]
        lines = self._storage.read(self._name, start, end).splitlines()
        return [File(*fields) for fields in json.loads(b"[" + b",".join(lines) + b"]")]

    def file(self, number: int) -> File:
        """Return the image file with this number among all of the job, counted from 0."""
        shard, index = divmod(number, self._items_per_shard)
        return self.shard(shard)[index]


def write_list(storage: Storage, files: Iterable[File], items_per_shard: int) -> Listed:
    """Write the list of image files of a job, holding those of one shard in memory at a time.

    Args:
        storage: the folder of the job.
        files: all image files of the job, in order.
        items_per_shard: number of images in each shard except the last.

    Returns:
        The fields of a :class:`Manifest` that depend only on the image files.
    """
    starts, keys, left = list[int](), hashlib.sha256(), iter(files)
    count = size = offset = 0
    name = f"{_LIST}{uuid4().hex[:8]}.jsonl"
    with storage.writing(name) as path, open(path, "wb") as out:
        while some := list(islice(left, items_per_shard)):
            starts.append(offset)
            count += len(some)
            size += sum(max(file.size, 0) for file in some)
            keys.update(b"".join(_as_bytes(file.key) for file in some))
            # One call for all of them takes half the time. A line begins and ends with a string,
            # and JSON writes a backslash before a quote in a string: only lines are divided here,
            # and a string that ends in '"], [', which is then seen by the number of lines.
            lines = json.dumps(some)[1:-1].replace('"], ["', '"]\n["')
            if lines.count("\n") >= len(some):
                lines = "\n".join(map(json.dumps, some))
            offset += out.write(lines.encode() + b"\n")
        out.write(json.dumps(starts).encode() + b"\n")
    list_record: ListedFiles = {"name": name, "index": offset, "bytes": size, "said": []}
    return Listed(count, keys.hexdigest(), list_record)


def digest_keys(keys: Iterable[str]) -> str:
    """Return the SHA-256 of all image keys in order, the field ``keys`` of a manifest."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(_as_bytes(key))
    return digest.hexdigest()


def _as_bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape") + b"\0"
