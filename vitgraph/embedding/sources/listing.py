"""Lists the images of a source, which is the argument of ``vitgraph embed`` that names images.

A source is a folder, a file name pattern, a list of paths, or a dataset of the Hub. All but data
sets may lie on a remote store. For a tar or parquet file that a pattern or a list names, the images
inside are listed. Only lists of paths and the headers of tar and parquet files are read here;
:mod:`.reading` reads the images.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import os
import posixpath
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...fetching import is_url
from ...terminal import counted
from .files import (
    entries_below,
    explaining,
    is_remote,
    local_path,
    open_filesystem,
    path_beside,
    read_file,
    version_from,
    version_in,
    version_of,
)
from .reading import File, FileKind, Media, SourceOptions, refusal_of_url, url_in
from .suffixes import LeftOut, holds_clip, is_clip
from .tables import DATASET, DataSet, ParquetTable, is_dataset, pin_dataset, pin_files
from .tars import Listed, list_members

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from weights import JsonObject


_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""The file name endings of compressed tar files, which are rejected."""
_PACKED = (".zip", ".7z", ".rar")
"""The file name endings of archives that are not read."""
WHAT_TO_GIVE = (
    "give a folder with images, a pattern in quotes, a .txt file with one path per line, - for "
    f"paths on standard input, or {DATASET}NAME"
)
"""The end of errors about a source without images."""
LISTING = 16
"""The number of tar files on a remote store whose headers are read at the same time."""


