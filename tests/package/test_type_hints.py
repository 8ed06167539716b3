"""``typing.get_type_hints`` reads the signatures of public callables, but for known exceptions."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from importlib import import_module

PACKAGES = ("encoders", "graphwrap", "vitgraph", "weights")
FACES = (
    *("encoders", "encoders.accelerated", "encoders.contract", "encoders.grids"),
    *("encoders.inputs", "encoders.streams"),
    *("graphwrap", "weights", "weights.files", "weights.published"),
    *("vitgraph", "vitgraph.features", "vitgraph.plots", "vitgraph.seeded"),
    *("vitgraph.types", "vitgraph.video"),
)
WHY_MISSING = {
    "Their files would be among those that the file of a family closes over.": {
        *("Accelerator", "EncoderConfig", "Kernels", "PatchConfig", "PoolingHead", "Precision"),
        *("Preprocessor", "Step", "TileConfig", "VisionConfig"),
    },
    "Their modules import PIL and numpy.": {
        *("AnyArray", "Image", "ImagesLike", "ItemEncoder", "ItemLike", "OnError"),
        *("Decode", "VectorPool", "VideosLike", "np"),
    },
    "Its module imports the module that names it.": {"VisionEncoder"},
    "Its module imports torch, and an unknown name is refused before that.": {"FamilyConfig"},
    "matplotlib is an extra.": {"Figure"},
    "A dataclass inherits a field whose hint only the module of its base can read.": {"Literal"},
}
"""Reason -> the names that modules with public callables do not have when code runs."""


def public_callables() -> Iterator[tuple[str, Callable[..., object]]]:
    """Package and object: what each face lists, and public methods of the classes among it."""
    seen = set()
    for face in map(import_module, FACES):
        for name in face.__all__:
            found = getattr(face, name, None) if name != "integrations" else None
            for item in [found, *(_methods(found) if inspect.isclass(found) else ())]:
                package = str(getattr(item, "__module__", "")).partition(".")[0]
                if callable(item) and package in PACKAGES and id(item) not in seen:
                    seen.add(id(item))
                    yield package, inspect.unwrap(item)


def _methods(cls: type) -> Iterator[object]:
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if not name.startswith("_") or name in ("__init__", "__call__"):
                yield getattr(member, "fget", None) or getattr(member, "__func__", member)


def missing_names(item: Callable[..., object]) -> set[str]:
    """The names in the hints of a callable that its module does not have when code runs."""
    stand_ins: dict[str, typing.Any] = {}
    while True:
        try:
            typing.get_type_hints(item, None, stand_ins or None)
        except NameError as error:
            stand_ins[str(error.name)] = typing.Any
        except (AttributeError, TypeError):  # a part of a stand-in
            assert stand_ins, item
            return {*stand_ins}
        else:
            return {*stand_ins}


def test_hints_of_public_callables_can_be_read() -> None:
    missing = [(package, missing_names(item)) for package, item in public_callables()]
    assert len(missing) > 500
    assert set().union(*(names for _, names in missing)) == set().union(*WHY_MISSING.values())
