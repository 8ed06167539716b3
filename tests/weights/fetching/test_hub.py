"""Repo ids through the real Hub client: what is loaded and fetched, and what the cache keeps."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO, point_client_at
from tests.support.hub.server import Fault, HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder, resolve_commit
from weights.cache.listing import remove_cached


def test_repo_id_gives_the_same_encoder_as_the_folder(
    hub: HubServer, sharded: Path, cache: Path
) -> None:
    hub.push(REPO, sharded)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(sharded))
    assert encoder.preprocessor == load_encoder(sharded).preprocessor


def test_only_shards_that_hold_the_tower_are_fetched(
    hub: HubServer, sharded: Path, cache: Path
) -> None:
    hub.push(REPO, sharded)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    assert hub.files_sent() == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00004.safetensors",
        "model-00002-of-00004.safetensors",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    }


def test_single_file_repo_needs_no_index(hub: HubServer, tmp_path: Path, cache: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "one", "qwen2_vl", width=64, shards=1)
    hub.push(REPO, folder)
    assert same_weights(load_encoder(REPO, cache_dir=cache, progress=False), load_encoder(folder))
    hub.requests.clear()
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert len(hub.log()) == 1


def test_second_load_asks_once_for_a_branch_and_never_for_a_commit(
    hub: HubServer, sharded: Path, cache: Path
) -> None:
    commit = hub.push(REPO, sharded)
    load_encoder(REPO, cache_dir=cache, progress=False)
    hub.requests.clear()
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert hub.log() == [f"/{REPO}/resolve/main/config.json"]
    hub.requests.clear()
    load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert hub.log() == []


def test_cached_tower_loads_without_a_hub(
    hub: HubServer, sharded: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, sharded)
    first = load_encoder(REPO, cache_dir=cache, progress=False)
    hub.requests.clear()
    assert same_weights(first, load_encoder(REPO, cache_dir=cache, local_files_only=True))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert same_weights(first, load_encoder(REPO, cache_dir=cache))
    assert hub.requests == []


def test_offline_and_not_cached_says_what_is_missing(hub: HubServer, cache: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"config\.json is not in the cache and the Hub cannot"
    ):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)


def test_offline_a_branch_never_loaded_needs_a_commit(
    hub: HubServer, sharded: Path, cache: Path
) -> None:
    commit = hub.push(REPO, sharded)
    for fetch in ("ranges", "shards"):
        load_encoder(REPO, revision=commit, cache_dir=cache, progress=False, fetch=fetch)
        with pytest.raises(
            CheckpointError, match=r"vitgraph cache list.* shows commits that load as"
        ):
            load_encoder(REPO, cache_dir=cache, local_files_only=True)
        load_encoder(REPO, revision=commit, cache_dir=cache, local_files_only=True)
        remove_cached(REPO, cache)
    with pytest.raises(CheckpointError, match=r"config\.json is not in the cache"):
        load_encoder(REPO, subfolder="other", cache_dir=cache, local_files_only=True)


def test_offline_with_a_shard_missing_names_the_shard(
    hub: HubServer, sharded: Path, cache: Path
) -> None:
    hub.push(REPO, sharded)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    (shard,) = cache.rglob("snapshots/*/model-00002-of-00004.safetensors")
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00004.safetensors is not in the"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)


def test_revision_is_a_branch_or_a_commit(hub: HubServer, tmp_path: Path, cache: Path) -> None:
    folders = [
        write_seeded_checkpoint(tmp_path / f"{seed}", "qwen3_5", width=64, seed=seed)
        for seed in (1, 2, 3)
    ]
    old = hub.push(REPO, folders[0])
    hub.push(REPO, folders[1])
    hub.push(REPO, folders[2], branch="next")
    for revision, folder in ((old, folders[0]), (None, folders[1]), ("next", folders[2])):
        encoder = load_encoder(REPO, revision=revision, cache_dir=cache, progress=False)
        assert same_weights(encoder, load_encoder(folder))


def test_a_branch_that_moves_is_seen(hub: HubServer, tmp_path: Path, cache: Path) -> None:
    for seed in (1, 2):
        folder = write_seeded_checkpoint(tmp_path / f"{seed}", "qwen3_5", width=64, seed=seed)
        hub.push(REPO, folder)
        encoder = load_encoder(REPO, cache_dir=cache, progress=False)
        assert same_weights(encoder, load_encoder(folder))


@pytest.mark.parametrize("fetch", ["ranges", "shards"])
def test_a_load_is_of_one_commit_whenever_the_branch_moves(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetch: str
) -> None:
    """Config, index, processor files, headers and tensors are all of the commit that is named."""
    folders: dict[str | None, Path] = {}
    for seed, family in enumerate(("qwen3_5", "qwen3_vl")):  # other sizes of images, too
        folder = write_seeded_checkpoint(tmp_path / family, family, width=64, seed=seed)
        folders[hub.push(REPO, folder)] = folder
    old, new = folders
    ask, left = hub.next_fault, 0

    def move_after(method: str, path: str) -> Fault:
        nonlocal left
        left -= 1
        hub.repos[REPO].branches["main"] = new if left < 0 else old
        return ask(method, path)

    monkeypatch.setattr(hub, "next_fault", move_after)
    seen = set()
    for requests in range(12):
        left, cache = requests, tmp_path / f"{requests}"
        encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch=fetch)
        assert encoder.published is not None
        seen.add(encoder.published.commit)
        expected = load_encoder(folders[encoder.published.commit])
        assert same_weights(encoder, expected)
        assert encoder.preprocessor == expected.preprocessor
    assert seen == {old, new}


def test_a_commit_that_is_resolved_once_holds_for_what_follows(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "1", "qwen3_5", width=64, seed=1)
    commit = hub.push(REPO, folder)
    assert resolve_commit(REPO, cache_dir=cache) == commit
    assert hub.log() == [f"/{REPO}/resolve/main/config.json"]
    hub.push(REPO, write_seeded_checkpoint(tmp_path / "2", "qwen3_5", width=64, seed=2))
    encoder = load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(folder))
    assert resolve_commit(REPO, revision=commit, cache_dir=cache) == commit
    assert resolve_commit(folder) is None
    with pytest.raises(CheckpointError, match="the repo has no revision 'gone'"):
        resolve_commit(REPO, revision="gone", cache_dir=cache)


def test_weights_that_a_repo_holds_twice_are_refused(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "shards", "qwen3_vl", width=64)
    other = write_seeded_checkpoint(tmp_path / "other", "qwen3_vl", width=64, seed=1, shards=1)
    (other / "model.safetensors").rename(folder / "model.safetensors")
    hub.push(REPO, folder)
    for load in (load_encoder, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=r"twice: model\.safetensors, and .*index\.json"):
            load(REPO, cache_dir=cache, progress=False)


def test_subfolder_of_a_repo(hub: HubServer, tmp_path: Path, cache: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo" / "vision", "qwen3_5", width=64)
    hub.push(REPO, tmp_path / "repo")
    encoder = load_encoder(REPO, subfolder="vision", cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(folder))


def test_force_download_fetches_what_is_cached(hub: HubServer, sharded: Path, cache: Path) -> None:
    hub.push(REPO, sharded)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    hub.requests.clear()
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards", force_download=True)
    assert "model-00001-of-00004.safetensors" in hub.files_sent()
    assert "model-00003-of-00004.safetensors" not in hub.files_sent()
    with pytest.raises(CheckpointError, match="force_download=True needs"):
        load_encoder(REPO, force_download=True, local_files_only=True)


@pytest.mark.parametrize("subfolder", ["a/b/", "./a/b", "a//b", "a/./b"])
def test_any_spelling_of_a_subfolder_is_the_same_one(
    hub: HubServer, tmp_path: Path, cache: Path, subfolder: str
) -> None:
    write_seeded_checkpoint(tmp_path / "repo" / "a" / "b", "qwen3_5", width=64)
    hub.push(REPO, tmp_path / "repo")
    load_encoder(REPO, subfolder="a/b", cache_dir=cache, progress=False)
    hub.requests.clear()
    load_encoder(REPO, subfolder=subfolder, cache_dir=cache, progress=False)
    assert hub.log() == [f"/{REPO}/resolve/main/a/b/config.json"]
    assert load_encoder(tmp_path / "repo", subfolder=subfolder) is not None


def test_inspect_fetches_headers_only(hub: HubServer, sharded: Path, cache: Path) -> None:
    commit = hub.push(REPO, sharded)
    info = inspect_checkpoint(REPO, cache_dir=cache, progress=False)
    assert info.commit == commit
    assert info.shards == tuple(f"model-0000{i}-of-00004.safetensors" for i in (1, 2))
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())


def test_hub_without_byte_ranges_still_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sharded: Path, cache: Path
) -> None:
    with HubServer(ranges=False) as server:
        point_client_at(server, monkeypatch, tmp_path)
        server.push(REPO, sharded)
        encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(sharded))
