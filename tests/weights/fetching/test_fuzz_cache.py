"""Random damage to what is kept, and random failures of the server: a right tower or an error."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub.checkpoints import same_weights
from tests.support.hub.client import REPO, point_client_at, wait_no_longer
from tests.support.hub.server import Fault, HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

RANGES = ("ignored", "shifted", "short", "long", "other size", "unnamed", "encoded")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        point_client_at(server, monkeypatch, tmp_path)
        wait_no_longer(monkeypatch)
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=32, depth=1)


def damage(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    way = rng.random()
    if way < 0.2:
        raw = raw[: rng.randrange(len(raw))]
    elif way < 0.3:
        raw += rng.randbytes(rng.randrange(1, 9))
    else:
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(rng.choice([len(raw), min(len(raw), 600)]))] = rng.randrange(256)
    path.write_bytes(raw)


@pytest.mark.slow
def test_damage_anywhere_is_never_loaded(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    commit = hub.push(REPO, folder)
    whole = load_encoder(folder)
    kept = tmp_path / "kept"
    load_encoder(REPO, cache_dir=kept, progress=False, fetch="ranges")
    rng, errors = random.Random(0), 0
    (tower,) = (path.relative_to(kept) for path in kept.rglob("tower"))
    for number in range(30):
        cache = tmp_path / "cache"
        shutil.copytree(kept, cache, symlinks=True)
        damage(cache / tower / ("config.json", "model.safetensors")[number % 2], rng)
        try:
            encoder = load_encoder(REPO, revision=commit, cache_dir=cache, local_files_only=True)
            assert same_weights(encoder, whole)  # the byte was what it had been
        except CheckpointError as error:
            errors += 1
            assert "damaged" in str(error), error  # noqa: PT017
        encoder = load_encoder(
            REPO, revision=commit, cache_dir=cache, progress=False, fetch="ranges"
        )
        assert same_weights(encoder, whole)
        shutil.rmtree(cache)
    assert errors > 20


def fault(rng: random.Random) -> Fault:
    kind = rng.random()
    if kind < 0.3:
        return Fault()
    if kind < 0.5:
        return Fault(rng.choice([429, 500, 502, 503, 504, 403]), {"Retry-After": "0"})
    if kind < 0.9:
        return Fault(cut_after=rng.randrange(40_000))
    return Fault(range=rng.choice(RANGES))


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 12))]
)
def test_any_servers_answers_give_the_tower_or_an_error(
    hub: HubServer, folder: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    hub.push(REPO, folder)
    hub.fail("/blob/|safetensors", *(fault(rng) for _ in range(rng.randrange(1, 30))))
    whole = load_encoder(folder)
    for _ in range(40):
        try:
            encoder = load_encoder(REPO, cache_dir=tmp_path / "cache", progress=False)
        except CheckpointError:
            continue
        assert same_weights(encoder, whole)
        break
    else:
        pytest.fail("the faults ran out and still there is no tower")
