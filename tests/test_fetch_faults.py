"""Servers that are busy, stall, break off or lie: asked again at the byte, or found out."""

from __future__ import annotations

import re
import time
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
from weights.remote import RangesUnsupported, RemoteFile
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
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"ratelimit": '"resolvers";r=0;t=55'}, 56),
        ({"Retry-After": "99999"}, 300),
    ],
)
def test_the_wait_that_a_server_asks_for_is_kept(
    hub: HubServer,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    seconds: float,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("weights.remote._sleep", lambda seconds, stop: waits.append(seconds))
    hub.push(REPO, folder)
    hub.fail("/blob/", Fault(429, headers))
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert waits == [seconds]


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


def test_a_server_that_stays_busy_is_given_up_and_what_arrived_is_kept(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_no_longer(monkeypatch)
    hub.push(REPO, folder)
    hub.fail("/blob/", *[Fault()] * 2, Fault(cut_after=60_000), *[Fault(503)] * 40)
    with pytest.raises(CheckpointError, match=r"given up after 6 tries.*load again to go on"):
        load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges", max_workers=1)
    hub.faults.clear()
    hub.requests.clear()
    encoder = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(encoder, load_encoder(folder))
    data = sum(r.sent for r in hub.requests if r.range and not r.range.startswith("bytes=0-"))
    assert data == inspect_checkpoint(folder).bytes - 60_000


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


@pytest.mark.parametrize(
    ("method", "what", "fault"),
    [
        ("HEAD", "resolve.*safetensors", Fault(silent=True)),
        ("GET", "/blob/", Fault(silent=True)),
        ("GET", "/blob/", Fault(500)),
        ("GET", "/blob/", Fault(503)),
        ("GET", "/blob/", Fault(504, {"Retry-After": "0"})),
    ],
    ids=str,
)
def test_whole_shards_are_asked_for_again(
    hub: HubServer,
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    what: str,
    fault: Fault,
) -> None:
    wait_no_longer(monkeypatch)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.push(REPO, folder)
    inspect_checkpoint(REPO, cache_dir=cache, progress=False)  # the headers, before any fault
    hub.ranges = False
    hub.fail(what, *([Fault()] * 2 if method == "GET" else []), *[fault] * 3, method=method)
    encoder = load_encoder(REPO, cache_dir=cache, progress=False)
    assert same_weights(encoder, load_encoder(folder))
    assert not any(faults for *_, faults in hub.faults)


def test_whole_shards_are_given_up_once_the_hub_stays_busy(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_no_longer(monkeypatch)
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


@pytest.mark.parametrize("faults", [[Fault(416)], [Fault(range="early")] * 6], ids=str)
def test_ranges_that_always_fail_are_given_up_for_whole_shards(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, faults: list[Fault]
) -> None:
    wait_no_longer(monkeypatch)
    hub.push(REPO, folder)
    inspect_checkpoint(REPO, cache_dir=cache, progress=False)
    hub.fail("/blob/", Fault(), Fault(), *faults)
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
    from weights.tower_cache import TowerCache, drop

    held, dropped = [False], []

    @contextmanager
    def lock(kept: TowerCache) -> Iterator[None]:
        held[0] = True
        yield
        held[0] = False

    def watched(path: Path) -> None:
        dropped.append((path.name, held[0]))
        drop(path)

    hub.push(REPO, folder)
    monkeypatch.setattr("weights.tower_cache.TowerCache.lock", lock)
    monkeypatch.setattr("weights.fetch.drop", watched)
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

    class Session:
        @contextmanager
        def stream(self, method: str, url: str, *, headers: Any, **_: Any) -> Iterator[Any]:
            asked.append((url, "authorization" in headers))
            first, last = map(int, re.findall(r"\d+", headers["Range"]))
            yield SimpleNamespace(
                status_code=206,
                url=storage,
                history=[SimpleNamespace(headers={})],
                headers={"content-range": f"bytes {first}-{last}/100"},
                iter_raw=lambda: iter([bytes(last + 1 - first)]),
            )

    monkeypatch.setattr("weights.remote.get_session", Session)
    monkeypatch.setattr("weights.remote.hf_raise_for_status", lambda response: None)
    file = RemoteFile("https://hub.example/owner/tower/resolve/main/x", "hf_secret", "x")
    assert len(file.read(0, 10) + file.read(10, 20)) == 20
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
        time.sleep(0.1)
        said.append(message)

    monkeypatch.setattr("weights.hub.remote_header", refuse)
    monkeypatch.setattr("weights.hub.warnings.warn", warn)
    load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert together.parties > 1
    assert len(said) == 1
