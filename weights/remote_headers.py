"""The header of a remote safetensors file, in one request where its length is guessed well."""

from __future__ import annotations

from .errors import CheckpointError
from .remote import RemoteFile
from .tensor_file import Header, check_size, header_length, parse_header

FIRST_READ = 1 << 16
"""Bytes of the first read of a header of which nothing is known."""


def remote_header(remote: RemoteFile, length: int) -> Header:
    """Read and check the header; one request if ``length`` is not too short.

    Raises:
        RangesUnsupported: the server does not do byte ranges.
        CheckpointError: the file is not what its header says.
    """
    raw = remote.read(0, length)
    end = 8 + header_length(raw, remote.label)
    if end > len(raw):
        raw += remote.read(len(raw), end)
    return _parse(remote, raw, end)


def header_without_ranges(remote: RemoteFile, length: int) -> Header:
    """The same of a server that sends whole files: it is hung up on after the header.

    Raises:
        RangesUnsupported: not even the file's own bytes come.
        CheckpointError: the file is not what its header says.
    """
    raw = remote.beginning(length)
    end = 8 + header_length(raw, remote.label)
    if end > len(raw) == length:
        raw = remote.beginning(end)
    return _parse(remote, raw, end)


def _parse(remote: RemoteFile, raw: bytes, end: int) -> Header:
    if end > len(raw):
        raise CheckpointError(f"{remote.label}: ends inside its header: truncated on the Hub")
    header = parse_header(raw[8:end], remote.label)
    if remote.size is not None:
        check_size(header, remote.size, remote.label)
    return header
