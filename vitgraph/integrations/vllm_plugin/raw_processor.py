"""Processors of vLLM that send whole images as uint8, which the engine's process cuts into patches.

An image processor of transformers runs on tensors without data (on the meta device), so its own
code computes the grids, and refuses what it refuses. InternVL's, in vLLM, resizes by Pillow; the
numbers of tiles are computed by its functions. Resizing and normalising happen in ``raw_images``,
in the engine's process.

vLLM and transformers are not imported here. Source: ``image_processing_backends.py`` and the image
processors of transformers 5.17.0, 5.19.0 and 5.23.0, ``transformers_utils/processors``,
``BaseProcessingInfo`` and ``_ProcessorFactories`` of vLLM 0.26.0, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from types import new_class
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .engine_config import ModelSettings
from .raw_images import (
    IMAGE,
    LAYOUTS,
    LEVELS,
    PIXELS,
    Layout,
    Sent,
    as_image,
    as_patches,
    as_positions,
    as_rows,
    as_tiles,
    describe_levels,
)
from .raw_switch import is_raw

IMAGE_PROCESSORS: Mapping[str, Layout] = {
    "Qwen2VLImageProcessor": as_rows,
    "Glm4vImageProcessor": as_rows,
    "Glm46VImageProcessor": as_rows,
    "MiniMaxM3VLImageProcessor": as_rows,
    "PaddleOCRVLImageProcessor": as_patches,
    "PixtralImageProcessor": as_image,
    "Gemma4ImageProcessor": as_positions,
}
"""The classes of transformers or vLLM that resize by torch and whose images can be sent as uint8,
and how each cuts them."""
REPLACED = ("pixel_values", "pixel_values_flat", "pixel_position_ids")
"""What the engine makes of the images, by its name in vLLM; it is not sent."""
MOST_SHRINKING = 2
"""An image that is resized to less than 1/2 of its pixels is resized before it is sent: vLLM's own
patches have each pixel twice, so no image is sent in more bytes than these."""
BICUBIC = 3
"""The number of the bicubic filter in PIL's ``Image.Resampling``."""
BACKEND = "TorchvisionBackend"
"""The class of transformers from which image processors derive that resize by torchvision."""
FRAMES_OF_GEMMA4 = 70
"""The tokens that vLLM gives to a frame of a clip of Gemma 4, which it processes as an image."""
POOLING = "pooling_kernel_size"
"""The setting of Gemma 4 that has the side of a token in patches."""


class Size(Protocol):
    """A size in transformers: sides in pixels, those that a processor does not read are None."""

    def __init__(self, *, height: int, width: int) -> None: ...

    height: int | None
    width: int | None


if TYPE_CHECKING:

    class Backend:
        """For type checkers: the methods of transformers' classes that the mixins call."""

        def resize(
            self, image: Tensor, size: Size, resample: object = None, antialias: bool = True
        ) -> Tensor: ...

        def rescale_and_normalize(self, images: Tensor, *args: object) -> Tensor: ...

        def _preprocess(
            self, images: Sequence[Tensor], *args: object, **settings: object
        ) -> MutableMapping[str, Tensor]: ...

        def aspect_ratio_preserving_resize(
            self,
            *,
            image: Tensor,
            patch_size: int,
            max_patches: int,
            pooling_kernel_size: int,
            resample: object,
        ) -> Tensor: ...

    class TileProcessor:
        """For type checkers: what vLLM's image processor of InternVL has."""

        code: str
        image_size: int
        use_thumbnail: bool

        def __call__(
            self,
            images: object,
            *,
            min_dynamic_patch: int | None,
            max_dynamic_patch: int | None,
            dynamic_image_size: bool | None,
            return_tensors: object,
        ) -> MutableMapping[str, Tensor]: ...

        def resolve_min_max_num(
            self,
            *,
            min_dynamic_patch: int | None,
            max_dynamic_patch: int | None,
            dynamic_image_size: bool | None,
            use_thumbnail: bool,
        ) -> tuple[int, int]: ...

    class Processor:
        """For type checkers: a processor of transformers for text and images."""

        image_processor: object

    class ProcessingInfo:
        """For type checkers: what vLLM's class of this name has."""

        ctx: Context

        def get_hf_processor(self, **settings: object) -> Processor: ...

    class Context(Protocol):
        """For type checkers: the context of vLLM's processors."""

        @property
        def model_config(self) -> ModelSettings: ...

    class MultiModalProcessor:
        """For type checkers: what vLLM's class of this name has."""

        info: ProcessingInfo

        def _get_mm_fields_config(
            self, hf_inputs: Mapping[str, Tensor], hf_processor_mm_kwargs: Mapping[str, object]
        ) -> Mapping[str, object]: ...

