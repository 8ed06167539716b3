"""Whole shards in the client's cache: verified when first used, checked since, fetched again."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from checkpoints import same_weights
from fetching import REPO, wait_no_longer
from hub_server import Fault, HubServer
from test_fetch_interrupts import start
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder
from weights.hub import HubSnapshot
from weights.shard_records import ShardRecord, measure
from weights.snapshot import Located, Piece

SHARD = "model-00001-of-00003.safetensors"


def flip(raw: bytes, position: int) -> bytes:
    return raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :]


def flip_in(raw: bytes, words: bytes) -> bytes:
    return flip(raw, raw.index(words) + len(words) - 1)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda raw: flip(raw, len(raw) - 5),
    "a name": lambda raw: flip_in(raw, b"model.visual."),
    "a shape": lambda raw: flip_in(raw, b'"shape":['),
    "the length": lambda raw: flip(raw, 0),
    "its metadata": lambda raw: flip_in(raw, b'"pt'),
    "truncated": lambda raw: raw[:-1000],
    "within the header": lambda raw: raw[:100],
    "emptied": lambda raw: b"",
    "too long": lambda raw: raw + b"x",
}


@pytest.fixture
def lone(folder: Path, tmp_path: Path) -> Path:
    """A repo that is little else than its tower, so that ``auto`` takes the whole file."""
    return extract_encoder(folder, tmp_path / "lone")


def shards_in(cache: Path) -> list[Path]:
    """The blobs, not the links to them."""
    return sorted(path.resolve() for path in cache.glob("models--*/snapshots/*/*.safetensors"))


def damage(path: Path, how: str = "a bit") -> None:
    path.write_bytes(DAMAGES[how](path.read_bytes()))


@pytest.mark.parametrize("first", ["ours", "another program's"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_shard_is_fetched_again_or_named_offline(
    hub: HubServer, folder: Path, cache: Path, how: str, first: str
) -> None:
    """Also where it is damaged before we see it: the client names it by its SHA-256."""
    commit = hub.push(REPO, folder)
    if first == "ours":
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    else:
        snapshot_download(REPO, cache_dir=cache)
    damage((cache / f"models--owner--tower/snapshots/{commit}/{SHARD}").resolve(), how)
    hub.requests.clear()
    with pytest.raises(CheckpointError, match=r"damaged and cannot be fetched again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)
    assert hub.requests == []
    whole = load_encoder(folder)
    again = load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert same_weights(again, whole)
    assert {name for name in hub.files_sent() if name.endswith(".safetensors")} == {SHARD}
    hub.requests.clear()
    assert same_weights(load_encoder(REPO, revision=commit, cache_dir=cache), whole)
    assert same_weights(load_encoder(REPO, cache_dir=cache, local_files_only=True), whole)
    assert hub.requests == []


@pytest.mark.parametrize("fetch", ["auto", "ranges", "shards"])
def test_a_lone_tower_that_was_damaged_is_not_loaded(
    hub: HubServer, lone: Path, tmp_path: Path, cache: Path, fetch: str
) -> None:
    commit = hub.push(REPO, lone)
    load_encoder(REPO, cache_dir=cache, progress=False)
    (shard,) = shards_in(cache)
    for again in range(2):
        damage(shard)
        with pytest.raises(CheckpointError, match=r"is not what was fetched.* offline"):
            extract_encoder(REPO, tmp_path / "out", cache_dir=cache, local_files_only=True)
        out = extract_encoder(
            REPO, tmp_path / f"{again}", revision=commit, cache_dir=cache, fetch=fetch
        )
        assert (out / "model.safetensors").read_bytes() == shard.read_bytes()
        assert shard.read_bytes() == (lone / "model.safetensors").read_bytes()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read through, in order."""
    found: list[Path] = []

    def watched(path: Path, *arguments: Any) -> ShardRecord:
        found.append(path.resolve())
        return measure(path, *arguments)

    monkeypatch.setattr("weights.whole_shards.measure", watched)
    return found


def test_a_shard_is_read_through_once_and_its_tensors_checked_since(
    hub: HubServer, folder: Path, cache: Path, measured: list[Path]
) -> None:
    commit = hub.push(REPO, folder)
    snapshot_download(REPO, cache_dir=cache)
    hub.requests.clear()
    with ThreadPoolExecutor(4) as pool:
        load = lambda _: load_encoder(REPO, revision=commit, cache_dir=cache)  # noqa: E731
        encoders = list(pool.map(load, range(4)))
    whole = load_encoder(folder)
    assert all(same_weights(encoder, whole) for encoder in encoders)
    wanted = inspect_checkpoint(folder).shards
    snapshot = cache / "models--owner--tower" / "snapshots" / commit
    assert sorted(measured) == sorted((snapshot / name).resolve() for name in wanted)
    assert not any(".safetensors" in path for path in hub.log())


