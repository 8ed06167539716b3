"""Config, index, processor files and the list of files: bounded, checked, kept beside the tower."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import Fault, HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder
from weights.cache.listing import list_cached, remove_cached

INDEX = "model.safetensors.index.json"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda raw: b"",
    "halved": lambda raw: raw[: len(raw) // 2],
    "zeroed": lambda raw: bytes(len(raw)),
    "another object": lambda raw: b"{}",
    "one digit changed": lambda raw: raw.replace(b"6", b"7", 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_small_files_are_fetched_again_or_named_offline(
    hub: HubServer, folder: Path, cache: Path, damage: str
) -> None:
    commit = hub.push(REPO, folder)
    first = load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    (path,) = cache.rglob("answers")
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    with pytest.raises(CheckpointError, match=r"is damaged and cannot be downloaded again offline"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)
    assert "damaged" in list_cached(cache, verify=True)[0].state
    hub.requests.clear()
    again = load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())
    assert same_weights(first, again)
    assert again.preprocessor == first.preprocessor
    hub.requests.clear()
    load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert hub.requests == []
    assert list_cached(cache, verify=True)[0].state == "configs only"


def test_the_clients_copy_of_a_small_file_is_used(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    commit = hub.push(REPO, folder)
    config = Path(huggingface_hub.hf_hub_download(REPO, "config.json", cache_dir=cache))
    hub.requests.clear()
    inspect_checkpoint(REPO, revision=commit, cache_dir=cache, progress=False)
    assert f"/{REPO}/resolve/{commit}/config.json" not in hub.log()
    config.write_bytes(config.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON.*force_download"):
        inspect_checkpoint(REPO, revision=commit, cache_dir=cache, progress=False)
    inspect_checkpoint(REPO, cache_dir=cache, progress=False, force_download=True)


def test_a_kept_tower_needs_nothing_of_the_clients_cache(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    commit = hub.push(REPO, folder)
    for name in ("config.json", INDEX, "preprocessor_config.json"):
        huggingface_hub.hf_hub_download(REPO, name, cache_dir=cache)
    first = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    shutil.rmtree(cache / "models--owner--tower")
    hub.requests.clear()
    for revision in (None, "main", commit):
        again = load_encoder(REPO, revision=revision, cache_dir=cache, local_files_only=True)
        assert same_weights(first, again)
        assert again.preprocessor == first.preprocessor
    assert hub.requests == []


def test_offline_without_an_index_says_that_it_is_not_here(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    hub.push(REPO, folder)
    huggingface_hub.hf_hub_download(REPO, "config.json", cache_dir=cache)
    with pytest.raises(CheckpointError, match=r"an index or weights is not in the cache.*offl"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)


def test_offline_the_newer_record_of_a_branch_counts(
    hub: HubServer, folder: Path, tmp_path: Path, cache: Path
) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False)
    other = write_seeded_checkpoint(tmp_path / "other", "qwen3_vl", width=64, seed=3)
    hub.push(REPO, other)
    huggingface_hub.snapshot_download(REPO, cache_dir=cache)
    encoder = load_encoder(REPO, cache_dir=cache, local_files_only=True)
    assert same_weights(encoder, load_encoder(other))


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("fetch", ["auto", "ranges", "shards"])
def test_a_cached_single_file_repo_costs_one_request_per_branch(
    hub: HubServer, folder: Path, tmp_path: Path, cache: Path, fetch: str, odd: bool
) -> None:
    lone = extract_encoder(folder, tmp_path / "lone")
    if odd:
        (lone / "model.safetensors").rename(lone / "tower-7.safetensors")
    commit = hub.push(REPO, lone)
    first = load_encoder(REPO, cache_dir=cache, progress=False, fetch=fetch)
    size = next(lone.glob("*.safetensors")).stat().st_size
    assert len(hub.requests) <= 3 + size / (64 << 20) + 8
    assert any(path.startswith("/api") for path in hub.log()) is odd
    for revision, requests in ((None, 1), (commit, 0)):
        hub.requests.clear()
        again = load_encoder(REPO, revision=revision, cache_dir=cache, fetch=fetch, progress=False)
        assert same_weights(first, again)
        assert len(hub.requests) == requests
    assert same_weights(first, load_encoder(REPO, cache_dir=cache, local_files_only=True))


@pytest.mark.parametrize("name", ["config.json", INDEX, "preprocessor_config.json"])
def test_json_of_unbelievable_size_is_refused_before_it_is_sent(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("weights.files.checkpoint.MAX_JSON_BYTES", 1_000_000)
    monkeypatch.setattr("weights.files.checkpoint.MAX_CONFIG_BYTES", 1_000_000)
    (folder / name).write_bytes(b"[" * 50_000_000)
    hub.push(REPO, folder)
    with pytest.raises(CheckpointError, match=f"{name}: 50000000 bytes, at most 1000000 are read"):
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert not list(cache.rglob(f"{name}*"))
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) < 1e5


def test_a_bare_404_at_a_commit_is_absence(hub: HubServer, folder: Path, cache: Path) -> None:
    """Mirrors and plain servers do not send the Hub's header."""
    hub.push(REPO, folder)
    hub.fail("/processor_config.json", Fault(404))
    first = load_encoder(REPO, cache_dir=cache, progress=False)
    assert first.preprocessor == load_encoder(folder).preprocessor
    hub.requests.clear()
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert len(hub.requests) == 1


def test_an_answer_that_names_no_commit_is_no_hub(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(REPO, folder)
    monkeypatch.setattr("weights.hub.http.RemoteFile._compare", lambda file, response: None)
    with pytest.raises(CheckpointError, match=r"names no commit \(X-Repo-Commit\).*HF_ENDPOINT"):
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert load_encoder(REPO, revision=commit, cache_dir=cache, progress=False) is not None


@pytest.mark.parametrize("left", ["config.json", "model.safetensors"])
def test_what_a_killed_removal_left_is_no_tower(
    hub: HubServer, folder: Path, cache: Path, left: str
) -> None:
    commit = hub.push(REPO, folder)
    first = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (tower,) = cache.rglob("tower")
    for path in tower.iterdir():
        if path.name != left:
            path.unlink()
    assert "damaged" in list_cached(cache)[0].state
    with pytest.raises(CheckpointError, match="damaged"):
        load_encoder(REPO, revision=commit, cache_dir=cache, local_files_only=True)
    assert same_weights(first, load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges"))
    assert list_cached(cache)[0].state == "whole"


def test_a_cache_that_cannot_be_written_is_an_error_that_says_so(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (tower,) = cache.rglob("tower/model.safetensors")
    raw = bytearray(tower.read_bytes())
    raw[-1] ^= 1
    tower.write_bytes(raw)

    def refuse(self: object) -> None:
        raise PermissionError(13, "Permission denied", "the.lock")

    monkeypatch.setattr("weights.cache.store.Store.lock", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*Permission denied"):
        load_encoder(REPO, cache_dir=cache, progress=False)
    with pytest.raises(CheckpointError, match=r"cannot be removed \(Permission denied"):
        remove_cached(REPO, cache)
