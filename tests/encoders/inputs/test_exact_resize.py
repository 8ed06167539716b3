"""Resizing as on a GPU: the weights and the kernel give the pixels of torch and Pillow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from encoders.inputs.exact_resize import Library, library_of, resize_exactly, resize_many
from encoders.inputs.processor_files import Resample
from encoders.inputs.resizing import resize
from tests.oracles import slow
from tests.support.accelerated.cases import needs_interpreter, needs_triton
from tests.support.photographs import hopper
from tests.support.resizing import FILTERS, Case, by_library, by_weights, cases, take_cpu_for_gpu
from tests.support.towers.streams import tower

LIBRARIES: tuple[Library, ...] = ("torch", "pillow")


def check_weights(mode: Resample, library: Library, count: int, longest: int) -> None:
    if library == "torch" and library_of(mode) != "torch":
        pytest.skip(f"this torch has no {mode} for uint8")
    for case in cases(count, longest, seed=count):
        assert torch.equal(by_weights(case, mode, library), by_library(case, mode, library)), case


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", FILTERS)
def test_weights_give_the_pixels_of_torch_and_pillow(mode: Resample, library: Library) -> None:
    check_weights(mode, library, count=150, longest=120)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", FILTERS)
def test_weights_hold_on_larger_sizes(mode: Resample, library: Library) -> None:
    check_weights(mode, library, count=500, longest=300)


@needs_triton
@needs_interpreter
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_kernel_gives_the_pixels_of_the_weights(library: Library) -> None:
    for mode, case in zip(FILTERS, cases(3, longest=12, seed=3), strict=True):
        batch = torch.stack([case.pixels, 255 - case.pixels])
        made = resize_exactly(batch, case.height, case.width, mode, library)
        for pixels, image in zip(made, batch, strict=True):
            wanted = by_weights(case._replace(pixels=image), mode, library)
            assert torch.equal(pixels, wanted), case


@needs_triton
@needs_interpreter
@pytest.mark.parametrize("library", LIBRARIES)
def test_images_of_several_sizes_are_resized_at_once(library: Library) -> None:
    sizes = [((5, 9), (3, 4)), ((40, 1), (4, 2)), ((4, 7), (9, 7)), ((6, 6), (6, 6))]
    images = [torch.randint(0, 256, (2, *old, 3), dtype=torch.uint8) for old, _ in sizes]
    together = resize_many(images, [new for _, new in sizes], "bicubic", library)
    for image, (_, new), made in zip(images, sizes, together, strict=True):
        assert torch.equal(made, resize_exactly(image, *new, "bicubic", library))
        assert made.is_contiguous()
    assert resize_many([], [], "bicubic", library) == []


@needs_triton
@needs_interpreter
@pytest.mark.parametrize("name", ["kimi_vl", *map(slow, ("qwen3_vl", "lfm2_vl", "siglip"))])
def test_preprocessors_give_the_same_pixels_by_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: Any = tower(name).preprocessor
    if name == "siglip":
        rules = replace(rules, image_size=28)
    images = [hopper().resize((21, 17)), np.asarray(hopper().convert("L").resize((9, 30)))]
    limits = {} if name == "siglip" else {"max_pixels": 600}
    if name in ("qwen3_vl", "lfm2_vl"):
        limits = {"min_pixels": 32 * 32, "max_pixels": 4 * 32 * 32}
    wanted = rules(images, **limits)
    take_cpu_for_gpu(monkeypatch)
    monkeypatch.delattr("encoders.inputs.resizing.resize_on_cpu")
    made = rules(images, **limits)
    assert torch.equal(made.grid_thw, wanted.grid_thw)
    for path, pixels in made.paths.items():
        assert torch.equal(pixels.pixel_values, wanted.paths[path].pixel_values)


@needs_triton
@needs_interpreter
def test_a_single_image_has_the_same_pixels_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.from_numpy(np.array(hopper().resize((9, 7)))).permute(2, 0, 1)
    wanted = resize(image, 5, 6, "bicubic")
    take_cpu_for_gpu(monkeypatch)
    monkeypatch.delattr("encoders.inputs.resizing.resize_on_cpu")
    assert torch.equal(resize(image, 5, 6, "bicubic"), wanted)


def test_preprocess_puts_pixels_on_the_device_that_is_named() -> None:
    encoder: Any = tower("qwen3_vl")
    assert encoder.preprocess([hopper()], device="meta").pixel_values.is_meta
    assert encoder.preprocess([hopper()], device="cpu").pixel_values.device.type == "cpu"
    assert encoder.preprocess([hopper()]).pixel_values.device.type == "cpu"


@needs_triton
def test_a_kernel_is_trusted_only_if_it_agrees_with_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from encoders.inputs import exact_resize

    off_by = 0

    def kernel(
        images: list[Tensor], sizes: list[tuple[int, int]], mode: Resample, library: Library
    ) -> list[Tensor]:
        return [
            torch.stack([by_weights(Case(one, *size), mode, library) for one in image]) ^ off_by
            for image, size in zip(images, sizes, strict=True)
        ]

    monkeypatch.setattr(exact_resize, "resize_many", kernel)
    assert exact_resize._difference(torch.device("cpu")) == ""
    off_by = 1
    assert "differ from the CPU's" in exact_resize._difference(torch.device("cpu"))
