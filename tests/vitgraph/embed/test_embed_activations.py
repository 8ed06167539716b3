"""``vitgraph embed --fields blocks.1``: activations of patches, and a dataset of them."""

from __future__ import annotations

import hashlib
import io
import math
import re
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import vitgraph
from encoders.base.vision_encoder import VisionEncoder
from tests.support.commands.embed_jobs import close, run_job
from tests.support.photographs import china, flower, hopper
from vitgraph.cli import main
from vitgraph.embedding.shard import Shard
from vitgraph.embedding.shards import read_embeddings
from vitgraph.embedding.verify import find_faults
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

KEYS = ["b.png", "c.png", "d.png"]
BLOCKS = ("--pool", "none", "--fields", "blocks.0,blocks.1.mlp")
NEEDS_PYARROW = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
FORMATS = ["npy", "safetensors", pytest.param("parquet", marks=NEEDS_PYARROW)]
Embed = Callable[..., int]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs of different sizes."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, (key, image) in enumerate(zip(KEYS, (china(), hopper(), flower()), strict=True)):
        image.resize((96 + 32 * number, 96)).save(folder / key)
    return folder


def maps_of(encoder: VisionEncoder, photo: Path) -> dict[str, Any]:
    """Return the maps [t, h, w, D] of the outputs of two blocks for one photograph."""
    inputs = encoder.preprocess([photo])
    with torch.no_grad():
        output = encoder.with_extras(["blocks.0", "blocks.1.mlp"])(inputs)[0]
    return {
        name: encoder.feature_maps(output[name], inputs.grid_thw)[0]
        for name in ("blocks.0", "blocks.1.mlp")
    }


@pytest.mark.parametrize("format", FORMATS)
def test_each_row_is_the_output_of_its_block_at_its_patch(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder, format: str
) -> None:
    chosen = (*BLOCKS, "--format", format, "--sample", 5, "--shard-items", 2)
    assert embed(photos, *chosen) == 0
    assert list(find_faults(str(tmp_path / "out"))) == []
    dataset = vitgraph.ActivationDataset(tmp_path / "out", block_rows=4)
    rows = list(dataset)
    assert (len(rows), len(dataset), dataset.keys) == (15, 15, KEYS)
    maps = [maps_of(encoder, photos / key) for key in KEYS]
    for row in rows:
        t, h, w = row["position"].tolist()
        for name in ("blocks.0", "blocks.1.mlp"):
            assert close(row[name], maps[row["image"]][name][t, h, w])
    places = {(int(row["image"]), *row["position"].tolist()) for row in rows}
    assert len(places) == 15


def test_npy_files_have_the_bytes_that_numpy_writes(
    embed: Embed, photos: Path, tmp_path: Path
) -> None:
    assert embed(photos, *BLOCKS, "--sample", 3, "--out-dtype", "float16") == 0
    files = sorted((tmp_path / "out").glob("*.npy"))
    assert len(files) == 4
    for path in files:
        again = io.BytesIO()
        np.save(again, np.load(path))
        assert path.read_bytes() == again.getvalue()


def test_without_a_sample_every_patch_is_written(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder
) -> None:
    assert embed(photos, *BLOCKS) == 0
    keys, items = read_embeddings(tmp_path / "out", "blocks.1.mlp")
    for key, rows in zip(keys, items, strict=True):
        assert close(rows, maps_of(encoder, photos / key)["blocks.1.mlp"].flatten(0, 2))


def test_a_sample_depends_on_the_seed_and_not_on_the_shards(
    embed: Embed, photos: Path, tmp_path: Path
) -> None:
    found = []
    for size, seed in ((1, 0), (3, 0), (3, 1)):
        out = f"out{size}{seed}"
        chosen = (*BLOCKS, "--sample", 4, "--shard-items", size, "--seed", seed)
        assert embed(photos, *chosen, out=out) == 0
        found.append(np.concatenate(read_embeddings(tmp_path / out, "position")[1]).tolist())
    assert found[0] == found[1] != found[2]


