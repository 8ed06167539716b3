"""DeepSeek-V4 and V4.1: ragged tokens in calls and graphs, sizes of images, both config forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from encoders import DeepseekV4Config, DeepseekV4Encoder
from encoders.deepseek.deepseek_v4_pixels import FlashPreprocessor
from graphwrap import GraphedEncoder
from tests.oracles import distance, distances, draw_pixels, tiny
from tests.support.photographs import china
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder
from weights.published import family_facts

V41, V4 = (model.config for model in family_facts("deepseek_v4").published)
RAGGED = [[1, 4, 5], [2, 1, 7], [1, 10, 3], [1, 9, 9]]


def encoder_of() -> DeepseekV4Encoder:
    encoder = tiny("deepseek_v4")
    assert isinstance(encoder, DeepseekV4Encoder)
    return encoder


def test_ragged_items_together_match_items_alone() -> None:
    encoder = encoder_of()
    pixels = draw_pixels(encoder, RAGGED)
    items = encoder.split(encoder(pixels, RAGGED), RAGGED)
    parts = pixels.split([t * h * w for t, h, w in RAGGED])
    assert [len(item.pooler_output) for item in items] == [4, 6, 4, 9]
    for item, part, grid in zip(items, parts, RAGGED, strict=True):
        assert max(distances(item, encoder(part, [grid])).values()) <= 2e-6


def test_padding_of_nan_reaches_no_ragged_token() -> None:
    encoder = encoder_of()
    pixels = draw_pixels(encoder, RAGGED)
    expected = encoder(pixels, RAGGED)
    rows = 9 * 30
    metadata = encoder.prepare_encoder_metadata(RAGGED, max_input_size=rows, max_batch_size=8)
    padded = torch.full((rows, pixels.shape[1]), float("nan"))
    padded[: len(pixels)] = pixels
    output = encoder(padded, encoder_metadata=metadata)
    assert distance(output.pooler_output[:23], expected.pooler_output) <= 2e-6
    with pytest.raises(ValueError, match="207"):  # 23 tokens of up to 9 patches
        encoder.prepare_encoder_metadata(RAGGED, max_input_size=9 * 22)


def test_static_graphs_replay_ragged_images() -> None:
    encoder = encoder_of()
    pixels = draw_pixels(encoder, RAGGED)
    graphed = GraphedEncoder(encoder, [8, 32], backend="static", max_batch_size=8)
    output = graphed(pixels, RAGGED)
    assert output.pooler_output is not None
    assert distance(output.pooler_output, encoder(pixels, RAGGED).pooler_output) <= 2e-6
    assert graphed.stats().eager_items == 0


@pytest.mark.usefixtures("fused")
@torch.no_grad()
def test_fused_blocks_agree_on_ragged_images() -> None:
    encoder = encoder_of()
    pixels, fast = draw_pixels(encoder, RAGGED), encoder.accelerated()
    assert max(distances(fast(pixels, RAGGED), encoder(pixels, RAGGED)).values()) <= 1e-5
    assert fast.kernel_choices()["layers_called"] == 0


def test_maps_of_tokens_are_rounded_up() -> None:
    encoder = encoder_of()
    output = encoder(draw_pixels(encoder, RAGGED), RAGGED)
    tokens = encoder.feature_maps(output.pooler_output, RAGGED)
    patches = encoder.feature_maps(output.last_hidden_state, RAGGED)
    assert [tuple(x.shape[:3]) for x in tokens] == [(1, 2, 2), (2, 1, 3), (1, 4, 1), (1, 3, 3)]
    assert [list(x.shape[:3]) for x in patches] == RAGGED


def test_sequences_have_a_newline_per_row_between_start_and_end() -> None:
    encoder, grids = encoder_of(), [[1, 4, 5], [2, 3, 7]]
    tokens = torch.arange(4.0 + 6)[:, None].expand(-1, 48)
    first, second = encoder.sequences(tokens, grids)
    start, newline, end = encoder.image_start, encoder.image_newline, encoder.image_end
    assert torch.equal(first[[0, 3, 6, 7]], torch.stack((start, newline, newline, end)))
    assert first[[1, 2, 4, 5], 0].tolist() == [0, 1, 2, 3]
    assert len(second) == 2 * (3 + 1 + 2)
    assert second[[1, 2, 3, 7, 8, 9], 0].tolist() == [4, 5, 6, 7, 8, 9]


def rules(config: Any) -> FlashPreprocessor:
    with torch.device("meta"):
        preprocessor = DeepseekV4Encoder(DeepseekV4Config.from_hf(config)).preprocessor
    assert isinstance(preprocessor, FlashPreprocessor)
    return preprocessor


GOLDEN = {
    (1080, 1920): ((966, 1708, 968), (588, 1036, 366)),
    (224, 224): ((546, 546, 184), (392, 392, 114)),
    (10, 10): ((546, 546, 184), (392, 392, 114)),
    (480, 640): ((490, 644, 206), (490, 644, 206)),
    (4000, 3000): ((1512, 1134, 1010), (840, 630, 322)),
    (100, 3000): ((112, 3010, 221), (140, 1092, 110)),
    (200, 1600): ((210, 1610, 202), (210, 1610, 242)),
}
"""Height and width of an image -> those of its canvas, and its tokens, in V4.1 and in V4."""


@pytest.mark.parametrize("size", GOLDEN)
def test_canvases_are_those_of_the_published_rules(size: tuple[int, int]) -> None:
    """The values were made with the functions of vLLM 0.33.0."""
    for config, (height, width, tokens) in zip((V41, V4), GOLDEN[size], strict=True):
        preprocessor = rules(config)
        assert preprocessor.canvas(*size) == (height, width)
        assert preprocessor.tokens(height, width) == tokens


@pytest.mark.parametrize("size", [(640, 480), (1000, 700), (2000, 100)])
def test_pixels_are_those_of_pil(size: tuple[int, int]) -> None:
    """The last image is wider than V4 takes it, so that it is squeezed."""
    image = china().resize(size, Image.Resampling.BICUBIC)
    for config in (V41, V4):
        inputs = rules(config)([image])
        _, h, w = inputs.grid_thw[0].tolist()
        canvas = (14 * w, 14 * h)
        squeezed = config is V4 and size == (2000, 100)
        fitted = (
            image.resize(canvas) if squeezed else ImageOps.pad(image, canvas, color=(127, 127, 127))
        )
        wanted = torch.from_numpy(np.array(fitted)).view(h, 14, w, 14, 3).permute(0, 2, 4, 1, 3)
        levels = (inputs.pixel_values.view(h, w, 3, 14, 14) + 1) * 127.5
        assert torch.equal(levels.round(), wanted.float())


def test_a_checkpoint_in_the_form_of_v4_loads(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "deepseek_v4", width=64, shards=1)
    before = load_encoder(folder, progress=False)
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    flat = {"model_type": "deepseek_v4", "hidden_size": config["text_config"]["hidden_size"]}
    names = {"vision_n_layers": "num_hidden_layers", "vision_dim": "hidden_size"}
    names |= {"vision_n_heads": "num_attention_heads", "vision_inter_dim": "intermediate_size"}
    flat |= {key: vision[name] for key, name in names.items()}
    (folder / "config.json").write_text(json.dumps(flat))
    with pytest.raises(CheckpointError, match=r"missing \(1\): image_pad"):
        load_encoder(folder, progress=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["image_pad"] = torch.zeros(96, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    encoder = load_encoder(folder, progress=False)
    assert isinstance(encoder, DeepseekV4Encoder)
    assert (encoder.config.max_image_tokens, encoder.config.paired_rows) == (384, True)
    assert torch.equal(encoder.aligner.fc1.weight, before.get_parameter("aligner.fc1.weight"))
    with pytest.raises(ValueError, match="by its place in the prompt"):
        encoder.sequences(torch.zeros(1, 96), [[1, 3, 3]])


@pytest.mark.parametrize("config", [{"vision_n_layers": 0}, {"vision_config": {}}], ids=str)
def test_a_model_without_a_tower_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this checkpoint has no vision tower"):
        DeepseekV4Config.from_hf({"hidden_size": 64, **config})
