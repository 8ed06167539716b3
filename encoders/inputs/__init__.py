"""Images and videos turned into the pixels and grids that towers take.

- ``intake``: paths, bytes, PIL images, arrays and tensors to uint8 RGB tensors
- ``image_files``: image files opened and turned upright
- ``clips``, ``video_files``: clips and video files to lists of such tensors
- ``sizes``: the size an image is resized to, and its tiling; ``sampling``: the frames of a video
- ``preprocessors``: images and clips to the pixels of each family's towers, a module per family
- ``images``: resizing, staging, normalising and checks of keywords, for all towers
- ``processor_files``: the defaults that a repo's processor files set, and ``pixel_rules``: those of
  the repos of towers over patches
- ``processor_outputs``: the pixels and grids that a Hugging Face processor gave
"""

from .clips import read_video
from .images import resize
from .intake import Video, to_rgb
from .preprocessors.deepseek_ocr import OcrPreprocessor
from .preprocessors.deepseek_vl import HybridPreprocessor, SquarePreprocessor
from .preprocessors.deepseek_vl2 import CandidatePreprocessor
from .preprocessors.intern_vit import TilePreprocessor
from .preprocessors.patches import PatchPreprocessor
from .preprocessors.step3 import CropPreprocessor
from .preprocessors.views import ViewPreprocessor
from .sampling import sample_frames
from .sizes import smart_resize, smart_resize_video

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
