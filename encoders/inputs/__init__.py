"""Images and videos turned into the pixels and grids that towers take.

- ``intake``: paths, bytes, PIL images, arrays and tensors to uint8 RGB tensors
- ``image_files``: image files opened and turned upright
- ``clips``, ``video_files``: clips and video files to lists of uint8 RGB tensors, one per frame
- ``sizes``: the size an image is resized to, and its tiling; ``sampling``: the frames of a video
- ``preprocessors``: images and clips to the pixels of each family's towers, a module per family
- ``images``: resizing, normalising and checks of the keywords of ``preprocess``, for all towers
- ``processor_files``: the defaults in a repo's processor files (``preprocessor_config.json``, ..);
  ``pixel_rules``: the same for towers over patches, such as Qwen's
- ``processor_outputs``: the pixels and grids in the output of a Hugging Face processor

Other packages import the names in ``__all__`` from here, not from the modules.
"""

from .clips import read_video
from .image_files import learn_heif, open_image, prefix_errors
from .images import StagedItem, resize
from .intake import AnyArray, ImageLike, ItemLike, Video, VideoLike, read_images, to_rgb
from .preprocessors.deepseek_ocr import OcrPreprocessor
from .preprocessors.deepseek_vl import HybridPreprocessor, SquarePreprocessor
from .preprocessors.deepseek_vl2 import CandidatePreprocessor
from .preprocessors.intern_vit import TilePreprocessor
from .preprocessors.llama4 import CanvasPreprocessor
from .preprocessors.patches import PatchPreprocessor
from .preprocessors.step3 import CropPreprocessor
from .preprocessors.views import ViewPreprocessor
from .processor_files import image_section
from .sampling import sample_frames
from .sizes import smart_resize, smart_resize_video
from .video_files import VideoFrames, require_av

__all__ = [
    "AnyArray",
    "CandidatePreprocessor",
    "CanvasPreprocessor",
    "CropPreprocessor",
    "HybridPreprocessor",
    "ImageLike",
    "ItemLike",
    "OcrPreprocessor",
    "PatchPreprocessor",
    "SquarePreprocessor",
    "StagedItem",
    "TilePreprocessor",
    "Video",
    "VideoFrames",
    "VideoLike",
    "ViewPreprocessor",
    "image_section",
    "learn_heif",
    "open_image",
    "prefix_errors",
    "read_images",
    "read_video",
    "require_av",
    "resize",
    "sample_frames",
    "smart_resize",
    "smart_resize_video",
    "to_rgb",
]
