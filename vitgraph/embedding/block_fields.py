"""The names of outputs of blocks among the fields of a job; nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Collection

PREFIX = ".prefix"
"""The end of the names of arrays with the rows before patches, such as "blocks.6.prefix"."""
IMAGE, POSITION = "image", "position"
"""The names of the arrays beside the activations: the number of the image [n], counted from 0 over
all images of the job, and (frame or tile, row, column) of the patch [n, 3]. A row before the
patches is at (frame or tile, -1, its number). Of these rows, the names end in :data:`PREFIX`."""
_BLOCK = re.compile(r"(.+\.)?blocks\.\d+(\.attn|\.mlp)?")


def is_block(field: str) -> bool:
    """Return whether a field is the output of a block, as "blocks.6" or "tiles.blocks.6.mlp"."""
    return _BLOCK.fullmatch(field) is not None


def has_rows_apart(name: str) -> bool:
    """Return whether an array of an image has other rows than the tokens or patches of the image.

    These are ``last_hidden_state``, and in jobs of blocks the rows before the patches.
    """
    return name == "last_hidden_state" or name.endswith(PREFIX)


def image_name(name: str) -> str:
    """Return the name of the array of image numbers beside an array of positions."""
    return f"{IMAGE}{name.removeprefix(POSITION)}"


def stack_of(fields: Collection[str]) -> str:
    """Return the stack of blocks that all fields are of: "", "tiles." or "tiles.sam.".

    Raises:
        ValueError: the fields are of several stacks, or one is no output of a block.
    """
    matches = [_BLOCK.fullmatch(field) for field in fields]
    stacks = {match and (match[1] or "") for match in matches}
    if len(stacks) > 1 or None in stacks:
        raise ValueError(
            f"--fields {','.join(fields)}: outputs of blocks have a row per patch, and are written "
            "with other outputs of the same blocks alone; give the other fields a job of their own"
        )
    (stack,) = stacks
    return stack or ""
