"""Images and videos in every form that a user may pass, turned into uint8 RGB tensors.

Accepted are PIL images of any mode; paths, bytes and open files of image files; the dicts with
"bytes" and "path" of the ``datasets`` package; numpy arrays [H, W, C] or [H, W]; tensors [C, H, W]
or [H, W]. Arrays and tensors have 1, 3 or 4 channels of uint8, or of floats from 0 to 1.
Conversions are those of transformers 5.23.0 (``convert_to_rgb``): transparency is laid over white,
everything else is PIL's ``convert("RGB")``.

Deliberate differences:

- 16-bit grey (PIL modes ``I;16*`` and ``I``) is scaled to 8 bits by 1/257, rounded; PIL would clip
  it at 255, which turns almost every such image white. 12 bits in ``I;16`` are read as 16 bits:
  scale them beforehand. Mode ``I`` with no value above 255 may be 8-bit, and is rejected.
- Files that are opened here are turned upright by their EXIF orientation, as transformers'
  ``load_image`` does; PIL objects are taken as they are.
- Arrays are read as channels-last and tensors as channels-first; transformers guesses the layout
  from the sizes, which fails where a side has 1, 3 or 4 pixels.
- The frames of a video are converted like images; transformers converts PIL frames that have a
  palette or transparency in another way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard
from weakref import WeakValueDictionary

import numpy as np
import torch
from PIL import Image
from PIL.ImageFile import ImageFile
from torch import Tensor

from .decoders import VideoDecoder
from .gpu_decoding import DeviceImage, active_decoder
from .image_files import DAMAGED, FileLike, Readable, decode_image, lock_of, prefix_errors

if TYPE_CHECKING:
    from ..data import Array

    AnyArray: TypeAlias = Array
    """An array of numpy of any shape and any type of numbers."""
else:
    AnyArray = np.ndarray  # when code runs, numpy's generic takes no argument

FileFields: TypeAlias = Mapping[str, bytes | str | None]
"""An image of the ``datasets`` package that is not decoded: its "bytes", or its "path"."""
ImageLike: TypeAlias = Image.Image | AnyArray | Tensor | FileLike | FileFields
"""One image in a form that :func:`to_rgb` takes."""

KEY_IS_IMAGE = (
    "a tuple of two is (key, item), and this key is an image: pass a clip as a list of frames, and "
    "an image that has a mask or a label alone or as (key, image)"
)
"""The error text for a pair of a stream that may be two frames, or an image with a mask."""


_FAILED: WeakValueDictionary[int, Image.Image] = WeakValueDictionary()
"""The PIL images that could not be decoded, by their addresses. PIL forgets most such errors, and
would return the grey or black rest of the pixels the next time."""


@dataclass(frozen=True)
class Video:
    """The frames of a video, and their rate, which sampling with ``fps=`` needs (24 if None)."""

    frames: Sequence[ImageLike] | AnyArray | Tensor
    """A sequence of images of one size, numpy [F, H, W, C] or a uint8 tensor [F, C, H, W]."""
    fps: float | None = None
    """The frames per second at which the frames of the source were recorded."""
    times: Sequence[float] | None = None
    """Seconds from the first frame to each, where frames are not evenly spaced: ``fps=`` then
    samples by time. ``fps`` is the number of frames over the duration, in seconds."""


VideoLike: TypeAlias = (
    Video | FileLike | FileFields | VideoDecoder | AnyArray | Tensor | Sequence[ImageLike]
)
"""One video: frames with their rate, a video file (its path, its bytes, the open file, or a dict
with "bytes" or "path"), a decoder of torchcodec or decord, or frames alone."""
ImagesLike: TypeAlias = ImageLike | Iterable[ImageLike]
"""One image, or several of any kinds; a 4-dimensional array or tensor is a batch of several."""
VideosLike: TypeAlias = VideoLike | Iterable[VideoLike]
"""One video, or several of any kinds."""
ItemLike: TypeAlias = ImageLike | VideoLike | Mapping[str, object]
"""One item of a stream: an image, a clip, or a row of a ``datasets`` column."""


def to_rgb(image: ImageLike | DeviceImage) -> Tensor:
    """Convert one image to a uint8 tensor [3, H, W], which may share its memory.

    The tensor is on the CPU, but on the GPU for an image that was decoded there.

    Args:
        image: a PIL image of any mode; an image file as a path, bytes, an open binary file, or a
            dict with "bytes" or "path"; a numpy array [H, W, C] or [H, W], or a tensor [C, H, W]
            or [H, W], of uint8 or of floats from 0 to 1, with 1 (grey), 3 (RGB) or 4 (RGBA)
            channels. 16-bit grey PIL images (modes ``I;16*`` and ``I``) are scaled to 8 bits by
            1/257, rounded; 12 bits in ``I;16`` are read as 16 bits.

    Raises:
        ValueError: something that is not an image, has no pixels, has not 8 bits per channel, is a
            tensor without values or in a sparse layout, is of mode ``I`` with values that may have
            8 or 16 bits, or a file that is missing or damaged.
    """
    return to_rows(image).permute(2, 0, 1)


class _Writable:
    """The memory of an array, which torch takes without a warning where it is read-only."""

    def __init__(self, array: AnyArray) -> None:
        self.array = array
        data = array.ctypes.data, False
        self.__array_interface__ = {**array.__array_interface__, "data": data}


def as_flat_tensor(array: AnyArray) -> Tensor:
    """Return the numbers of an array as a tensor of one axis, which must not be written to.

    It is a view, except of an array that is not contiguous. No function of torch is called per
    axis, since each lets other threads take Python's lock.
    """
    flat = array.ravel()  # `reshape` would give a view of an array that is reversed on all axes
    return torch.from_numpy(flat if flat.flags.writeable else np.asarray(_Writable(flat)))


def to_rows(image: ImageLike | DeviceImage) -> Tensor:
    """Convert one image as :func:`to_rgb` does, to a uint8 tensor [H, W, 3]."""
    if isinstance(image, np.ndarray):
        array = read_array(image)
        if array is image and not (array.flags.c_contiguous and array.flags.writeable):
            array = np.require(array, requirements=["C", "W"])
        return _not_pinned(torch.from_numpy(array))
    if isinstance(image, str | os.PathLike):
        decoded = decode_image(image)
        if isinstance(decoded, Tensor):
            return decoded
        with prefix_errors(str(image)):
            return _from_pil(decoded)
    if isinstance(image, bytes | bytearray | memoryview):
        return _from_decoded(decode_image(image))
    if isinstance(image, DeviceImage):
        return image.pixels
    if isinstance(image, Mapping):
        return to_rows(file_of(image, "an image"))
    if isinstance(image, Image.Image):
        return _from_pil(image)
    if isinstance(image, Tensor):
        return _not_pinned(_from_tensor(image).permute(1, 2, 0))
    if isinstance(image, Video):
        raise ValueError("is a clip, not an image: pass it as videos=[clip]")
    if isinstance(image, Readable):
        return _from_decoded(decode_image(image))
    raise ValueError(
        f"is of type {type(image).__name__}, not an image: pass a PIL image, the path of an image "
        "file, a numpy uint8 array [H, W, C] or a uint8 tensor [C, H, W]"
    )


def file_of(fields: FileFields, kind: str) -> bytes | str:
    """Return the "bytes" of a dict of the ``datasets`` package, else its "path".

    Raises:
        ValueError: a dict with neither; ``kind`` says what it should be, such as "an image".
    """
    for name in ("bytes", "path"):
        if (file := fields.get(name)) is not None:
            return file
    raise ValueError(
        f'is a dict of {sorted(map(str, fields))}: {kind} of the datasets package has "bytes" or '
        '"path"'
    )


def read_images(images: ImagesLike) -> list[Tensor]:
    """Convert every image with :func:`to_rgb`.

    Args:
        images: an iterable of images, one image, or one 4-dimensional array or tensor, which is a
            batch of images.

    Returns:
        uint8 [3, H, W] per image.

    Raises:
        ValueError: an image that :func:`to_rgb` rejects; the message has the number of the image.
    """
    return [rows.permute(2, 0, 1) for rows in read_rows(images)]


def read_rows(images: ImagesLike) -> list[Tensor]:
    """Convert every image as :func:`read_images` does, to uint8 [H, W, 3]."""
    is_list = type(images) is list  # asking whether it is an open file takes many microseconds
    several: object = images if is_list or not is_one_image(images) else [images]
    if not isinstance(several, Iterable):
        raise ValueError(
            f"images is one {type(images).__name__}: pass an image, or a list of images"
        )
    if (decoder := active_decoder()) is not None:
        several = decoder.decode_files(list(several))
    pixels: list[Tensor] = []
    for number, image in enumerate(several):
        try:
            pixels.append(to_rows(image))
        except ValueError as error:
            raise ValueError(f"image {number}: {error}") from error
    return pixels


def is_one_image(images: object) -> bool:
    """Return whether the value is one image and not a collection of images."""
    if isinstance(images, np.ndarray | Tensor):
        return images.ndim < 4
    return isinstance(
        images,
        str | bytes | bytearray | memoryview | os.PathLike | Image.Image | Mapping | Readable,
    )


def is_picture(image: object) -> bool:
    """Return whether the value is a PIL image."""
    return isinstance(image, Image.Image)


def is_one_item(items: object) -> bool:
    """Return whether ``items``, which a user passed to a stream, are one image instead of several.

    A loop over a single image would yield its rows or bytes as items.
    """
    if isinstance(items, np.ndarray | Tensor):
        return items.ndim in (2, 3)
    return is_one_image(items)


def is_array(value: object) -> TypeGuard[AnyArray]:
    """Return whether the value is a numpy array; who asks need not import numpy."""
    return isinstance(value, np.ndarray)


def is_rgb_array(value: object) -> TypeGuard[AnyArray]:
    """Return whether the value is a numpy array, uint8 [H, W, 3], which needs no conversion."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        return False
    return value.ndim == 3 and value.shape[2] == 3


