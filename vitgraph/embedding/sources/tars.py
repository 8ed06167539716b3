"""Images inside tar files, which ``tarfile`` lists once per job.

The offset and the size of each member are kept, so any thread can later read it with one request.
To list a tar file on a remote store, only its headers are transferred: 2 kB per member.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from .files import is_remote, open_file

HEADER_BLOCK = 2048 - 1
"""The bytes that are read ahead in a remote tar file, enough for a header with a long file name,
which takes 1,536."""
NOWHERE = -1
"""The offset of a link whose target is not in the tar file."""


class Member(NamedTuple):
    """One file inside a tar file: its name, its byte offset, and its size in bytes."""

    name: str
    offset: int
    """The byte offset in the tar file of this file's content, or of its header if it is sparse."""
    size: int
    sparse: bool = False


class Listed(NamedTuple):
    """The files in a tar file, and the number of bytes that were read to list them."""

    members: list[Member]
    transferred: int
    """The number of bytes that were read from a remote store; 0 for a local tar file."""


def list_members(path: str, version: str = "") -> Listed:
    """List the files in a tar file; a link is listed with the offset and size of its target.

    Files and hard links come in the order of the tar file, symbolic links after them.

    Args:
        path: path or address of the tar file.
        version: the text for its content that ``files.version_of`` returned when the job found the
            file; empty checks nothing.

    Raises:
        ValueError: the file is no tar file, or is damaged.
        OSError: the file cannot be read, or has changed.
    """
    with open_file(path, version, HEADER_BLOCK) as file:
        try:
            members = list(_with_links(_members(file)))
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(
                f"{path}: cannot be read as a tar file ({error}); replace it or leave it out"
            ) from error
        fetched = 0
        if is_remote(path):
            from fsspec.spec import AbstractBufferedFile

            if isinstance(file, AbstractBufferedFile):
                fetched = file.cache.total_requested_bytes
        return Listed(members, fetched)


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of the files in a tar file; the contents of the files are not read.

    Raises:
        tarfile.TarError: ``file`` is no tar file, or its headers break off before the end.
    """
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # or TarFile keeps all headers in memory
            yield member
        # A tar file ends in blocks of zeros; tarfile ends without error at a damaged header, too.
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"its list of files breaks off at byte {tar.offset:,}")


def _with_links(headers: Iterator[tarfile.TarInfo]) -> Iterator[Member]:
    """Yield the files and links that the headers of a tar file describe, each with its byte offset.

    A hard link names an earlier file. A symbolic link may name any file, relative to its own
    folder, so symbolic links are yielded after all files.
    """
    members: dict[str, Member] = {}
    links: dict[str, str] = {}
    linked: list[str] = []
    for header in headers:
        name = posixpath.normpath(header.name)
        if header.issym():
            target = posixpath.join(posixpath.dirname(name), header.linkname)
            links[name] = posixpath.normpath(target)
            linked.append(header.name)
            continue
        if header.isreg() or header.issparse():
            sparse = header.issparse()
            offset = header.offset if sparse else header.offset_data
            member = Member(header.name, offset, header.size, sparse)
        elif header.islnk():
            target = posixpath.normpath(header.linkname)
            member = members.get(target, Member("", NOWHERE, 0))._replace(name=header.name)
        else:
            continue
        members[name] = member
        yield member
    for name in linked:
        yield _follow(posixpath.normpath(name), links, members)._replace(name=name)


def _follow(name: str, links: dict[str, str], members: dict[str, Member]) -> Member:
    """Return the file that a symbolic link leads to, possibly through other links."""
    target = name
    for _ in range(len(links)):
        target = links.get(target, target)
        if target in members:
            return members[target]
    return Member("", NOWHERE, 0)


def read_sparse(path: str, version: str, offset: int) -> bytes:
    """Return the bytes of a sparse file in a tar file, with the zeros that the tar file leaves out.

    Args:
        path: path or address of the tar file.
        version: the text for the tar file's content that ``files.version_of`` returned when the job
            listed it; empty checks nothing.
        offset: byte offset of the header of the sparse file.

    Raises:
        OSError: the file cannot be read, or has changed.
    """
    with open_file(path, version) as file:
        file.seek(offset)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                member = tar.next()
                content = tar.extractfile(member) if member is not None else None
                if content is None:
                    raise OSError(f"{path}: has no file at byte {offset:,} any more")
                return content.read()
        except tarfile.TarError as error:
            raise OSError(f"{path}: cannot be read at byte {offset:,} ({error})") from error
