"""Processors of vLLM that send whole images as uint8, which the engine's process cuts into patches.

An image processor of transformers runs on tensors without data (on the meta device), so its own
code computes the grids, and refuses what it refuses. Resizing and normalising happen in
``raw_images``, in the engine's process.

vLLM and transformers are not imported here. Source: ``models/{qwen2_vl,glm4v,glm46v}`` and
``image_processing_backends.py`` of transformers 5.19.0 and 5.23.0, ``BaseProcessingInfo`` and
``_ProcessorFactories`` of vLLM 0.26.0, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from types import new_class
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .engine_config import ModelSettings
from .raw_images import IMAGE, NORM, describe_norm, describe_sizes
from .raw_switch import is_raw

IMAGE_PROCESSORS = ("Qwen2VLImageProcessor", "Glm4vImageProcessor", "Glm46VImageProcessor")
"""The classes of transformers whose images can be sent as uint8."""
MOST_SHRINKING = 2
"""An image that is resized to less than 1/2 of its pixels is resized before it is sent: vLLM's own
patches have each pixel twice, so no image is sent in more bytes than these."""
BICUBIC = 3
"""The number of the bicubic filter in PIL's ``Image.Resampling``."""
BACKEND = "TorchvisionBackend"
"""The class of transformers from which image processors derive that resize by torchvision."""


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
    Backend = ProcessingInfo = MultiModalProcessor = object


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
    """Mixin for image processors of Qwen's kind, which send images in place of patches."""

    def _preprocess(
        self, images: Sequence[Tensor], *args: object, **settings: object
    ) -> MutableMapping[str, Tensor]:
        """Compute the grids of images, and return them with the bytes of the images.

        Images that are not uint8 RGB, and settings that no published processor has, are processed
        by the class of transformers.
        """
        if args or not all(map(is_rgb, images)) or not can_follow(settings):
            return super()._preprocess(images, *args, **settings)
        shapes = [torch.empty_like(image, device="meta") for image in images]
        grouping = settings["disable_grouping"]  # None means True for images on a CPU
        settings["disable_grouping"] = True if grouping is None else grouping
        batch = super()._preprocess(shapes, **settings)
        patch, merge, frames = (
            int(str(settings[name])) for name in ("patch_size", "merge_size", "temporal_patch_size")
        )
        targets = [(h * patch, w * patch) for _, h, w in batch["image_grid_thw"].tolist()]
        ready = [
            self._shrunk(image, target, settings)
            for image, target in zip(images, targets, strict=True)
        ]
        rows = [image.permute(1, 2, 0).reshape(-1) for image in ready]  # as PIL's lie in memory
        batch["pixel_values"] = torch.cat(rows) if len(rows) > 1 else rows[0]
        batch[IMAGE] = describe_sizes(ready, targets, patch, merge, frames)
        if settings["do_normalize"]:
            batch[NORM] = describe_norm(settings["image_mean"], settings["image_std"], len(images))
        return batch

    def _shrunk(
        self, image: Tensor, target: tuple[int, int], settings: Mapping[str, object]
    ) -> Tensor:
        """Return an image, resized if its target is much smaller or the filter is not bicubic."""
        (height, width), size, resample = target, settings["size"], settings["resample"]
        area = image.shape[1] * image.shape[2]
        if area <= MOST_SHRINKING * height * width and resample in (None, BICUBIC):
            return image
        new_size: Size = type(size)(height=height, width=width)  # type: ignore[call-arg,assignment]
        backend = next(kind for kind in type(self).__mro__ if kind.__name__ == BACKEND)
        resized: Tensor = backend.resize(self, image[None], new_size, resample)[0]  # type: ignore[attr-defined]
        return resized


def is_rgb(image: Tensor) -> bool:
    """Return whether an image is uint8 [3, H, W] on the CPU."""
    return image.dtype == torch.uint8 and image.device.type == "cpu" and len(image) == 3


def can_follow(settings: Mapping[str, object]) -> bool:
    """Return whether the engine can do what settings of an image processor say, to the bit."""
    both = {bool(settings[name]) for name in ("do_rescale", "do_normalize")}
    known = len(both) == 1 and settings["rescale_factor"] in (None, 1 / 255)
    return known and not (settings["do_resize"] and settings["resample"] is None)


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
        sizes = hf_inputs.get(IMAGE)
        if sizes is None:
            return fields
        pixels = MultiModalFieldConfig.flat_from_sizes("image", 3 * sizes[:, :2].prod(-1))
        on_host = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return {**fields, "pixel_values": pixels, IMAGE: on_host, NORM: on_host}


@lru_cache(maxsize=64)  # vLLM has one processor per set of settings
def sending_images(processor: Processor) -> Processor:
    """Return a copy of a processor that sends images; the processor itself if it is not known."""
    kind = type(processor.image_processor)
    if kind.__name__ not in IMAGE_PROCESSORS or not kind.__module__.startswith("transformers."):
        return processor
    if BACKEND not in (base.__name__ for base in kind.__mro__):  # it resizes by Pillow
        return processor
    changed = copy(processor)
    changed.image_processor = copy(processor.image_processor)
    changed.image_processor.__class__ = raw_class(kind)
    return changed


def raw_class(kind: type) -> type:
    """Return a subclass of an image processor of transformers that sends images."""
    backend = next(base for base in kind.__mro__ if base.__name__ == BACKEND)
    sizes = new_class("SizesAlone", (SizesAlone, backend))
    return new_class(kind.__name__, (SendsImages, kind, sizes))


class Factories(Protocol):
    """The classes from which vLLM builds the processor of a model; a dataclass."""

    info: type
    processor: type


def raw_factories(factories: Factories) -> Factories:
    """Return factories of processors that send images, where :func:`is_raw` says so."""
    info, processor = factories.info, factories.processor
    return replace(  # type: ignore[type-var]
        factories,
        info=new_class(info.__name__, (RawInfo, info)),
        processor=new_class(processor.__name__, (RawProcessor, processor)),
    )