class Source:
    """An iterable over the image files of a source, such as a folder.

    Images are sorted by key (relative path), except those of a list, which keep its order. After
    the iteration, ``left_out`` has the number of files per suffix that are not images, and
    ``notes`` has lines to print, such as the time that listing took.

    Args:
        source: a folder, a file name pattern, a text file of paths, "-" for paths on standard
            input, a tar file, a parquet file, or "hf://datasets/NAME". All but the last may be
            local or an address on a remote store.
        options: the options for images inside tables, lists and datasets; None takes the defaults.
    """

    def __init__(self, source: str, options: SourceOptions | None = None) -> None:
        self.options = options or SourceOptions()
        self.name = local_path(source)
        self._text = _read_standard_input() if source == "-" else ""
        self.left_out = LeftOut(self.options.clips)
        self.notes: list[str] = []

    def identity(self) -> str:
        """Return a string that identifies the source in the settings of a job."""
        if self.name == "-":
            digest = hashlib.sha256(self._text.encode("utf-8", "surrogateescape")).hexdigest()
            return f"- ({digest[:16]}) in {os.getcwd()}"
        return self.name if is_remote(self.name) else os.path.abspath(self.name)

    def __iter__(self) -> Iterator[File]:
        """Yield the images of the source.

        Raises:
            ValueError: there is no image, a tar or parquet file cannot be read, or a list names a
                file outside its folder or a URL and ``options`` does not permit that.
            OSError: a folder or a list cannot be read.
        """
        count = 0
        for file in self._find():
            name = urlsplit(file.key).path if is_url(file.key) else file.key
            if is_clip(name):
                if not self.left_out.takes(name):  # a list or a pattern names it
                    continue
                file = file._replace(media="clip")
            count += 1
            yield file
        if not count:
            left_out = "".join(f" ({line})" for line in self.left_out.describe())
            raise ValueError(f"{self.name}: no images found{left_out}; {WHAT_TO_GIVE}")

    def _find(self) -> Iterator[File]:
        name = self.name
        if name == "-":
            return self._expand_archives(self._files_of_list(self._text, "", any_path=True))
        if is_dataset(name):
            return self._rows_of_dataset(name.removeprefix(DATASET))
        if is_remote(name):
            return self._find_remote(pin_files(name) if name.startswith("hf://") else name)
        return self._find_local(name)

    def _find_local(self, name: str) -> Iterator[File]:
        path = Path(os.path.abspath(name))
        if path.is_dir():
            return self._files_below(str(path))
        if path.suffix.lower() == ".txt" and path.is_file():
            text = _decode(path.read_bytes(), name)
            return self._expand_archives(self._files_of_list(text, str(path.parent)))
        if path.exists():
            return self._expand_archives([_local_file(str(path), path.name)])
        fixed = path.parts[:-1]
        depth = next((n for n, part in enumerate(fixed) if glob.has_magic(part)), len(fixed))
        root = os.path.join(*fixed[:depth])
        names = glob.glob(str(path), recursive=True)
        keys = {Path(name_found).relative_to(root).as_posix(): name_found for name_found in names}
        files = (_local_file(keys[key], key) for key in sorted(keys) if self._takes(keys[key]))
        return self._expand_archives(files)

    def _takes(self, path: str) -> bool:
        """Return whether a path that a pattern matches is listed; count a pipe or a device.

        Folders are not. A broken link is, as in a folder, because reading it reports its name.
        """
        if os.path.isfile(path) or not os.path.exists(path):
            return True
        if not os.path.isdir(path):
            self.left_out.counts["of another kind (pipe, device)"] += 1
        return False

    def _files_below(self, root: str) -> Iterator[File]:
        """Yield the image files below a local folder, sorted by key; hidden files are skipped.

        Until all files are sorted, each is held in memory as one short text. A NUL character comes
        between the key and the version, so that the texts sort in the order of the keys.

        Raises:
            OSError: a folder below ``root`` cannot be read, so images would be missing unnoticed.
        """
        lines: list[str] = []
        for entry, key in entries_below(root):
            if not self.left_out.takes(entry.name):
                continue
            try:
                state = entry.stat()
            except OSError:  # a broken link stays in the list; reading it reports its name
                lines.append(f"{key}\0")
                continue
            if stat.S_ISREG(state.st_mode):
                lines.append(f"{key}\0{version_from(state)}")
            else:
                self.left_out.counts["of another kind (pipe, device)"] += 1
        lines.sort()
        start = os.path.join(root, "")
        for text in lines:
            key, version = text.split("\0")
            yield File(key, start + key, int(version.partition(" ")[0] or -1), version)

    def _find_remote(self, url: str) -> Iterator[File]:
        name = posixpath.basename(urlsplit(url).path)
        if name.lower().endswith(".txt"):
            text = _decode(read_file(url), url)
            return self._expand_archives(self._files_of_list(text, posixpath.dirname(url)))
        if is_url(url):
            return self._expand_archives([File(name or url, url, version=version_of(url))])
        fs, path = open_filesystem(url)
        with explaining(url):
            if glob.has_magic(path):
                infos, root = fs.glob(path, detail=True), _fixed_part(path)
                return self._expand_archives(_remote_files(fs, infos, root))
            infos = fs.find(path, detail=True)
        if set(infos) == {path}:
            return self._expand_archives(_remote_files(fs, infos, posixpath.dirname(path)))
        return self._images_of(_remote_files(fs, infos, path.rstrip("/")))

    def _images_of(self, files: Iterable[File]) -> Iterator[File]:
        """Yield files with an image's suffix outside hidden folders; count the others in
        ``left_out``."""
        for file in files:
            hidden = any(part.startswith(".") for part in file.key.split("/"))
            if not hidden and self.left_out.takes(file.key):
                yield file

    def _files_of_list(self, text: str, folder: str, any_path: bool = False) -> Iterator[File]:
        """Yield the files that the lines of a list name."""
        any_path = any_path or self.options.any_path
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
            name = line.removesuffix("\r")
            if not name.strip():
                continue
            if "\0" in name:
                raise ValueError(
                    f"{self.name}: line {number}: has NUL characters, so the list is no text in "
                    "UTF-8; save it as UTF-8"
                )
            if is_url(name):
                if not self.options.fetch_urls:
                    raise ValueError(f"{self.name}: line {number}: {refusal_of_url(name)}")
                yield File(name, name, kind="url")
                continue
            try:
                path = path_beside(folder, local_path(name), any_path)
            except ValueError as error:
                raise ValueError(f"{self.name}: line {number}: {error}") from error
            yield _file_of_line(path, folder)

    def _expand_archives(self, files: Iterable[File]) -> Iterator[File]:
        """Yield the given files, but instead of a tar or parquet file the images inside it.

        The headers of up to 16 remote tar files are read at the same time.
        """
        with ThreadPoolExecutor(LISTING) as pool:
            for listed_so_far in _batches(files, LISTING):
                batch = list(pool.map(_with_version, listed_so_far))
                tars = [file for file in batch if _ends(file.path, ".tar") and is_remote(file.path)]
                start_time = time.perf_counter()
                listings = dict(zip((t.path for t in tars), pool.map(_list_tar, tars), strict=True))
                if tars:
                    self._note(tars, listings, time.perf_counter() - start_time)
                for file in batch:
                    yield from self._expand(file, listings)

    def _note(self, tars: list[File], listings: dict[str, Listed], seconds: float) -> None:
        transferred = sum(listing.transferred for listing in listings.values())
        count = sum(len(listing.members) for listing in listings.values())
        tar_bytes = sum(max(file.size, int(file.version.split()[0])) for file in tars)
        self.notes.append(
            f"listed {counted(len(tars), 'remote tar file')} in {seconds:.1f} s: "
            f"{counted(count, 'member')}, {transferred:,} of {tar_bytes:,} bytes "
            f"transferred ({transferred / max(tar_bytes, 1):.2%})"
        )

    def _expand(self, file: File, listings: dict[str, Listed]) -> Iterator[File]:
        if file.kind == "file" and _ends(file.path, *_COMPRESSED):
            raise ValueError(
                f"{file.path}: is compressed, so that no image in it can be reached without "
                "reading all before it; decompress it to a .tar file"
            )
        if file.kind == "file" and _ends(file.path, *_PACKED):
            raise ValueError(
                f"{file.path}: is an archive of a kind that is not read; unpack it and give the "
                "folder, or pack its images into a .tar file"
            )
        if file.kind == "file" and _ends(file.path, ".tar"):
            yield from self._members(file, listings.get(file.path) or _list_tar(file))
        elif file.kind == "file" and _ends(file.path, ".parquet"):
            table = ParquetTable(file.path, file.version, self.options.column)
            yield from self._rows(table, file.path, file.version, file.key)
        else:
            yield file

    def _members(self, tar: File, listing: Listed) -> Iterator[File]:
        for member in listing.members:
            hidden = posixpath.basename(member.name).startswith(".")
            if not hidden and self.left_out.takes(member.name):
                kind: FileKind = "sparse" if member.sparse else "member"
                key = f"{tar.key}/{member.name}"
                yield File(key, tar.path, member.size, tar.version, kind, member.offset)

    def _rows(
        self, table: ParquetTable | DataSet, path: str, version: str, key: str
    ) -> Iterator[File]:
        """Yield a :class:`File` per row of a table."""
        if len(table) and table.holds_text and not self.options.fetch_urls:
            first = url_in(table.cell(0))
            if first is not None:
                raise ValueError(f"{path}: column {self.options.column!r}: {refusal_of_url(first)}")
        is_clips = self.options.clips and len(table) > 0 and holds_clip(table.cell(0))
        media: Media = "clip" if is_clips else "image"
        for row in range(len(table)):
            yield File(f"{key}/{row}", path, -1, version, "row", row, media)

    def _rows_of_dataset(self, name: str) -> Iterator[File]:
        pinned, version = pin_dataset(name)
        options = self.options
        table = DataSet(pinned, version, options.column, options.subset, options.split)
        self.notes.append(f"dataset {pinned}")
        return self._rows(table, DATASET + pinned, version, options.split)


