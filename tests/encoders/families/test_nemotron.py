"""Nemotron: its projector on the tower of C-RADIO, and its images whole or in tiles."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision.transforms import v2

from encoders import NemotronConfig, NemotronEncoder
from encoders.nvidia.nemotron_pixels import (
    NemotronPreprocessor,
    NemotronTilesPreprocessor,
    even_grid,
)
from tests.oracles import distance, draw_weights
from tests.oracles.references.c_radio import OLDER
from tests.oracles.versions import needs
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder
from weights.published import PUBLISHED, family_facts

PHOTO = Image.effect_noise((640, 480), 64).convert("RGB")
FILE: dict[str, Any] = dict(family_facts("nemotron").processors["nemotron"]["preprocessor_config"])
CONFIGS = [dict(model.config) for model in PUBLISHED if model.family == "nemotron"]
OMNI, NANO = CONFIGS
BOUNDS = {"min_num_patches": 1024, "max_num_patches": 13312, "max_model_len": 16384}


def write_omni(folder: Path, *, original: bool, predicted: int) -> Any:
    """Write a small Nemotron Omni as transformers saves it; return the model."""
    from transformers.models.nemotron_h_omni import (
        NemotronH_Omni_Reasoning_V3,
        NemotronH_Omni_Reasoning_V3_Config,
    )

    config = NemotronH_Omni_Reasoning_V3_Config(
        vision_config={
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_img_size": 128,
            "video_temporal_patch_size": 2,
        },
        text_config={
            "model_type": "nemotron_h",
            "hidden_size": 32,
            "layers_block_type": ["mlp"],
            "intermediate_size": 32,
            "vocab_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mamba_num_heads": 2,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "num_nextn_predict_layers": predicted,
        },
        vision_hidden_size=64,
        projector_hidden_size=48,
    )
    model: Any = draw_weights(NemotronH_Omni_Reasoning_V3(config)).eval().requires_grad_(False)
    model.save_pretrained(folder, save_original_format=original)
    (folder / "preprocessor_config.json").write_text(json.dumps({**FILE, **BOUNDS}))
    return model


@pytest.mark.filterwarnings("default")  # of transformers
@needs(*OLDER)
@pytest.mark.parametrize(("original", "predicted"), [(True, 0), (False, 1)], ids=str)
def test_tokens_are_those_of_the_omni_model(tmp_path: Path, original: bool, predicted: int) -> None:
    model = write_omni(tmp_path, original=original, predicted=predicted)
    encoder = load_encoder(tmp_path)
    assert isinstance(encoder, NemotronEncoder)
    images = [PHOTO, PHOTO.crop((0, 0, 600, 300))]
    inputs = encoder.preprocess(images, min_pixels=1 << 14, max_pixels=1 << 17)
    theirs = model.get_image_features(inputs.pixel_values, inputs.grid_thw[:, 1:])
    for ours, wanted in zip(encoder(inputs), theirs.pooler_output, strict=True):
        assert distance(ours.pooler_output, wanted) <= 1e-5


def write_nano(folder: Path, change: dict[str, Any] | None = None) -> Path:
    """Write a small Nemotron Nano VL V2, with other fields at the top of its config."""
    write_seeded_checkpoint(folder, "nemotron_nano_vl", width=64, shards=1, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **(change or {})}))
    return folder


def patches_of(tile: Tensor) -> Tensor:
    """Return the patches of a tile [3, s, s], row by row, [P, 3*16*16]."""
    return tile.unfold(1, 16, 16).unfold(2, 16, 16).permute(1, 2, 0, 3, 4).reshape(-1, 768)


def lifted_tiles(image: Image.Image, columns: int, rows: int) -> Tensor:
    """Return the tiles of an image as NVIDIA's processor makes them, [tiles, 3, 512, 512]."""

    def resized(height: int, width: int) -> Tensor:
        pixels = v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True)
        return v2.functional.resize(pixels, [height, width], v2.InterpolationMode.BICUBIC)

    canvas = resized(512 * rows, 512 * columns)
    tiles = [part for row in canvas.split(512, 1) for part in row.split(512, 2)]
    if len(tiles) > 1:
        tiles.append(resized(512, 512))
    mean, std = (torch.tensor(FILE[name])[:, None, None] for name in ("norm_mean", "norm_std"))
    return (torch.stack(tiles) - mean) / std


@pytest.mark.parametrize(
    ("size", "grid"),
    [((640, 480), (4, 3)), ((500, 500), (1, 1)), ((300, 901), (1, 3)), ((512, 1024), (1, 2))],
    ids=str,
)
def test_tiles_are_those_of_nvidias_processor(size: tuple[int, int], grid: tuple[int, int]) -> None:
    image = PHOTO.resize(size)
    found = NemotronTilesPreprocessor(16).with_files({"preprocessor_config": FILE})([image])
    wanted = lifted_tiles(image, *grid)
    assert found.tiles == [(*grid, len(wanted) > 1)]
    assert found.grid_thw.tolist() == [[len(wanted), 32, 32]]
    rows = torch.cat([patches_of(tile) for tile in wanted])
    torch.testing.assert_close(found.pixel_values, rows, rtol=0, atol=1e-5)


