"""Whole shards in the Hub client's cache: used as they are, damage in them named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from weights import CheckpointError, extract_encoder, load_encoder
from weights.cache.listing import remove_cached
from weights.files.checkpoint import TensorLocation, TowerFiles
from weights.hub.hub_checkpoint import HubCheckpoint

SHARD = "model-00001-of-00003.safetensors"


def flip_in(raw: bytes, words: bytes) -> bytes:
    position = raw.index(words) + len(words) - 1
    return raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a name": lambda raw: flip_in(raw, b"model.visual."),
    "a shape": lambda raw: flip_in(raw, b'"shape":['),
    "the length": lambda raw: bytes([raw[0] ^ 1]) + raw[1:],
    "truncated": lambda raw: raw[:-1000],
    "within the header": lambda raw: raw[:100],
    "emptied": lambda raw: b"",
    "too long": lambda raw: raw + b"x",
}


def shards_in(cache: Path) -> list[Path]:
    """The blobs, not the links to them."""
    return sorted(path.resolve() for path in cache.glob("models--*/snapshots/*/*.safetensors"))


@pytest.mark.parametrize(
    "first", [pytest.param("ours", marks=pytest.mark.slow), "another program's"]
)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_shard_is_an_error_that_names_force_download(
    hub: HubServer, folder: Path, cache: Path, how: str, first: str
) -> None:
    commit = hub.push(REPO, folder)
    if first == "ours":
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    else:
        snapshot_download(REPO, cache_dir=cache)
    path = (cache / f"models--owner--tower/snapshots/{commit}/{SHARD}").resolve()
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    for offline in (True, False):
        with pytest.raises(CheckpointError, match=r"force_download=True \(--force-download\)"):
            load_encoder(REPO, cache_dir=cache, progress=False, local_files_only=offline)
    whole = load_encoder(folder)
    again = load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards", force_download=True)
    assert same_weights(again, whole)
    assert same_weights(load_encoder(REPO, cache_dir=cache, local_files_only=True), whole)


@pytest.mark.parametrize("fetch", ["shards", "ranges"])
def test_what_is_removed_while_it_is_loaded_is_fetched_again(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fetch: str
) -> None:
    hub.push(REPO, folder)
    locate, calls = HubCheckpoint.locate, []

    def located(checkpoint: HubCheckpoint, tower_files: TowerFiles) -> dict[str, TensorLocation]:
        found = locate(checkpoint, tower_files)
        if not calls and fetch == "ranges":
            remove_cached(REPO, cache)
        elif not calls:
            shards_in(cache)[0].unlink()
        calls.append(len(found))
        return found

    monkeypatch.setattr(HubCheckpoint, "locate", located)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch=fetch)
    assert same_weights(encoder, load_encoder(folder))
    assert len(calls) == 2


def test_whole_shards_load_beside_a_read_only_cache(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(REPO, folder)
    snapshot_download(REPO, cache_dir=cache)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "the cache")

    for place in ("cache.store", "hub.repo"):
        monkeypatch.setattr(f"weights.{place}.write_atomic", refuse)
    for revision in (None, commit):
        again = load_encoder(REPO, revision=revision, cache_dir=cache)
        assert same_weights(again, load_encoder(folder))
    assert not list(cache.rglob("vitgraph/**/answers"))


def test_offline_shards_replace_a_damaged_kept_tower(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    commit = hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    snapshot_download(REPO, cache_dir=cache)
    (tower,) = cache.rglob("tower/model.safetensors")
    raw = tower.read_bytes()
    for broken in (raw[:-1] + bytes([raw[-1] ^ 1]), raw[:1000]):
        tower.write_bytes(broken)
        for revision in (None, commit):
            again = load_encoder(REPO, revision=revision, cache_dir=cache, local_files_only=True)
            assert same_weights(again, load_encoder(folder))


def test_a_lone_tower_is_fetched_as_a_whole_file(
    hub: HubServer, folder: Path, tmp_path: Path, cache: Path
) -> None:
    lone = extract_encoder(folder, tmp_path / "lone")
    hub.push(REPO, lone)
    load_encoder(REPO, cache_dir=cache, progress=False)
    (shard,) = shards_in(cache)
    assert shard.read_bytes() == (lone / "model.safetensors").read_bytes()
    assert not list(cache.rglob("tower"))