def is_pixels(value: object) -> bool:
    """Return whether the value is a decoded image: a PIL image, or an array or tensor of pixels."""
    return is_picture(value) or (isinstance(value, np.ndarray | Tensor) and value.ndim >= 2)


def _from_decoded(image: Image.Image | Tensor) -> Tensor:
    return _from_pil(image) if isinstance(image, Image.Image) else image


def _from_pil(image: Image.Image) -> Tensor:
    _require_pixels(image.height, image.width)
    if image.mode == "F":
        raise ValueError(
            "PIL image of mode F cannot be decoded to RGB: floating-point grey has no fixed range; "
            "scale it to 0..255 as uint8"
        )
    try:
        rgb = torch.from_numpy(np.array(_pil_to_rgb(image)))
    except DAMAGED as error:
        raise ValueError(
            f"PIL image {_file_of(image)}of mode {image.mode} cannot be decoded to RGB ({error}): "
            "it is truncated or of a mode that has no RGB form; replace it or convert it to RGB"
        ) from error
    if image.mode == "I" and 0 < (brightest := int(np.array(image).max())) <= 255:
        raise ValueError(
            f"PIL image of mode I with values up to {brightest}, which may be 8-bit or 16-bit: "
            'convert it, with .convert("L") if 255 is white, .convert("I;16") if 65535 is'
        )
    return rgb


