"""The files of a checkpoint: read, checked against one another, and written whole.

- ``snapshot``: the files of one checkpoint on this disk, as loading asks for them
- ``index``: its config, and its index, which says which tensor lies in which file
- ``tensor_file``: one safetensors file, its header checked and its tensors read
- ``tower_folder``: the form of a folder that holds a tower alone
- ``writing``: files that appear whole or not at all, and the lock against other writers
"""
