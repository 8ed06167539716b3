"""Repo ids through the real Hub client, against a hub on the loopback interface."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import are_progress_bars_disabled

from checkpoints import same_weights
from fetching import REPO, environment, point_client_at, wait_no_longer
from hub_server import TOKEN, HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder
from weights.cache.listing import remove_cached


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with the tower, two without."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_seeded_checkpoint(folder, "qwen3_vl", width=64, decoy_shards=2)


def test_repo_id_gives_the_same_encoder_as_the_folder(
    hub: HubServer, checkpoint: Path, cache: Path
) -> None:
    hub.push(REPO, checkpoint)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(checkpoint))
    assert encoder.preprocessor == load_encoder(checkpoint).preprocessor


def test_only_shards_that_hold_the_tower_are_fetched(
    hub: HubServer, checkpoint: Path, cache: Path
) -> None:
    hub.push(REPO, checkpoint)
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
    hub: HubServer, checkpoint: Path, cache: Path
) -> None:
    commit = hub.push(REPO, checkpoint)
    load_encoder(REPO, cache_dir=cache, progress=False)
    hub.requests.clear()
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert hub.log() == [f"/{REPO}/resolve/main/config.json"]
    hub.requests.clear()
    load_encoder(REPO, revision=commit, cache_dir=cache, progress=False)
    assert hub.log() == []


def test_cached_tower_loads_without_a_hub(
    hub: HubServer, checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, checkpoint)
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
    hub: HubServer, checkpoint: Path, cache: Path
) -> None:
    commit = hub.push(REPO, checkpoint)
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
    hub: HubServer, checkpoint: Path, cache: Path
) -> None:
    hub.push(REPO, checkpoint)
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


def test_subfolder_of_a_repo(hub: HubServer, tmp_path: Path, cache: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo" / "vision", "qwen3_5", width=64)
    hub.push(REPO, tmp_path / "repo")
    encoder = load_encoder(REPO, subfolder="vision", cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(folder))


def test_force_download_fetches_what_is_cached(
    hub: HubServer, checkpoint: Path, cache: Path
) -> None:
    hub.push(REPO, checkpoint)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")
    hub.requests.clear()
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards", force_download=True)
    assert "model-00001-of-00004.safetensors" in hub.files_sent()
    assert "model-00003-of-00004.safetensors" not in hub.files_sent()
    with pytest.raises(CheckpointError, match="force_download=True needs"):
        load_encoder(REPO, force_download=True, local_files_only=True)


def test_private_repo_needs_the_token(hub: HubServer, checkpoint: Path, cache: Path) -> None:
    hub.push(REPO, checkpoint, private=True)
    with pytest.raises(CheckpointError, match=r"no such repo on the Hub, or it is private.*token="):
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert load_encoder(REPO, cache_dir=cache, progress=False, token=TOKEN) is not None


def test_a_token_that_nobody_has_is_asked_for(
    hub: HubServer, checkpoint: Path, cache: Path
) -> None:
    hub.push(REPO, checkpoint)
    with pytest.raises(CheckpointError, match="hf auth login"):
        load_encoder(REPO, cache_dir=cache, progress=False, token=True)
    assert hub.requests == []


def test_gated_repo_says_how_to_get_in(hub: HubServer, checkpoint: Path, cache: Path) -> None:
    hub.push(REPO, checkpoint, gated=True)
    page = re.escape(
        f"owner/tower@main: the repo is gated: accept its terms on {hub.endpoint}/{REPO},"
    )
    with pytest.raises(CheckpointError, match=page) as info:
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert isinstance(info.value.__cause__, huggingface_hub.errors.GatedRepoError)
    assert load_encoder(REPO, cache_dir=cache, progress=False, token=TOKEN) is not None


def test_missing_repo_and_missing_revision(hub: HubServer, checkpoint: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder here and no such repo") as info:
        load_encoder("owner/typo", cache_dir=cache, progress=False)
    assert isinstance(info.value.__cause__, huggingface_hub.errors.RepositoryNotFoundError)
    hub.push(REPO, checkpoint)
    with pytest.raises(CheckpointError, match="has no revision 'v9'"):
        load_encoder(REPO, revision="v9", cache_dir=cache, progress=False)


@pytest.mark.parametrize("bad", ["owner/na me", "owner/--x..y"])
def test_a_name_no_repo_can_have_is_refused_without_a_request(hub: HubServer, bad: str) -> None:
    with pytest.raises(CheckpointError, match="not a repo id"):
        load_encoder(bad)
    assert hub.requests == []


def test_repos_of_pickles_or_adapters_are_refused_as_such(
    hub: HubServer, checkpoint: Path, tmp_path: Path, cache: Path
) -> None:
    pickles, adapter = tmp_path / "pickles", tmp_path / "adapter"
    for folder in (pickles, adapter):
        folder.mkdir()
    (pickles / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
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


def test_a_token_may_have_a_line_end(hub: HubServer, checkpoint: Path, cache: Path) -> None:
    hub.push(REPO, checkpoint, private=True)
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


def test_inspect_fetches_headers_only(hub: HubServer, checkpoint: Path, cache: Path) -> None:
    commit = hub.push(REPO, checkpoint)
    info = inspect_checkpoint(REPO, cache_dir=cache, progress=False)
    assert info.commit == commit
    assert info.shards == tuple(f"model-0000{i}-of-00004.safetensors" for i in (1, 2))
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())


def test_hub_without_byte_ranges_still_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path, cache: Path
) -> None:
    with HubServer(ranges=False) as server:
        point_client_at(server, monkeypatch, tmp_path)
        server.push(REPO, checkpoint)
        encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(checkpoint))


def test_progress_bars_follow_the_keyword_and_only_while_loading(
    hub: HubServer, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, checkpoint)
    hidden = []

    @functools.wraps(huggingface_hub.hf_hub_download)
    def download(*arguments: Any, **keywords: Any) -> str:
        bar = keywords.get("tqdm_class")  # or, of a client that takes none, one for the process
        hidden.append(bar(disable=False).disable if bar else are_progress_bars_disabled())
        return huggingface_hub.hf_hub_download(*arguments, **keywords)

    monkeypatch.setattr("weights.hub.downloads.hf_hub_download", download)
    for progress in (False, True):
        load_encoder(REPO, cache_dir=tmp_path / str(progress), progress=progress, fetch="shards")
        assert set(hidden) == {not progress}
        assert not are_progress_bars_disabled()
        hidden.clear()


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["0", "1"])
def test_no_bar_and_no_warning_whatever_the_clients_switch_says(
    hub: HubServer, checkpoint: Path, tmp_path: Path, switch: str
) -> None:
    hub.push(REPO, checkpoint)
    code = f"import weights; weights.load_encoder({REPO!r}, progress=False, fetch='shards')"
    shell = environment(hub, tmp_path) | {"HF_HUB_DISABLE_PROGRESS_BARS": switch}
    done = run(code, shell, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_environment_of_the_client_is_honoured(checkpoint: Path, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE, as in a user's shell."""
    code = f"import weights; weights.load_encoder({REPO!r}); print('loaded')"
    with HubServer() as server:
        server.push(REPO, checkpoint, private=True)
        shell = dict(os.environ, HF_ENDPOINT=server.endpoint, HF_HOME=str(tmp_path / "home"))
        shell |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        online = run(code, shell | {"HF_TOKEN": TOKEN})
        assert online.stdout == "loaded\n", online.stderr
    offline = run(code, shell | {"HF_HUB_OFFLINE": "1"})
    assert offline.stdout == "loaded\n", offline.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["ranges", "shards"])
def test_a_fresh_process_asks_once_for_a_branch_only(
    hub: HubServer, checkpoint: Path, tmp_path: Path, fetch: str
) -> None:
    """The client would ask which agents there are before its first request; ours do not."""
    commit = hub.push(REPO, checkpoint)
    shell = environment(hub, tmp_path)
    offline = "local_files_only=True"
    for how, requests in (("", None), ("", 1), (f"revision={commit!r}", 0), (offline, 0)):
        hub.requests.clear()
        code = f"import weights; weights.load_encoder({REPO!r}, fetch={fetch!r}, {how})"
        assert run(code, shell).returncode == 0
        assert requests is None or len(hub.requests) == requests, hub.requests


def test_an_empty_cache_dir_is_refused() -> None:
    with pytest.raises(ValueError, match="pass a folder, or None"):
        load_encoder(REPO, cache_dir="")


def run(code: str, shell: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, env=shell, capture_output=True, text=True, timeout=120)
