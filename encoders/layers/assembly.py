"""The tokens of an image's views as one sequence: rows that end in a newline, and a separator.

A view of 2x3 tokens makes two rows of three tokens, each with the learned newline behind it::

    a b c
    d e f      a b c NEWLINE d e f NEWLINE

All tiles of an image make one large view. A learned separator stands between or behind the views.

Shapes: h rows and w columns of a view in tokens, D width of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

SEPARATOR = "separator"
"""The name that stands for the learned separator in the argument ``order`` of :func:`assemble`."""


class Picture(NamedTuple):
    """The arrangement in rows and columns of views of one image, which make one feature map."""

    cell: tuple[int, int]
    """The number of rows and of columns of tokens in one view."""
    columns: int = 1
    """The number of views side by side."""
    rows: int = 1
    """The number of views one above another."""

    @property
    def grid(self) -> tuple[int, int]:
        """The number of rows and of columns of tokens in the map of all views together."""
        return self.rows * self.cell[0], self.columns * self.cell[1]


def stitch(tokens: Tensor, grid: tuple[int, int], columns: int) -> Tensor:
    """Lay the tiles of an image side by side, as one large view.

    Args:
        tokens: [tiles*h*w, D], tile by tile.
        grid: h and w, rows and columns of a tile in tokens.
        columns: number of tiles side by side.

    Returns:
        [h, w, D], h rows and w columns of tokens.
    """
    h, w = grid
    return rearrange(tokens, "(r c h w) d -> (r h) (c w) d", c=columns, h=h, w=w)


def end_rows(view: Tensor, newline: Tensor) -> Tensor:
    """Return the tokens of a view, row by row, with the learned newline behind each row.

    Args:
        view: [rows, columns, D].
        newline: [D].

    Returns:
        [rows*(columns+1), D].
    """
    ends = newline.expand(len(view), 1, -1)
    return torch.cat((view, ends), dim=1).flatten(0, 1)


def covered_part(grid: tuple[int, int], size: tuple[int, int]) -> tuple[range, range]:
    """Return which rows and columns of a map an image covers that lies in its middle.

    A long and narrow image may cover no row at all, as in ``unpad_image`` of transformers, which
    rounds down.

    Args:
        grid: the number of rows and of columns of the map.
        size: height and width of the image in any unit.
    """
    (rows, columns), (height, width) = grid, size
    if width / height > columns / rows:
        cut = (rows - int(round(height * (columns / width), 7))) // 2
        return range(cut, rows - cut), range(columns)
    cut = (columns - int(round(width * (rows / height), 7))) // 2
    return range(rows), range(cut, columns - cut)


def assemble(
    views: Mapping[str, Tensor], order: Sequence[str], newline: Tensor, separator: Tensor
) -> Tensor:
    """Return the sequence of tokens that a language model reads for an image.

    Args:
        views: tokens [rows, columns, D] by the name of a view; the image may lack some views.
        order: the names of all views, and ``SEPARATOR``, in the order of the sequence.
        newline: [D], the token behind each row.
        separator: [D], the token in the place of ``SEPARATOR``.

    Returns:
        [tokens, D].
    """
    parts = []
    for name in order:
        if name == SEPARATOR:
            parts.append(separator[None])
        elif name in views:
            parts.append(end_rows(views[name], newline))
    return torch.cat(parts)
