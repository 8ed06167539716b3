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
from tests.oracles import NO_LIFT, LiftFloat32, distance, draw_weights
from tests.oracles.references.c_radio import OLDER
from tests.oracles.versions import needs
from vitgraph import GraphedEncoder, Video
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
    assert not inputs.pixel_values[:, 768:].any()
    theirs = model.get_image_features(inputs.pixel_values[:, :768], inputs.grid_thw[:, 1:])
    for ours, wanted in zip(encoder(inputs), theirs.pooler_output, strict=True):
        assert distance(ours.pooler_output, wanted) <= 1e-5


def omni_clips(processor: Any, clips: list[list[Image.Image]]) -> list[Tensor]:
    """Return the frames [frames, 3, h, w] of clips as the video processor of Omni makes them."""
    frames = [torch.stack([v2.functional.pil_to_tensor(frame) for frame in clip]) for clip in clips]
    return [processor([clip], return_tensors="pt")["pixel_values_videos"] for clip in frames]


CLIPS = [
    [PHOTO.crop((n, n, 320 + n, 200 + n)) for n in (0, 9, 30)],
    [PHOTO.crop((50, 60, 290, 470))],
    [PHOTO.crop((5 * n, 0, 100 + 5 * n, 100)) for n in range(4)],
]
"""Clips of three frames, of one, and of four."""


@pytest.mark.filterwarnings("default")  # of transformers
@needs(*OLDER)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_tokens_of_clips_packed_with_images_are_those_of_omni(
    tmp_path: Path, dtype: torch.dtype, most: float
) -> None:
    model = write_omni(tmp_path, original=True, predicted=0).to(dtype)
    model.vision_model.config.dtype = dtype
    encoder = load_encoder(tmp_path, dtype="float32").to(dtype)
    inputs = encoder.preprocess([PHOTO], CLIPS, max_pixels=64 * 256, min_pixels=256).to(dtype)
    assert [grid[0] for grid in inputs.grid_thw.tolist()] == [1, 2, 1, 2]
    image, *outputs = encoder(inputs)
    rows = inputs.pixel_values.split([t * h * w for t, h, w in inputs.grid_thw.tolist()])
    lift = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    with lift:
        wanted = model.get_image_features(rows[0][:, :768], inputs.grid_thw[:1, 1:])
    assert distance(image.pooler_output, wanted.pooler_output[0]) <= most
    for clip, part, (t, h, w), ours in zip(
        CLIPS, rows[1:], inputs.grid_thw[1:].tolist(), outputs, strict=True
    ):
        assert not part[:, :768].any()
        frames = part[:, 768:].view(t, h, w, 2, 3, 16, 16).permute(0, 3, 4, 1, 5, 2, 6)
        pixels = frames.reshape(2 * t, 3, 16 * h, 16 * w)[: len(clip)]
        with lift:
            theirs = model.get_video_features(pixels)
        assert distance(ours.pooler_output, theirs.pooler_output.flatten(0, 1)) <= most
        assert ours["prefix"].shape[0] == t
        assert encoder.feature_maps(ours.last_hidden_state, [[t, h, w]])[0].shape[0] == t


@needs(*OLDER)
def test_pixels_of_clips_are_those_of_omni_s_processor() -> None:
    from transformers.models.nemotron_h_omni import video_processing_nemotron_h_omni as theirs

    small = {**FILE, "video_target_num_patches": 96}
    processor: Any = theirs.NemotronH_Omni_Reasoning_V3VideoProcessor(**small)
    ours = NemotronPreprocessor.nemotron(16).with_files({"video_preprocessor_config": small})
    for clip, wanted in zip(CLIPS, omni_clips(processor, CLIPS), strict=True):
        got = ours(videos=[clip])
        t, h, w = got.grid_thw[0].tolist()
        assert (16 * h, 16 * w) == wanted.shape[2:]
        frames = wanted[[*range(len(clip)), *[-1] * (len(clip) % 2)]]
        rows = frames.view(t, 2, 3, h, 16, w, 16).permute(0, 3, 5, 1, 2, 4, 6).reshape(-1, 1536)
        torch.testing.assert_close(got.pixel_values[:, 768:], rows, rtol=0, atol=1e-5)
    rng = random.Random(0)
    for keeps, most in ((True, 1024), (False, 1024), (False, 15), (False, 3)):
        change = {
            **FILE,
            "video_maintain_aspect_ratio": keeps,
            "video_target_num_patches": most,
        }
        processor = theirs.NemotronH_Omni_Reasoning_V3VideoProcessor(**change)
        own = NemotronPreprocessor.nemotron(16).with_files({"preprocessor_config": change})
        for _ in range(100):
            frame = torch.empty(3, rng.randint(1, 4000), rng.randint(1, 4000), device="meta")
            columns, rows = processor._compute_target_patches(*frame.shape[1:])
            assert own._grid([frame, frame], own.videos) == (1, rows, columns)


