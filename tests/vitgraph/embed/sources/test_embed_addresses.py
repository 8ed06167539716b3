"""Jobs from and to Google's store, and addresses that cannot be used."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.support.commands.embed_jobs import find_files, run_in_twos, upload
from tests.support.fakes.google_store import Buckets
from vitgraph.cli import main
from vitgraph.embedding.sources.listing import Source
from vitgraph.embedding.sources.tables import is_dataset, pin_files
from vitgraph.embedding.storage import open_storage
from vitgraph.features import load_embeddings

# --- GCS ------------------------------------------------------------------------------------------


def test_a_job_from_and_to_google_has_the_vectors_of_files(
    repo: Path, photos: Path, gs: Buckets, tmp_path: Path
) -> None:
    upload(gs, photos, "gs://bucket/photos")
    out = "gs://bucket/vectors"
    for _ in range(2):
        assert run_in_twos(repo, "gs://bucket/photos", out) == 0
    assert main(["embed", "--verify", out]) == 0
    assert run_in_twos(repo, photos, tmp_path / "local") == 0
    keys, vectors = load_embeddings(out)
    wanted_keys, wanted = load_embeddings(tmp_path / "local")
    assert keys == wanted_keys
    assert np.allclose(vectors, wanted, atol=1e-5)
    assert not open_storage(out).create("manifest.json", b"")


def test_what_googles_driver_raises_is_an_error_that_names_the_address(
    gs: Buckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HttpError(Exception):
        """As gcsfs has it: no OSError."""

    def fail(*_: object, **__: object) -> None:
        raise HttpError("Bad gateway, 502")

    driver = ModuleType("gcsfs.retry")
    monkeypatch.setitem(vars(driver), "HttpError", HttpError)
    monkeypatch.setitem(sys.modules, "gcsfs.retry", driver)
    monkeypatch.setattr(Buckets, "find", fail)
    with pytest.raises(OSError, match="gs://bucket/photos: Bad gateway, 502"):
        find_files("gs://bucket/photos")


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "driver", "requirement"),
    [
        ("s3://bucket/photos", "s3fs", "s3fs>=2025.3"),
        ("gs://bucket/photos", "gcsfs", "gcsfs>=2025.3"),
        ("https://host/x.png", "aiohttp", "aiohttp>=3.9"),
    ],
)
def test_a_missing_driver_is_an_error_that_names_the_package(
    repo: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    url: str,
    driver: str,
    requirement: str,
) -> None:
    import fsspec

    assert fsspec.registry is not None
    for name in ("s3", "gs", "https"):  # those that are loaded already
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, name, raising=False)
    for name in (driver, "fsspec.implementations.http"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, driver, None)
    assert run_in_twos(repo, url, tmp_path / "out") == 2
    assert f"pip install '{requirement}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    if driver != "aiohttp":
        assert run_in_twos(repo, photos, url) == 2
        assert f"pip install '{requirement}'" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["https://host/x", "hf://datasets/a/b/c", "ftp://host/x"])
def test_what_cannot_be_written_to_is_refused(
    repo: Path, photos: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in_twos(repo, photos, out) == 2
    assert "cannot be written to; give a folder, s3://... or gs://..." in capsys.readouterr().err


def test_home_and_file_addresses_are_local(
    repo: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(photos.parent))
    assert run_in_twos(repo, f"~/{photos.name}", f"file://{tmp_path}/out") == 0
    assert len(load_embeddings(f"file://{tmp_path}/out")[0]) == 12
    assert main(["embed", "--verify", os.path.join(str(tmp_path), "out")]) == 0


def test_files_of_the_hub_are_read_at_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789" * 4
    monkeypatch.setattr(
        "vitgraph.embedding.sources.tables.hub_commit", lambda repo, revision: commit
    )
    for name in ("hf://datasets/beans", "hf://datasets/owner/name", "hf://datasets/owner/name@v1"):
        assert is_dataset(name)
    url = "hf://datasets/owner/name/data/*.tar"
    assert not is_dataset(url)
    assert pin_files(url) == f"hf://datasets/owner/name@{commit}/data/*.tar"
    assert pin_files("hf://datasets/o/n@v1/x.png") == f"hf://datasets/o/n@{commit}/x.png"
    with pytest.raises(ValueError, match=r"files of the Hub are named hf://datasets/OWNER/NAME"):
        find_files("hf://owner/model/x.png")


def test_the_identity_of_a_source_is_its_place(tmp_path: Path) -> None:
    assert Source(f"file://{tmp_path}").identity() == str(tmp_path)
    assert Source("s3://bucket/x").identity() == "s3://bucket/x"