else:
    Backend = TileProcessor = ProcessingInfo = MultiModalProcessor = object


class SizesAlone(Backend):
    """Mixin between an image processor and its backend: tensors without data change their size."""

    def resize(
        self, image: Tensor, size: Size, resample: object = None, antialias: bool = True
    ) -> Tensor:
        """Return a tensor without data in the new size for one without data."""
        if image.is_meta and size.height and size.width:
            return image.new_empty(*image.shape[:-2], size.height, size.width)
        return super().resize(image, size, resample, antialias)

    def rescale_and_normalize(self, images: Tensor, *args: object) -> Tensor:
        """Return a tensor without data as it is."""
        return images if images.is_meta else super().rescale_and_normalize(images, *args)


class SendsImages(Backend):
    """Mixin for image processors that resize by torch, which send images in place of patches."""

    def _preprocess(
        self, images: Sequence[Tensor], *args: object, **settings: object
    ) -> MutableMapping[str, Tensor]:
        """Compute the sizes of images, and return them with the bytes of the images.

        Images that are not uint8 RGB, and settings that no published processor has, are processed
        by the class of transformers.
        """
        if args or not all(map(is_rgb, images)) or not can_follow(settings):
            return super()._preprocess(images, *args, **settings)
        shapes = [torch.empty_like(image, device="meta") for image in images]
        grouping = settings["disable_grouping"]  # None means True for images on a CPU
        settings["disable_grouping"] = True if grouping is None else grouping
        batch = super()._preprocess(shapes, **settings)
        targets = self._targets(shapes, batch, settings)
        ready = [
            self._shrunk(image, target, settings["resample"])
            for image, target in zip(images, targets, strict=True)
        ]
        pixels = [image.permute(1, 2, 0).reshape(-1) for image in ready]  # as PIL's lie in memory
        layout, numbers = self._layout(settings)
        rows = [
            Sent(layout, image.shape[1], image.shape[2], *target, *numbers)
            for image, target in zip(ready, targets, strict=True)
        ]
        return add_images(batch, pixels, rows, self._levels(settings))

    def _targets(
        self,
        shapes: Sequence[Tensor],
        batch: Mapping[str, Tensor],
        settings: Mapping[str, object],
    ) -> list[tuple[int, int]]:
        """Return the height and width in pixels to which each image is resized."""
        if "image_grid_thw" in batch:
            patch = number(settings["patch_size"])
            return [(h * patch, w * patch) for _, h, w in batch["image_grid_thw"].tolist()]
        if "image_sizes" in batch:  # Pixtral
            return [(int(h), int(w)) for h, w in batch["image_sizes"]]
        if not settings["do_resize"]:
            return [(shape.shape[1], shape.shape[2]) for shape in shapes]
        tokens, side = (number(settings[name]) for name in ("max_soft_tokens", POOLING))
        resized = [
            self.aspect_ratio_preserving_resize(
                image=shape,
                patch_size=number(settings["patch_size"]),
                max_patches=tokens * side**2,
                pooling_kernel_size=side,
                resample=settings["resample"],
            )
            for shape in shapes
        ]
        return [(shape.shape[1], shape.shape[2]) for shape in resized]

    def _layout(self, settings: Mapping[str, object]) -> tuple[int, Sequence[int]]:
        """Return the number of the layout of the images, and the numbers that it needs."""
        layout = IMAGE_PROCESSORS[type(self).__name__]
        names = ["patch_size", "merge_size", "temporal_patch_size"]
        numbers = (
            [number(settings[name]) for name in names] if layout in (as_rows, as_patches) else []
        )
        if layout is as_positions:
            tokens, side = (number(settings[name]) for name in ("max_soft_tokens", POOLING))
            numbers = [number(settings["patch_size"]), 1, tokens * side**2]
        return LAYOUTS.index(layout), numbers

    def _levels(self, settings: Mapping[str, object]) -> Tensor | None:
        """Return the normalised value of every level [3, 256], or None if they stay uint8."""
        every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(-1, 3, -1, -1)
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        values = self.rescale_and_normalize(every, *(settings[name] for name in names))
        return values.view(3, 256) if values.is_floating_point() else None

    def _shrunk(self, image: Tensor, target: tuple[int, int], resample: object) -> Tensor:
        """Return an image, resized if its target is much smaller or the filter is not bicubic."""
        height, width = target
        area = image.shape[1] * image.shape[2]
        if area <= MOST_SHRINKING * height * width and resample in (None, BICUBIC):
            return image
        backend = next(kind for kind in type(self).__mro__ if kind.__name__ == BACKEND)
        new_size: Size = import_module(backend.__module__).SizeDict(height=height, width=width)
        resized: Tensor = backend.resize(self, image[None], new_size, resample)[0]  # type: ignore[attr-defined]
        return resized


