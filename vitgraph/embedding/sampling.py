"""The patches of an image that a job with a sample writes: they follow from its key and a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .parquet_files import Array


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
        return [self._drawn(key, count) for key, count in zip(keys, patches, strict=True)]

    def _drawn(self, key: str, patches: int) -> Array:
        if self.most is None or self.most >= patches:
            return np.arange(patches)
        digest = hashlib.sha256(f"{self.seed}:{key}".encode("utf-8", "surrogateescape")).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
        return np.sort(generator.choice(patches, self.most, replace=False))
