"""Images embedded through sentence-transformers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from encoders.base.vision_encoder import VisionEncoder
from graphwrap import GraphedEncoder
from tests.support.photographs import photographs
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

ALL = ("last_hidden_state", "pooler_output")
FAMILIES = ["qwen3_vl", "intern_vit_300m"]
"""A tower over patches, and one over tiles."""
IMAGES = [
    image.resize((max(image.width // 4, 40), max(image.height // 4, 40))) for image in photographs()
]


def load(folder: Path, family: str = "qwen3_vl") -> VisionEncoder:
    path = write_seeded_checkpoint(folder, family, width=64)
    return load_encoder(path, progress=False, dtype=torch.float32)


def build(encoder: Any, **settings: Any) -> Any:
    """A ``SentenceTransformer`` of one module."""
    library = pytest.importorskip("sentence_transformers")
    module = importlib.import_module("vitgraph.integrations.sentence_transformers")
    return library.SentenceTransformer(modules=[module.ImageEncoder(encoder, **settings)])


def means(encoder: VisionEncoder) -> NDArray[np.float32]:
    """Every image alone, pooled by hand."""
    pooled = [encoder.encode(images=[image])[0].pooler_output for image in IMAGES]
    return np.stack([tokens.mean(0).numpy() for tokens in pooled if tokens is not None])


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of sentence-transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_embedded_in_batches_and_in_order(tmp_path: Path, family: str) -> None:
    encoder = load(tmp_path, family)
    model, wanted = build(encoder), means(encoder)
    vectors = model.encode(IMAGES, batch_size=3, show_progress_bar=True)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, wanted, rtol=1e-4, atol=1e-5)
    assert model.get_embedding_dimension() == wanted.shape[1]
    unit = model.encode(IMAGES, batch_size=8, normalize_embeddings=True)
    lengths = np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, wanted / lengths, rtol=1e-4, atol=1e-5)
    assert model.similarity(unit, unit).diagonal().min() > 1 - 1e-5


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of sentence-transformers
def test_a_graphed_encoder_embeds_the_same(tmp_path: Path) -> None:
    encoder = load(tmp_path)
    graphed = GraphedEncoder(encoder, [64, 256], backend="static")
    vectors = build(graphed, min_pixels=8192, max_pixels=16_384).encode(IMAGES, batch_size=4)
    wanted = build(encoder, min_pixels=8192, max_pixels=16_384).encode(IMAGES, batch_size=4)
    np.testing.assert_allclose(vectors, wanted, rtol=1e-4, atol=1e-5)
    assert not np.allclose(wanted, means(encoder), atol=1e-3)
    assert graphed.stats().to_dict()["budgets"]


@pytest.mark.slow
@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of sentence-transformers
def test_a_pool_of_processes_embeds_the_same(tmp_path: Path) -> None:
    """One process takes all chunks: starting another one takes longer than this test."""
    encoder = load(tmp_path)
    model = build(encoder)
    pool = model.start_multi_process_pool(["cpu"])
    try:
        vectors = model.encode(IMAGES, pool=pool, batch_size=2, chunk_size=3)
    finally:
        model.stop_multi_process_pool(pool)
    np.testing.assert_allclose(vectors, means(encoder), rtol=1e-4, atol=1e-5)


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of sentence-transformers
def test_a_saved_model_loads_with_its_pooling(tmp_path: Path) -> None:
    model = build(load(tmp_path / "whole"), pool="max", min_pixels=8192, max_pixels=16_384)
    wanted = model.encode(IMAGES)
    model.save(str(tmp_path / "saved"))
    library = importlib.import_module("sentence_transformers")
    again = library.SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True)
    np.testing.assert_array_equal(again.encode(IMAGES), wanted)
    assert (again[0].pool, again[0].max_pixels) == ("max", 16_384)


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of sentence-transformers
def test_saving_prints_no_error_and_the_card_says_how_to_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(load(tmp_path / "whole"))
    with caplog.at_level("WARNING"):
        model.save(str(tmp_path / "saved"))
    assert caplog.messages == []
    card = (tmp_path / "saved" / "README.md").read_text("utf-8")
    assert 'SentenceTransformer("sentence_transformers_model_id", trust_remote_code=True)' in card
    assert "The flag is needed although the repo holds no code" in card
    assert 'vitgraph.load_encoder("sentence_transformers_model_id")' in card
    assert "as `Qwen3VLVisionModel`" in card
    assert "sunny" not in card
    library = importlib.import_module("sentence_transformers")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        library.SentenceTransformer(str(tmp_path / "saved"))


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of sentence-transformers
def test_text_and_unknown_pools_are_refused(tmp_path: Path) -> None:
    encoder = load(tmp_path)
    with pytest.raises(ValueError, match="text"):
        build(encoder).encode(["a sentence"])
    for name in ("sum", "none"):
        with pytest.raises(ValueError, match=f"pool='{name}': must be one of mean, max, cls"):
            build(encoder, pool=name)


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of sentence-transformers
def test_a_pool_that_the_encoder_cannot_make_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pool='cls': this encoder has no class token"):
        build(load(tmp_path / "qwen"), pool="cls")
    taps = GraphedEncoder(
        load(tmp_path / "qwen"), [256], outputs=("deepstack_features",), backend="static"
    )
    with pytest.raises(ValueError, match="pool='mean' reads "):
        build(taps, pool="mean")


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of sentence-transformers
@pytest.mark.parametrize("how", ["mean", "max", "cls"])
def test_vectors_and_their_width_are_those_of_embed(tmp_path: Path, how: Any) -> None:
    encoder = load(tmp_path, "intern_vit_300m")
    encoder.requires_grad_(False)
    graphed = GraphedEncoder(encoder, [1024], backend="static", outputs=ALL)
    wanted = encoder.embed(IMAGES[:2], pool=how).numpy()
    for made in (encoder, graphed):
        model = build(made, pool=how)
        assert model.get_embedding_dimension() == wanted.shape[1]
        np.testing.assert_allclose(model.encode(IMAGES[:2]), wanted, rtol=1e-4, atol=1e-5)
    assert (encoder.num_features == wanted.shape[1]) == (how == "cls")


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "vitgraph.integrations.sentence_transformers"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "sentence_transformers.base.modules", None)
    with pytest.raises(ImportError, match="pip install 'sentence-transformers"):
        importlib.import_module(name)
