"""Checks that no other module hides the packages that are installed beside ``vitgraph``."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

PACKAGES = ("encoders", "graphwrap", "weights")
"""The packages that are installed beside ``vitgraph``; a user's file may have the same name."""
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def refuse_shadows() -> None:
    """Check, without imports, that no other module hides ``encoders``, ``graphwrap`` or
    ``weights``.

    Raises:
        ImportError: another module has one of the names, such as an ``encoders.py`` beside the
            script.
    """
    for name in PACKAGES:
        found_path = _path_of(_spec_of(name))
        own_path = os.path.join(_ROOT, name)
        if found_path and os.path.realpath(found_path) != os.path.realpath(own_path):
            raise ImportError(
                f"{found_path} hides the package {name!r} of vitgraph, which is {own_path}: rename "
                "yours, or move it into a package, so that another name imports it; if it is "
                "not imported at all, start Python in another folder",
                name=name,
                path=found_path,
            )


def _spec_of(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    return find_spec(name) if module is None else module.__spec__


def _path_of(spec: ModuleSpec | None) -> str | None:
    """Return the folder of a package, or the file of a module, from its import spec; None without a
    spec."""
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return folders[0] if folders else spec.origin