def test_a_sample_is_what_numpy_draws_by_a_digest_of_the_key(
    embed: Embed, photos: Path, tmp_path: Path, encoder: VisionEncoder
) -> None:
    assert embed(photos, *BLOCKS, "--sample", 4, "--seed", 3) == 0
    for key, rows in zip(*read_embeddings(tmp_path / "out", "position"), strict=True):
        grid = encoder.preprocess([photos / key]).grid_thw[0].tolist()
        digest = hashlib.sha256(f"3:{key}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:16], "big"))
        drawn = np.sort(generator.choice(math.prod(grid), 4, replace=False))
        assert rows.tolist() == np.stack(np.unravel_index(drawn, grid), 1).tolist()


def test_an_interrupted_job_goes_on_to_the_same_bytes(
    embed: Embed, photos: Path, tmp_path: Path
) -> None:
    chosen = (*BLOCKS, "--sample", 4, "--shard-items", 1)
    assert embed(photos, *chosen) == 0
    files = sorted((tmp_path / "out").glob("*.npy"))
    before = {path.name: path.read_bytes() for path in files}
    for path in (tmp_path / "out").glob("00001*"):
        path.unlink()
    assert embed(photos, *chosen, "--shard", "1/3") == 0
    assert before == {path.name: path.read_bytes() for path in files}


def test_the_next_shard_is_encoded_while_one_is_written(
    embed: Embed, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, second = Shard.write, threading.Event()

    def held(shard: Shard, *arguments: Any) -> None:
        if shard.number == 1:
            second.set()
        assert second.wait(60), "the first shard held up the second one"
        write(shard, *arguments)

    monkeypatch.setattr(Shard, "write", held)
    assert embed(photos, *BLOCKS, "--sample", 2, "--shard-items", 1) == 0
    assert list(find_faults(str(tmp_path / "out"))) == []


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("intern_vit_300m", "npy"),
        ("dinov3", "safetensors"),
        pytest.param("dinov3", "parquet", marks=NEEDS_PYARROW),
    ],
)
def test_class_tokens_lie_apart_and_tiles_are_numbered(
    tmp_path: Path, photos: Path, family: str, format: str
) -> None:
    repo = write_seeded_checkpoint(tmp_path / "tower", family, width=32, depth=2)
    encoder = load_encoder(repo, dtype="float32")
    assert isinstance(encoder, VisionEncoder)
    out, names = tmp_path / "out", ["blocks.0", "blocks.0.prefix"]
    chosen = ("--sample", 9, "--format", format, "--shard-items", 2, "--graph")
    assert run_job(repo, photos, out, "--pool", "none", "--fields", "blocks.0", *chosen) == 0
    assert list(find_faults(str(out))) == []
    inputs = [encoder.preprocess([photos / key]) for key in KEYS]
    with torch.no_grad():
        outputs = [encoder.with_extras(names)(one)[0] for one in inputs]
    patches = list(vitgraph.ActivationDataset(out))
    assert len(patches) == 27
    for row in patches:
        image, (t, h, w) = int(row["image"]), row["position"].tolist()
        grid = inputs[image].grid_thw
        (maps,) = encoder.feature_maps(outputs[image]["blocks.0"], grid)
        assert close(row["blocks.0"], maps[t, h, w])
    dataset = vitgraph.ActivationDataset(out, rows="prefix", block_rows=4)
    rows = list(dataset)
    assert len(rows) == len(dataset) == sum(map(before, outputs))
    for row in rows:
        t, h, number = row["position"].tolist()
        assert h == -1
        assert close(row["blocks.0"], outputs[int(row["image"])]["blocks.0.prefix"][t, number])
    assert len({(int(row["image"]), *row["position"].tolist()) for row in rows}) == len(rows)
    keys, items = read_embeddings(out, "blocks.0.prefix")
    assert (keys, [len(item) for item in items]) == (KEYS, [*map(before, outputs)])


def before(output: Any) -> int:
    """Return the number of rows before the patches of an image, over all of its segments."""
    return int(output["blocks.0.prefix"].shape[:2].numel())


