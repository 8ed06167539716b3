"""``vitgraph embed --format vllm``: a feature store that vLLM reads, filled by a job."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from encoders import Encoder
from tests.support.photographs import china, flower, hopper
from vitgraph.cli import main
from vitgraph.features import load_embeddings
from vitgraph.integrations.vllm import FeatureStore, content_key, multi_modal_data
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

KEYS = ["a.png", "b.png", "c.png", "same_as_a.png"]
Embed = Callable[..., int]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four photographs; two files have the same bytes, and one is no image."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, (key, image) in enumerate(zip(KEYS, (china(), hopper(), flower()), strict=False)):
        image.resize((64 + 32 * number, 96)).save(folder / key)
    (folder / KEYS[3]).write_bytes((folder / KEYS[0]).read_bytes())
    (folder / "bad.png").write_text("no image")
    return folder


@pytest.fixture
def embed(repo: Path, photos: Path, tmp_path: Path) -> Embed:
    """Run the command; returns its exit code."""

    def run(*arguments: object, out: object = tmp_path / "store") -> int:
        command = ["embed", repo, photos, "--out", out, "--format", "vllm", "--no-progress"]
        return main([str(each) for each in (*command, *arguments)])

    return run


def keys_of(photos: Path) -> dict[str, str]:
    return {key: content_key((photos / key).read_bytes()) for key in KEYS}


def test_a_list_may_name_an_image_of_a_store_twice(
    repo: Path, photos: Path, tmp_path: Path
) -> None:
    names = ["a.png", "b.png", "a.png", "a.png", "bad.png", "bad.png"]
    (photos / "list.txt").write_text("\n".join(names))
    store = tmp_path / "store"
    command = ["embed", repo, photos / "list.txt", "--out", store, "--shard-items", 3]
    assert main([*map(str, command), "--format", "vllm", "--no-progress"]) == 3
    assert load_embeddings(store)[0] == names[:4]
    assert main(["embed", "--verify", str(store)]) == 0


def test_a_job_writes_one_file_per_content_and_a_table_of_keys(
    embed: Embed, repo: Path, photos: Path, tmp_path: Path
) -> None:
    assert embed("--shard-items", 2, "--max-pixels", 70_000) == 3
    encoder = load_encoder(repo, progress=False)
    assert encoder.dtype == torch.bfloat16
    store = FeatureStore(tmp_path / "store", encoder, max_pixels=70_000)
    for key, uuid in keys_of(photos).items():
        data = multi_modal_data(encoder, [photos / key], max_pixels=70_000)["image"]
        wanted = data["image_embeds"].float()
        found = store.get(uuid)
        assert found.dtype == torch.bfloat16
        assert (found.float() - wanted).norm() <= 1e-2 * wanted.norm()  # rounding in batches
    lines = [
        line
        for number in range(3)
        for line in csv.DictReader((tmp_path / f"store/{number:05d}.csv").read_text().splitlines())
    ]
    assert {line["key"]: line["uuid"] for line in lines} == keys_of(photos)
    assert len(list((tmp_path / "store").glob("*/encoder_cache.safetensors"))) == 3
    assert "bad.png" in (tmp_path / "store" / "errors.csv").read_text()


def test_features_of_a_store_are_read_for_training(
    embed: Embed, encoder: Encoder, photos: Path, tmp_path: Path
) -> None:
    assert embed("--dtype", "float32") == 3
    keys, items = load_embeddings(tmp_path / "store")
    assert keys == KEYS
    for key, rows in zip(keys, items, strict=True):
        wanted = multi_modal_data(encoder, [photos / key])["image"]["image_embeds"].numpy()
        assert np.linalg.norm(rows - wanted) <= 2e-6 * np.linalg.norm(wanted)


def test_status_and_verify_know_the_files_of_a_store(
    embed: Embed, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed("--shard-items", 2) == 3
    store = str(tmp_path / "store")
    assert main(["embed", "--status", store]) == 0
    assert main(["embed", "--verify", store]) == 0
    damaged = tmp_path / "store" / keys_of(photos)["c.png"] / "encoder_cache.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert main(["embed", "--verify", store]) == 1
    said = capsys.readouterr().out
    assert f"{damaged.parent.name}/{damaged.name} is not what was written; delete it; " in said
    damaged.unlink()
    (tmp_path / "store" / "00001_stats.json").unlink()
    assert embed("--shard-items", 2) == 3
    assert main(["embed", "--verify", store]) == 0


def test_a_job_goes_on_and_writes_no_file_twice(embed: Embed, tmp_path: Path, photos: Path) -> None:
    assert embed("--shard-items", 1, "--shard", "0/2") == 3
    files = sorted((tmp_path / "store").glob("*/*.safetensors"))
    times = [path.stat().st_mtime_ns for path in files]
    assert len(files) == 1  # shards 0 and 4 have the same content
    (tmp_path / "store" / "00000_stats.json").unlink()
    assert embed("--shard-items", 1) == 3
    assert [path.stat().st_mtime_ns for path in files] == times
    assert len(list((tmp_path / "store").glob("*/*"))) == 3
    assert not list((tmp_path / "store").rglob("*.tmp"))


def test_a_store_is_filled_by_jobs_and_by_put(
    embed: Embed, encoder: Encoder, photos: Path, tmp_path: Path
) -> None:
    store = FeatureStore(tmp_path / "store", encoder)
    (output,) = encoder.encode([china()])
    assert store.put("by_put", output)
    assert embed("--dtype", "float32") == 3
    assert FeatureStore(tmp_path / "store", encoder).put("later", output)
    assert {"by_put", "later", *keys_of(photos).values()} == {
        path.parent.name for path in (tmp_path / "store").glob("*/*.safetensors")
    }
    assert main(["embed", "--verify", str(tmp_path / "store")]) == 0


def test_a_job_refuses_a_store_of_other_settings(
    embed: Embed, encoder: Encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FeatureStore(tmp_path / "store", encoder)
    assert embed("--dtype", "float32", "--max-pixels", 16384) == 2
    assert "holds features of max_pixels None, now it is 16384" in capsys.readouterr().err
    assert embed("--dtype", "bfloat16") == 2
    assert "holds features of dtype float32, now it is bfloat16" in capsys.readouterr().err
    assert embed("--format", "npy") == 2
    assert "is a feature store; give --format vllm or another folder" in capsys.readouterr().err
    assert json.loads((tmp_path / "store" / "store.json").read_text())["max_pixels"] is None
    assert not (tmp_path / "store" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--pool", "mean"), "--pool mean: --format vllm writes all that a language model reads"),
        (("--out-dtype", "float16"), "--out-dtype float16: --format vllm writes all"),
        (("--fields", "pooler_output"), "--fields pooler_output: --format vllm writes all"),
        (("--normalize",), "--normalize: needs one vector per item"),
        (("--out", "s3://bucket/store"), "vLLM reads features from a folder; give a local"),
    ],
)
def test_options_that_a_store_does_not_take_are_refused(
    embed: Embed, capsys: pytest.CaptureFixture[str], option: tuple[str, ...], message: str
) -> None:
    assert embed(*option) == 2
    assert message in capsys.readouterr().err


def test_towers_that_vllm_takes_no_features_of_are_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = write_seeded_checkpoint(tmp_path / "other", "step3_vl", width=64)
    out = tmp_path / "store"
    assert main(["embed", str(repo), str(photos), "--out", str(out), "--format", "vllm"]) == 2
    assert "a feature store takes no Step3VLEncoder, since" in capsys.readouterr().err
    assert not out.exists() or not list(out.iterdir())


def test_a_plan_counts_the_bytes_of_the_stored_dtype(
    embed: Embed, capsys: pytest.CaptureFixture[str], photos: Path
) -> None:
    (photos / "bad.png").unlink()
    assert embed("--plan") == 0
    assert "(pooler_output, deepstack_features, bfloat16)" in capsys.readouterr().out
