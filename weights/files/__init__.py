"""The files of a checkpoint: read, checked against one another, and written whole.

- ``checkpoint``: one checkpoint on this disk: its files, as loading asks for them
- ``index``: its config, and its index, which says which tensor lies in which file
- ``tensor_file``: one safetensors file, its header checked and its tensors read
- ``tower_folder``: the form of a folder that holds a tower alone
- ``writing``: files that appear whole or not at all, and the lock against other writers

Other packages import the names in ``__all__``, and no module of this one. A name is imported when
it is first used, because writing a file needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import Route as Route
    from .index import read_contents as read_contents
    from .tensor_file import TensorEntry as TensorEntry
    from .tensor_file import file_crc32 as file_crc32
    from .tensor_file import header_bytes as header_bytes
    from .tower_folder import vision_section as vision_section
    from .writing import flush as flush
    from .writing import lock as lock
    from .writing import temporary_beside as temporary_beside
    from .writing import write_atomic as write_atomic
    from .writing import writing_atomic as writing_atomic

_NAMES = {
    "index": ("read_contents",),
    "checkpoint": ("Route",),
    "tensor_file": ("TensorEntry", "file_crc32", "header_bytes"),
    "tower_folder": ("vision_section",),
    "writing": ("flush", "lock", "temporary_beside", "write_atomic", "writing_atomic"),
}
"""Per module, the names that other packages may import, which are imported when first used."""
_MODULES = {name: f".{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import a name of another module when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
