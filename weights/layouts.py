"""Layouts: how published checkpoints name a tower's tensors, and the encoder's names for them.

A layout is data: ``joins`` lists the encoder's tensors that are made of several published ones,
``renames`` the others whose names differ, in the order of a checkpoint's index. ``N`` stands for a
number, such as a block's. A name in neither is the same in checkpoint and encoder. Every layout
works in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isqrt

from .errors import CheckpointError
from .strict_json import JsonObject

MOST_IN_TOWER = 20_000
"""The most tensor names under a tower's prefix. The largest published tower has a thousand, and
matching a million names took 20 s."""


_BUFFERS = ("position_ids", "inv_freq", "original_inv_freq")


@dataclass(frozen=True)
class Prefix:
    """Prefixes of a tower's names (``root + tower``) and of its projector's names (``root``)."""

    root: str
    tower: str

    @property
    def full(self) -> str:
        """The prefix that stands before every name of the tower's tensors."""
        return self.root + self.tower


@dataclass(frozen=True)
class Slot:
    """The place of a published tensor: chunk ``chunk`` (from 0) of the encoder's tensor ``name``.

    The tensor is divided into ``chunks`` equal chunks along its first axis.
    """

    name: str
    chunk: int = 0
    chunks: int = 1
    rotary_halves: bool = False
    """Whether the layout lists the tensor in ``rotary_halves``."""

    def joined_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor: ``chunks`` chunks of ``shape`` along axis 0."""
        return (shape[0] * self.chunks, *shape[1:]) if shape else shape


@dataclass(frozen=True)
class Layout:
    """One published way to name the tensors of a tower."""

    name: str
    prefixes: tuple[Prefix, ...]
    """The prefixes that towers have in published checkpoints, and ``Prefix("", "")`` for a tower
    saved in a folder of its own."""
    marks: tuple[str, ...]
    """Beginnings of tensor names, after the prefix. A checkpoint has this layout if a name begins
    with one of them."""
    projector: tuple[str, ...] = ()
    """The beginnings of the names of the projector's tensors, after ``Prefix.root``."""
    needed: tuple[str, ...] = ()
    """Beginnings of names, after ``Prefix.root``. Every checkpoint in this layout has a name that
    begins with one of them, so that a checkpoint without them is in another layout."""
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layer of the encoder -> the published layers whose weights, stacked along rows, it has."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Published module or parameter -> the encoder's name of it."""
    reshapes: Mapping[str, str] = field(default_factory=dict)
    """Tensor of the encoder -> the axes of its shape and of the published shape, as in
    ``"n d -> one n d"``. An axis that only one of the two shapes has is of length 1, and ``s²`` is
    as long as ``s`` times ``s``."""
    transposed: tuple[str, ...] = ()
    """Tensors of the encoder, matrices, that are published with rows and columns exchanged."""
    rotary_halves: tuple[str, ...] = ()
    """Published query and key layers whose weight rows need reordering: per head they have the
    first rows of all rotary pairs, then the second rows; the encoder has pair after pair."""
    ignored: tuple[str, ...] = ()
    """The published names of tensors that no forward pass needs."""
    processor_files: Mapping[str, JsonObject] = field(default_factory=dict)
    """Processor files that repos publish with this layout, by file name without ``.json``."""
    refusal: str = ""
    """Why a checkpoint in this layout is not loaded, and what to load; empty if it is loaded."""
    images_only: str = ""
    """Why a tower in this layout takes no videos, as a sentence; empty if it takes them."""

    def local_name(self, prefix: Prefix, name: str) -> str | None:
        """Return a tensor's name without the tower's or projector's prefix; None if in neither."""
        local = name.removeprefix(prefix.root)
        if name.startswith(prefix.root) and local.startswith(self.projector):
            return local
        return name.removeprefix(prefix.full) if name.startswith(prefix.full) else None

    def full_name(self, prefix: Prefix, local: str) -> str:
        """Return the full name of the tensor that :meth:`local_name` calls ``local``."""
        return (prefix.root if local.startswith(self.projector) else prefix.full) + local

    def is_ignored(self, local: str) -> bool:
        """Return whether no forward pass needs the tensor ``local``, named without the prefix.

        Buffers that every forward pass computes anew, and old versions of transformers saved, are
        ignored in all layouts.
        """
        return local.rpartition(".")[2] in _BUFFERS or any(
            _pattern(template).fullmatch(local) for template in self.ignored
        )

    def tower_names(self, prefix: Prefix, names: Iterable[str], label: str) -> dict[str, str]:
        """Return the tensors of tower and projector: full name -> name without the prefix.

        Args:
            prefix: the prefix of the tower's names in the checkpoint.
            names: full names of tensors of the checkpoint. Tensors that no forward pass needs, and
                tensors outside tower and projector, are left out of the result.
            label: name of the checkpoint in messages.

        Raises:
            CheckpointError: more names than any tower has.
        """
        local_names: dict[str, str] = {}
        for name in names:
            local = self.local_name(prefix, name)
            if local is not None and not self.is_ignored(local):
                local_names[name] = local
            if len(local_names) > MOST_IN_TOWER:
                raise CheckpointError(
                    f"{label}: over {MOST_IN_TOWER} tensors under {prefix.full!r}, which is no "
                    "tower that was ever published"
                )
        return local_names

    def to_slot(self, local: str) -> Slot | None:
        """Return the encoder's tensor, or the chunk of one, that a published tensor fills.

        ``local`` is the published name without the prefix. The result is None if no tensor of the
        encoder has this name in the layout.
        """
        for encoder_name, parts in self.joins.items():
            for part, published in enumerate(parts):
                if match := _pattern(published).fullmatch(local):
                    halves = published in self.rotary_halves
                    return Slot(_fill(encoder_name, match), part, len(parts), halves)
        slot = Slot(_translate(self.renames.items(), local))
        return slot if self.published_names(slot.name) == [local] else None

    def published_names(self, encoder_name: str) -> list[str]:
        """Return the names, without prefix, of published tensors that make up one of the encoder.

        Stacked in this order along axis 0, they are the encoder's tensor ``encoder_name``.
        """
        for module, parts in self.joins.items():
            if match := _pattern(module).fullmatch(encoder_name):
                return [_fill(published, match) for published in parts]
        return [_translate([(b, a) for a, b in self.renames.items()], encoder_name)]

    def published_shape(
        self, encoder_name: str, shape: tuple[int, ...], *, inverse: bool = False
    ) -> tuple[int, ...]:
        """Return the shape in which the checkpoint holds a tensor of the encoder.

        Args:
            encoder_name: name of the tensor in the encoder's ``state_dict``.
            shape: its shape in the encoder or, if ``inverse``, in the checkpoint.
            inverse: return the shape in the encoder instead.

        Returns:
            The reversed shape of a tensor in ``transposed``, else that by the tensor's entry in
            ``reshapes``: with "n d -> one n d", (4, 8) becomes (1, 4, 8). A tensor without an
            entry, or whose shape does not match its entry, keeps its shape.
        """
        if encoder_name in self.transposed:
            return shape[::-1]
        axes = [side.split() for side in self.reshapes.get(encoder_name, " -> ").split("->")]
        source_axes, target_axes = reversed(axes) if inverse else axes
        if len(source_axes) != len(shape):
            return shape
        lengths = {
            axis.removesuffix("²"): isqrt(length) if axis.endswith("²") else length
            for axis, length in zip(source_axes, shape, strict=True)
        }
        names = [axis.removesuffix("²") for axis in target_axes]
        if _axis_lengths(source_axes, lengths) != shape or any(
            length != 1 for axis, length in lengths.items() if axis not in names
        ):
            return shape
        return _axis_lengths(target_axes, lengths)


