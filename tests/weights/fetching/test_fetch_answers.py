"""Servers that answer other bytes than they were asked for, or another file, are found out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO, point_client_at
from tests.support.hub.server import Fault, HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder
from weights.errors import AbsentError
from weights.files.tensor_file import Header
from weights.hub.http import RangesUnsupported, RemoteFile

WRONG = ("ignored", "shifted", "short", "long", "unnamed", "encoded", "other size")


@pytest.mark.parametrize("redirected", [True, False])
@pytest.mark.parametrize("answers", [1, 2, 3])
def test_a_file_that_changes_while_it_is_fetched_is_refused(
    hub: HubServer,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: int,
    redirected: bool,
) -> None:
    """Between two reads of the header, between header and ranges, and between two ranges."""
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, shards=1)
    hub.push(REPO, folder)
    hub.redirects = redirected
    monkeypatch.setattr("weights.hub.hub_checkpoint.FIRST_READ", 64)
    monkeypatch.setattr("weights.hub.ranges.MOST_BYTES", 300_000)
    place = "/blob/" if redirected else r"\.safetensors$"
    hub.fail(place, *[Fault()] * answers, *[Fault(etag="another")] * 99)
    with pytest.raises(CheckpointError, match=r"changed on the Hub while it was being downloaded"):
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    hub.faults.clear()
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))


def test_parts_of_a_file_that_changed_since_are_fetched_again(
    hub: HubServer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fetch ends early; then a mirror has other tensors under the same header."""
    monkeypatch.setattr("weights.hub.ranges.MOST_BYTES", 300_000)
    folders = [
        write_seeded_checkpoint(tmp_path / f"{seed}", "qwen3_vl", width=64, shards=1, seed=seed)
        for seed in (0, 1)
    ]
    commit = hub.push(REPO, folders[0])
    hub.fail("/blob/", *[Fault()] * 2, Fault(418))
    with pytest.raises(CheckpointError, match="418"):
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    hub.push("owner/other", folders[1])
    hub.repos[REPO].commits[commit] = folders[1]
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folders[1]))


@pytest.mark.parametrize(
    ("storage", "sent"),
    [
        ("https://hub.example/blob", True),
        ("https://hub.example:443/blob", True),
        ("http://hub.example/blob", False),
        ("https://hub.example:8443/blob", False),
        ("https://storage.example/blob", False),
    ],
)
def test_the_token_is_sent_to_the_hub_alone(
    monkeypatch: pytest.MonkeyPatch, storage: str, sent: bool
) -> None:
    asked: list[tuple[str, bool]] = []

    @contextmanager
    def stream(method: str, url: str, *, headers: Any, **_: Any) -> Iterator[Any]:
        asked.append((url, "authorization" in headers))
        first, last = map(int, re.findall(r"\d+", headers["range"]))
        yield SimpleNamespace(
            status_code=206,
            url=storage,
            history=[SimpleNamespace(headers={})],
            headers={"content-range": f"bytes {first}-{last}/100"},
            iter_raw=lambda: iter([bytes(last + 1 - first)]),
        )

    monkeypatch.setattr("weights.hub.http.http_stream_backoff", stream)
    monkeypatch.setattr("weights.hub.http.hf_raise_for_status", lambda response: None)
    file = RemoteFile("https://hub.example/owner/tower/resolve/main/x", "hf_secret", "x")
    assert len(b"".join([*file.stream(0, 10), *file.stream(10, 20)])) == 20
    assert asked == [(file.url, True), (storage, sent)]


def test_storage_that_signs_every_range_is_asked_through_the_hub(
    hub: HubServer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in hf-fetch-model 0.11.2 on the Hub's Xet storage; `xet-core` issue 897 has its 403."""
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, shards=1)
    monkeypatch.setattr("weights.hub.ranges.MOST_BYTES", 300_000)
    hub.push(REPO, folder)
    hub.signs_ranges = True
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    assert same_weights(encoder, load_encoder(folder))
    blobs = [request.status for request in hub.requests if request.path.startswith("/blob/")]
    assert blobs.count(206) >= 5
    assert blobs.count(403) == 1


@pytest.mark.parametrize(
    ("wrong", "when"), [*product(WRONG, ["tensors"]), *product(WRONG[:-1], ["headers"])]
)
def test_servers_that_answer_other_bytes_are_found_out_and_shards_used(
    hub: HubServer, folder: Path, cache: Path, wrong: str, when: str
) -> None:
    hub.push(REPO, folder)
    hub.fail("/blob/", *[Fault()] * (2 if when == "tensors" else 0), *[Fault(range=wrong)] * 2)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(folder))
    assert not list(cache.rglob("partial"))


def test_a_remote_file_of_another_size_than_its_header_says_is_refused(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    shard = folder / "model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    hub.push(REPO, folder)
    with pytest.raises(CheckpointError, match=r"model-00001.*header describes.*truncated"):
        load_encoder(REPO, cache_dir=cache, progress=False)
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())


def test_asking_for_ranges_where_there_are_none_warns(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, cache: Path
) -> None:
    with HubServer(ranges=False) as server:
        point_client_at(server, monkeypatch, tmp_path)
        server.push(REPO, folder)
        expected = "ignores byte ranges: whole shards are downloaded"
        with pytest.warns(UserWarning, match=expected) as caught:
            encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
        assert [warning.filename for warning in caught] == [__file__]
    assert same_weights(encoder, load_encoder(folder))


def test_one_load_warns_once_however_many_files_it_reads(
    hub: HubServer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, depth=6, shards=6)
    hub.push(REPO, folder)
    hub.ranges = False
    together, said = Barrier(len(inspect_checkpoint(folder).shards)), []

    def refuse(remote: RemoteFile, length: int) -> Header:
        if remote.label.endswith(": model.safetensors"):
            raise AbsentError(remote.label)
        together.wait(60)  # all headers fail at the same moment
        raise RangesUnsupported(remote.label)

    monkeypatch.setattr(RemoteFile, "header", refuse)
    monkeypatch.setattr("encoders.contract.warn_caller", said.append)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert together.parties > 1
    assert len(said) == 1