class SendsTiles(TileProcessor):
    """Mixin for vLLM's image processor of InternVL, which sends images in place of tiles."""

    def __call__(
        self,
        images: object,
        *,
        min_dynamic_patch: int | None = None,
        max_dynamic_patch: int | None = None,
        dynamic_image_size: bool | None = None,
        return_tensors: object = None,
    ) -> MutableMapping[str, Tensor]:
        """Compute the numbers of tiles of images, and return them with the bytes of the images.

        Images that are not RGB, and calls with an image that has more bytes than its tiles have in
        bfloat16, are processed by vLLM's class.
        """
        code = import_module(self.code)
        theirs = partial(
            super().__call__,
            images,
            min_dynamic_patch=min_dynamic_patch,
            max_dynamic_patch=max_dynamic_patch,
            dynamic_image_size=dynamic_image_size,
            return_tensors=return_tensors,
        )
        listed = images if isinstance(images, list) else [images]
        given = [image for image in listed if isinstance(image, Image.Image)]
        if len(given) < len(listed) or any(image.mode != "RGB" for image in given):
            return theirs()
        # The thumbnail is not counted here, as in vLLM's code.
        ratios = code.get_internvl_target_ratios(
            *self.resolve_min_max_num(
                min_dynamic_patch=min_dynamic_patch,
                max_dynamic_patch=max_dynamic_patch,
                dynamic_image_size=dynamic_image_size,
                use_thumbnail=False,
            )
        )
        side, rows, counts = self.image_size, [], []
        for image in given:
            width, height = image.size
            tiles, new_width, new_height = code.calculate_internvl_targets(
                orig_width=width,
                orig_height=height,
                target_ratios=ratios,
                image_size=side,
                use_thumbnail=False,
            )
            thumbnail = int(self.use_thumbnail and tiles != 1)
            counts.append(tiles + thumbnail)
            size = (height, width, new_height, new_width)
            rows.append(Sent(LAYOUTS.index(as_tiles), *size, side, 1, thumbnail))
            if height * width > 2 * counts[-1] * side**2:
                return theirs()
        every = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
        levels = code.build_transform(input_size=16)(Image.fromarray(every)).view(3, 256)
        pixels = [torch.from_numpy(np.array(image)).view(-1) for image in given]
        batch = code.BatchFeature({"image_num_patches": torch.tensor(counts)})
        return add_images(batch, pixels, rows, levels)


def add_images(
    batch: MutableMapping[str, Tensor],
    pixels: Sequence[Tensor],
    rows: Sequence[Sent],
    levels: Tensor | None,
) -> MutableMapping[str, Tensor]:
    """Add the bytes of images, what is made of them, and the values of their levels to a batch.

    Tensors without data become one byte on the CPU in their shape, which vLLM neither copies nor
    casts. Its code may divide them among the images; they are not sent.
    """
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.is_meta:
            batch[name] = torch.zeros((), dtype=torch.uint8).expand(value.shape)
    batch[PIXELS] = torch.cat(list(pixels)) if len(pixels) > 1 else pixels[0]
    batch[IMAGE] = torch.tensor(rows)
    if levels is not None:
        batch[LEVELS] = describe_levels(levels, len(rows))
    return batch


