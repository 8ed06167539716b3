"""Images and videos turned into the pixels and grids that towers take.

- ``intake``: paths, bytes, PIL images, arrays and tensors to uint8 RGB tensors
- ``image_files``: image files opened and turned upright; ``jpeg_files``: JPEG without PIL's lock
- ``clips``, ``video_files``: clips and video files to lists of uint8 RGB tensors, one per frame;
  ``video_times``, ``video_damage``: their rate and what is wrong with them; ``decoders``: those of
  torchcodec and decord
- ``sizes``: the size an image is resized to, and its tiling; ``sampling``: the frames of a video
- ``resizing``: resizing, for all towers; ``exact_resize``, ``resize_kernel``: on a GPU, to the bit
  as on the CPU
- ``staging``: items that are resized but not normalised yet; ``normalizing``: the step after it
- ``limits``: checks of the keywords of ``preprocess``
- ``patches``: patches of images and clips of any size, for Qwen, GLM, ERNIE, MiniMax and Pixtral
- ``fixed_size``: patches of images of one published size, for DINO and C-RADIO
- ``views``: square views of a fixed size (whole images and tiles), for the other families
- ``processor_files``: the defaults in a repo's processor files (``preprocessor_config.json``, ..);
  ``pixel_rules``: the same for towers over patches, such as Qwen's

Code of a single family lies beside its tower: ``encoders/<maker>/<family>_pixels.py``. Other
packages import the names in ``__all__`` from here, not from the modules.
"""

from .clips import read_item, read_video
from .exact_resize import is_exact_on, resize_many
from .image_files import FileLike, learn_heif, open_image, prefix_errors
from .intake import AnyArray, ImageLike, ItemLike, Video, VideoLike, read_images, to_rgb
from .normalizing import look_up, normalize
from .patches import PatchPreprocessor, cut_frames
from .processor_files import PIL_TRANSFORMS, image_section
from .resizing import resize
from .sampling import sample_frames
from .sizes import smart_resize, smart_resize_video
from .staging import StagedItem
from .video_files import VideoFrames, require_av
from .views import ViewPreprocessor

__all__ = [
    "PIL_TRANSFORMS",
    "AnyArray",
    "FileLike",
    "ImageLike",
    "ItemLike",
    "PatchPreprocessor",
    "StagedItem",
    "Video",
    "VideoFrames",
    "VideoLike",
    "ViewPreprocessor",
    "cut_frames",
    "image_section",
    "is_exact_on",
    "learn_heif",
    "look_up",
    "normalize",
    "open_image",
    "prefix_errors",
    "read_images",
    "read_item",
    "read_video",
    "require_av",
    "resize",
    "resize_many",
    "sample_frames",
    "smart_resize",
    "smart_resize_video",
    "to_rgb",
]
