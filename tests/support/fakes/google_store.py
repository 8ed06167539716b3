"""The memory of this process in the place of Google's store."""

from __future__ import annotations

import re
import zlib
from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem


class Buckets(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The memory of this process in the place of Google's store."""

    protocol = ("gs", "gcs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(re.sub(r"^(gs|gcs)://", "", str(path)))
        return stripped

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """What the store says about a file, its etag as well."""
        found: dict[str, Any] = super().info(path, **options)
        if found["type"] == "file":
            found["etag"] = str(zlib.crc32(self.cat_file(path)))
        return found

    def find(self, path: str, detail: bool = False, **options: Any) -> Any:
        """As Google's: a list says of a file what it says of itself."""
        names = super().find(path, detail=False, **options)
        return {name: self.info(name) for name in names} if detail else names

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        """The bytes of a file, for any number of threads at a time."""
        content: bytes = self.store[self._strip_protocol(path)].getvalue()
        return content[start:end]