def test_several_that_find_the_same_damage_make_one_fetch(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    commit = hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    for shard in shards_in(cache):
        damage(shard)
    hub.requests.clear()
    hub.bytes_per_second = 10e6
    with ThreadPoolExecutor(4) as pool:
        load = lambda _: load_encoder(  # noqa: E731
            REPO, revision=commit, cache_dir=cache, progress=False
        )
        encoders = list(pool.map(load, range(4)))
    assert all(same_weights(encoder, load_encoder(folder)) for encoder in encoders)
    whole = [r for r in hub.requests if r.path.startswith("/blob/") and r.method == "GET"]
    assert len(whole) == len(shards_in(cache))


def test_several_processes_that_find_the_same_damage_make_one_fetch(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    """Nothing is recorded yet: the damage is another program's."""
    hub.push(REPO, folder)
    home = tmp_path / "home"
    snapshot_download(REPO)
    shards = [path for path in shards_in(home / "hub") if b"model.visual." in path.read_bytes()]
    for shard in shards:
        damage(shard)
    hub.requests.clear()
    processes = [start(hub, home, "auto") for _ in range(3)]
    for process in processes:
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    bodies = [r for r in hub.requests if r.path.startswith("/blob/") and r.method == "GET"]
    assert len(bodies) == len(shards) > 1
    assert same_weights(load_encoder(REPO, local_files_only=True), load_encoder(folder))


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and our cache can be read and no more."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "the cache")

    def set_up() -> None:
        monkeypatch.setattr("weights.tower_cache.TowerCache.lock", refuse)
        for place in ("tower_cache", "shard_records", "revisions"):
            monkeypatch.setattr(f"weights.{place}.write_whole", refuse)

    return set_up


def test_a_cache_that_cannot_be_written_is_still_read(
    hub: HubServer, folder: Path, cache: Path, measured: list[Path], unwritable: Callable[[], None]
) -> None:
    commit = hub.push(REPO, folder)
    snapshot_download(REPO, cache_dir=cache)
    unwritable()
    hub.requests.clear()
    for _ in range(2):
        again = load_encoder(REPO, revision=commit, cache_dir=cache)
        assert same_weights(again, load_encoder(folder))
    assert not list(cache.rglob("vitgraph/**/*.json"))
    assert not any(".safetensors" in path for path in hub.log())


def test_records_made_before_hold_in_a_cache_that_cannot_be_written(
    hub: HubServer, folder: Path, cache: Path, measured: list[Path], unwritable: Callable[[], None]
) -> None:
    commit = hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    measured.clear()
    unwritable()
    assert same_weights(load_encoder(REPO, revision=commit, cache_dir=cache), load_encoder(folder))
    assert measured == []
    damage(shards_in(cache)[0])
    with pytest.raises(CheckpointError, match="damaged and cannot be fetched again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)
    again = load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert same_weights(again, load_encoder(folder))


def test_without_a_record_what_is_little_but_the_tower_is_read_through_each_time(
    hub: HubServer, lone: Path, cache: Path, measured: list[Path], unwritable: Callable[[], None]
) -> None:
    commit = hub.push(REPO, lone)
    snapshot_download(REPO, cache_dir=cache)
    unwritable()
    for _ in range(2):
        load_encoder(REPO, revision=commit, cache_dir=cache)
    assert len(measured) == 2
    damage(shards_in(cache)[0])
    with pytest.raises(CheckpointError, match="damaged and cannot be fetched again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)


@pytest.mark.parametrize("how", ["emptied", "a bit", "halved"])
def test_a_record_that_is_damaged_is_made_again(
    hub: HubServer, lone: Path, cache: Path, measured: list[Path], how: str
) -> None:
    hub.push(REPO, lone)
    load_encoder(REPO, cache_dir=cache, progress=False)
    (record,) = cache.rglob("shards/*.json")
    raw = record.read_bytes()
    record.write_bytes(raw[: len(raw) // 2] if how == "halved" else DAMAGES[how](raw))
    assert same_weights(load_encoder(REPO, cache_dir=cache), load_encoder(lone))
    assert record.read_bytes() == raw
    assert len(measured) == 2


@pytest.mark.parametrize("etag", ["0123abcd" * 5, "0123abcd" * 8])
def test_a_server_that_names_its_files_otherwise_is_taken_at_its_word(
    hub: HubServer, lone: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, etag: str
) -> None:
    """A name that could be a SHA-256 is told from damage by fetching twice, once for all."""
    monkeypatch.setattr("hub_server._hash", lambda path: etag)
    commit = hub.push(REPO, lone)
    whole = load_encoder(lone)
    assert same_weights(load_encoder(REPO, cache_dir=cache, progress=False), whole)
    bodies = [r for r in hub.requests if r.path.startswith("/blob/") and r.range is None]
    assert len(bodies) == len(etag) // 32
    hub.requests.clear()
    assert same_weights(load_encoder(REPO, revision=commit, cache_dir=cache), whole)
    assert hub.requests == []
    damage(shards_in(cache)[0])
    with pytest.raises(CheckpointError, match="cannot be fetched again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)
    again = load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert same_weights(again, whole)


@pytest.mark.parametrize("times", [1, 2])
def test_what_arrives_damaged_is_fetched_once_more(
    hub: HubServer, lone: Path, cache: Path, times: int
) -> None:
    hub.push(REPO, lone)
    inspect_checkpoint(REPO, cache_dir=cache)
    faults = [Fault(garbled=number) for number in range(1, times + 1)]
    hub.fail("/blob/", Fault(), *faults, method="GET")
    if times == 2:
        with pytest.raises(CheckpointError, match="arrives damaged, two times"):
            load_encoder(REPO, cache_dir=cache, progress=False)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(lone))


def test_a_shard_removed_while_it_is_loaded_is_fetched_again(
    hub: HubServer, lone: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, lone)
    locate, calls = HubSnapshot.locate, []

    def located(snapshot: HubSnapshot, pieces: list[Piece]) -> dict[str, Located]:
        found = locate(snapshot, pieces)
        if not calls:
            shards_in(cache)[0].unlink()
        calls.append(len(found))
        return found

    monkeypatch.setattr(HubSnapshot, "locate", located)
    assert same_weights(load_encoder(REPO, cache_dir=cache, progress=False), load_encoder(lone))


def test_a_damaged_shard_and_a_hub_that_is_out_of_order_are_both_named(
    hub: HubServer, lone: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_no_longer(monkeypatch)
    commit = hub.push(REPO, lone)
    load_encoder(REPO, cache_dir=cache, progress=False)
    damage(shards_in(cache)[0])
    hub.fail("", *[Fault(403)] * 100)
    with pytest.raises(CheckpointError, match=r"is damaged and could not be fetched again: .*403"):
        load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)


def test_a_damaged_kept_tower_is_no_obstacle_offline_where_its_shards_are_here(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    commit = hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    snapshot_download(REPO, cache_dir=cache)
    (tower,) = cache.rglob("tower/model.safetensors")
    raw = tower.read_bytes()
    for broken in (flip(raw, len(raw) - 1), raw[:1000]):
        tower.write_bytes(broken)
        for revision in (None, commit):
            again = load_encoder(REPO, revision=revision, cache_dir=cache, local_files_only=True)
            assert same_weights(again, load_encoder(folder))
    for path in cache.rglob("files/*.json"):
        path.write_bytes(b"{}")
    again = load_encoder(REPO, cache_dir=cache, local_files_only=True)
    assert same_weights(again, load_encoder(folder))
    assert again.preprocessor == load_encoder(folder).preprocessor
    damage((cache / f"models--owner--tower/snapshots/{commit}/{SHARD}").resolve())
    tower.write_bytes(flip(raw, len(raw) - 1))
    with pytest.raises(CheckpointError, match="damaged and cannot be fetched again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)


def test_a_subfolder_has_records_of_its_own(
    hub: HubServer, tmp_path: Path, cache: Path, measured: list[Path]
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        whole = write_seeded_checkpoint(tmp_path / name, "qwen3_vl", width=64, seed=seed)
        extract_encoder(whole, tmp_path / "repo" / name)
    hub.push(REPO, tmp_path / "repo")
    for _ in range(2):
        for name in ("a", "b"):
            encoder = load_encoder(REPO, subfolder=name, cache_dir=cache, progress=False)
            assert same_weights(encoder, load_encoder(tmp_path / "repo" / name))
    assert len(measured) == 2


@pytest.mark.skipif(os.name == "nt", reason="links")
def test_where_the_client_makes_no_links_the_first_load_is_recorded(
    hub: HubServer, lone: Path, cache: Path
) -> None:
    """As on Windows: what the Hub calls the file is then known while it is fetched only."""
    commit = hub.push(REPO, lone)
    load_encoder(REPO, cache_dir=cache, progress=False)
    (link,) = cache.glob("models--*/snapshots/*/model.safetensors")
    link.resolve().rename(link)
    load_encoder(REPO, cache_dir=cache, local_files_only=True)
    damage(link)
    with pytest.raises(CheckpointError, match="damaged and cannot be fetched again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)
    again = load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert same_weights(again, load_encoder(lone))
