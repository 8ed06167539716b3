"""Towers that several families share: plain pre-norm blocks, SigLIP, CLIP and SAM.

Each is written once. A family's encoder file puts them together and names its projector.
"""

from .blocks import Block, BlockSizes, Context
from .clip import Clip
from .sam import Sam, SamSizes
from .siglip import Siglip

__all__ = ["Block", "BlockSizes", "Clip", "Context", "Sam", "SamSizes", "Siglip"]