def _file_of(image: Image.Image) -> str:
    """Return the file name of a PIL image and a space, for messages; "" if it has no file."""
    file = image.filename if isinstance(image, ImageFile) else ""
    return f"{file} " if isinstance(file, str) and file else ""


def _pil_to_rgb(image: Image.Image) -> Image.Image:
    _load(image)
    if image.mode == "RGB" and image.info.get("transparency") is None:
        return image
    if image.mode.startswith("I"):
        return Image.fromarray(_eight_bits(np.array(image))).convert("RGB")
    if image.mode in ("La", "RGBa"):  # their colours are multiplied by alpha
        image = image.convert(image.mode.replace("a", "A"))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _load(image: Image.Image) -> None:
    """Decode a PIL image that is not decoded yet, and note if that fails."""
    with lock_of(image):
        is_over = isinstance(image, ImageFile) and not image.tile
        if is_over and _FAILED.get(id(image)) is image:
            raise OSError("it was damaged when it was decoded before")
        try:
            image.load()
        except DAMAGED:
            _FAILED[id(image)] = image
            raise
        _FAILED.pop(id(image), None)  # another page of the file, or the file as it is now


def _eight_bits(grey: AnyArray) -> AnyArray:
    levels = grey.astype(np.int64)
    low, high = int(levels.min()), int(levels.max())
    if low < 0 or high > 65535:
        raise ValueError(f"grey values from {low} to {high} are not 16-bit: scale them to 0..65535")
    return ((levels + 128) // 257).astype(np.uint8)


def read_array(array: AnyArray) -> AnyArray:
    """Convert an image that is an array as :func:`to_rgb` does, to a uint8 array [H, W, 3].

    The result is the array itself if it has this form, read-only or not: a tensor of it takes
    longer to make than all that is checked here.

    Raises:
        ValueError: an array that :func:`to_rgb` rejects.
    """
    if array.dtype.kind == "f":
        unit = torch.from_numpy(np.require(array, np.float64, "W"))
        array = _from_unit(unit, f"array of {array.dtype}").numpy()
    if array.dtype != np.uint8:
        raise ValueError(
            f"numpy array of {array.dtype}: pixels must be uint8, 0..255; {_fix(array.dtype.kind)}"
        )
    _require_layout(array.shape, "[H, W, C] or [H, W]", -1)
    if array.ndim == 3 and array.shape[2] == 3:
        return array
    rows = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    pixels = _to_three_channels(rows[None] if array.ndim == 2 else rows.permute(2, 0, 1))
    return pixels.permute(1, 2, 0).numpy()


def _from_tensor(image: Tensor) -> Tensor:
    if image.is_meta or image.is_nested or image.layout != torch.strided:
        nested = "a nested tensor" if image.is_nested else f"a tensor of layout {image.layout}"
        kind = "a meta tensor" if image.is_meta else nested
        raise ValueError(f"is {kind}: an image is a dense tensor with values; pass uint8 [C, H, W]")
    if image.is_cuda:  # threads read items on another CUDA stream than the one that makes them
        default = torch.cuda.default_stream(image.device)
        torch.cuda.current_stream(image.device).wait_stream(default)
    image = image.cpu()  # before floats are scaled in float64, which MPS does not have
    if image.is_floating_point():
        image = _from_unit(image, f"tensor of {image.dtype}")
    if image.dtype != torch.uint8:
        kind = "b" if image.dtype == torch.bool else "u"
        raise ValueError(f"tensor of {image.dtype}: pixels must be uint8, 0..255; {_fix(kind)}")
    _require_layout(image.shape, "[C, H, W] or [H, W]", 0)
    return _to_three_channels(image[None] if image.ndim == 2 else image)


def _not_pinned(rows: Tensor) -> Tensor:
    """Return an image of the caller, copied if it lies in page-locked memory.

    A GPU copies from such memory later, when the caller may have written the next image there.
    """
    return rows.clone() if torch.cuda.is_initialized() and rows.is_pinned() else rows


def _from_unit(image: Tensor, subject: str) -> Tensor:
    """Convert floats from 0 to 1 to uint8 as torchvision's ``to_dtype(uint8, scale=True)`` does.

    ``subject`` describes the image in errors, such as "tensor of torch.float32".
    """
    low, high = image.aminmax() if image.numel() else (image.new_zeros(()), image.new_zeros(()))
    # This rejects NaN, too, because a comparison with NaN is false.
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"{subject} with values from {float(low):g} to {float(high):g}: floats "
            "must lie between 0 and 1; scale them, or pass uint8, 0..255"
        )
    return image.double().mul(255 + 1.0 - 1e-3).to(torch.uint8)


