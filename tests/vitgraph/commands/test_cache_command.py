"""``vitgraph cache``, and ``inspect`` and ``extract`` of a repo that is fetched by ranges."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download
from PIL import Image
from safetensors import safe_open

from tests.support.commands.command_line import Cli
from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder
from weights.cache.listing import list_cached, remove_cached
from weights.cache.store import Store, cache_root, repo_folder


def test_cache_is_listed_verified_and_removed(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    cache = tmp_path / "cache"
    where = ("--cache-dir", cache)
    assert "no towers are cached" in cli("cache", "list", *where)[1]
    commit = hub.push(REPO, folder)
    hub.push("owner/other", folder)
    for repo in (REPO, "owner/other"):
        load_encoder(repo, cache_dir=cache, progress=False)
    code, out, _ = cli("cache", "list", *where)
    assert code == 0
    assert REPO in out
    assert commit[:10] in out
    rows = json.loads(cli("cache", "list", "--json", *where)[1])
    assert [row["state"] for row in rows] == ["whole", "whole"]
    assert rows[0]["bytes"] >= inspect_checkpoint(folder).bytes
    assert cli("cache", "verify", *where)[0] == 0
    code, out, _ = cli("cache", "remove", REPO, *where)
    assert (code, "MB freed" in out) == (0, True)
    assert [tower.repo_id for tower in list_cached(cache)] == ["owner/other"]
    assert not list(cache.glob("vitgraph/towers/models--owner--tower"))


def test_verify_finds_a_flipped_bit_that_list_does_not_look_for(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    cache = tmp_path / "cache"
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False)
    (tensors,) = cache.rglob("tower/model.safetensors")
    raw = bytearray(tensors.read_bytes())
    raw[-1] ^= 1
    tensors.write_bytes(raw)
    assert list_cached(cache)[0].state == "whole"
    code, out, err = cli("cache", "verify", "--cache-dir", cache)
    assert code == 2
    assert "damaged" in out
    assert f"1 of 1 cached tower damaged ({REPO})" in err


def test_kept_tables_of_times_are_listed_and_removed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITGRAPH_TABLES", str(tmp_path))
    assert cli("cache", "tables")[1] == "no tables are kept\n"
    budget = {"tokens": 4, "rows": 4, "segments": 1, "longest_segment": 4, "windows": 0, "ms": 1.0}
    table = {
        "fingerprint": {"encoder": "Tower", "dtype": "torch.bfloat16", "device": "NVIDIA H200"},
        "eager_runs": [{"rows": 4, "ms": 1.0}],
        "budgets": [budget],
        "kernels": None,
    }
    for name in ("one", "other", "third"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"image": table}))
    assert "NVIDIA H200" in cli("cache", "tables")[1]
    rows = json.loads(cli("cache", "tables", "--json")[1])
    assert [(row["name"], row["encoder"], row["budgets"]) for row in rows] == [
        (name, "Tower", 1) for name in ("one", "other", "third")
    ]
    assert "removed 1 table" in cli("cache", "remove-tables", "other")[1]
    code, _, err = cli("cache", "remove-tables", "other")
    assert (code, "no table other is kept" in err) == (2, True)
    assert "removed 2 tables" in cli("cache", "remove-tables")[1]
    assert list(tmp_path.iterdir()) == []


def test_whole_shards_are_left_to_the_client(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=tmp_path, progress=False, fetch="shards")
    (tower,) = list_cached(tmp_path)
    assert (tower.state, tower.tensors) == ("configs only", 0)
    assert cli("cache", "remove", REPO, "--cache-dir", tmp_path)[0] == 0
    assert list_cached(tmp_path) == []
    hub.requests.clear()
    load_encoder(REPO, cache_dir=tmp_path, progress=False)
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_what_cannot_be_read_is_said_so(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    """A link to itself cannot be read by anybody, root included."""
    cache = tmp_path / "cache"
    for repo, fetch in ((REPO, "shards"), ("owner/zero", "ranges")):
        hub.push(repo, folder)
        load_encoder(repo, cache_dir=cache, progress=False, fetch=fetch)
    whole, _ = list_cached(cache)
    answers = whole.folder / "answers"
    answers.unlink()
    answers.symlink_to(answers)
    assert [tower.state for tower in list_cached(cache)] == ["configs only", "whole"]
    code, out, err = cli("cache", "verify", "--cache-dir", cache)
    assert (code, f"damaged: {answers}: cannot be read (" in out) == (2, True)
    assert f"1 of 2 cached towers damaged ({REPO})" in err
    root = cache / "vitgraph"
    root.rename(tmp_path / "away")
    root.symlink_to(root)
    for command in (("list",), ("verify",), ("remove", REPO)):
        code, _, err = cli("cache", *command, "--cache-dir", cache)
        assert code == 2
        assert f"what is kept in {root} is not known: {root / 'towers'} cannot be read (" in err


def test_a_repo_that_cannot_be_read_does_not_hide_the_others(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for repo in (REPO, "owner/zero"):
        hub.push(repo, folder)
        load_encoder(repo, cache_dir=tmp_path, progress=False, fetch="ranges")
    listdir = os.listdir

    def refuse(path: Path) -> list[str]:
        if path.name == "models--owner--tower":
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr("weights.cache.listing.os.listdir", refuse)
    one, other = list_cached(tmp_path)
    assert (one.repo_id, other.state) == (REPO, "whole")
    assert one.state.startswith("damaged: ")
    assert "cannot be read (Permission denied)" in one.state


def test_unfinished_fetches_and_lone_configs_are_named(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    hub.push(REPO, folder)
    inspect_checkpoint(REPO, cache_dir=tmp_path, progress=False)
    (tower,) = list_cached(tmp_path)
    assert (tower.state, tower.tensors) == ("configs only", 0)
    (tower.folder / "partial").mkdir()
    assert list_cached(tmp_path)[0].state == "unfinished"


def test_removing_what_is_not_kept_says_what_is(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"owner/no: no tower of it is kept .*kept are: none"):
        remove_cached("owner/no", tmp_path)


def test_kept_towers_lie_beside_the_clients_cache_and_move_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The client counts a strange folder inside its cache as damage."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    assert cache_root() == tmp_path / "home" / "vitgraph"
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "big"))
    assert cache_root() == tmp_path / "big" / "vitgraph"
    assert cache_root(tmp_path / "mine") == tmp_path / "mine" / "vitgraph"


def test_inspect_shows_bytes_either_way_and_the_cache(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    hub.push(REPO, folder)
    arguments = ("inspect", REPO, "--cache-dir", tmp_path / "cache")
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert "MB as byte ranges" in out
    assert "cached: nothing" in out
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())
    load_encoder(REPO, cache_dir=tmp_path / "cache", progress=False)
    report = json.loads(cli(*arguments, "--json")[1])
    assert report["cached"] == "tower"
    assert report["bytes_as_ranges"] == report["bytes"] < report["bytes_as_shards"]


def test_extract_replaces_a_folder_only_by_force(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    hub.push(REPO, folder)
    out = tmp_path / "tower"
    arguments = ("extract", REPO, out, "--cache-dir", tmp_path / "cache")
    assert cli(*arguments)[0] == 0
    hub.requests.clear()
    code, _, err = cli(*arguments)
    assert (code, "--force" in err) == (2, True)
    assert not hub.requests
    code, _, err = cli(*arguments, "--force", "--force-download", "--fetch", "shards")
    assert code == 0, err
    assert any(name.endswith(".safetensors") for name in hub.files_sent())
    assert same_weights(load_encoder(out), load_encoder(folder))


def test_encode_of_a_repo_fetches_the_tower_alone_and_names_its_commit(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    commit = hub.push(REPO, folder)
    Image.new("RGB", (64, 64)).save(tmp_path / "photo.png")
    out = tmp_path / "features.safetensors"
    arguments = ("encode", REPO, tmp_path / "photo.png", "--out", out, "--cache-dir", tmp_path)
    code, _, err = cli(*arguments)
    assert code == 0, err
    with safe_open(out, "pt") as file:
        assert commit in str(file.metadata())
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())


@pytest.mark.parametrize("spelling", ["{repo}@{commit}", "{repo} --revision {commit}"])
def test_one_commit_is_removed_and_the_other_stays(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli, spelling: str
) -> None:
    where = ("--cache-dir", tmp_path / "cache")
    commits = []
    for seed in (0, 1):
        made = write_seeded_checkpoint(tmp_path / f"seed{seed}", "qwen3_vl", width=64, seed=seed)
        commits.append(hub.push(REPO, made))
        load_encoder(REPO, cache_dir=tmp_path / "cache", progress=False, fetch="ranges")
    words = spelling.format(repo=REPO, commit=commits[0][:12]).split()
    code, out, err = cli("cache", "remove", *words, *where)
    assert (code, "MB freed" in out) == (0, True), err
    assert [tower.commit for tower in list_cached(tmp_path / "cache")] == [commits[1]]
    code, _, err = cli("cache", "remove", f"{REPO}@main", *where)
    assert code == 2
    assert f"no tower of that commit is kept; kept are: {commits[1][:10]}" in err
    code, _, err = cli("cache", "remove", f"{REPO}@x", "--revision", "y", *where)
    assert (code, "name the commit once" in err) == (2, True)


@pytest.mark.parametrize("words", [(f"{REPO}@",), (REPO, "--revision", ""), (f"{REPO}@ ",)])
def test_an_empty_commit_removes_nothing(
    hub: HubServer,
    folder: Path,
    tmp_path: Path,
    cli: Cli,
    words: tuple[str, ...],
) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=tmp_path, progress=False, fetch="ranges")
    code, _, err = cli("cache", "remove", *words, "--cache-dir", tmp_path)
    assert (code, "an empty commit" in err) == (2, True)
    assert [tower.state for tower in list_cached(tmp_path)] == ["whole"]


def test_inspect_says_which_way_loading_will_go(
    hub: HubServer, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    commit = hub.push(REPO, folder)
    cache = tmp_path / "cache"

    def way(**keywords: Any) -> tuple[str, bool]:
        info = inspect_checkpoint(REPO, cache_dir=cache, progress=False, **keywords)
        return info.fetch, info.unfinished

    assert way() == ("ranges", False)
    assert way(fetch="shards") == ("shards", False)
    first = inspect_checkpoint(REPO, cache_dir=cache, progress=False).shards[0]
    hf_hub_download(REPO, first, revision=commit, cache_dir=cache)
    assert inspect_checkpoint(REPO, cache_dir=cache, progress=False).cached == "some shards"
    hub.requests.clear()
    fetched, _ = way()
    load_encoder(REPO, cache_dir=cache, progress=False)
    whole = any(name.endswith(".safetensors") for name in hub.files_sent())
    assert fetched == ("shards" if whole else "ranges")
    assert way() == ("nothing", False)
    cache = tmp_path / "another"
    Store(repo_folder(cache_root(cache), REPO) / commit).partial.mkdir(parents=True)
    assert way(fetch="ranges") == ("ranges", True)
    out = cli("inspect", REPO, "--cache-dir", cache, "--fetch", "ranges")[1]
    assert "to download: the byte ranges, where an earlier download was cut off" in out
    assert "to download: nothing" in cli("inspect", folder)[1]


def test_every_keyword_of_loading_can_be_given(hub: HubServer, tmp_path: Path, cli: Cli) -> None:
    write_seeded_checkpoint(tmp_path / "repo" / "deep" / "er", "qwen3_vl", width=64)
    hub.push(REPO, tmp_path / "repo")
    common = ("--subfolder", "deep/er", "--max-workers", 2, "--cache-dir", tmp_path / "cache")
    for again in (False, True):
        hub.requests.clear()
        forced = ("--force-download", "--force") if again else ()
        out = tmp_path / "out"
        code, _, err = cli("extract", REPO, out, "--no-progress", *common, *forced)
        assert (code, err) == (0, "")
        assert sum(request.sent for request in hub.requests) > 100_000
    Image.new("RGB", (64, 64)).save(tmp_path / "photo.png")
    features = tmp_path / "features.safetensors"
    arguments = ("encode", REPO, tmp_path / "photo.png", "--out", features, "--force-download")
    code, _, err = cli(*arguments, "--no-progress", *common)
    assert code == 0, err
    code, _, err = cli("inspect", REPO, "--max-workers", "0")
    assert (code, "max_workers=0: must be an integer from 1 to 64" in err) == (2, True)


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(hub: HubServer, folder: Path, tmp_path: Path, cli: Cli) -> None:
    hub.push(REPO, folder)
    hub.ranges = False
    arguments = ("extract", REPO, tmp_path / "out", "--cache-dir", tmp_path / "cache")
    code, _, err = cli(*arguments, "--fetch", "ranges", "--no-progress")
    assert code == 0, err
    lines = [line for line in err.splitlines() if "warn" in line.lower()]
    assert lines
    for line in lines:  # and no line of source code
        assert line.startswith("vitgraph: warning: ")
        assert line.endswith("whole shards are downloaded instead")
