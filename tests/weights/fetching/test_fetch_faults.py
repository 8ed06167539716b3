"""Servers that are busy, stall, break off or lie: asked again at the byte, or found out."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO, point_client_at, wait_no_longer
from tests.support.hub.server import Fault, HubServer
from weights import CheckpointError, inspect_checkpoint, load_encoder
from weights.hub.http import RemoteFile

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
    """The server is silent for longer than the client's timeout: time itself is tested."""
    wait_no_longer(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.6)
    hub.push(REPO, folder)
    hub.fail("/blob/", Fault(stall=1.5), Fault(), Fault(), Fault(stall=1.5))
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
    """The server is silent for longer than ``SILENCE``: time itself is tested."""
    hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert caplog.text == ""
    monkeypatch.setattr("weights.threads.SILENCE", 0.1)
    hub.fail("/config.json", Fault(stall=0.5))
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert "owner/tower@main: config.json: waiting for an answer" in caplog.text


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


def test_a_whole_file_whose_signed_address_expired_is_asked_for_again(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor file of a repo may lie where the weights lie."""
    wait_no_longer(monkeypatch)
    commit = hub.push(REPO, folder)
    weights = sorted(folder.glob("*.safetensors"))[0]
    hub.fail("/blob/", Fault(cut_after=100), Fault(403))
    remote = RemoteFile(f"{hub.endpoint}/{REPO}/resolve/{commit}/{weights.name}", None, "x")
    assert remote.read_all(weights.stat().st_size) == weights.read_bytes()


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


def test_unusable_parts_are_removed_before_the_lock_is_released(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it might be what the next in line has begun."""
    from weights.cache.store import Store

    held, dropped, rmtree = [False], [], shutil.rmtree

    @contextmanager
    def lock(store: Store) -> Iterator[None]:
        held[0] = True
        yield
        held[0] = False

    def watched(path: Path, ignore_errors: bool = False) -> None:
        dropped.append((path.name, held[0]))
        rmtree(path, ignore_errors)

    hub.push(REPO, folder)
    monkeypatch.setattr("weights.cache.store.Store.lock", lock)
    monkeypatch.setattr("weights.hub.downloads.shutil.rmtree", watched)
    hub.fail("/blob/", Fault(), Fault(), *[Fault(range="ignored")] * 2)
    load_encoder(REPO, cache_dir=cache, progress=False)
    assert dropped[-1] == ("partial", True)
    assert all(locked for _, locked in dropped)
