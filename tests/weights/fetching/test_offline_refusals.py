"""Offline, a load that is refused has sent no request, whatever lies in the cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder


def no_tower(cache: Path) -> None:
    for tower in cache.rglob("tower"):
        shutil.rmtree(tower)


def damaged_tower(cache: Path) -> None:
    for path in cache.rglob("tower/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])


def no_config(cache: Path) -> None:
    for path in cache.rglob("tower/config.json"):
        path.unlink()


def nothing(cache: Path) -> None:
    shutil.rmtree(cache)


@pytest.mark.parametrize("damage", [no_tower, damaged_tower, no_config, nothing])
@pytest.mark.parametrize("read", [load_encoder, inspect_checkpoint, extract_encoder])
def test_a_refused_offline_load_has_sent_no_request(
    hub: HubServer,
    qwen3: Path,
    cache: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    read: Callable[..., Any],
) -> None:
    hub.push(REPO, qwen3)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    damage(cache)
    hub.requests.clear()
    places = [tmp_path / "out"] if read is extract_encoder else []
    with pytest.raises(CheckpointError):
        read(REPO, *places, cache_dir=cache, local_files_only=True)
    assert hub.requests == []


@pytest.mark.parametrize(
    "keywords",
    [
        {"revision": "v9"},
        {"revision": "0" * 40},
        {"subfolder": "other"},
        {"force_download": True},
        {"fetch": "shards", "revision": "v9"},
    ],
    ids=str,
)
def test_what_the_cache_lacks_is_refused_without_a_request(
    hub: HubServer, qwen3: Path, cache: Path, keywords: dict[str, Any]
) -> None:
    hub.push(REPO, qwen3)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    hub.requests.clear()
    with pytest.raises(ValueError, match=r"offline|local_files_only|cache|connection"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True, **keywords)
    assert hub.requests == []


def test_a_kept_tower_that_lacks_a_tensor_is_fetched_again(
    hub: HubServer, qwen3: Path, cache: Path
) -> None:
    hub.push(REPO, qwen3)
    expected = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    (kept,) = cache.rglob("tower/model.safetensors")
    with safe_open(kept, "pt") as file:
        metadata, names = file.metadata(), sorted(file.keys())
        tensors = {name: file.get_tensor(name) for name in names[1:]}
    save_file(tensors, kept, metadata)
    hub.requests.clear()
    with pytest.raises(CheckpointError, match="damaged"):
        load_encoder(REPO, cache_dir=cache, local_files_only=True)
    assert hub.requests == []
    again = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert hub.requests
    assert same_weights(again, expected)