def _axis_lengths(axes: Sequence[str], lengths: Mapping[str, int]) -> tuple[int, ...]:
    """Return the length of each of ``axes``: its number in ``lengths``, or 1 if it has none there.

    An axis ``s²`` is as long as the square of the length of ``s``.
    """
    sides = [(lengths.get(axis.removesuffix("²"), 1), axis) for axis in axes]
    return tuple(side**2 if axis.endswith("²") else side for side, axis in sides)


def _translate(rules: Iterable[tuple[str, str]], name: str) -> str:
    for pattern, replacement in rules:
        if match := _pattern(pattern).fullmatch(name):
            return _fill(replacement, match)
    return name


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """Compile a template such as ``blocks.N.ls1`` to a pattern for names that begin with it.

    The group ``number`` of the pattern is the number in place of ``N``, and ``rest`` is the end of
    the name, from a dot on, or None.
    """
    words = (r"(?P<number>0|[1-9]\d*)" if w == "N" else re.escape(w) for w in template.split("."))
    return re.compile(r"\.".join(words) + r"(?P<rest>\..+)?")


def _fill(template: str, match: re.Match[str]) -> str:
    number = match.groupdict().get("number") or ""
    words = (number if word == "N" else word for word in template.split("."))
    return ".".join(words) + (match.group("rest") or "")
