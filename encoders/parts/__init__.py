"""Towers that several families share: plain pre-norm blocks, SigLIP, CLIP and SAM.

Each is written once. A family's encoder file puts them together and names its projector.
``assembly`` makes one sequence of the tokens of an image's views.
"""

from .assembly import SEPARATOR, Picture, assemble, split_items, stitch, take_apart
from .blocks import Block, BlockSizes, nested_sizes
from .clip import Clip
from .sam import Neck, Sam, SamSizes, read_channels
from .siglip import Siglip, read_siglip

__all__ = [
    "SEPARATOR",
    "Block",
    "BlockSizes",
    "Clip",
    "Neck",
    "Picture",
    "Sam",
    "SamSizes",
    "Siglip",
    "assemble",
    "nested_sizes",
    "read_channels",
    "read_siglip",
    "split_items",
    "stitch",
    "take_apart",
]
