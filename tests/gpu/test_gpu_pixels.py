"""Pixels made on a GPU: to the bit those of the CPU, for every filter and every preprocessor."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from encoders.contract import VisionInputs
from encoders.inputs import exact_resize
from encoders.inputs.exact_resize import Library, is_exact_on, library_of, resize_exactly
from encoders.inputs.normalizing import fold_mean_std, normalize
from encoders.inputs.processor_files import CLIP_MEAN, CLIP_STD, Resample
from tests.gpu.gpu_towers import NEEDS_CUDA
from tests.support.photographs import china, flower, hopper, panning_clip, photographs
from tests.support.resizing import FILTERS, Case, by_library, cases
from tests.support.towers.streams import tower
from vitgraph.integrations.vllm_plugin.raw_images import (
    LAYOUTS,
    Sent,
    as_positions,
    cut_images,
    describe_levels,
)
from weights import FAMILIES

pytestmark = NEEDS_CUDA

KINDS = [
    name for family in FAMILIES.values() for name, kind in family.facts.small.items() if kind.title
]
"""The small checkpoints with a title: one of each tower of each family."""
FLOATS = {
    ("deepseek_vl_hybrid", "image"): 255e-6,
    ("dinov3", "image"): 1e-5 / 0.224,
    ("nemotron", "image"): 5e-5 / min(CLIP_STD),
    ("nemotron_nano_vl", "image"): 5e-5 / min(CLIP_STD),
}
"""The checkpoints and input paths whose pixels are resized in floating point, and the largest
difference of their values. On an H100, torch's float32 resize of a photograph is up to 1e-5 from
that in float64 on the CPU, up to 6e-6 on the GPU, and the two differ by up to 8e-6, of pixels from
0 to 1; normalising divides by the standard deviation. At the sizes that Nemotron takes, whose ratio
to the original is not a short fraction, torch's own result on the CPU is up to 4.8e-5 from that in
float64, that on the GPU up to 3.6e-5, and the two differ by up to 2.6e-5."""
LARGE = [
    ((1080, 1920), (1088, 1920)),
    ((768, 1024), (448, 608)),
    ((3024, 4032), (896, 1184)),
    ((3024, 4032), (14, 4032)),
    ((4320, 7680), (224, 224)),
    ((1, 70_000), (3, 100_000)),
    ((70_000, 1), (100_000, 3)),
]


def on_gpu(case: Case, mode: Resample, library: Library) -> Tensor:
    pixels = case.pixels.cuda()[None]
    return resize_exactly(pixels, case.height, case.width, mode, library)[0].cpu()


def libraries(mode: Resample) -> list[Library]:
    return ["pillow"] if library_of(mode) == "pillow" else ["torch", "pillow"]


@pytest.mark.parametrize("mode", FILTERS)
def test_five_hundred_sizes_have_the_bits_of_torch_and_pillow(mode: Resample) -> None:
    for library in libraries(mode):
        for case in cases(500, longest=1200, seed=5):
            wanted = by_library(case, mode, library)
            assert torch.equal(on_gpu(case, mode, library), wanted), (library, str(case))


@pytest.mark.parametrize("mode", FILTERS)
def test_large_images_have_the_bits_of_torch_and_pillow(mode: Resample) -> None:
    noise = np.random.default_rng(0)
    for old, new in LARGE:
        pixels = torch.from_numpy(noise.integers(0, 256, (*old, 3), dtype=np.uint8))
        case = Case(pixels, *new)
        for library in libraries(mode):
            wanted = by_library(case, mode, library)
            assert torch.equal(on_gpu(case, mode, library), wanted), (library, str(case))


def test_normalised_levels_have_the_bits_of_the_cpu() -> None:
    levels = torch.arange(256, dtype=torch.uint8).expand(2, 3, 256)
    wanted = normalize(levels, CLIP_MEAN, CLIP_STD)
    assert torch.equal(normalize(levels.cuda(), CLIP_MEAN, CLIP_STD).cpu(), wanted)
    last = normalize(levels.mT.cuda(), CLIP_MEAN, CLIP_STD, axis=2)
    assert torch.equal(last.cpu(), wanted.mT)
    mean, std = fold_mean_std(CLIP_MEAN, CLIP_STD)
    assert torch.equal(wanted[0], (levels[0].float() - mean[:, None]) / std[:, None])
    dice = random.Random(0)
    for _ in range(100):
        drawn = [(dice.random(), dice.random(), dice.random() + 0.01) for _ in range(2)]
        wanted = normalize(levels, drawn[0], drawn[1])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = normalize(levels.cuda(), drawn[0], drawn[1], dtype=dtype)
            assert torch.equal(found.cpu(), wanted.to(dtype)), drawn
        rows = levels.movedim(1, -1).contiguous().movedim(-1, 1)
        assert torch.equal(normalize(rows.cuda(), drawn[0], drawn[1]).cpu(), wanted), drawn


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_pixels_are_normalised_on_another_gpu_than_the_current_one() -> None:
    levels = torch.arange(256, dtype=torch.uint8).expand(2, 3, 256)
    with torch.cuda.device(0):
        found = normalize(levels.to("cuda:1"), CLIP_MEAN, CLIP_STD)
    assert found.device == torch.device("cuda:1")
    assert torch.equal(found.cpu(), normalize(levels, CLIP_MEAN, CLIP_STD))


def check_equal(name: str, made: VisionInputs, wanted: VisionInputs) -> None:
    assert made.tiles == wanted.tiles
    assert made.paths.keys() == wanted.paths.keys()
    for path, (pixels, grid, items) in made.paths.items():
        other = wanted.paths[path]
        assert pixels.is_cuda
        assert pixels.is_contiguous()
        assert torch.equal(grid, other.grid_thw)
        assert items == other.items
        if (name, path) in FLOATS:
            bound = FLOATS[name, path]
            assert torch.allclose(pixels.cpu(), other.pixel_values, rtol=0, atol=bound)
        else:
            assert torch.equal(pixels.cpu(), other.pixel_values), path


@pytest.mark.parametrize("name", KINDS)
def test_every_preprocessor_gives_the_same_pixels_on_the_gpu(name: str) -> None:
    encoder: Any = tower(name)
    grey = np.asarray(china().convert("L"))
    odd = [hopper().resize((13, 170)), flower().resize((1500, 40)), grey]
    for images in ([*photographs()[:4], china().resize((1700, 1200))], odd[:1], odd[1:3]):
        check_equal(name, encoder.preprocess(images, device="cuda"), encoder.preprocess(images))
    nothing = encoder.preprocess(device="cuda")
    assert torch.equal(nothing.pixel_values.cpu(), encoder.preprocess().pixel_values)
    try:
        wanted = encoder.preprocess(china(), [panning_clip(5), panning_clip(1)])
    except ValueError:  # this family takes no videos
        return
    made = encoder.preprocess(china(), [panning_clip(5), panning_clip(1)], device="cuda:0")
    check_equal(name, made, wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["qwen3_vl", "siglip", "llama4", "deepseek_vl", "step3_vl"])
def test_making_pixels_on_the_gpu_does_not_wait_for_it(name: str) -> None:
    encoder: Any = tower(name)
    images = [photographs()[0], hopper().resize((300, 200))]
    encoder.preprocess(images, device="cuda")  # compiles the kernel, and compares it with the CPU
    torch.cuda.set_sync_debug_mode("error")
    try:
        encoder.preprocess([*images, hopper().resize((313, 207))], device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["qwen3_vl", "intern_vit_300m", "lfm2_vl"])
def test_encode_makes_its_pixels_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tower(name).to("cuda")
    images = photographs()[:2]
    wanted = encoder(encoder.preprocess(images))
    with monkeypatch.context() as patch:  # no image is resized on the CPU
        patch.delattr("encoders.inputs.resizing.resize_on_cpu")
        made = encoder.encode(images)
        streamed = list(encoder.encode_many(images, progress=False))
    for one, two, other in zip(made, streamed, wanted, strict=True):
        assert torch.allclose(one.pooler_output, other.pooler_output, rtol=1e-4, atol=1e-5)
        assert torch.allclose(two.pooler_output, other.pooler_output, rtol=1e-4, atol=1e-5)
    encoder.cpu()


@pytest.mark.parametrize("name", ["qwen3_vl", "intern_vit_300m"])
def test_a_pinned_image_may_change_when_preprocess_returns(name: str) -> None:
    encoder, rows = tower(name), torch.from_numpy(np.array(flower())).pin_memory()
    kept = rows.clone()
    wanted = encoder.preprocess(kept.numpy(), device="cuda").pixel_values
    for image in (rows.numpy(), rows.permute(2, 0, 1)):
        torch.cuda._sleep(500_000_000)
        made = encoder.preprocess(image, device="cuda").pixel_values
        rows.zero_()
        assert torch.equal(made, wanted)
        rows.copy_(kept)


@pytest.fixture
def not_compared() -> Iterator[None]:
    """The kernel has not been compared with the CPU yet, and will be again."""
    exact_resize._compare.cache_clear()
    yield
    exact_resize._compare.cache_clear()


@pytest.mark.usefixtures("not_compared")
def test_a_kernel_that_differs_is_warned_of_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from encoders.inputs import exact_resize

    whole = exact_resize.resize_many

    def wrong(*given: Any) -> list[Tensor]:
        return [image ^ 1 for image in whole(*given)]

    monkeypatch.setattr(exact_resize, "resize_many", wrong)
    encoder: Any = tower("qwen3_vl")
    images = photographs()[:2]
    with pytest.warns(UserWarning, match="resized on the CPU, not on cuda:0") as caught:
        made = encoder.preprocess(images, device="cuda")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.preprocess(images, device="cuda")
    check_equal("qwen3_vl", made, encoder.preprocess(images))
    assert not is_exact_on(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_images_sent_to_vllms_engine_are_cut_as_on_the_cpu(dtype: torch.dtype | None) -> None:
    """The bytes of an image may begin anywhere; without a dtype patches stay uint8."""
    dice = torch.Generator().manual_seed(0)
    sizes = [(65, 97), (1080, 1920), (33, 31), (448, 448)]
    targets = [(56, 112), (1064, 1932), (28, 28), (448, 448)]
    images = [torch.randint(256, (*size, 3), generator=dice, dtype=torch.uint8) for size in sizes]
    pixels = torch.cat([image.flatten() for image in images])
    levels = describe_levels(torch.rand(3, 256, generator=dice), len(images))
    for number, layout in enumerate(LAYOUTS):
        side, count = (16, 10_488) if layout is as_positions else (14, 2)
        rows = [
            Sent(number, *size, h // 14 * side, w // 14 * side, side, 2, count)
            for size, (h, w) in zip(sizes, targets, strict=True)
        ]
        given = torch.tensor(rows), None if dtype is None else levels, dtype or torch.float32
        wanted, found = (cut_images(place, *given) for place in (pixels, pixels.cuda()))
        for name, expected in wanted.items():
            for one, other in zip(found[name], expected, strict=True):
                assert one.is_cuda
                assert one.dtype == other.dtype
                assert torch.equal(one.cpu(), other), (layout, name)
