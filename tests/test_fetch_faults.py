"""Servers that are busy, stall, break off or lie: asked again at the byte, or found out."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import same_weights
from fetching import REPO, point_client_at, wait_no_longer
from hub_server import Fault, HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder
from weights.hub.http import RangesUnsupported, RemoteFile
from weights.tensor_file import Header


SOON = [
    Fault(429, {"Retry-After": "0"}),
    Fault(503),
    Fault(500),
    Fault(cut_after=1000),
    Fault(cut_after=0),
]


def test_busy_servers_and_cut_connections_are_tried_again_at_the_byte(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_no_longer(monkeypatch)
    hub.push(REPO, folder)
    hub.fail("/blob/", *SOON)
    hub.fail(r"resolve.*json", Fault(503), Fault(429), Fault(cut_after=5))
    hub.fail(r"resolve.*safetensors", Fault(502), Fault(cut_after=0))
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    assert same_weights(encoder, load_encoder(folder))
    blobs = [r for r in hub.requests if r.path.startswith("/blob/") and r.status == 206]
    assert any(not str(r.range).startswith("bytes=0-") for r in blobs)


def test_a_cut_connection_goes_on_where_it_stopped(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_no_longer(monkeypatch)
    hub.push(REPO, folder)
    info = inspect_checkpoint(REPO, cache_dir=cache, progress=False)
    hub.requests.clear()
    hub.fail("/blob/", *[Fault(), Fault()], Fault(cut_after=50_000), Fault(cut_after=20_000))
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    data = [r for r in hub.requests if r.path.startswith("/blob/") and r.status == 206][2:]
    starts = [int(re.findall(r"\d+", str(request.range))[0]) for request in data]
    assert starts[1] - starts[0] == 50_000
    assert starts[2] - starts[1] == 20_000
    assert sum(request.sent for request in data) == info.bytes


def test_a_server_that_stalls_is_asked_again(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_no_longer(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.push(REPO, folder)
    hub.fail("/blob/", Fault(stall=0.7), Fault(), Fault(), Fault(stall=0.7))
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))


@pytest.mark.parametrize(
    ("headers", "seconds"), [({"Retry-After": "7"}, 8), ({"ratelimit": '"resolvers";r=0;t=55'}, 56)]
)
def test_the_wait_that_a_server_asks_for_is_kept_and_said(
    hub: HubServer,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    seconds: float,
) -> None:
    waits, said = wait_no_longer(monkeypatch), Said()
    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addHandler(said)
    hub.push(REPO, folder)
    hub.fail("/blob/", Fault(429, headers), Fault(429, headers))
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    logger.removeHandler(said)
    assert waits == [seconds] * 2
    assert len([line for line in said.lines if f"Waiting {seconds}" in line]) == 2


class Said(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_silent_server_is_named_once_the_wait_is_long(
    hub: HubServer,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert caplog.text == ""
    monkeypatch.setattr("weights.hub.parallel.SILENCE", 0.1)
    hub.fail("/config.json", Fault(stall=0.5))
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert "owner/tower@main: config.json: waiting for an answer" in caplog.text


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
    monkeypatch.setattr("weights.hub.snapshot.FIRST_READ", 64)
    monkeypatch.setattr("weights.hub.ranges.MOST_BYTES", 300_000)
    place = "/blob/" if redirected else r"\.safetensors$"
    hub.fail(place, *[Fault()] * answers, *[Fault(etag="another")] * 99)
    with pytest.raises(CheckpointError, match=r"changed on the Hub while it was being fetched"):
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


def test_a_hub_that_is_gone_is_no_obstacle_to_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, cache: Path
) -> None:
    with HubServer() as server:
        point_client_at(server, monkeypatch, tmp_path)
        commit = server.push(REPO, folder)
        first = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    wait_no_longer(monkeypatch)
    for revision in (commit, "main"):
        assert same_weights(first, load_encoder(REPO, revision=revision, cache_dir=cache))


def test_a_signed_address_that_expired_is_asked_for_again(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    hub.push(REPO, folder)
    hub.fail("/blob/", Fault(), Fault(), Fault(403), Fault(), Fault(403))
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    assert same_weights(encoder, load_encoder(folder))


def test_a_server_that_stays_busy_is_given_up(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_no_longer(monkeypatch)
    hub.push(REPO, folder)
    hub.fail("/blob/", *[Fault()] * 2, Fault(cut_after=60_000), *[Fault(503)] * 40)
    with pytest.raises(CheckpointError, match=r"given up after .*answers 503.*load again to go on"):
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    hub.faults.clear()
    hub.requests.clear()
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))


WRONG = ("ignored", "shifted", "short", "long", "unnamed", "encoded", "other size")
ANY = [Fault(status) for status in (408, 500, 502, 503, 504)]
ANY += [Fault(429, {"Retry-After": "0"}), Fault(silent=True), Fault(cut_after=3)]


@pytest.mark.parametrize("fault", ANY, ids=str)
def test_the_first_request_is_tried_again_like_all_others(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    wait_no_longer(monkeypatch)
    hub.push(REPO, folder)
    hub.fail("/config.json", fault, fault)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(folder))


def test_whole_shards_of_a_busy_server_are_a_clear_error(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's client fetches them and asks again as it sees fit."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.push(REPO, folder)
    hub.fail("/blob/", *[Fault()] * 2, *[Fault(503)] * 100, method="GET")
    with pytest.raises(CheckpointError, match=r"model-0000\d.*given up .*server answers 503"):
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="shards")


@pytest.mark.parametrize("fault", ANY[:-1], ids=str)
def test_the_list_of_files_is_asked_for_again(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    wait_no_longer(monkeypatch)
    index = folder / "model.safetensors.index.json"
    index.rename(folder / "other.safetensors.index.json")
    hub.push(REPO, folder)
    hub.fail("/api/models", fault, fault)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(folder))


@pytest.mark.parametrize("fault", [*ANY, Fault(429, {"Retry-After": "200"}), Fault(403)], ids=str)
def test_a_hub_in_trouble_is_no_obstacle_to_what_is_kept(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    wait_no_longer(monkeypatch)
    hub.push(REPO, folder)
    first = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    hub.requests.clear()
    hub.fail("", *[fault] * 1000)
    assert same_weights(first, load_encoder(REPO, cache_dir=cache, progress=False))
    assert len(hub.requests) <= 2
    wait_no_longer(monkeypatch)
    with pytest.raises(CheckpointError):
        load_encoder(REPO, cache_dir=cache, progress=False, force_download=True)


@pytest.mark.parametrize(
    ("headers", "message"),
    [({"X-Error-Code": "GatedRepo"}, "the repo is gated: accept its terms"), ({}, "is refused")],
)
def test_access_that_is_taken_away_while_fetching_is_said_so(
    hub: HubServer, folder: Path, cache: Path, headers: dict[str, str], message: str
) -> None:
    hub.push(REPO, folder)
    hub.fail("/blob/", Fault(), Fault(), *[Fault(403)] * 9)
    hub.fail("resolve.*safetensors", Fault(), Fault(), *[Fault(403, headers)] * 9)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert "written" not in str(raised.value)


def test_a_range_that_the_server_refuses_is_given_up_for_whole_shards(
    hub: HubServer, folder: Path, cache: Path
) -> None:
    hub.push(REPO, folder)
    inspect_checkpoint(REPO, cache_dir=cache, progress=False)
    hub.fail("/blob/", Fault(), Fault(), Fault(416))
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, max_workers=1)
    assert same_weights(encoder, load_encoder(folder))
    assert any(name.endswith(".safetensors") for name in hub.files_sent())
    assert not list(cache.rglob("partial"))


def test_an_empty_shard_is_too_short(hub: HubServer, folder: Path, cache: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"")
    hub.push(REPO, folder)
    with pytest.raises(CheckpointError, match=r"model-00001.*: 0 bytes is too short"):
        load_encoder(REPO, cache_dir=cache, progress=False)


def test_what_cannot_be_gone_on_with_is_removed_before_the_lock_is_let_go(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it might be what the next in line has begun."""
    from weights.cache.store import Store, drop

    held, dropped = [False], []

    @contextmanager
    def lock(store: Store) -> Iterator[None]:
        held[0] = True
        yield
        held[0] = False

    def watched(path: Path) -> None:
        dropped.append((path.name, held[0]))
        drop(path)

    hub.push(REPO, folder)
    monkeypatch.setattr("weights.cache.store.Store.lock", lock)
    monkeypatch.setattr("weights.hub.downloads.drop", watched)
    hub.fail("/blob/", Fault(), Fault(), *[Fault(range="ignored")] * 2)
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert dropped[-1] == ("partial", True)
    assert all(locked for _, locked in dropped)


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
        with pytest.warns(UserWarning, match="ignores byte ranges: whole shards are fetched"):
            encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))


def test_one_load_warns_once_however_many_files_it_reads(
    hub: HubServer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, depth=6, shards=6)
    hub.push(REPO, folder)
    hub.ranges = False
    together, said = Barrier(len(inspect_checkpoint(folder).shards)), []

    def refuse(remote: RemoteFile, length: int) -> Header:
        together.wait(10)  # all headers fail at the same moment
        raise RangesUnsupported(remote.label)

    def warn(message: str, **_: object) -> None:
        said.append(message)

    monkeypatch.setattr(RemoteFile, "header", refuse)
    monkeypatch.setattr("weights.hub.snapshot.warnings.warn", warn)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert together.parties > 1
    assert len(said) == 1
