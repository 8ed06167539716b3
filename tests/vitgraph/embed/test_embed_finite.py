"""An image whose features are NaN or infinite is an error of it, wherever vectors are made."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from encoders import Encoder, ItemError
from tests.support.commands.command_line import Cli
from tests.support.commands.embed_jobs import run_job
from vitgraph import EmbedBatch
from vitgraph.features import load_embeddings
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

FIT = ["grey.png", "light.png"]
"""The images whose features are finite; the pixels of "black.png" are too far from grey."""


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of such large weights that float32 overflows unless an image is grey."""
    folder = tmp_path_factory.mktemp("overflowing")
    write_seeded_checkpoint(folder, "qwen3_vl", width=64, dtype=torch.float32)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("patch_embed.proj.weight"):
                tensor *= 5e20
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def large(overflowing: Path) -> Encoder:
    return load_encoder(overflowing, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for name, level in {"black": 0, "grey": 127, "light": 128}.items():
        Image.new("RGB", (64, 64), (level, level, level)).save(folder / f"{name}.png")
    return folder


def paths_in(pictures: Path) -> list[Path | str]:
    return [*sorted(pictures.iterdir())]


@pytest.mark.parametrize("pool", ["mean", "none"])
def test_a_job_lists_an_image_that_is_not_finite_as_an_error(
    overflowing: Path, pictures: Path, tmp_path: Path, cli: Cli, pool: str
) -> None:
    out = tmp_path / "out"
    assert run_job(overflowing, pictures, out, "--pool", pool) == 3
    with (out / "errors.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert line["key"] == "black.png"
    assert "NaN or infinite" in line["error"]
    assert cli("embed", "--verify", out).code == 0
    if pool == "mean":
        keys, matrix = load_embeddings(out)
        assert keys == FIT
        assert np.isfinite(matrix).all()


@pytest.mark.parametrize("pool", ["mean", "none"])
def test_encode_names_the_file_that_is_not_finite(
    overflowing: Path, pictures: Path, tmp_path: Path, cli: Cli, pool: str
) -> None:
    out = tmp_path / "features.safetensors"
    options = ["--out", out, "--pool", pool, "--dtype", "float32"]
    run = cli("encode", overflowing, *paths_in(pictures), *options)
    assert run.code == 2
    assert "black.png: has features that are NaN or infinite" in run.err
    assert not out.exists()


def test_embed_raises_for_what_encode_returns(large: Encoder, pictures: Path) -> None:
    images = list(reversed(paths_in(pictures)))
    assert [bool(output.pooler_output.isfinite().all()) for output in large.encode(images)] == [
        True,
        True,
        False,
    ]
    with pytest.raises(ValueError, match=r"^item 2: has features that are NaN or infinite"):
        large.embed(images, pool="max")
    assert len(large.embed(images[:2], pool="max")) == 2


def test_a_kept_stream_has_an_error_for_a_vector_that_is_not_finite(
    large: Encoder, pictures: Path
) -> None:
    pairs = [(Path(path).name, path) for path in paths_in(pictures)]
    results = list(large.embed_many(pairs, pool="mean", on_error="keep", progress=False))
    errors = [result for result in results if isinstance(result, ItemError)]
    assert [error.key for error in errors] == ["black.png"]
    with pytest.raises(ValueError, match=r"^item 0 \(black\.png\): has features that are NaN"):
        list(large.encode_many(pairs, progress=False))


def test_a_batch_says_which_row_is_not_finite(overflowing: Path, pictures: Path) -> None:
    embed = EmbedBatch(str(overflowing), dtype="float32", device="cpu")
    result = embed({"image": [str(path) for path in paths_in(pictures)]})
    assert ["NaN or infinite" in str(text) for text in result["error"]] == [True, False, False]


def test_search_refuses_a_photograph_that_is_not_finite(
    overflowing: Path, pictures: Path, tmp_path: Path, cli: Cli
) -> None:
    assert run_job(overflowing, pictures, tmp_path / "out") == 3
    run = cli("search", tmp_path / "out", pictures / "black.png", "--no-progress")
    assert run.code == 2
    assert "NaN or infinite" in run.err
