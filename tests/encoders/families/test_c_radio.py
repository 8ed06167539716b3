"""C-RADIO agrees with timm and transformers, in every form that its checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPImageProcessor
from transformers.initialization import no_init_weights

from encoders import CRadioConfig
from encoders.nvidia.c_radio_pixels import CRadioPreprocessor
from tests.oracles import BY_NAME, build_pair, distance, draw_pixels, draw_weights
from tests.oracles.references.c_radio import OLDER, unnormalised
from tests.oracles.references.dino import image_of
from tests.oracles.versions import needs
from weights import FAMILIES, load_encoder
from weights.files.tower_folder import transformers_class
from weights.published import PUBLISHED, family_facts

PHOTO = Image.effect_noise((640, 480), 64).convert("RGB")
FILES = family_facts("c_radio").processors["c_radio"]
SECTION: dict[str, Any] = dict(FILES["preprocessor_config"])
CONFIGS = {model.repo_id: dict(model.config) for model in PUBLISHED if model.family == "c_radio"}
V4: dict[str, Any] = CONFIGS["nvidia/C-RADIOv4-H"]


def test_the_head_is_the_summary_of_transformers() -> None:
    encoder, reference = build_pair(BY_NAME["c_radio"], BY_NAME["c_radio"].tiny)
    inputs = encoder.preprocess([PHOTO], max_pixels=90_000)
    (vector,) = encoder.embed([PHOTO], pool="head", max_pixels=90_000)
    theirs = reference(inputs.pixel_values, image_grid_hw=inputs.grid_thw[:, 1:]).summary
    assert vector.shape == (128,)
    assert distance(vector[None], theirs) <= 1e-5


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("vit_base_patch16_radio_v3", (4, 4)),
        ("naflexvit_base_patch16_radio_v3", (5, 11)),
        ("naflexvit_huge_patch16_radio_v4", (9, 2)),
    ],
)
def test_checkpoints_of_timm_have_its_features(
    tmp_path: Path, name: str, grid: tuple[int, int]
) -> None:
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4}
    own = {"img_size": 64, **sizes} if name.startswith("vit") else sizes
    with no_init_weights():
        model: Any = draw_weights(timm.create_model(name, **own)).eval().requires_grad_(False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": name, "model_args": own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = load_encoder(tmp_path)
    pixels = draw_pixels(encoder, [[1, *grid]])
    image = image_of(pixels, *grid)
    rows = model.forward_features(image)[0]
    prefix = encoder.prefix_rows
    output = encoder(pixels, [[1, *grid]])
    assert distance(output.extras["prefix"][0], rows[:prefix]) <= 1e-5
    assert distance(output.pooler_output, rows[prefix:]) <= 1e-5
    theirs = model.forward_intermediates(image, norm=False, intermediates_only=True)
    ours = encoder.forward_intermediates(pixels, [[1, *grid]], output_fmt="NCHW")
    for (mine,), layer in zip(ours, theirs, strict=True):
        assert distance(mine, layer) <= 1e-5


@pytest.mark.filterwarnings("default")  # of transformers
@needs(*OLDER)
@pytest.mark.parametrize("original", [True, False], ids=["published", "own"])
def test_a_folder_that_transformers_saved_has_its_features(tmp_path: Path, original: bool) -> None:
    from transformers.models.radio import RadioConfig, RadioModel

    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = draw_weights(RadioModel(RadioConfig(**sizes, max_img_size=128)))
    model.eval().requires_grad_(False)
    model.save_pretrained(tmp_path, save_original_format=original)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SECTION))
    encoder = load_encoder(tmp_path)
    pixels = draw_pixels(encoder, [[1, 5, 3]])
    inputs = unnormalised(pixels), torch.tensor([[5, 3]])
    theirs = model(*inputs).features
    assert distance(encoder(pixels, [[1, 5, 3]]).pooler_output, theirs) <= 1e-5
    read = RadioModel.from_pretrained(encoder.save_pretrained(tmp_path / "ours")).eval()
    assert distance(read.requires_grad_(False)(*inputs).features, theirs) <= 1e-5
    read.save_pretrained(tmp_path / "again", save_original_format=original)
    (tmp_path / "again" / "preprocessor_config.json").write_text(json.dumps(SECTION))
    again = load_encoder(tmp_path / "again")
    assert distance(again(pixels, [[1, 5, 3]]).pooler_output, theirs) <= 1e-5


def test_the_corners_of_version_3_h_are_in_no_class_of_transformers() -> None:
    record = FAMILIES["c_radio"]
    layout = next(layout for layout in record.layouts if layout.name == "c_radio")
    reader = transformers_class(V4, record, layout)
    assert reader is not None
    assert reader.name == "RadioModel"
    assert transformers_class(CONFIGS["nvidia/C-RADIOv3-H"], record, layout) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": "radio_v2.5-h"}, r"version='radio_v2.5-h'"),
        ({"adaptor_names": ["siglip2-g"]}, r"adaptor_names=\['siglip2-g'\]"),
        ({"vitdet_window_size": 8}, "vitdet_window_size=8"),
        ({"feature_normalizer_config": {"embed_dim": 3}}, "feature_normalizer_config="),
        ({"use_swiglu_ffn": True}, "use_swiglu_ffn=True"),
        ({"norm_mean": [0.5, 0.5, 0.5]}, "norm_mean="),
        ({"summary_idxs": [3]}, r"summary=\(3,\)"),
        ({"args": {**V4["args"], "model": "eradio"}}, "model='eradio'"),
        ({"args": {**V4["args"], "model_norm": True}}, "model_norm=True"),
        ({"args": {**V4["args"], "teachers": None}}, "teachers=None"),
        ({"args": {**V4["args"], "model_kwargs": {"qk_norm": True}}}, "model_kwargs="),
    ],
)
def test_a_config_of_another_tower_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CRadioConfig.from_hf({**V4, **change})


def test_one_class_token_for_all_teachers_is_the_summary() -> None:
    args = {**V4["args"], "cls_token_per_teacher": False, "register_multiple": None}
    config = CRadioConfig.from_hf({**V4, "args": {**args, "cpe_num_registers": 4}})
    assert (config.class_tokens, config.registers, config.summary) == (1, 4, (0,))


@pytest.mark.parametrize("size", [(512, 512), (96, 250)], ids=str)
def test_pixels_are_those_of_processor_and_model(size: tuple[int, int]) -> None:
    section = {**SECTION, "size": {"height": size[0], "width": size[1]}}
    wanted = CLIPImageProcessor(**section)([PHOTO], return_tensors="pt")["pixel_values"]
    ours = CRadioPreprocessor.c_radio(16, 512, 512).with_files({"preprocessor_config": section})
    got = ours([PHOTO])
    _, h, w = got.grid_thw[0].tolist()
    image = image_of(unnormalised(got.pixel_values), h, w)
    torch.testing.assert_close(image, wanted[..., : 16 * h, : 16 * w], rtol=0, atol=1e-6)


def test_the_file_of_the_repos_sets_the_defaults() -> None:
    ours = CRadioPreprocessor.c_radio(16, 512, 512)
    assert ours.with_files(FILES) == ours
    assert ours([PHOTO], max_pixels=1 << 24).grid_thw.tolist() == [[1, 30, 40]]


def test_a_file_that_normalises_twice_is_refused() -> None:
    file = {"preprocessor_config": {**SECTION, "do_normalize": True}}
    with pytest.raises(ValueError, match="do_normalize=True"):
        CRadioPreprocessor.c_radio(16, 512, 512).with_files(file)
