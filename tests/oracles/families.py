"""The one table of towers that all tests share, each at three sizes beside the published one.

Encoder, config class and published config come from the family's record in ``weights``; the
reference, the key map to it and all else that tests know of a family stand in its module of
``references``, which lists its towers as ``ROWS``.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from . import references
from .family import Family

FAMILIES: list[Family] = [
    row
    for module in iter_modules(references.__path__, f"{references.__name__}.")
    for row in import_module(module.name).ROWS
]
