"""The files of a checkpoint: read, checked against one another, and written whole.

- ``checkpoint``: the files of one checkpoint on this disk, and the tensors in them
- ``index``: the config, and the index, which says which tensor lies in which file
- ``adapter_file``: the config and the header of an adapter beside the weights
- ``tensor_file``: one safetensors file, its header checked and its tensors read
- ``tower_folder``: the form of a folder that holds only a tower
- ``writing``: files that appear whole or not at all, and the lock against other writers

Other packages import the names in ``__all__``, not the modules. None of the modules needs torch.
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
