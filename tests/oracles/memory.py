"""Watches the sizes of the tensors that operations make."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no mode
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out
