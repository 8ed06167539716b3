"""Images for checkpoints of timm have the sizes and pixels of timm's transforms."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from einops import rearrange

from encoders.dino.dino_pixels import DinoPreprocessor
from encoders.nvidia.c_radio_pixels import CRadioPreprocessor
from tests.support.photographs import of_random_sizes, photographs
from weights import FAMILIES

OURS: dict[str, Any] = {
    "dinov2": DinoPreprocessor.dinov2(14),
    "dinov3": DinoPreprocessor.dinov3(16),
    "c_radio": CRadioPreprocessor.c_radio(16, 512, 512),
}
NAMES = {
    "dinov2": "vit_base_patch14_reg4_dinov2.lvd142m",
    "dinov3": "vit_large_patch16_dinov3.sat493m",
    "c_radio": "vit_base_patch16_radio_v3.c_radio",
}


@pytest.mark.parametrize("family", OURS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"input_size": (3, 112, 112), "crop_pct": 0.9},
        {"input_size": (3, 112, 112), "interpolation": "bilinear"},
        {"input_size": (3, 112, 112), "crop_mode": "squash"},
        dict.fromkeys(("crop_pct", "crop_mode", "mean", "std", "interpolation")),
    ],
    ids=["published", "crop", "bilinear", "squash", "nothing"],
)
def test_images_of_timms_checkpoints_are_those_of_its_transforms(
    family: str, change: dict[str, Any]
) -> None:
    config: dict[str, Any] = {**timm.get_pretrained_cfg(NAMES[family]).to_dict(), **change}
    describe: Any = FAMILIES[family].processor_of
    section = describe({"architecture": "any", "pretrained_cfg": config})
    images = [*photographs()[:3], *of_random_sizes(90, 6)]
    inputs = OURS[family].with_files({"preprocessor_config": section})(images)
    transform = timm.data.create_transform(**timm.data.resolve_data_config(config))
    wanted = torch.stack([transform(image) for image in images])
    _, h, w = inputs.grid_thw[0].tolist()
    patch = OURS[family].patch_size
    pattern = "(b h w) (c p q) -> b c (h p) (w q)"
    made = rearrange(inputs.pixel_values, pattern, h=h, w=w, p=patch, q=patch)
    cut = wanted[:, :, : h * patch, : w * patch]
    torch.testing.assert_close(made, cut, rtol=0, atol=1e-5)


@pytest.mark.parametrize("crop", [{"crop_mode": "border"}, {"crop_mode": "squash"}], ids=str)
def test_a_crop_of_timm_that_is_not_implemented_is_an_error(crop: dict[str, Any]) -> None:
    describe: Any = FAMILIES["dinov2"].processor_of
    with pytest.raises(ValueError, match=r"crop_mode=.* with crop_pct=0.9 is not implemented"):
        describe({"pretrained_cfg": {"input_size": [3, 224, 224], "crop_pct": 0.9, **crop}})


@pytest.mark.parametrize("size", [None, [], [3, 224], [3, 224, 112]])
def test_a_size_of_timm_that_is_no_square_is_an_error(size: object) -> None:
    describe: Any = FAMILIES["dinov2"].processor_of
    with pytest.raises(ValueError, match=r"input_size=.*: must be"):
        describe({"architecture": "any", "pretrained_cfg": {"input_size": size}})