def number(value: object) -> int:
    """Return a setting of an image processor that is an integer."""
    return int(str(value))


def is_rgb(image: Tensor) -> bool:
    """Return whether an image is uint8 [3, H, W] on the CPU."""
    return image.dtype == torch.uint8 and image.device.type == "cpu" and len(image) == 3


def can_follow(settings: Mapping[str, object]) -> bool:
    """Return whether the engine can do what settings of an image processor say, to the bit."""
    if settings.get("do_center_crop") or settings.get("max_soft_tokens") == FRAMES_OF_GEMMA4:
        return False
    return not (settings["do_resize"] and settings["resample"] is None)


class RawInfo(ProcessingInfo):
    """Mixin for vLLM's processing info: image processors send images in place of patches."""

    def get_hf_processor(self, **settings: object) -> Processor:
        """Return vLLM's processor, or a copy of it whose image processor sends images."""
        processor = super().get_hf_processor(**settings)
        return sending_images(processor) if is_raw(self.ctx.model_config) else processor


class RawProcessor(MultiModalProcessor):
    """Mixin for vLLM's processor, which divides the bytes of images among the items."""

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Tensor], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return vLLM's fields of items, and those of images that are sent as bytes."""
        from vllm.multimodal.inputs import MultiModalFieldConfig

        fields = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))
        rows = hf_inputs.get(IMAGE)
        if rows is None:
            return fields
        fields = {name: field for name, field in fields.items() if name not in REPLACED}
        pixels = MultiModalFieldConfig.flat_from_sizes("image", 3 * rows[:, 1:3].prod(-1))
        on_host = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return {**fields, PIXELS: pixels, IMAGE: on_host, LEVELS: on_host}


@lru_cache(maxsize=64)  # vLLM has one processor per set of settings
def sending_images(processor: Processor) -> Processor:
    """Return a copy of a processor that sends images; the processor itself if it is not known."""
    kind = raw_class(type(processor.image_processor))
    if kind is None:
        return processor
    changed = copy(processor)
    changed.image_processor = copy(processor.image_processor)
    changed.image_processor.__class__ = kind
    return changed


def raw_class(kind: type) -> type | None:
    """Return a subclass of an image processor that sends images; None if it is not known."""
    name, bases = kind.__name__, {base.__name__: base for base in kind.__mro__}
    if not kind.__module__.startswith(("transformers.", "vllm.")):
        return None
    if name == "InternVLImageProcessor":
        facts = {"code": kind.__module__}
        return new_class(name, (SendsTiles, kind), exec_body=lambda body: body.update(facts))
    if name not in IMAGE_PROCESSORS or BACKEND not in bases:  # it resizes by Pillow
        return None
    sizes = new_class("SizesAlone", (SizesAlone, bases[BACKEND]))
    return new_class(name, (SendsImages, kind, sizes))


class Makes(Protocol):
    """A class of vLLM, or a function that makes an instance of one."""

    def __call__(self, *given: object, **named: object) -> object: ...


class Factories(Protocol):
    """What makes the processor of a model in vLLM; a dataclass."""

    @property
    def info(self) -> Makes: ...

    @property
    def processor(self) -> Makes: ...


def raw_factories(factories: Factories) -> Factories:
    """Return factories of processors that send images, where :func:`is_raw` says so."""
    info, processor = factories.info, factories.processor
    return replace(  # type: ignore[type-var]
        factories, info=_extended(info, RawInfo), processor=_extended(processor, RawProcessor)
    )


def _extended(make: Makes, mixin: type) -> Makes:
    """Return a subclass of a class with a mixin before it; for a function, what makes one of it."""
    if isinstance(make, type):
        return new_class(make.__name__, (mixin, make))  # type: ignore[return-value]

    def _made(*given: object, **named: object) -> object:
        one = make(*given, **named)
        kind = type(one)
        extended: object = object.__new__(new_class(kind.__name__, (mixin, kind)))
        vars(extended).update(vars(one))
        return extended

    return _made
