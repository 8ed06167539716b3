"""``EmbedBatch``: two columns more for every batch, and nothing that cannot be pickled."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch

import weights
from encoders.base.vision_encoder import VisionEncoder
from tests.support.graphs.made import note_graphed_encoders
from tests.support.photographs import china, flower, photographs
from vitgraph import EmbedBatch
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder


@pytest.fixture
def embed(repo: Path) -> EmbedBatch:
    return EmbedBatch(str(repo), dtype="float32")


def forms(folder: Path) -> dict[str, Any]:
    """Two photographs as columns of every form that engines hand over."""
    images = [china().resize((160, 120)), flower().resize((120, 160))]
    paths = [folder / "china.png", folder / "flower.png"]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    ragged = np.empty(2, object)
    ragged[:] = [np.asarray(image) for image in images]
    binary = np.empty(2, object)
    binary[:] = [path.read_bytes() for path in paths]
    return {
        "PIL images": images,
        "paths": [str(path) for path in paths],
        "an array of paths": np.array([str(path) for path in paths]),
        "an array of bytes": binary,
        "arrays of two sizes": ragged,
        "rows of datasets": [{"bytes": path.read_bytes(), "path": None} for path in paths],
    }


def test_every_form_of_a_column_gives_the_vectors_of_encode(
    embed: EmbedBatch, encoder: VisionEncoder, tmp_path: Path
) -> None:
    columns = forms(tmp_path)
    wanted = encoder.embed(columns["PIL images"], pool="mean").numpy()
    for name, column in columns.items():
        batch = {"id": [4, 5], "image": column}
        result = embed(batch)
        assert list(result) == ["id", "image", "embedding", "error"], name
        assert result["id"] is batch["id"]
        assert result["embedding"].dtype == np.float32
        assert np.allclose(result["embedding"], wanted, atol=1e-5), name
        assert result["error"] == ["", ""]


def test_a_damaged_member_of_a_zip_file_is_an_error_of_its_row(
    embed: EmbedBatch, tmp_path: Path
) -> None:
    china().resize((80, 60)).save(tmp_path / "china.jpg")
    data = (tmp_path / "china.jpg").read_bytes()
    with ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("china.jpg", data)
    raw = (tmp_path / "photos.zip").read_bytes()
    damaged = raw.replace(data, data[:-10] + bytes(10))
    with ZipFile(io.BytesIO(raw)) as whole, ZipFile(io.BytesIO(damaged)) as broken:
        column = [archive.open("china.jpg") for archive in (whole, broken, whole)]
        result = embed({"image": column})
    assert [bool(error) for error in result["error"]] == [False, True, False]
    assert "Bad CRC-32 for file 'china.jpg'" in result["error"][1]


def test_images_of_one_size_may_be_one_array(embed: EmbedBatch, encoder: VisionEncoder) -> None:
    images = [np.asarray(china().resize((96, 64))), np.asarray(flower().resize((96, 64)))]
    result = embed({"image": np.stack(images)})
    wanted = encoder.embed(images, pool="mean").numpy()
    assert np.allclose(result["embedding"], wanted, atol=1e-5)


def test_bad_images_are_rows_of_nan_with_the_reason(embed: EmbedBatch) -> None:
    column = ["/nowhere.png", photographs()[0], None, b"no image"]
    result = embed({"image": column})
    assert np.isnan(result["embedding"]).all(axis=1).tolist() == [True, False, True, True]
    assert "there is no such file" in result["error"][0]
    assert result["error"][1] == ""
    assert "NoneType" in result["error"][2]
    assert "cannot be read as an image" in result["error"][3]


@pytest.mark.parametrize("column", [[], ["/nowhere.png"]])
def test_a_batch_without_a_good_image_has_both_columns(embed: EmbedBatch, column: Any) -> None:
    result = embed({"image": column})
    assert result["embedding"].shape == (len(column), 96)
    assert len(result["error"]) == len(column)


@pytest.mark.parametrize("graph", [False, True])
def test_vectors_of_a_head_have_its_width(tmp_path: Path, graph: bool) -> None:
    folder = write_seeded_checkpoint(tmp_path / "clip", "clip", width=64)
    encoder, images = load_encoder(folder, dtype="float32", progress=False), photographs()[:2]
    wanted = encoder.embed(images, pool="head").numpy()
    assert wanted.shape[1] != encoder.out_features
    assert encoder.embed(pool="head").shape == (0, wanted.shape[1])
    found = EmbedBatch(str(folder), "head", dtype="float32", graph=graph)({"image": images})
    assert found["error"] == ["", ""]
    assert np.allclose(found["embedding"], wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["dinov2", "llava_next", "intern_vit", "llama4"])
def test_vectors_of_class_tokens_keep_no_other_rows(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = note_graphed_encoders(monkeypatch, "vitgraph.embedding.batch.GraphedEncoder")
    folder = write_seeded_checkpoint(tmp_path / name, name, width=64)
    encoder, images = load_encoder(folder, dtype="float32", progress=False), photographs()[:1]
    found = EmbedBatch(str(folder), "cls", dtype="float32", graph=True)({"image": images})
    assert found["error"] == [""]
    assert np.allclose(found["embedding"], encoder.embed(images, pool="cls").numpy(), atol=1e-5)
    (output,) = made[0].encode(images)
    assert output.last_hidden_state is output.pooler_output is None


def test_settings_reach_the_encoder(repo: Path, encoder: VisionEncoder) -> None:
    embed = EmbedBatch(
        str(repo), "max", normalize=True, column="photo", dtype="float32", max_pixels=64 * 64 * 25
    )
    images = photographs()[:2]
    wanted = encoder.embed(images, pool="max", normalize=True, max_pixels=64 * 64 * 25)
    found = embed({"photo": images})["embedding"]
    assert np.allclose(found, wanted.numpy(), atol=1e-5)


def test_a_copy_in_another_process_is_a_few_settings_and_loads_anew(
    embed: EmbedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photographs()[:1]
    before = pickle.dumps(embed)
    wanted = embed({"image": images})["embedding"]
    assert pickle.dumps(embed) == before
    assert len(before) < 2000
    loads = []
    plain = weights.load_encoder
    monkeypatch.setattr(weights, "load_encoder", lambda *a, **k: loads.append(a) or plain(*a, **k))
    copy = pickle.loads(before)
    for _ in range(2):
        assert np.array_equal(copy({"image": images})["embedding"], wanted)
    assert len(loads) == 1


def test_narrow_grey_images_are_one_batch_with_a_channel_axis(embed: EmbedBatch) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (2, 40, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"grey images so narrow need the shape \[n, H, W, 1\]"):
        embed({"image": grey, "id": [0, 1]})
    found = embed({"image": grey[..., None], "id": [0, 1]})
    assert found["error"] == ["", ""]
    assert np.allclose(found["embedding"], embed({"image": [*grey]})["embedding"], atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"photo": []}, r"no column 'image': name one of photo with column="),
        ({"image": [], "error": []}, r"has a column 'error' already: rename or drop it"),
        ({"image": "china.png"}, r"'image' is one str, not one image per row: pass batched=True"),
        ({"image": {"bytes": b"", "path": None}}, r"is one dict, not one image per row"),
        ({"image": photographs()[0]}, r"is one \w*Image\w*, not one image per row"),
        (
            {"image": np.zeros((40, 50, 3), np.uint8)},
            r"'image' has the shape \(40, 50, 3\), that of one image",
        ),
        (
            {"image": np.zeros((40, 50), np.uint8), "label": 3},
            r"'label' is one int, 'image' has 40",
        ),
        (
            {"image": torch.zeros(3, 4, 5), "id": torch.tensor(1)},
            r"'id' is one Tensor, 'image' has",
        ),
        ({"image": [], "label": [1]}, r"'label' has 1 rows, 'image' has 0: pass batched=True"),
        (["china.png"], r"the batch is a list, not a dict of columns: take batch_format='numpy'"),
    ],
    ids=[
        *("no column", "a taken name", "one path", "one row of datasets", "one image"),
        *("one array", "one row with a number", "one row of tensors", "several lengths", "no dict"),
    ],
)
def test_columns_that_cannot_be_are_refused(embed: EmbedBatch, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embed(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "none"}, "pool='none': must be one of 'mean', 'max', 'cls', 'head'"),
        ({"pool": "median"}, "must be one of"),
    ],
)
def test_pools_that_make_no_vector_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbedBatch("repo", **options)


def test_each_rank_of_a_map_takes_a_gpu_of_its_own(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def load(*_: Any, device: str, **__: Any) -> VisionEncoder:
        asked.append(device)
        return load_encoder(repo, dtype=torch.float32, device="cpu", progress=False)

    monkeypatch.setattr(weights, "load_encoder", load)
    for device, rank in (("auto", 6), ("cuda", 1), ("cuda:3", 1), ("cpu", 1), ("auto", None)):
        EmbedBatch(str(repo), device=device)({"image": []}, rank)
    assert asked == ["cuda:2", "cuda:1", "cuda:3", "cpu", "auto"]
