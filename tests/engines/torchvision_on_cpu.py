"""Lets a torchvision that was built for CUDA be imported beside a torch that was not.

``make engines`` copies this file into its environment, with a ``.pth`` file that imports it in
every process, those that an engine starts included. The operators are declared and never called.
"""

from __future__ import annotations

import sys


class Finder:
    """Declares the operators of torchvision's library just before torchvision is imported."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        """Find nothing: the finders after this one import the module."""
        if name != "torchvision":
            return
        sys.meta_path.remove(cls)
        import torch

        if torch.version.cuda is None:
            cls.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                arguments = "Tensor dets, Tensor scores, float iou_threshold"
                cls.library.define(f"{operator}({arguments}) -> Tensor")


sys.meta_path.insert(0, Finder)