def _fix(kind: str) -> str:
    return {
        "b": "multiply by 255 and cast to uint8",
    }.get(kind, "scale them to 0..255 (16 bits: divide by 257, round) and cast to uint8")


def _require_layout(shape: Sequence[int], layout: str, channels: int) -> None:
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[channels] not in (1, 3, 4)):
        is_other_layout = len(shape) == 3 and shape[-1 - channels] in (1, 3, 4)
        fix = "move the channels to their place" if is_other_layout else "1, 3 or 4 channels"
        raise ValueError(f"shape {tuple(shape)}: an image of this type is {layout}; {fix}")
    height, width = shape[:2] if channels else shape[-2:]
    _require_pixels(height, width)


def _require_pixels(height: int, width: int) -> None:
    if not height or not width:
        raise ValueError(
            f"is {width}x{height} pixels: an image needs at least one; leave it out of the list"
        )


def _to_three_channels(image: Tensor) -> Tensor:
    """Convert uint8 [C, H, W] with 1 (grey), 3 (RGB) or 4 (RGBA) channels to uint8 [3, H, W].

    Transparency is laid over white, with torchvision's order of operations.
    """
    if image.shape[0] == 1:
        return image.expand(3, -1, -1)
    if image.shape[0] == 3:
        return image
    unit = image.to(torch.float32).mul_(1.0 / 255)
    over_white = unit[:3] * unit[3:] + (1 - unit[3:])
    return over_white.mul_(255 + 1.0 - 1e-3).to(torch.uint8)
