"""Safetensors files: the header checked against the file, tensors read straight into memory.

Our own reader rather than ``safetensors.safe_open`` for two reasons. Bytes are read into the tensor
they end up in, so that no page of a mapped file counts towards the process and nothing is copied
twice. And a header is refused before anything is allocated for it. The format: 8 bytes of
little-endian length, so many bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the data
without gaps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from zlib import crc32

from .errors import CheckpointError, shown

JsonObject: TypeAlias = Mapping[str, Any]
"""The type of a parsed JSON object that is only read."""
JsonDict: TypeAlias = dict[str, Any]
"""The type of a parsed JSON object that may be changed and written."""

LFS_POINTER = b"version https://git-lfs"
"""The beginning of the file that a clone without Git LFS has in place of the content."""
CHECKED_BYTES = 1 << 19
MAX_HEADER_BYTES = 100_000_000
"""The most bytes of a header in the safetensors format; published ones stay under 10 MB."""
MOST_CONTAINERS = 1_500_000
"""Limit for objects and lists in a JSON file: three per tensor, so that half a million tensors may
lie in one file. Published checkpoints have a fifth of that in all their files."""
MOST_VALUES = 6_000_000
"""Limit for commas and colons, which bounds what parsing makes. With both limits, 100 MB of JSON
take at most 5 s and 1 GB; without, 100 MB of ``[],`` took 16 s and 2.2 GB."""
MOST_WIDE_BYTES = 16_000_000
"""Limit for JSON that is not all ASCII: one wide character makes Python hold four bytes each."""

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
    """One tensor of a header; ``begin`` and ``end`` count bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: every tensor, and where in the file the data starts."""

    tensors: Mapping[str, TensorEntry]
    data_start: int
    metadata: JsonObject = field(default_factory=dict)

    @property
    def file_bytes(self) -> int:
        """The number of bytes of a whole file with this header."""
        return self.data_start + max((entry.end for entry in self.tensors.values()), default=0)


def read_header(path: Path, label: str) -> Header:
    """Read the header of a file, which errors call ``label``; the file must be whole and sound."""
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
    """Raise a :class:`CheckpointError` unless a file of ``size`` bytes is what ``header`` says."""
    if header.file_bytes != size:
        raise CheckpointError(
            f"{label}: the file has {size} bytes, its header describes {header.file_bytes}: "
            "truncated or damaged; download it again"
        )


def header_length(raw: bytes, label: str) -> int:
    """Return the length of the JSON header, read from the first 8 bytes (or more) of a file."""
    _refuse_pointer(raw, label)
    if len(raw) < 8:
        raise CheckpointError(f"{label}: {len(raw)} bytes is too short for a safetensors file")
    length = int.from_bytes(raw[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{label}: a header of {length} bytes, the format allows {MAX_HEADER_BYTES}: "
            "not a safetensors file, or damaged"
        )
    return length


def _refuse_pointer(raw: bytes, label: str) -> None:
    if raw.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{label}: a Git LFS pointer, not the file itself: run git lfs pull in the clone, or "
            "pass the repo id instead of the folder"
        )


def parse_header(raw: bytes, label: str) -> Header:
    """Parse the JSON part of a file, and check that its tensors lie without overlaps or gaps."""
    table = parse_json(raw, label)
    metadata = table.pop("__metadata__", None)
    tensors = {name: _entry(name, value, label) for name, value in table.items()}
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            problem = "overlaps the one before" if entry.begin < position else "leaves a gap"
            raise CheckpointError(
                f"{label}: {shown(name)!r} at bytes {entry.begin} to {entry.end} {problem} "
                f"(which ends at {position}): a damaged or forged header"
            )
        position = entry.end
    return Header(tensors, 8 + len(raw), metadata if isinstance(metadata, dict) else {})


def header_bytes(tensors: Iterable[tuple[str, TensorEntry]], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a safetensors file whose data are ``tensors`` in this order."""
    table: JsonDict = {"__metadata__": metadata}
    position = 0
    for name, entry in tensors:
        offsets = [position, position + entry.nbytes]
        table[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        position += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_json(raw: bytes, label: str) -> JsonDict:
    """Parse a JSON object in which no name occurs twice, unless that would take gigabytes."""
    _refuse_pointer(raw, label)
    _refuse_bulk(raw, label)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except CheckpointError as error:
        raise CheckpointError(f"{label}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{label}: not valid JSON ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: a JSON {type(value).__name__}, must be an object")
    return value


def _refuse_bulk(raw: bytes, label: str) -> None:
    """Raise a :class:`CheckpointError` for JSON of too many parts; counting 100 MB takes 0.1 s."""
    if len(raw) > MOST_WIDE_BYTES and not raw.isascii():
        raise CheckpointError(
            f"{label}: {len(raw)} bytes that are not all ASCII, at most {MOST_WIDE_BYTES} of such "
            "are read: not the file of a published checkpoint"
        )
    containers = raw.count(b"[") + raw.count(b"{")
    values = raw.count(b",") + raw.count(b":")
    if containers > MOST_CONTAINERS or values > MOST_VALUES:
        raise CheckpointError(
            f"{label}: some {containers} objects and lists of {values} values, at most "
            f"{MOST_CONTAINERS} of {MOST_VALUES} are read: not the file of a published checkpoint"
        )


def _unique(pairs: list[tuple[str, object]]) -> JsonDict:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise CheckpointError(f"the name {shown(twice)!r} occurs twice")
    return table


def _entry(name: str, value: object, label: str) -> TensorEntry:
    fields: Any = value if isinstance(value, dict) else {}  # its values are checked below
    dtype, shape, offsets = map(fields.get, ("dtype", "shape", "data_offsets"))
    rising = _sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]
    if not (isinstance(dtype, str) and _sizes(shape) and rising):
        raise CheckpointError(
            f"{label}: {shown(name)!r} has the entry {shown(str(value))}, needs dtype, shape and "
            "two rising data_offsets"
        )
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"{label}: {shown(name)!r} has the unknown dtype {shown(dtype)!r}")
    needed, held = prod(shape) * DTYPE_BITS[dtype], (offsets[1] - offsets[0]) * 8
    if needed != held:
        raise CheckpointError(
            f"{label}: {shown(name)!r} of shape {shape} and dtype {dtype} needs {needed / 8:.0f} "
            f"bytes, its offsets hold {held // 8}"
        )
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 16
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    )


def file_crc32(
    path: Path, begin: int = 0, length: int | None = None, copy: BinaryIO | None = None
) -> int:
    """Return the CRC-32 of ``length`` bytes of a file from ``begin`` on; write them to ``copy``."""
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
    file: RawIOBase, offset: int, view: memoryview, label: str, *, checked: bool = False
) -> int | None:
    """Fill ``view`` with the bytes of an unbuffered ``file`` from ``offset`` on.

    If ``checked``, return their CRC-32, taken while they are in the processor's cache (3.7 GiB/s).
    """
    file.seek(offset)
    done, value, step = 0, 0, CHECKED_BYTES if checked else len(view)
    while done < len(view):
        count = file.readinto(view[done : done + step])
        if not count:
            raise CheckpointError(
                f"{label}: ends at byte {offset + done}, inside a tensor: changed while being read"
            )
        if checked:
            value = crc32(view[done : done + count], value)
        done += count
    return value if checked else None
