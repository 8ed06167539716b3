"""Base classes of encoders that take several inputs per item, each encoded by a path of its own.

- ``paths_encoder``: what all of them have in common
- ``tiles_then_image``: one tower for whole images and their tiles
"""

from .paths_encoder import PathPreprocessor, PathsEncoder, tilings_of
from .tiles_then_image import TilesThenImage

__all__ = ["PathPreprocessor", "PathsEncoder", "TilesThenImage", "tilings_of"]