def _read_standard_input() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):
        return _decode(sys.stdin.buffer.read(), "standard input")
    return sys.stdin.read()


def _decode(content: bytes, name: str) -> str:
    """Return the text of a list, in UTF-8 or, as PowerShell writes it, in UTF-16 with a mark.

    Bytes of file names that are not UTF-8 are kept as surrogates.
    """
    if not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-8", "surrogateescape")
    try:
        return content.decode("utf-16")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: begins like text in UTF-16 and is none ({error}); save it as UTF-8"
        ) from error


def _file_of_line(path: str, folder: str) -> File:
    """Return the file at a path that a list in ``folder`` names.

    The file's key is its path relative to ``folder``, or the unchanged path if it lies outside.
    """
    if is_remote(path):
        return File(path.removeprefix(f"{folder}/"), path)
    is_inside = Path(path).is_relative_to(folder)
    key = (Path(path).relative_to(folder) if is_inside else Path(path)).as_posix()
    return _local_file(os.path.abspath(path), key)


def _remote_files(
    fs: AbstractFileSystem, infos: Mapping[str, JsonObject], root: str
) -> Iterator[File]:
    """Yield a :class:`File` per path in ``infos``, the result of ``fs.find(..., detail=True)``.

    The keys of the files are their paths relative to ``root``.
    """
    for path in sorted(infos):
        info = infos[path]
        if info.get("type", "file") == "file":
            key, url = path[len(root) :].lstrip("/"), fs.unstrip_protocol(path)
            size = info.get("size")  # None on stores that do not tell the size
            known_size = size if isinstance(size, int) and size > 0 else -1
            yield File(key, url, known_size, version_in(info))


def _fixed_part(path: str) -> str:
    """Return the part of a file name pattern before the first folder with a wildcard."""
    parts = path.split("/")
    return "/".join(parts[: next(n for n, part in enumerate(parts) if glob.has_magic(part))])


def _with_version(file: File) -> File:
    """Return a file with its version, which is looked up if the file has none yet."""
    if file.kind != "file" or file.version or not is_remote(file.path):
        return file
    try:
        return file._replace(version=version_of(file.path))
    except OSError:
        return file  # an error must not stop the listing; it is reported when this file is read


def _local_file(path: str, key: str) -> File:
    try:
        version = version_of(path)
    except OSError:
        return File(key, path)  # an error must not stop the listing; reading reports it later
    return File(key, path, int(version.split()[0]), version)


def _list_tar(file: File) -> Listed:
    try:
        return list_members(file.path, file.version)
    except OSError as error:
        raise ValueError(
            f"{file.path}: cannot be read as a tar file ({error}); replace it or leave it out"
        ) from error


def _ends(path: str, *endings: str) -> bool:
    name = urlsplit(path).path if is_url(path) else path
    return name.lower().endswith(endings)


def _batches(files: Iterable[File], size: int) -> Iterator[list[File]]:
    batch: list[File] = []
    for file in files:
        batch.append(file)
        if len(batch) == size:
            yield batch
            batch = []
    yield batch
