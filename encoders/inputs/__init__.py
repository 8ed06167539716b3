"""Images and videos turned into the pixels and grids that towers take.

- ``intake``: paths, bytes, PIL images, arrays and tensors to uint8 RGB tensors
- ``image_files``: image files opened and turned upright
- ``clips``, ``video_files``: clips and video files to lists of such tensors
- ``sizes``: the size an image is resized to, and its tiling; ``sampling``: the frames of a video
- ``patches``, ``tiles``, ``crops``, ``views``: the preprocessing of the Qwen and GLM, InternViT,
  Step and DeepSeek towers; ``stretched``: SigLIP and Gemma 3; ``naflex``: SigLIP2 NaFlex
- ``images``: what the preprocessing of all towers shares
- ``processor_files``: the defaults that a repo's processor files set, and ``pixel_rules``: those of
  the repos of towers over patches
- ``processor_outputs``: the pixels and grids that a Hugging Face processor gave
"""

from .clips import read_item, read_video
from .crops import CropPreprocessor, plan_crops
from .image_files import naming, open_image
from .images import StagedItem, StagedPreprocessor, resize
from .intake import Video, is_one_item, read_images, to_rgb
from .patches import PatchPreprocessor
from .pixel_rules import PixelRules
from .processor_files import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD
from .sampling import sample_frames
from .sizes import best_tiling, read_candidates, smart_resize, smart_resize_video
from .tiles import TilePreprocessor
from .video_files import VideoFrames, require_av
from .views import (
    CandidatePreprocessor,
    HybridPreprocessor,
    OcrPreprocessor,
    SquarePreprocessor,
    ViewPreprocessor,
)

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "HALF",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CandidatePreprocessor",
    "CropPreprocessor",
    "HybridPreprocessor",
    "OcrPreprocessor",
    "PatchPreprocessor",
    "PixelRules",
    "SquarePreprocessor",
    "StagedItem",
    "StagedPreprocessor",
    "TilePreprocessor",
    "Video",
    "VideoFrames",
    "ViewPreprocessor",
    "best_tiling",
    "is_one_item",
    "naming",
    "open_image",
    "plan_crops",
    "read_candidates",
    "read_images",
    "read_item",
    "read_video",
    "require_av",
    "resize",
    "sample_frames",
    "smart_resize",
    "smart_resize_video",
    "to_rgb",
]
