"""``vitgraph embed --fetch-urls``: URLs in lists and in cells of tables, asked for and not."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from encoders import Encoder
from tests.support.commands.command_line import Cli, refusal
from tests.support.hub.tls_server import TlsServer, make_certificate
from tests.support.photographs import china, flower
from vitgraph.features import load_embeddings

IMAGES = {"/a.png": china().resize((80, 60)), "/b.png": flower().resize((60, 80))}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsServer]:
    with TlsServer(certificate).running() as made:
        for path, image in IMAGES.items():
            image.save(file := io.BytesIO(), "PNG")
            made.files[path] = file.getvalue()
        monkeypatch.setattr("vitgraph.embedding.sources.reading.Fetcher", made.fetcher)
        yield made


def write_table(path: Path, cells: list[object]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"image": cells}), path)
    return path


def vectors_of(folder: Path) -> dict[str, np.ndarray]:
    keys, matrix = load_embeddings(folder)
    return dict(zip(keys, matrix, strict=True))


def assert_vectors(found: dict[str, np.ndarray], keys: list[str], encoder: Encoder) -> None:
    """These keys have the vectors of the images of the server, in their order."""
    wanted = encoder.embed(list(IMAGES.values()), pool="mean").numpy()
    assert list(found) == keys
    for key, vector in zip(keys, wanted, strict=True):
        assert np.allclose(found[key], vector, atol=1e-5)


def errors_of(folder: Path) -> dict[str, str]:
    with open(folder / "errors.csv", newline="") as file:
        return {row["key"]: row["error"] for row in csv.DictReader(file)}


def test_urls_of_a_list_are_read_where_that_is_asked_for(
    cli: Cli, repo: Path, encoder: Encoder, server: TlsServer, tmp_path: Path
) -> None:
    urls = [server.url("/a.png"), server.url("/b.png", "cdn.test")]
    bad = ["https://unknown.test/c.png", server.url("/gone.png"), "http://photos.test/a.png"]
    (tmp_path / "list.txt").write_text("\n".join([*urls, *bad]))
    settings = (repo, tmp_path / "list.txt", "--out", tmp_path / "out", "--dtype", "float32")
    run = cli("embed", *settings, "--fetch-urls", "--no-progress")
    assert run.code == 3, run.err
    assert_vectors(vectors_of(tmp_path / "out"), urls, encoder)
    errors = errors_of(tmp_path / "out")
    assert list(errors) == bad
    assert errors[bad[0]].startswith("https://unknown.test/c.png: cannot be fetched")
    assert "the server answers 404 Not Found" in errors[bad[1]]
    assert "is not an https URL" in errors[bad[2]]
    assert not any("damaged" in error for error in errors.values())


def test_a_private_address_is_an_error_of_its_image(cli: Cli, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("https://127.0.0.1/a.png\nhttps://[::1]/a.png\n")
    run = cli("embed", repo, tmp_path / "list.txt", "--out", tmp_path / "out", "--fetch-urls")
    assert run.code == 3, run.err
    assert all("which is not public" in error for error in errors_of(tmp_path / "out").values())


@pytest.mark.parametrize("wrap", [str, lambda url: {"bytes": None, "path": url}])
def test_urls_of_a_column_are_read_where_that_is_asked_for(
    wrap: object, cli: Cli, repo: Path, encoder: Encoder, server: TlsServer, tmp_path: Path
) -> None:
    assert callable(wrap)
    table = write_table(tmp_path / "x.parquet", [wrap(server.url(path)) for path in IMAGES])
    settings = ("embed", repo, table, "--out", tmp_path / "out", "--dtype", "float32")
    told = refusal(cli(*settings, "--no-progress"))
    assert "x.parquet: column 'image': https://photos.test" in told
    assert "give --fetch-urls" in told
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    run = cli(*settings, "--fetch-urls", "--no-progress")
    assert run.code == 0, run.err
    assert_vectors(vectors_of(tmp_path / "out"), ["x.parquet/0", "x.parquet/1"], encoder)


def test_a_list_of_urls_stops_the_job_before_it_begins(
    cli: Cli, repo: Path, tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text("a.png\nhttps://photos.test/a.png\n")
    run = cli("embed", repo, tmp_path / "list.txt", "--out", tmp_path / "out")
    told = refusal(run)
    assert "list.txt: line 2: https://photos.test/a.png is a URL" in told
    assert "give --fetch-urls" in told
    assert not list(tmp_path.glob("out/*.npy"))


def test_a_job_of_urls_goes_on_only_where_they_may_be_fetched(
    cli: Cli, repo: Path, server: TlsServer, tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text(server.url("/a.png"))
    settings = ("embed", repo, tmp_path / "list.txt", "--out", tmp_path / "out")
    assert cli(*settings, "--fetch-urls", "--no-progress").code == 0
    assert len(server.requests) == 1
    assert cli(*settings, "--fetch-urls", "--no-progress").code == 0
    assert len(server.requests) == 1
    assert cli(*settings, "--no-progress").code == 2


def test_a_plan_reads_urls_of_a_list(
    cli: Cli, repo: Path, server: TlsServer, tmp_path: Path
) -> None:
    (tmp_path / "list.txt").write_text("\n".join(map(server.url, IMAGES)))
    run = cli("embed", repo, tmp_path / "list.txt", "--plan", "--fetch-urls")
    assert run.code == 0, run.err
    assert "list.txt: 2 images" in run.out
