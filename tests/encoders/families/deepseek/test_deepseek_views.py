"""Views of the DeepSeek families: sizes, counts, and pixels against PIL and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers.models.deepseek_vl import DeepseekVLImageProcessor
from transformers.models.deepseek_vl_hybrid import DeepseekVLHybridImageProcessor
from transformers.models.janus.image_processing_janus import JanusImageProcessor
from transformers.models.unlimited_ocr import UnlimitedOcrImageProcessor

from encoders.deepseek.deepseek_ocr_pixels import OcrPreprocessor
from encoders.deepseek.deepseek_vl2 import DeepseekVL2Config
from encoders.deepseek.deepseek_vl2_pixels import CandidatePreprocessor
from encoders.deepseek.deepseek_vl_pixels import HybridPreprocessor, SquarePreprocessor
from encoders.inputs.views import ViewPreprocessor
from encoders.step.step3_pixels import CropPreprocessor
from tests.oracles.versions import needs
from tests.support.photographs import china
from weights import FAMILIES

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CANDIDATES = tuple(
    (384 * m, 384 * n)
    for area in range(1, 10)
    for m in range(1, 10)
    for n in range(1, 10)
    if m * n == area
)
VL2 = CandidatePreprocessor(14, candidates=CANDIDATES)
OCR, VL, HYBRID = OcrPreprocessor(16), SquarePreprocessor(16), HybridPreprocessor(16)
UNLIMITED = OcrPreprocessor(16, max_tiles=32, tiles_several=False)
EXACT: dict[str, float] = {"rtol": 0, "atol": 1e-5}
"""What normalising in another order changes: less than a hundredth of one of 255 levels."""
Chosen = TypeVar("Chosen", bound=ViewPreprocessor)


def photograph(width: int, height: int) -> Image.Image:
    """A photograph of this size."""
    return china().resize((width, height), Image.Resampling.BICUBIC)


def levels(pixels: Tensor, mean: float = 0.5, std: float = 0.5) -> Tensor:
    """Pixels from 0 to 255 of normalised ones."""
    return (pixels.double() * std + mean) * 255


def of_pil(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).double()


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """Check that levels are equal; those of normalised pixels are integers but for rounding."""
    assert float((ours - ours.round()).abs().max()) < 1e-3
    assert torch.equal(ours.round(), theirs)


def by_class(ours: Chosen, reference: Any) -> Chosen:
    """A preprocessor of the processor file that a class of transformers writes."""
    numbers = {"resample": int(reference.resample)}  # an enum, as a JSON file has numbers
    if hasattr(reference, "high_res_resample"):
        numbers["high_res_resample"] = int(reference.high_res_resample)
    return ours.with_files({"preprocessor_config": {**reference.to_dict(), **numbers}})


# --- DeepSeek-OCR ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "tiling"),
    [
        ((640, 640), (1, 1, False)),
        ((300, 640), (1, 1, False)),
        ((641, 500), (3, 2, True)),
        ((1920, 1080), (2, 1, True)),
        ((1000, 1400), (2, 3, True)),
        ((1024, 1024), (2, 2, True)),
        ((3000, 500), (6, 1, True)),
        ((700, 2200), (1, 3, True)),
    ],
)
def test_ocr_cuts_images_over_640_into_two_to_six_tiles(
    size: tuple[int, int], tiling: tuple[int, int, bool]
) -> None:
    inputs = OCR([Image.new("RGB", size)])
    columns, rows, tiled = tiling
    assert inputs.tiles == [tiling]
    assert inputs.grid_thw.tolist() == [[1, 64, 64]]
    assert inputs.paths["tiles"].grid_thw.tolist() == ([[columns * rows, 40, 40]] if tiled else [])


@pytest.mark.parametrize("size", [(1280, 853), (853, 1280), (700, 701), (500, 333)])
def test_ocr_views_are_those_of_pil(size: tuple[int, int]) -> None:
    image = photograph(*size)
    inputs = OCR([image])
    whole = ImageOps.pad(image, (1024, 1024), color=(127, 127, 127))
    assert_equal(levels(inputs.pixel_values[0]), of_pil(whole))
    ((columns, rows, tiled),) = inputs.tiles or []
    if tiled:
        canvas = of_pil(image.resize((640 * columns, 640 * rows)))
        for number, tile in enumerate(inputs.paths["tiles"].pixel_values):
            top, left = number // columns * 640, number % columns * 640
            assert_equal(levels(tile), canvas[:, top : top + 640, left : left + 640])


@pytest.mark.parametrize("size", [(1280, 853), (853, 1280), (700, 1400), (500, 333)])
def test_ocr_pixels_of_a_file_of_transformers_are_its_classes(size: tuple[int, int]) -> None:
    image, reference = photograph(*size), UnlimitedOcrImageProcessor(max_patches=6)
    theirs = reference([image], return_tensors="pt")
    ours = by_class(OCR, reference)([image])
    torch.testing.assert_close(ours.pixel_values, theirs["pixel_values"], **EXACT)
    if theirs["num_local_patches"][0]:
        local = torch.as_tensor(np.stack(theirs["pixel_values_local"]))
        torch.testing.assert_close(ours.paths["tiles"].pixel_values, local, **EXACT)


@pytest.mark.parametrize("size", [(1700, 2200), (2560, 5120), (641, 500), (640, 640), (3000, 900)])
def test_unlimited_ocr_cuts_one_image_as_transformers_does(size: tuple[int, int]) -> None:
    theirs = UnlimitedOcrImageProcessor().get_number_of_image_patches(size[1], size[0])
    ((columns, rows, tiled),) = UNLIMITED([Image.new("RGB", size)]).tiles or []
    assert 1 + tiled * columns * rows == theirs


@pytest.mark.parametrize("most", [1, 2, 4])
def test_ocr_makes_at_most_max_tiles(most: int) -> None:
    inputs = OCR([Image.new("RGB", (2000, 2000))], max_tiles=most)
    ((columns, rows, tiled),) = inputs.tiles or []
    assert columns * rows <= most
    assert tiled == (most > 1)


def test_ocr_makes_the_nine_tiles_of_the_hubs_code_if_asked() -> None:
    image = Image.new("RGB", (1920, 1080))
    assert OCR([image]).tiles == [(2, 1, True)]
    assert OCR([image], max_tiles=9).tiles == [(4, 2, True)]


def test_small_ocr_modes_stretch_the_image() -> None:
    image = photograph(800, 400)
    small = OcrPreprocessor(16, base_size=512, tiled=False, keep_shape=False)
    inputs = small([image])
    assert inputs.other_paths == {}
    assert_equal(levels(inputs.pixel_values[0]), of_pil(image.resize((512, 512))))


# --- DeepSeek-VL2 ------------------------------------------------------------------------------


def best_of_source(width: int, height: int) -> tuple[int, int]:
    """The rule of ``select_best_resolution``, by plain loops."""
    best, kept, wasted = (0, 0), 0, math.inf
    for wide, tall in CANDIDATES:
        scale = min(wide / width, tall / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        waste = wide * tall - effective
        if effective > kept or (effective == kept and waste < wasted):
            best, kept, wasted = (wide, tall), effective, waste
    return best


@pytest.mark.parametrize(
    "size", [(384, 384), (100, 100), (1000, 500), (500, 1000), (3000, 300), (1920, 1080), (37, 999)]
)
def test_vl2_takes_the_candidate_that_wastes_least(size: tuple[int, int]) -> None:
    ((columns, rows, thumbnail),) = VL2([Image.new("RGB", size)]).tiles or []
    assert (384 * columns, 384 * rows) == best_of_source(*size)
    assert thumbnail


@pytest.mark.parametrize("size", [(1000, 667), (667, 1000), (384, 384), (250, 300)])
def test_vl2_views_are_those_of_pil_cut_to_whole_patches(size: tuple[int, int]) -> None:
    image = photograph(*size)
    inputs = VL2([image])
    ((columns, rows, _),) = inputs.tiles or []
    assert inputs.grid_thw.tolist() == [[1 + columns * rows, 27, 27]]
    grey = (127, 127, 127)
    whole = of_pil(ImageOps.pad(image, (384, 384), color=grey))
    canvas = of_pil(ImageOps.pad(image, (384 * columns, 384 * rows), color=grey))
    assert_equal(levels(inputs.pixel_values[0]), whole[:, :378, :378])
    for number, tile in enumerate(inputs.pixel_values[1:]):
        top, left = number // columns * 384, number % columns * 384
        assert_equal(levels(tile), canvas[:, top : top + 378, left : left + 378])


def test_vl2_cuts_no_image_with_one_tile_at_most() -> None:
    inputs = VL2([Image.new("RGB", (2000, 900))] * 3, max_tiles=1)
    assert inputs.tiles == [(1, 1, True)] * 3
    assert inputs.grid_thw.tolist() == [[2, 27, 27]] * 3


# --- DeepSeek-VL -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(800, 600), (600, 800), (500, 500), (1000, 20)])
def test_vl_pads_the_resized_image_with_its_mean_colour(size: tuple[int, int]) -> None:
    image = photograph(*size)
    width, height = (max(int(side / max(size) * 384), 14) for side in size)
    canvas = Image.new("RGB", (384, 384), (127, 127, 127))
    small = image.resize((width, height), Image.Resampling.BICUBIC)
    canvas.paste(small, ((384 - width) // 2, (384 - height) // 2))
    assert_equal(levels(VL([image]).pixel_values[0]), of_pil(canvas))


@pytest.mark.parametrize("size", [(800, 600), (640, 640), (333, 1000), (4000, 30)])
def test_vl_pixels_of_a_file_of_transformers_are_its_classes(size: tuple[int, int]) -> None:
    image, reference = photograph(*size), DeepseekVLImageProcessor(**HALF)
    theirs = reference([image], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(by_class(VL, reference)([image]).pixel_values, theirs, **EXACT)


@pytest.mark.parametrize("file", [HALF, {}], ids=["half", "clip"])
def test_views_of_janus_are_those_of_its_processor(file: dict[str, Any]) -> None:
    files = {"preprocessor_config": {"image_processor_type": "JanusImageProcessor", **file}}
    ours, reference = VL.with_files(files), JanusImageProcessor(**file)
    for width, height in ((640, 480), (333, 100), (97, 211), (10, 10), (4000, 30)):
        image = photograph(width, height)
        theirs = reference([image], return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(ours([image]).pixel_values, theirs, **EXACT)


def test_the_class_of_a_file_that_names_only_its_processor_is_read() -> None:
    file = {"processor_class": "JanusProcessor"}
    image, ours = photograph(333, 100), VL.with_files({"preprocessor_config": file})
    theirs = JanusImageProcessor()([image], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(ours([image]).pixel_values, theirs, **EXACT)


@needs("transformers", "5.21", "it pads the large view with grey in place of the mean")
@pytest.mark.parametrize("size", [(800, 600), (640, 640), (333, 1000)])
def test_hybrid_pixels_of_a_file_of_transformers_are_its_classes(size: tuple[int, int]) -> None:
    image, reference = photograph(*size), DeepseekVLHybridImageProcessor(resample=2, **HALF)
    theirs = reference([image], return_tensors="pt")
    ours = by_class(HYBRID, reference)([image])
    high = ours.paths["high"]
    torch.testing.assert_close(ours.pixel_values, theirs["pixel_values"], **EXACT)
    torch.testing.assert_close(high.pixel_values, theirs["high_res_pixel_values"], **EXACT)
    assert high.grid_thw.tolist() == [[1, 64, 64]]


@pytest.mark.parametrize("size", [(800, 600), (333, 1000)])
def test_the_large_view_of_the_hybrid_is_that_of_pil(size: tuple[int, int]) -> None:
    image = photograph(*size)
    width, height = (int(side / max(size) * 1024) for side in size)
    canvas = Image.new("RGB", (1024, 1024), (122, 116, 104))
    small = image.resize((width, height), Image.Resampling.BICUBIC)
    canvas.paste(small, ((1024 - width) // 2, (1024 - height) // 2))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (HYBRID.mean, HYBRID.std))
    pixels = HYBRID([image]).paths["high"].pixel_values[0].double()
    assert_equal((pixels * std + mean) * 255, of_pil(canvas))


# --- files and refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("deepseek")])
def test_published_files_change_nothing(name: str) -> None:
    record = FAMILIES[name]
    config = record.config.from_hf(record.facts.published[0].config)
    ours: Any = record.on_meta(config).preprocessor
    for layout in record.layouts:
        followed = {"as_transformers": True} if layout.name.endswith("-hf") else {}
        assert ours.with_files(layout.processor_files) == replace(ours, **followed)


def test_files_set_mean_and_std() -> None:
    files = {"processor_config": {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}}
    changed = OCR.with_files(files)
    assert (changed.mean, changed.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


def test_the_files_of_the_converted_hybrid_are_read() -> None:
    followed = by_class(HYBRID, DeepseekVLHybridImageProcessor(resample=2, **HALF))
    assert followed == replace(HYBRID, as_transformers=True)


def test_what_a_file_leaves_out_is_that_of_its_class() -> None:
    """VLMImageProcessor has CLIP's mean and std, DeepseekVLV2Processor 0.5."""
    changed = VL.with_files({"preprocessor_config": {"image_size": 384}})
    assert (changed.mean, changed.std) == (HYBRID.mean, HYBRID.std)
    assert VL2.with_files({"processor_config": {"candidate_resolutions": [[384, 384]]}}).mean == (
        (0.5, 0.5, 0.5)
    )


