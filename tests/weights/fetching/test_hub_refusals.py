"""Repos, tokens and names that the Hub or the loader refuses, each with one clear error."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
import pytest

from tests.support.hub.client import REPO, point_client_at, wait_no_longer
from tests.support.hub.server import TOKEN, HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder


def test_private_repo_needs_the_token(hub: HubServer, sharded: Path, cache: Path) -> None:
    hub.push(REPO, sharded, private=True)
    with pytest.raises(CheckpointError, match=r"no such repo on the Hub, or it is private.*token="):
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert load_encoder(REPO, cache_dir=cache, progress=False, token=TOKEN) is not None


def test_a_token_that_nobody_has_is_asked_for(hub: HubServer, sharded: Path, cache: Path) -> None:
    hub.push(REPO, sharded)
    with pytest.raises(CheckpointError, match="hf auth login"):
        load_encoder(REPO, cache_dir=cache, progress=False, token=True)
    assert hub.requests == []


def test_gated_repo_says_how_to_get_in(hub: HubServer, sharded: Path, cache: Path) -> None:
    hub.push(REPO, sharded, gated=True)
    page = re.escape(
        f"owner/tower@main: the repo is gated: accept its terms on {hub.endpoint}/{REPO},"
    )
    with pytest.raises(CheckpointError, match=page) as info:
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert isinstance(info.value.__cause__, huggingface_hub.errors.GatedRepoError)
    assert load_encoder(REPO, cache_dir=cache, progress=False, token=TOKEN) is not None


def test_missing_repo_and_missing_revision(hub: HubServer, sharded: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder here and no such repo") as info:
        load_encoder("owner/typo", cache_dir=cache, progress=False)
    assert isinstance(info.value.__cause__, huggingface_hub.errors.RepositoryNotFoundError)
    hub.push(REPO, sharded)
    with pytest.raises(CheckpointError, match="has no revision 'v9'"):
        load_encoder(REPO, revision="v9", cache_dir=cache, progress=False)


@pytest.mark.parametrize("bad", ["owner/na me", "owner/--x..y"])
def test_a_name_no_repo_can_have_is_refused_without_a_request(hub: HubServer, bad: str) -> None:
    with pytest.raises(CheckpointError, match="not a repo id"):
        load_encoder(bad)
    assert hub.requests == []


def test_repos_of_pickles_or_adapters_are_refused_as_such(
    hub: HubServer, sharded: Path, tmp_path: Path, cache: Path
) -> None:
    pickles, adapter = tmp_path / "pickles", tmp_path / "adapter"
    for folder in (pickles, adapter):
        folder.mkdir()
    (pickles / "config.json").write_bytes((sharded / "config.json").read_bytes())
    (pickles / "pytorch_model.bin").write_bytes(b"never opened")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"never opened")
    hub.push("owner/pickles", pickles)
    hub.push("owner/adapter", adapter)
    with pytest.raises(CheckpointError, match="only pickle weights"):
        load_encoder("owner/pickles", cache_dir=cache, progress=False)
    with pytest.raises(CheckpointError, match=r"owner/adapter@main .*LoRA adapter.*owner/base"):
        load_encoder("owner/adapter", cache_dir=cache, progress=False)
    assert not hub.files_sent() & {"pytorch_model.bin", "adapter_model.safetensors"}


@pytest.mark.parametrize("subfolder", ["../other", "a/../b", "/a", "a\\b"])
def test_subfolder_that_climbs_is_refused_without_a_request(hub: HubServer, subfolder: str) -> None:
    with pytest.raises(CheckpointError, match="leaves the checkpoint"):
        load_encoder(REPO, subfolder=subfolder)
    assert hub.requests == []


@pytest.mark.parametrize("token", ["hf_first\nsecond", "hf_ä", "hf_a b", " "])
def test_a_token_that_is_none_is_refused_and_never_shown(hub: HubServer, token: str) -> None:
    with pytest.raises(ValueError, match="not shown") as raised:
        load_encoder(REPO, token=token)
    assert not token.strip() or token not in str(raised.value)
    assert hub.requests == []


def test_a_token_may_have_a_line_end(hub: HubServer, sharded: Path, cache: Path) -> None:
    hub.push(REPO, sharded, private=True)
    assert load_encoder(REPO, cache_dir=cache, progress=False, token=f"{TOKEN}\n") is not None


def test_hub_that_is_not_there_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    with HubServer() as server:
        point_client_at(server, monkeypatch, tmp_path)
    wait_no_longer(monkeypatch)
    with pytest.raises(CheckpointError, match="the Hub cannot be reached"):
        load_encoder(REPO, cache_dir=cache, progress=False)


def test_tensors_that_do_not_fit_are_found_before_any_is_fetched(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "odd", "qwen3_vl", width=64)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"depth": 2', '"depth": 3'))
    hub.push(REPO, folder)
    with pytest.raises(CheckpointError, match=r"owner/tower@main \(\w{10}\).*\n.*missing \(12\)"):
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())


def test_an_empty_cache_dir_is_refused() -> None:
    with pytest.raises(ValueError, match="pass a folder, or None"):
        load_encoder(REPO, cache_dir="")
