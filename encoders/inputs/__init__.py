"""What goes into a tower: images and videos turned into pixels, and the grids that describe them.

- ``intake``: paths, bytes, PIL images, arrays and tensors to uint8 RGB tensors
- ``image_files``: image files opened and turned upright
- ``clips``, ``video_files``: clips and video files to lists of such tensors
- ``sizes``: the size an image is resized to, its tiling, and the frames sampled from a video
- ``patches``, ``tiles``, ``windows``, ``views``: the preprocessing of the Qwen, InternViT, Step and
  DeepSeek towers
- ``images``: what the preprocessing of all towers shares
- ``processor_files``: the defaults that a repo's processor files set, and ``pixel_rules``: those of
  the Qwen repos
- ``grids``: ``grid_thw`` read on the host, and the orders of patches that follow from it
- ``checks``: arguments of an encoder's methods that are refused
"""

from .checks import (
    block_indices,
    check_input_size,
    check_pixels,
    check_rows,
    check_tiles,
    missing_grid,
    require_features,
    require_metadata,
    require_output,
    require_tensor,
)
from .clips import read_item, read_video
from .grids import (
    merge_order_positions,
    raster_maps,
    read_grid,
    split_rows,
    squarest,
    stitch_tiles,
    window_order,
)
from .image_files import naming, open_image
from .images import Preprocessor, StagedItem, StagedPreprocessor, resize
from .intake import Video, is_one_item, read_images, to_rgb
from .patches import PatchPreprocessor
from .pixel_rules import PixelRules
from .processor_files import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD
from .sizes import best_tiling, read_candidates, sample_frames, smart_resize, smart_resize_video
from .tiles import TilePreprocessor
from .video_files import VideoFrames, require_av
from .views import (
    CandidatePreprocessor,
    HybridPreprocessor,
    OcrPreprocessor,
    SquarePreprocessor,
    ViewPreprocessor,
)
from .windows import WindowPreprocessor, plan_windows

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "HALF",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CandidatePreprocessor",
    "HybridPreprocessor",
    "OcrPreprocessor",
    "PatchPreprocessor",
    "PixelRules",
    "Preprocessor",
    "SquarePreprocessor",
    "StagedItem",
    "StagedPreprocessor",
    "TilePreprocessor",
    "Video",
    "VideoFrames",
    "ViewPreprocessor",
    "WindowPreprocessor",
    "best_tiling",
    "block_indices",
    "check_input_size",
    "check_pixels",
    "check_rows",
    "check_tiles",
    "is_one_item",
    "merge_order_positions",
    "missing_grid",
    "naming",
    "open_image",
    "plan_windows",
    "raster_maps",
    "read_candidates",
    "read_grid",
    "read_images",
    "read_item",
    "read_video",
    "require_av",
    "require_features",
    "require_metadata",
    "require_output",
    "require_tensor",
    "resize",
    "sample_frames",
    "smart_resize",
    "smart_resize_video",
    "split_rows",
    "squarest",
    "stitch_tiles",
    "to_rgb",
    "window_order",
]
