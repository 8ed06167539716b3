"""The files of a checkpoint: read, checked against one another, and written whole.

- ``checkpoint``: one checkpoint on this disk: its files, as loading asks for them
- ``index``: its config, and its index, which says which tensor lies in which file
- ``tensor_file``: one safetensors file, its header checked and its tensors read
- ``tower_folder``: the form of a folder that holds a tower alone
- ``writing``: files that appear whole or not at all, and the lock against other writers

Other packages import the names in ``__all__``, and no module of this one. None of the modules needs
torch.
"""

from .checkpoint import Route
from .index import read_contents
from .tensor_file import TensorEntry, file_crc32, header_bytes
from .tower_folder import vision_section
from .writing import flush, lock, temporary_beside, write_atomic, writing_atomic

__all__ = [
    "Route",
    "TensorEntry",
    "file_crc32",
    "flush",
    "header_bytes",
    "lock",
    "read_contents",
    "temporary_beside",
    "vision_section",
    "write_atomic",
    "writing_atomic",
]
