"""The patches of each image that a job with a sample writes: they follow from its key and a seed.

The seeds of a batch are mixed at once, as ``numpy.random.SeedSequence`` mixes each of them: it
takes longer than all else that a job does for an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

from .parquet_files import Array

Words: TypeAlias = NDArray[np.uint32]
State: TypeAlias = NDArray[np.uint64]
_WORDS = 4
"""The 32-bit words of a pool of ``SeedSequence``."""
_LEFT, _RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)
_SMALL = 10_000
"""Up to so many patches, ``Generator.choice`` draws the same ones whether it shuffles or not."""


class Sampling(NamedTuple):
    """The patches of an image whose activations are written."""

    most: int | None = None
    """The most patches of an image; None for all."""
    seed: int = 0

    def choose(self, keys: Sequence[str], patches: Sequence[int]) -> list[Array]:
        """Return the patches that only the key of an image and the seed choose, in ascending order.

        Args:
            keys: the keys of images.
            patches: the number of patches of each.
        """
        if self.most is None:
            return [np.arange(count) for count in patches]
        texts = (f"{self.seed}:{key}".encode("utf-8", "surrogateescape") for key in keys)
        seeds = b"".join(hashlib.sha256(text).digest()[:16] for text in texts)
        return [
            self._drawn(count, state) for count, state in zip(patches, _states(seeds), strict=True)
        ]

    def _drawn(self, patches: int, state: State) -> Array:
        """Return patches of one image; ``state`` is that of its random generator."""
        if self.most is None or self.most >= patches:
            return np.arange(patches)
        generator = np.random.Generator(np.random.PCG64(_Mixed(state)))  # type: ignore[arg-type]
        shuffle = patches > _SMALL
        chosen: Array = generator.choice(patches, self.most, replace=False, shuffle=shuffle)
        chosen.sort()
        return chosen


class _Mixed(ISeedSequence):
    """A seed that is mixed already."""

    def __init__(self, state: State) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> State:
        """Return the state, which has the words that PCG64 asks for."""
        return self._state


def _constants(first: int, factor: int, count: int) -> Words:
    """Return the constants of a hash of so many steps, and the one after the last."""
    values = [first]
    for _ in range(count):
        values.append(values[-1] * factor % (1 << 32))
    return np.array(values, np.uint32)


_A = _constants(0x43B0D7E5, 0x931E8875, _WORDS * _WORDS)
_B = _constants(0x8B51F9DD, 0x58F38DED, 2 * _WORDS)


def _hashed(values: Words, constants: Words) -> Words:
    mixed: Words = (values ^ constants[:-1]) * constants[1:]
    mixed ^= mixed >> _SHIFT
    return mixed


def _states(seeds: bytes) -> Iterable[State]:
    """Return the states of PCG64 generators, uint64 [4], whose seeds are 128-bit integers.

    ``seeds`` are the big-endian bytes of the integers. Each state is that which
    ``SeedSequence(integer).generate_state(4, numpy.uint64)`` returns.
    """
    words = np.frombuffer(seeds, ">u4").reshape(-1, _WORDS)[:, ::-1].astype(np.uint32)
    pool, step = _hashed(words, _A[: _WORDS + 1]), _WORDS
    for source in range(_WORDS):
        others = [word for word in range(_WORDS) if word != source]
        hashed = _hashed(pool[:, source, None], _A[step : step + _WORDS])
        mixed = _LEFT * pool[:, others] - _RIGHT * hashed
        pool[:, others] = mixed ^ (mixed >> _SHIFT)
        step += _WORDS - 1
    return _hashed(np.tile(pool, 2), _B).astype("<u4").view("<u8").astype(np.uint64)
