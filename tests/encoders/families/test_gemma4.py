"""Gemma 4: the processor's padded batches, clipping, and what its config and grids may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor

from encoders.gemma.gemma4 import Gemma4Encoder
from encoders.gemma.gemma4_pixels import SoftTokenPreprocessor
from tests.oracles import (
    BY_NAME,
    add_noise,
    build_encoder,
    build_pair,
    distance,
    distances,
    draw_pixels,
    tiny,
)
from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.photographs import photographs
from vitgraph.integrations.transformers import mm_encoder_outputs
from vitgraph.integrations.vllm import multi_modal_data
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder


@pytest.mark.parametrize("name", ["gemma4", "gemma4_e2b"])
def test_packed_images_match_the_padded_batch_of_transformers(name: str) -> None:
    """The processor pads every image to 630 patches, with places of -1."""
    family = BY_NAME[name]
    encoder, reference = build_pair(family, {**family.tiny, "pooling_kernel_size": 3})
    images = [photo.resize((90, 60 + 30 * n)) for n, photo in enumerate(photographs()[:3])]
    padded = Gemma4ImageProcessor(max_soft_tokens=70)(images, return_tensors="pt")
    theirs = reference["vision_tower"](padded["pixel_values"], padded["image_position_ids"])
    files = {"preprocessor_config": {"max_soft_tokens": 70}}
    inputs = SoftTokenPreprocessor.gemma4(16, 3).with_files(files)(images)
    ours = encoder(inputs.pixel_values, inputs.grid_thw).pooler_output
    assert distance(ours, reference["embed_vision"](theirs.last_hidden_state)) <= 1e-5


def test_each_bound_moves_an_output() -> None:
    family = BY_NAME["gemma4_e2b"]
    encoder = build_encoder(family, {**family.tiny, "num_hidden_layers": 1})
    grids = [[1, 6, 4]]
    pixels = draw_pixels(encoder, grids)
    before, bounds = encoder(pixels, grids), dict(encoder.named_buffers())
    assert len(bounds) == 7 * 4
    for name, bound in bounds.items():
        kept = bound.clone()
        bound.mul_(0.1)
        assert max(distances(encoder(pixels, grids), before).values()) > 1e-4, name
        bound.copy_(kept)


def test_standardisation_moves_the_tokens() -> None:
    family = BY_NAME["gemma4"]
    encoder, grids = build_encoder(family, family.tiny), [[1, 6, 4]]
    pixels = draw_pixels(encoder, grids)
    before = encoder(pixels, grids)
    for value in encoder.buffers():
        kept = value.clone()
        add_noise(value, share=0.01)
        assert distance(encoder(pixels, grids).pooler_output, before.pooler_output) > 1e-4
        value.copy_(kept)


def test_a_side_longer_than_the_table_of_positions_is_refused() -> None:
    family = BY_NAME["gemma4"]
    encoder = build_encoder(family, family.tiny)
    with pytest.raises(ValueError, match=r"grid 2x162: .* at most position_embedding_size=160"):
        encoder(torch.zeros(324, 768), [[1, 2, 162]])
    assert encoder.grid_for(79) == (1, 2, 158)
    assert encoder.grid_for(83) == (83, 2, 2)


def test_a_tower_without_its_projector_gives_tokens_of_its_width(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "gemma4", width=64)
    whole = load_encoder(folder)
    edit_tensors(folder, lambda t: t.pop("model.embed_vision.embedding_projection.weight"))
    tower = load_encoder(folder)
    assert isinstance(tower, Gemma4Encoder)
    assert isinstance(whole, Gemma4Encoder)
    assert (tower.out_features, whole.out_features) == (64, 96)
    pixels = draw_pixels(tower, [[1, 6, 3]], dtype=torch.bfloat16)
    projected = whole.embed_vision(tower(pixels, [[1, 6, 3]]).pooler_output)
    assert torch.equal(projected, whole(pixels, [[1, 6, 3]]).pooler_output)
    assert same_weights(load_encoder(tower.save_pretrained(tmp_path / "saved")), tower)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_e2b"])
def test_a_sparse_config_is_filled_from_the_tensors(tmp_path: Path, name: str) -> None:
    folder = write_seeded_checkpoint(tmp_path, name, width=64)
    whole = load_encoder(folder)
    edit_config(folder, lambda c: c.update(text_config={}, vision_config={}))
    assert load_encoder(folder).config == whole.config


def test_features_are_those_that_transformers_model_reads() -> None:
    encoder, photos = tiny("gemma4"), photographs()[:2]
    outputs = mm_encoder_outputs(encoder, photos, max_soft_tokens=70)
    items = encoder.encode(photos, max_soft_tokens=70)
    for tokens, item in zip(outputs["image"].pooler_output, items, strict=True):
        assert torch.equal(tokens, item.pooler_output)


def test_data_for_vllm_refuse_a_tower_of_raster_order() -> None:
    with pytest.raises(ValueError, match=r"Qwen.* famil.* not .*Gemma4Encoder"):
        multi_modal_data(tiny("gemma4"))


@pytest.mark.parametrize("inner", ["gemma4_vision", "gemma4_unified_vision"])
def test_gemma_4_12b_is_refused_by_name(tmp_path: Path, inner: str) -> None:
    folder = write_seeded_checkpoint(tmp_path, "gemma4", width=64)
    outer = "gemma4_unified"
    edit_config(folder, lambda c: c.update(model_type=outer, vision_config={"model_type": inner}))
    with pytest.raises(CheckpointError, match=r"'gemma4_unified.*12B has no vision tower"):
        load_encoder(folder)