def test_the_file_of_the_hybrid_colours_its_padding_alone() -> None:
    """Its towers normalise, by the values of config.json."""
    file = {"image_size": 1024, "do_normalize": False, "image_mean": [1.0, 0.0, 0.0]}
    ours = HYBRID.with_files({"preprocessor_config": file})
    inputs = ours([Image.new("RGB", (100, 50))])
    red = (torch.tensor([1.0, 0.0, 0.0]) - torch.tensor(HYBRID.mean)) / torch.tensor(HYBRID.std)
    assert torch.allclose(inputs.paths["high"].pixel_values[0, :, 0, 0], red, atol=1e-6)
    assert inputs.pixel_values[0, :, 0, 0].tolist() == pytest.approx([1.0, -1.0, -1.0])


@pytest.mark.parametrize(
    ("ours", "section", "message"),
    [
        (VL, {"image_size": 448}, r"size=448 but the tower takes views of 384x384"),
        (VL, {"size": {"height": 1, "width": 1}}, r"takes views of 384x384"),
        (VL, {"do_normalize": False}, r"do_normalize=False is not implemented"),
        (VL, {"image_processor_type": "CLIPImageProcessor"}, r"must be DeepseekVLImageProcessor"),
        (VL, {"do_pad": False}, r"do_pad=False is not implemented: it must be True"),
        (VL, {"resample": 2}, r"resample=2 is not implemented: it must be 3"),
        (HYBRID, {"high_res_size": 512}, r"takes views of 1024x1024"),
        (HYBRID, {"high_res_size": 1024, "size": 224}, r"takes views of 384x384"),
        (HYBRID, {"high_res_size": 1024, "resample": 3}, r"resample=3 .* it must be 2"),
        (HYBRID, {"high_res_size": 1024}, r"resample=3 .* it must be 2"),
        (
            HYBRID,
            {"high_res_size": 1024, "resample": 2, "high_res_resample": 2},
            r"high_res_resample=2 .* be 3",
        ),
        (HYBRID, {"image_size": 384}, r"takes views of 1024x1024"),
        (HYBRID, {"do_normalize": True}, r"do_normalize=True is not implemented"),
        (VL2, {"patch_size": 16}, r"patch_size=16 is not implemented: it must be 14"),
        (VL2, {"downsample_ratio": 4}, r"downsample_ratio=4 is not implemented"),
        (VL2, {"candidate_resolutions": [[768, 384]]}, r"must be pairs of multiples of 384"),
        (VL2, {"candidate_resolutions": "x"}, r"must be pairs of multiples of 384"),
        (OCR, {"normalize": False}, r"normalize=False is not implemented"),
        (VL2, {"image_mean": [1]}, r"image_mean=\[1\] must be three numbers"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    ours: ViewPreprocessor, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ours.with_files({"preprocessor_config": section})


LARGE = {  # the most views that an image may be cut into, and one size more on each side
    384: ([32 * 384, 32 * 384], [33 * 384, 32 * 384], [64 * 384, 64 * 384]),
    4096: ([4 * 4096, 4 * 4096], [5 * 4096, 4 * 4096], [4096, 17 * 4096]),
}


@pytest.mark.parametrize("side", LARGE)
@pytest.mark.parametrize("where", ["config", "file", "argument"])
def test_candidates_over_the_limit_of_pixels_or_views_are_refused(side: int, where: str) -> None:
    largest, *over = LARGE[side]
    preprocessor = CandidatePreprocessor(14, image_size=side, candidates=((side, side),))

    def make(sizes: list[list[int]]) -> Any:
        if where == "config":
            vision = {"width": 64, "layers": 1, "image_size": side, "patch_size": 14}
            config = {"vision_config": vision, "candidate_resolutions": sizes}
            return DeepseekVL2Config.from_hf(config).candidate_resolutions
        if where == "file":
            files = {"processor_config": {"candidate_resolutions": sizes}}
            return preprocessor.with_files(files).candidates
        return replace(preprocessor, candidates=tuple(map(tuple, sizes))).candidates

    assert make([[side, side], largest]) == ((side, side), tuple(largest))
    for size in over:
        with pytest.raises(ValueError, match=r"of at most \d+ pixels each \(1024 views, and 268"):
            make([[side, side], size])


@pytest.mark.parametrize(
    "make",
    [
        lambda side: SquarePreprocessor(16, image_size=side),
        lambda side: HybridPreprocessor(16, image_size=side),
        lambda side: HybridPreprocessor(16, low_size=side),
        lambda side: CandidatePreprocessor(14, image_size=side, candidates=((side, side),)),
        lambda side: OcrPreprocessor(16, base_size=side),
        lambda side: OcrPreprocessor(16, tile_size=side),
        lambda side: CropPreprocessor(image_size=side),
        lambda side: CropPreprocessor(tile_size=side),
    ],
)
def test_views_over_the_limit_of_pixels_are_refused(make: Callable[[int], object]) -> None:
    make(16384)
    with pytest.raises(ValueError, match=r"at most 268435456"):
        make(16385)


def test_tiles_over_the_limit_of_pixels_together_are_refused() -> None:
    image = Image.new("RGB", (660, 620))
    with pytest.raises(ValueError, match=r"1023 tiles of 640x640 pixels .* at most 268435456"):
        OCR([image], max_tiles=1024)
    thin = Image.new("RGB", (3000, 33))
    with pytest.raises(ValueError, match=r"91 tiles of 2000x2000 pixels .* at most 268435456"):
        CropPreprocessor(tile_size=2000)([thin])


@pytest.mark.parametrize("ours", [VL, HYBRID, VL2, OCR], ids=lambda ours: type(ours).__name__)
@pytest.mark.parametrize("keyword", ["min_pixels", "max_pixels", "fps", "num_frames"])
def test_keywords_without_a_use_are_refused(ours: ViewPreprocessor, keyword: str) -> None:
    reason = "takes (only images|images in views of fixed sizes)|has no such limit; pass max_tiles"
    with pytest.raises(ValueError, match=f"{keyword}=3: this (family|tower) ({reason})"):
        ours([Image.new("RGB", (8, 8))], **{keyword: 3})


@pytest.mark.parametrize(
    "ours", [VL, HYBRID, OcrPreprocessor(16, tiled=False)], ids=lambda ours: type(ours).__name__
)
def test_max_tiles_is_refused_where_nothing_is_cut(ours: ViewPreprocessor) -> None:
    with pytest.raises(ValueError, match="max_tiles=4: this family takes images in views of fixed"):
        ours([Image.new("RGB", (8, 8))], max_tiles=4)


def test_true_is_no_number_of_tiles() -> None:
    with pytest.raises(ValueError, match="max_tiles=True: must be a positive integer"):
        OCR([Image.new("RGB", (8, 8))], max_tiles=True)


@pytest.mark.parametrize("ours", [VL, HYBRID, VL2, OCR], ids=lambda ours: type(ours).__name__)
def test_videos_are_refused(ours: ViewPreprocessor) -> None:
    with pytest.raises(ValueError, match="this tower takes only images: pass the frames"):
        ours(videos=[[Image.new("RGB", (8, 8))] * 2])
