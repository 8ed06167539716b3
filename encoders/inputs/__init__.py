"""Images and videos turned into the pixels and grids that towers take.

- ``intake``: paths, bytes, PIL images, arrays and tensors to uint8 RGB tensors
- ``image_files``: image files opened and turned upright
- ``clips``, ``video_files``: clips and video files to lists of such tensors
- ``sizes``: the size an image is resized to, and its tiling; ``sampling``: the frames of a video
- ``patches``: images of any size to the patches of Qwen, GLM and Pixtral; ``naflex``: of SigLIP2
  NaFlex, ``navit``: of Kimi, ``raster``: of PaddleOCR-VL, ``soft_tokens``: of Gemma 4
- ``views``: what all preprocessing to square views shares; ``crops``: Step, ``splits``: Idefics3,
  ``stretched``: SigLIP and Gemma 3, ``square_views`` and ``tiled_views``: DeepSeek
- ``tiles``: images and clips to the tiles of InternViT
- ``images``: what the preprocessing of all towers shares
- ``processor_files``: the defaults that a repo's processor files set, and ``pixel_rules``: those of
  the repos of towers over patches
- ``processor_outputs``: the pixels and grids that a Hugging Face processor gave
"""

from .clips import read_video
from .crops import CropPreprocessor
from .images import resize
from .intake import Video, to_rgb
from .patches import PatchPreprocessor
from .sampling import sample_frames
from .sizes import smart_resize, smart_resize_video
from .square_views import HybridPreprocessor, SquarePreprocessor
from .tiled_views import CandidatePreprocessor, OcrPreprocessor
from .tiles import TilePreprocessor
from .views import ViewPreprocessor

__all__ = [
    "CandidatePreprocessor",
    "CropPreprocessor",
    "HybridPreprocessor",
    "OcrPreprocessor",
    "PatchPreprocessor",
    "SquarePreprocessor",
    "TilePreprocessor",
    "Video",
    "ViewPreprocessor",
    "read_video",
    "resize",
    "sample_frames",
    "smart_resize",
    "smart_resize_video",
    "to_rgb",
]