def test_rows_of_a_path_are_written_with_that_path(tmp_path: Path, photos: Path) -> None:
    repo = write_seeded_checkpoint(tmp_path / "step", "step3_vl", width=32, depth=1)
    out = tmp_path / "out"
    command = ["embed", str(repo), str(photos), "--out", str(out), "--no-progress"]
    assert main([*command, "--pool", "none", "--fields", "tiles.blocks.0", "--sample", "7"]) == 0
    rows = list(vitgraph.ActivationDataset(out, fields=["tiles.blocks.0"]))
    assert {vitgraph.ActivationDataset(out).keys[row["image"]] for row in rows} == {"d.png"}
    assert len(rows) == 7


def test_a_data_set_gives_each_row_once_in_a_seeded_order(
    embed: Embed, photos: Path, tmp_path: Path
) -> None:
    assert embed(photos, *BLOCKS, "--shard-items", 2) == 0

    def order(dataset: vitgraph.ActivationDataset) -> list[tuple[int, ...]]:
        return [(int(row["image"]), *row["position"].tolist()) for row in dataset]

    dataset = vitgraph.ActivationDataset(tmp_path / "out", block_rows=32, fields=["blocks.0"])
    first = order(dataset)
    assert first == order(dataset) != sorted(first)
    assert len(set(first)) == len(first) == len(dataset)
    dataset.set_epoch(1)
    assert order(dataset) != first
    assert sorted(order(dataset)) == sorted(first)
    batches = list(dataset.batches(10))
    assert {len(batch["blocks.0"]) for batch in batches[:-1]} == {10}
    assert sum(len(batch["image"]) for batch in batches) == len(first)
    loader = DataLoader(dataset, batch_size=10, num_workers=2)
    divided = [
        (int(image), *place.tolist())
        for batch in loader
        for image, place in zip(batch["image"], batch["position"], strict=True)
    ]
    assert sorted(divided) == sorted(first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fields", "blocks.9"], r"blocks\.0 to blocks\.1"),
        (["--fields", "blocks.0,pooler_output"], "with other outputs of the same blocks alone"),
        (["--fields", "blocks.0,tiles.blocks.0"], "with other outputs of the same blocks alone"),
        (["--fields", "block.0"], "or the output of a block, such as blocks.6"),
        (["--sample", "4"], "--sample 4: is for outputs of blocks"),
        (["--fields", "blocks.0", "--sample", "0"], "--sample 0: must be at least 1"),
        (["--fields", "blocks.0", "--seed", "4"], "--seed 4: is for --sample"),
    ],
)
def test_wrong_fields_and_samples_are_refused(
    embed: Embed, photos: Path, tmp_path: Path, capsys: Any, options: list[str], message: str
) -> None:
    assert embed(photos, "--pool", "none", *options) == 2
    assert not (tmp_path / "out").exists()
    assert re.search(message, capsys.readouterr().err)


def test_other_jobs_and_fields_are_no_activations(
    embed: Embed, photos: Path, tmp_path: Path
) -> None:
    assert embed(photos, "--limit", 1) == 0
    with pytest.raises(ValueError, match="holds pooler_output and no outputs of blocks"):
        vitgraph.ActivationDataset(tmp_path / "out")
    assert embed(photos, *BLOCKS, "--sample", 2, out="acts") == 0
    with pytest.raises(ValueError, match=r"'blocks\.5' is none of blocks\.0, blocks\.1\.mlp"):
        vitgraph.ActivationDataset(tmp_path / "acts", fields=["blocks.5"])
    with pytest.raises(ValueError, match=r"fields='blocks\.0': must be a list of names"):
        vitgraph.ActivationDataset(tmp_path / "acts", fields="blocks.0")
    with pytest.raises(ValueError, match="seed=-1: must not be negative"):
        vitgraph.ActivationDataset(tmp_path / "acts", seed=-1)
    with pytest.raises(ValueError, match="has no rows before the patches"):
        vitgraph.ActivationDataset(tmp_path / "acts", rows="prefix")
    with pytest.raises(ValueError, match="must be 'patches' or 'prefix'"):
        vitgraph.ActivationDataset(tmp_path / "acts", rows="all")  # type: ignore[arg-type]
