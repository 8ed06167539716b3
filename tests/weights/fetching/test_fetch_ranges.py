"""Fetching only the tower's byte ranges: what crosses the wire, and that it is the same tower."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.hub.checkpoints import LAYOUTS, Written, same_weights
from tests.support.hub.client import REPO, sparse_around
from tests.support.hub.server import TOKEN, HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder
from weights.files.checkpoint import TowerTensor
from weights.files.tensor_file import Header, TensorEntry
from weights.hub.ranges import MOST_BYTES, in_order, plan_requests


@pytest.mark.parametrize("family", LAYOUTS)
def test_every_layout_comes_as_ranges_as_it_is_in_the_folder(
    hub: HubServer, written: Written, cache: Path, family: str
) -> None:
    folder = written(family)
    hub.push(REPO, folder)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    whole = load_encoder(folder)
    assert same_weights(encoder, whole)
    assert encoder.preprocessor == whole.preprocessor
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())
    assert list(cache.rglob("tower/model.safetensors"))
    hub.requests.clear()
    again = load_encoder(REPO, cache_dir=cache, progress=False, local_files_only=True)
    assert same_weights(again, whole)
    assert hub.requests == []


@pytest.mark.parametrize("prefix", ["visual.", "model.language_model.visual."])
def test_odd_prefixes_and_odd_shard_names(
    hub: HubServer, tmp_path: Path, cache: Path, prefix: str
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen2_vl", width=64, prefix=prefix)
    index = folder / "model.safetensors.index.json"
    for number in (1, 2):
        name = f"model-{number:05d}-of-00002.safetensors"
        (folder / name).rename(folder / f"vlm-{number:06d}.safetensors")
        index.write_text(index.read_text().replace(name, f"vlm-{number:06d}.safetensors"))
    index.rename(folder / "vlm.safetensors.index.json")
    commit = hub.push(REPO, folder)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))
    hub.requests.clear()
    assert load_encoder(REPO, revision=commit, cache_dir=cache) is not None
    assert hub.requests == []


def test_extracted_tower_is_the_same_from_ranges_and_from_the_folder(
    hub: HubServer, folder: Path, tmp_path: Path, cache: Path
) -> None:
    hub.push(REPO, folder)
    one = extract_encoder(REPO, tmp_path / "one", cache_dir=cache, progress=False, fetch="ranges")
    other = extract_encoder(folder, tmp_path / "other")
    assert sorted(path.name for path in one.iterdir()) == sorted(p.name for p in other.iterdir())
    assert same_weights(load_encoder(one), load_encoder(other))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("family", ["qwen3_vl", "intern_vit_300m"])
def test_hardly_more_than_the_tower_is_transferred(
    hub: HubServer, tmp_path: Path, cache: Path, family: str
) -> None:
    """A tower in three shards of a checkpoint 50 times its size."""
    folder = write_seeded_checkpoint(tmp_path / "repo", family, width=256, depth=8, shards=3)
    tower = inspect_checkpoint(folder).bytes
    headers = sparse_around(folder, 50 * tower)
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False)
    small = sum(path.stat().st_size for path in folder.glob("*.json"))
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) >= 50 * tower
    # A header's length is guessed from the index, so that one request brings it.
    assert hub.bytes_sent() <= 1.01 * tower + 1.3 * headers + 2048 + small
    assert len(hub.requests) <= 3 * 3 + tower / (64 << 20) + 8


def test_second_load_sends_one_request_for_a_branch_and_none_otherwise(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(REPO, folder)
    first = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    for revision, requests in ((None, 1), ("main", 1), (commit, 0)):
        hub.requests.clear()
        assert same_weights(first, load_encoder(REPO, revision=revision, cache_dir=cache))
        assert len(hub.requests) == requests
    hub.requests.clear()
    inspect_checkpoint(REPO, revision=commit, cache_dir=cache)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert same_weights(first, load_encoder(REPO, cache_dir=cache))
    assert hub.requests == []


def test_a_single_file_repo_needs_no_request_the_second_time(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen3_5", width=64, shards=1)
    (folder / "model.safetensors").rename(folder / "odd.safetensors")
    commit = hub.push(REPO, folder)
    first = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    hub.requests.clear()
    assert same_weights(first, load_encoder(REPO, revision=commit, cache_dir=cache))
    assert hub.requests == []


def test_auto_takes_ranges_where_they_save_a_tenth(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    whole = write_seeded_checkpoint(tmp_path / "whole", "qwen3_vl", width=64)
    lone = extract_encoder(whole, tmp_path / "lone")
    for repo, folder, ranges in (("owner/whole", whole, True), ("owner/lone", lone, False)):
        hub.requests.clear()
        hub.push(repo, folder)
        load_encoder(repo, cache_dir=cache, progress=False)
        assert any(name.endswith(".safetensors") for name in hub.files_sent()) is not ranges


def test_shards_that_are_cached_already_are_used(hub: HubServer, folder: Path, cache: Path) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    assert inspect_checkpoint(REPO, cache_dir=cache).cached == "shards"
    hub.requests.clear()
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert len(hub.requests) == 1
    assert not list(cache.rglob("tower/model.safetensors"))


def test_inspect_tells_bytes_either_way_and_what_is_cached(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    hub.push(REPO, folder)
    before = inspect_checkpoint(REPO, cache_dir=cache, progress=False)
    assert (before.cached, before.bytes_as_ranges) == ("nothing", before.bytes)
    assert before.bytes_as_shards == sum((folder / f).stat().st_size for f in before.shards)
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert inspect_checkpoint(REPO, cache_dir=cache).cached == "tower"
    assert inspect_checkpoint(folder).cached == "local"


def test_unknown_way_to_fetch_and_no_workers_are_refused(hub: HubServer) -> None:
    with pytest.raises(ValueError, match="fetch='range': must be one of auto, ranges, shards"):
        load_encoder(REPO, fetch="range")
    with pytest.raises(ValueError, match="max_workers=0: must be an integer from 1 to 64"):
        load_encoder(REPO, max_workers=0)
    assert hub.requests == []


def test_force_download_fetches_ranges_again_and_keeps_one_tower(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    sent = hub.bytes_sent()
    hub.requests.clear()
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", force_download=True)
    assert hub.bytes_sent() >= 0.9 * sent
    assert len(list(cache.rglob("tower/model.safetensors"))) == 1


def test_token_goes_to_the_hub_and_not_to_the_storage_host(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    hub.push(REPO, folder, private=True)
    with pytest.raises(CheckpointError, match="it is private"):
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", token=TOKEN)
    to_storage = [r for r in hub.requests if r.path.startswith("/blob/")]
    assert to_storage
    assert not any(request.token for request in to_storage)


def test_progress_is_in_bytes_and_follows_the_clients_switch(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, folder)
    shown: list[tuple[bool | None, str, int, int]] = []

    class Bar:
        def __init__(self, *, total: int, unit: str, disable: bool | None, **_: object) -> None:
            self.row = (disable, unit, total)
            self.done = 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            shown.append((*self.row, self.done))

        def update(self, count: int) -> None:
            self.done += count

    monkeypatch.setattr("weights.hub.downloads.tqdm", Bar)
    for progress in (False, True):
        load_encoder(REPO, cache_dir=tmp_path / f"{progress}", progress=progress, fetch="ranges")
    total = inspect_checkpoint(folder).bytes
    assert shown == [(True, "B", total, total), (None, "B", total, total)]


def test_no_byte_of_the_tower_is_asked_for_twice(hub: HubServer, folder: Path, cache: Path) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=3)
    seen: set[tuple[str, str | None]] = set()
    for request in hub.requests:
        if request.status == 206:
            assert (request.path, request.range) not in seen
            seen.add((request.path, request.range))


def pieces_of(
    rng: random.Random, count: int, size: int
) -> tuple[list[TowerTensor], dict[str, Header]]:
    """Random tensors of two files, some of them wanted."""
    wanted, headers = [], {}
    for file in ("a", "b"):
        tensors, position = {}, 0
        for number in range(count):
            length = rng.randrange(0, size)
            tensors[f"{file}{number}"] = TensorEntry("U8", (length,), position, position + length)
            position += length
        headers[file] = Header(tensors, 100)
        names = rng.sample(sorted(tensors), count // 2)
        wanted += [TowerTensor(name, name, file, tensors[name]) for name in names]
    return in_order(wanted), headers


@pytest.mark.parametrize("seed", range(20))
def test_parts_bring_every_wanted_byte_to_its_place_once(seed: int) -> None:
    rng = random.Random(seed)
    tensors, headers = pieces_of(rng, 40, rng.choice([3, 300, 20 << 20]))
    requests = plan_requests(tensors, headers, 1000)
    places: list[tuple[int, str, int, int]] = []
    for request in requests:
        assert 0 < request.end - request.begin <= MOST_BYTES
        target = request.target
        for begin, end in request.segments:
            assert request.begin <= begin < end <= request.end
            places.append((target, request.file, begin, end))
            target += end - begin
        assert target - request.target == request.kept
    position = 1000
    for target, file, begin, end in places:  # they follow one another
        assert target == position
        position += end - begin
        for byte in (begin, end - 1):
            tensor = next(
                tensor
                for tensor in tensors
                if tensor.file == file and tensor.entry.begin <= byte - 100 < tensor.entry.end
            )
            before = sum(p.entry.nbytes for p in tensors[: tensors.index(tensor)])
            assert 1000 + before + byte - 100 - tensor.entry.begin == target + byte - begin
    wanted = sum(tensor.entry.nbytes for tensor in tensors)
    assert position - 1000 == wanted == sum(request.kept for request in requests)
    assert sum(request.end - request.begin for request in requests) <= 1.005 * wanted


def test_inspect_reads_headers_alone_also_of_a_server_without_ranges(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    sparse_around(folder, 400 << 20)
    hub.ranges = False
    hub.push(REPO, folder)
    info = inspect_checkpoint(REPO, cache_dir=cache)
    assert info.bytes == inspect_checkpoint(folder).bytes
    assert info.bytes_as_shards > 200 << 20
    assert hub.written < 40 << 20  # what lies in sockets when we hang up
    assert not list(cache.rglob("*.incomplete"))