@pytest.mark.parametrize(
    ("limits", "frames"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 6]),
        ({"num_frames": 3}, [0, 2, 4, 4]),
        ({"fps": 8.0}, [0, 3]),
    ],
)
def test_frames_are_evenly_spaced_and_the_last_repeated(
    limits: dict[str, Any], frames: list[int]
) -> None:
    film = [Image.new("RGB", (64, 64), (30 * n,) * 3) for n in range(7)]
    ours = NemotronPreprocessor.nemotron(16, video_patches=16, video_frames=2)
    found = ours(videos=[Video(film, 24.0)], **limits)
    each = ours(videos=[[frame] for frame in film]).pixel_values.view(7, 16, 3, 768)[:, :, 1]
    pairs = found.pixel_values.view(-1, 16, 3, 768)[:, :, 1:].transpose(1, 2).flatten(0, 1)
    assert torch.equal(pairs, each[frames])


def test_clips_and_images_of_omni_replay_in_one_batch(tmp_path: Path) -> None:
    write_seeded_checkpoint(tmp_path, "nemotron", width=64, dtype=torch.float32)
    encoder = load_encoder(tmp_path)
    graphed = GraphedEncoder(encoder, [256], backend="static", max_frames_per_batch=16).capture()
    inputs = encoder.preprocess([PHOTO], CLIPS[:1], max_pixels=64 * 256, min_pixels=256)
    for ours, wanted in zip(graphed(inputs), encoder(inputs), strict=True):
        assert distance(ours.pooler_output, wanted.pooler_output) <= 1e-5
    assert sum(budget.hits for budget in graphed.stats().budgets) == 1


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


def test_frames_of_nano_are_tiles_as_vllm_makes_them() -> None:
    clip = CLIPS[0]
    found = NemotronTilesPreprocessor(16).with_files({"preprocessor_config": FILE})(videos=[clip])
    assert found.grid_thw.tolist() == [[3, 32, 32]]
    rows = torch.cat([patches_of(lifted_tiles(frame, 1, 1)[0]) for frame in clip])
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
    rows = got.pixel_values[:, :768]
    torch.testing.assert_close(rows, wanted["pixel_values"], rtol=0, atol=1e-5)
    rng = random.Random(0)
    for _ in range(300):
        height, width = rng.randint(1, 4000), rng.randint(1, 4000)
        grid = theirs.get_patch_grid_size(height, width, 16, 2, 1024, 13312)
        assert even_grid(height / 16, width / 16, 1024, 13312) == grid


@needs(*OLDER)
@pytest.mark.parametrize(
    "change",
    [
        {"min_num_patches": 256, "max_num_patches": 64},
        {"min_num_patches": 64, "max_num_patches": 256, "image_mean": [0.1, 0.2, 0.3]},
    ],
    ids=["contradiction", "mean"],
)
def test_values_of_omni_s_file_that_disagree_are_read_as_in_its_processor(
    change: dict[str, Any],
) -> None:
    from transformers.models.nemotron_h_omni import image_processing_nemotron_h_omni as theirs

    processor: Any = theirs.NemotronH_Omni_Reasoning_V3ImageProcessor(**FILE, **change)
    wanted = processor([PHOTO], return_tensors="pt")
    section = {**FILE, **change}
    got = NemotronPreprocessor.nemotron(16).with_files({"preprocessor_config": section})([PHOTO])
    assert torch.equal(got.grid_thw[:, 1:], wanted["image_grid_hw"])
    rows = got.pixel_values[:, :768]
    torch.testing.assert_close(rows, wanted["pixel_values"], rtol=0, atol=1e-5)


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