def test_tiles_of_nano_are_encoded_each_for_itself(tmp_path: Path) -> None:
    encoder = load_encoder(write_nano(tmp_path))
    assert isinstance(encoder, NemotronEncoder)
    image = PHOTO.resize((1024, 512))
    inputs = encoder.preprocess([image], max_tiles=2)
    assert inputs.tiles == [(2, 1, True)]
    (output,) = encoder(inputs)
    assert output.pooler_output.shape == (3 * 256, 96)
    for number, rows in enumerate(inputs.pixel_values.chunk(3)):
        (alone,) = encoder.split(encoder(rows, [[1, 32, 32]]), [[1, 32, 32]])
        tokens = output.pooler_output[256 * number : 256 * (number + 1)]
        assert distance(tokens, alone.pooler_output) <= 1e-5


def test_a_size_that_the_config_leaves_out_is_that_of_the_tensors(tmp_path: Path) -> None:
    folder = write_nano(tmp_path, {"projector_hidden_size": None, "llm_config": {}})
    config = load_encoder(folder).config
    assert isinstance(config, NemotronConfig)
    assert (config.projector_hidden_size, config.out_hidden_size) == (128, 96)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ps_version": "v1"}, "ps_version='v1'"),
        ({"downsample_ratio": 0.25}, "downsample_ratio=0.25"),
        ({"norm_mean": [0.5, 0.5, 0.5]}, "norm_mean="),
        ({"force_image_size": 500}, "force_image_size=500"),
    ],
)
def test_another_rule_of_the_config_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        NemotronConfig.from_hf({**NANO, **change})


def test_a_norm_before_the_projector_needs_no_weights(tmp_path: Path) -> None:
    text = {"hidden_size": 96, "num_nextn_predict_layers": 1}
    encoder = load_encoder(write_nano(tmp_path / "normed", {"llm_config": text}))
    other = load_encoder(write_nano(tmp_path / "plain"))
    assert isinstance(encoder, NemotronEncoder)
    assert isinstance(other, NemotronEncoder)
    output = encoder(torch.randn(4, 768), [[1, 2, 2]])
    rows = F.layer_norm(output.last_hidden_state, (64,), eps=1e-6)
    assert distance(output.pooler_output, other.projector(rows)) <= 1e-5


def test_weights_of_a_norm_that_the_config_lacks_are_refused(tmp_path: Path) -> None:
    file = write_nano(tmp_path) / "model.safetensors"
    norm = {"vision_projector.vision_final_layernorm.weight": torch.ones(64)}
    save_file({**load_file(file), **norm}, file)
    with pytest.raises(CheckpointError, match=r"vision_projector\.vision_final_layernorm"):
        load_encoder(tmp_path)


def test_the_tower_of_llama_nemotron_is_refused_by_name(tmp_path: Path) -> None:
    write_nano(tmp_path, {"model_type": "Llama_Nemotron_Nano_VL"})
    with pytest.raises(CheckpointError, match=r"Llama_Nemotron_Nano_VL.* its tower is C-RADIO v2"):
        load_encoder(tmp_path)


def test_images_of_a_nano_that_bounds_patches_keep_their_shape() -> None:
    config: dict[str, Any] = deepcopy(NANO)
    config["vision_config"]["args"] |= {"min_num_patches": 64, "max_num_patches": 512}
    built = NemotronConfig.from_hf(config)
    assert built.tile_size is None
    assert NemotronConfig.from_hf(NANO).tile_size == 512
    assert NemotronConfig.from_hf({**NANO, "model_type": "renamed"}).tile_size == 512
    assert (built.min_patches, built.max_patches) == (64, 512)


@needs(*OLDER)
def test_pixels_of_omni_are_those_of_its_processor() -> None:
    from transformers.models.nemotron_h_omni import image_processing_nemotron_h_omni as theirs

    small = {**FILE, **BOUNDS, "min_num_patches": 64, "max_num_patches": 512}
    images = [PHOTO, PHOTO.resize((100, 333)), PHOTO.resize((256, 160)), PHOTO.resize((9, 9))]
    processor: Any = theirs.NemotronH_Omni_Reasoning_V3ImageProcessor(**small)
    wanted = processor(images, return_tensors="pt")
    ours = NemotronPreprocessor.nemotron(16).with_files({"preprocessor_config": small})
    got = ours(images)
    assert torch.equal(got.grid_thw[:, 1:], wanted["image_grid_hw"])
    torch.testing.assert_close(got.pixel_values, wanted["pixel_values"], rtol=0, atol=1e-5)
    rng = random.Random(0)
    for _ in range(300):
        height, width = rng.randint(1, 4000), rng.randint(1, 4000)
        grid = theirs.get_patch_grid_size(height, width, 16, 2, 1024, 13312)
        assert even_grid(height / 16, width / 16, 1024, 13312) == grid


def test_the_files_of_the_repos_set_the_defaults() -> None:
    ours = NemotronPreprocessor.nemotron(16)
    assert ours.with_files({"preprocessor_config": {**FILE, **BOUNDS}}) == ours
    tiles = NemotronTilesPreprocessor(16)
    assert tiles.with_files({"preprocessor_config": FILE}) == tiles
    for change in ({"downsample_ratio": 1.0}, {"patch_size": 14}, {"max_model_len": 100}):
        with pytest.raises(ValueError, match=next(iter(change))):
            ours.with_files({"preprocessor_config": {**FILE, **change}})
    with pytest.raises(ValueError, match="image_size=448"):
        tiles.with_files({"preprocessor_config": {**FILE, "image_size": 448}})
    with pytest.raises(ValueError, match=r"image 0: is 18750x0\.0625 patches, too long"):
        ours([Image.new("RGB", (300_000, 1))])
