"""Safetensors files: the header checked against the file, tensors read straight into memory.

Files are not read with ``safetensors.safe_open`` for two reasons. Here bytes are read straight into
the final tensor, so that nothing is copied twice and no page of a mapped file counts towards the
memory of the process. And a bad header is rejected before memory is allocated for its tensors. The
format: 8 bytes of little-endian length, so many bytes of JSON
``{name: {dtype, shape, data_offsets}}``, then the data without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import BinaryIO, TypeGuard
from zlib import crc32

from ..errors import CheckpointError, legible
from ..strict_json import LFS_POINTER, JsonDict, JsonObject, parse_json, refuse_pointer

CHECKED_BYTES = 1 << 19
"""Bytes that are read and checked at a time, so that values and CRC-32 are checked while they are
in the processor's cache. A second of CPU time takes the CRC-32 of 2.3 GiB of a tensor of 64 MiB in
such pieces, and of 1.6 GiB in pieces of 4 MiB (file in the page cache, Xeon with 2 MiB of
second-level cache per core)."""
MAX_HEADER_BYTES = 100_000_000
"""The most bytes of a header in the safetensors format; published ones stay under 10 MB."""

DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "BF16", "F16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The bits per element of each dtype, by its name in a header."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a header: its dtype by the format's name ("BF16"), its shape, and its bytes.

    The bytes are those from ``begin`` up to ``end``, counted from the first byte after the header.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes in the file."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: every tensor by name, and the byte at which data starts."""

    tensors: Mapping[str, TensorEntry]
    data_start: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The strings under ``__metadata__``; other values are left out."""

    @property
    def file_bytes(self) -> int:
        """The number of bytes of a whole file with this header."""
        return self.data_start + max((entry.end for entry in self.tensors.values()), default=0)


def read_header(path: Path, label: str) -> Header:
    """Read the header of a safetensors file; errors name the file by ``label``.

    A CheckpointError is raised if the header is not sound, or if the file is shorter or longer than
    the header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(file.read(len(LFS_POINTER)), label)
            if length > size - 8:
                raise CheckpointError(
                    f"{label}: the header claims {length} bytes but the file has {size}: "
                    "truncated or not a safetensors file; download it again"
                )
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read ({error})") from error
    header = parse_header(raw, label)
    check_size(header, size, label)
    return header


def check_size(header: Header, size: int, label: str) -> None:
    """Raise a :class:`CheckpointError` unless ``header`` describes a file of ``size`` bytes.

    The error names the file by ``label``.
    """
    if header.file_bytes != size:
        raise CheckpointError(
            f"{label}: the file has {size} bytes, its header describes {header.file_bytes}: "
            "truncated or damaged; download it again"
        )


def header_length(raw: bytes, label: str) -> int:
    """Return the length in bytes of a file's JSON header; ``raw`` is 8 or more of its first bytes.

    A length that the format does not allow raises a CheckpointError, which names ``label``.
    """
    refuse_pointer(raw, label)
    if len(raw) < 8:
        raise CheckpointError(f"{label}: {len(raw)} bytes is too short for a safetensors file")
    length = int.from_bytes(raw[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{label}: a header of {length} bytes, the format allows {MAX_HEADER_BYTES}: "
            "not a safetensors file, or damaged"
        )
    return length


def parse_header(raw: bytes, label: str) -> Header:
    """Parse a file's JSON header ``raw``, and check that its tensors lie without overlaps or gaps.

    Any defect raises a CheckpointError, which names the file by ``label``.
    """
    table = parse_json(raw, label)
    metadata = table.pop("__metadata__", None)
    tensors = {name: _entry(name, value, label) for name, value in table.items()}
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            problem = "overlaps the one before" if entry.begin < position else "leaves a gap"
            raise CheckpointError(
                f"{label}: {legible(name)!r} at bytes {entry.begin} to {entry.end} {problem} "
                f"(which ends at {position}): a damaged or forged header"
            )
        position = entry.end
    published_metadata: JsonObject = metadata if isinstance(metadata, dict) else {}
    texts = {name: text for name, text in published_metadata.items() if isinstance(text, str)}
    return Header(tensors, 8 + len(raw), texts)


def header_bytes(tensors: Iterable[tuple[str, TensorEntry]], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a safetensors file: the header's length (8 bytes), and the header.

    The header is JSON that lists ``tensors`` in this order with new offsets, and has ``metadata``
    under ``__metadata__``.
    """
    table: JsonDict = {"__metadata__": metadata}
    position = 0
    for name, entry in tensors:
        offsets = [position, position + entry.nbytes]
        table[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        position += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(name: str, value: object, label: str) -> TensorEntry:
    fields: Mapping[str, object] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = map(fields.get, ("dtype", "shape", "data_offsets"))
    if not (
        isinstance(dtype, str)
        and _sizes(shape)
        and _sizes(offsets)
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    ):
        raise CheckpointError(
            f"{label}: {legible(name)!r} has the entry {legible(str(value))}, needs dtype, shape "
            "and two rising data_offsets"
        )
    if dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{label}: {legible(name)!r} has the unknown dtype {legible(dtype)!r}"
        )
    expected_bits, stored_bits = prod(shape) * DTYPE_BITS[dtype], (offsets[1] - offsets[0]) * 8
    if expected_bits != stored_bits:
        raise CheckpointError(
            f"{label}: {legible(name)!r} of shape {shape} and dtype {dtype} needs "
            f"{expected_bits / 8:.0f} bytes, its offsets hold {stored_bits // 8}"
        )
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    )


def file_crc32(
    path: Path, begin: int = 0, length: int | None = None, copy: BinaryIO | None = None
) -> int:
    """Return the CRC-32 of a part of a file, and write the part to ``copy`` unless that is None.

    Args:
        path: the file.
        begin: first byte, from 0.
        length: number of bytes; None for all bytes up to the end of the file.
        copy: open file that the bytes are written to, or None.

    Raises:
        CheckpointError: the file ends before the end of the part.
    """
    length = path.stat().st_size - begin if length is None else length
    value = 0
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while length:
            chunk = file.read(min(length, 1 << 20))
            if not chunk:
                raise CheckpointError(f"{path}: ends inside a tensor: changed while being read")
            if copy is not None:
                copy.write(chunk)
            value = crc32(chunk, value)
            length -= len(chunk)
    return value


def read_into(
    file: RawIOBase,
    offset: int,
    view: memoryview,
    label: str,
    look: Callable[[memoryview], object],
    *,
    checked: bool = False,
) -> int | None:
    """Fill ``view`` with the bytes of an unbuffered ``file`` from ``offset`` on.

    The bytes are read in pieces of ``CHECKED_BYTES``, and ``look`` is called with each piece. If
    ``checked``, return the CRC-32 of all bytes; else None. If the file ends too early, a
    CheckpointError that names it by ``label`` is raised.
    """
    file.seek(offset)
    value = 0
    for begin in range(0, len(view), CHECKED_BYTES):
        piece = view[begin : begin + CHECKED_BYTES]
        position = 0
        while position < len(piece):
            count = file.readinto(piece[position:])
            if not count:
                raise CheckpointError(
                    f"{label}: ends at byte {offset + begin + position}, inside a tensor: changed "
                    "while being read"
                )
            position += count
        look(piece)
        if checked:
            value = crc32(piece, value)
    return value if checked else None
