"""``vitgraph embed`` from and to remote stores: S3 as moto serves it on loopback, and the web."""

from __future__ import annotations

import csv
import io
import logging
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands.embed_jobs import find_files, run_in_twos, upload
from tests.support.hub.server import HubServer
from tests.support.photographs import china
from tests.support.processes.own import start_stopped
from vitgraph.cli import main
from vitgraph.embedding.shard import Row, Shard
from vitgraph.embedding.sources.reading import ImageReader, SourceOptions
from vitgraph.embedding.storage import open_storage
from vitgraph.features import load_embeddings

pytestmark = pytest.mark.slow  # the server and its client take seconds to import
pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_DEFAULT_REGION": "us-east-1",
}
read = ImageReader(SourceOptions()).read


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of an S3 server with an empty bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system with an empty bucket "bucket", which the command reaches by its environment."""
    import s3fs

    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.mkdir("bucket")
    yield files
    files.rm("bucket", recursive=True)


def write_tar(path: Path, count: int, padding: int = 0) -> None:
    with tarfile.open(path, "w") as file:
        for number in range(count):
            image = io.BytesIO()
            china().crop((number, 0, number + 70, 70)).save(image, "PNG")
            about = tarfile.TarInfo(f"{number}.png")
            content = image.getvalue() + bytes(padding)
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))


# --- S3 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["npy mean", "parquet none", "safetensors mean", "npy none"])
def test_a_job_from_and_to_a_bucket_has_the_vectors_of_files(
    repo: Path, photos: Path, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.chdir(tmp_path)
    format, pool = chosen.split()
    if format == "parquet":
        pytest.importorskip("pyarrow")
    upload(s3, photos, "bucket/photos")
    options = ("--format", format, "--pool", pool)
    assert run_in_twos(repo, "s3://bucket/photos", "s3://bucket/vectors", *options) == 0
    assert list(tmp_path.iterdir()) == []
    assert run_in_twos(repo, photos, "local", *options) == 0
    keys, items = load_embeddings("s3://bucket/vectors")
    wanted_keys, wanted = load_embeddings("local")
    assert keys == wanted_keys
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(items, wanted, strict=True))
    for check in ("--verify", "--status"):
        assert main(["embed", check, "s3://bucket/vectors"]) == 0
    assert run_in_twos(repo, "s3://bucket/photos", "s3://bucket/vectors", *options) == 0


def test_errors_of_a_job_in_a_bucket_are_tried_again(repo: Path, photos: Path, s3: Any) -> None:
    upload(s3, photos, "bucket/photos")
    s3.pipe_file("bucket/photos/01.png", b"no image")
    job = (repo, "s3://bucket/photos", "s3://bucket/vectors")
    assert run_in_twos(*job) == 3
    s3.put_file(str(photos / "01.png"), "bucket/photos/01.png")
    assert run_in_twos(*job, "--retry-errors") == 0
    assert main(["embed", "--verify", "s3://bucket/vectors"]) == 0
    assert run_in_twos(repo, photos, "s3://bucket/whole") == 0
    keys, rows = load_embeddings("s3://bucket/vectors")
    wanted_keys, wanted = load_embeddings("s3://bucket/whole")
    assert keys == wanted_keys
    assert np.allclose(rows, wanted, atol=1e-5)


def test_clips_of_a_bucket_have_the_vectors_of_files(
    repo: Path, clip: Path, s3: Any, tmp_path: Path
) -> None:
    s3.put_file(str(clip), "bucket/films/clip.mp4")
    sampled = ("--num-frames", 2)
    assert run_in_twos(repo, "s3://bucket/films", tmp_path / "out", *sampled) == 0
    assert run_in_twos(repo, clip, tmp_path / "wanted", *sampled) == 0
    keys, rows = load_embeddings(tmp_path / "out")
    assert keys == ["clip.mp4"]
    assert np.allclose(rows, load_embeddings(tmp_path / "wanted")[1], atol=1e-5)


def test_a_damaged_object_is_found_and_written_again(
    repo: Path, photos: Path, s3: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in_twos(repo, photos, "s3://bucket/vectors") == 0
    (array,) = [name for name in s3.ls("bucket/vectors", False) if re.search(r"00001\..*npy", name)]
    s3.pipe_file(array, s3.cat_file(array)[:-1] + b"?")
    capsys.readouterr()
    assert main(["embed", "--verify", "s3://bucket/vectors"]) == 1
    said = capsys.readouterr().out
    assert f"{Path(array).name} is not what was written; delete 00001_stats.json" in said
    s3.rm_file("bucket/vectors/00001_stats.json")
    assert run_in_twos(repo, photos, "s3://bucket/vectors") == 0
    assert not s3.exists(array)  # the one that counts has another writer's name
    assert main(["embed", "--verify", "s3://bucket/vectors"]) == 0


def test_of_two_writers_of_a_shard_the_first_statistics_count(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shard, "is_done", False)  # each has looked before the other wrote
    empty = {"embeddings": np.zeros((0, 2), np.float32)}
    stats = {"shard": 0, "items": 1, "rows": 1, "seconds": 1.0, "errors": []}
    stats |= {"worker": "0/1", "written": 0.0}
    for value in (1.0, 2.0):
        shard = Shard(open_storage("s3://bucket/vectors"), 0, "npy", "mean")
        row = Row("a", (1, 2, 2), {"embeddings": np.full(2, value, np.float32)})
        shard.write([row], empty, stats)
    assert len(s3.ls("bucket/vectors")) == 3
    (found,) = Shard(open_storage("s3://bucket/vectors"), 0, "npy", "mean").read_rows_in_order()
    assert found.arrays["embeddings"].tolist() == [1.0, 1.0]


def test_a_manifest_in_a_bucket_is_created_once(s3: Any) -> None:
    storages = [open_storage("s3://bucket/vectors") for _ in range(2)]
    assert [each.create("manifest.json", b"%d" % n) for n, each in enumerate(storages)] == [1, 0]
    assert storages[1].read("manifest.json") == b"0"


def test_a_request_that_is_repeated_has_created_its_own_file(
    s3: Any, repo: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = s3.pipe_file

    def repeated(path: str, content: bytes, mode: str = "overwrite") -> None:
        plain(path, content, mode=mode)
        if mode == "create":  # the answer was lost
            plain(path, content, mode=mode)

    monkeypatch.setattr(s3, "pipe_file", repeated)  # fsspec gives the job the same object
    with pytest.raises(FileExistsError):
        s3.pipe_file("bucket/twice", b"", mode="create")
    assert run_in_twos(repo, photos, "s3://bucket/vectors") == 0
    assert main(["embed", "--verify", "s3://bucket/vectors"]) == 0


def test_a_job_to_a_bucket_goes_on_after_a_kill(
    repo: Path, s3: Any, endpoint: str, tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(20):
        china().crop((number, 0, number + 70, 70)).save(photos / f"{number:02d}.png")
    command = ["embed", str(repo), str(photos), "--out", "s3://bucket/vectors", "--dtype"]
    command += ["float32", "--shard-items", "2", "--workers", "1", "--no-progress"]
    environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
    # The first is killed before it writes the manifest, the others before statistics of a shard.
    for creation, written in ((0, 0), (3, 2), (4, 6)):
        process = start_stopped(command, creation, environment)
        process.join()
        assert process.exitcode == -9
        assert len(s3.glob("bucket/vectors/*_stats.json")) == written
        begun = len(s3.glob("bucket/vectors/*.npy")) - written  # two shards are written at once
        assert begun in ((1, 2) if written else (0,))
    assert main(command) == 0
    assert main(["embed", "--verify", "s3://bucket/vectors"]) == 0
    assert load_embeddings("s3://bucket/vectors")[0] == [f"{n:02d}.png" for n in range(20)]
    assert len(s3.glob("bucket/vectors/*.npy")) == 10  # nothing of a killed writer is left
    assert len(s3.glob("bucket/vectors/files.*")) == 1


# --- remote sources -------------------------------------------------------------------------------


def test_listing_remote_tar_files_transfers_less_than_a_hundredth(
    repo: Path, s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tar(tmp_path / "x.tar", 20, padding=300_000)
    for name in ("x", "y"):
        s3.put_file(str(tmp_path / "x.tar"), f"bucket/tars/{name}.tar")
    assert run_in_twos(repo, "s3://bucket/tars/*.tar", tmp_path / "out") == 0
    said = capsys.readouterr().out
    found = re.search(
        r"listed 2 remote tar files in [\d.]+ s: 40 members, ([\d,]+) of ([\d,]+) bytes", said
    )
    assert found is not None
    read_bytes, whole = (int(part.replace(",", "")) for part in found.groups())
    assert whole == 2 * (tmp_path / "x.tar").stat().st_size
    assert read_bytes <= 0.01 * whole
    assert len(load_embeddings(tmp_path / "out")[0]) == 40


def test_a_member_of_a_remote_tar_file_is_one_request(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    write_tar(tmp_path / "x.tar", 3)
    s3.put_file(str(tmp_path / "x.tar"), "bucket/x.tar")
    files = find_files("s3://bucket/x.tar")
    requests = []
    plain = s3fs.S3FileSystem._call_s3

    async def noting(self: Any, method: str, *rest: Any, **options: Any) -> Any:
        requests.append((method, options.get("Range")))
        return await plain(self, method, *rest, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", noting)
    content = read(files[1])
    position, size = files[1].position, files[1].size
    assert content == (tmp_path / "x.tar").read_bytes()[position : position + size]
    assert requests == [("get_object", f"bytes={position}-{position + size - 1}")]


@pytest.mark.parametrize("source", ["photos", "x.tar"])
def test_what_changes_on_a_store_during_a_job_is_an_error(
    repo: Path, photos: Path, s3: Any, tmp_path: Path, source: str
) -> None:
    upload(s3, photos, "bucket/photos")
    write_tar(tmp_path / "x.tar", 4)
    s3.put_file(str(tmp_path / "x.tar"), "bucket/x.tar")
    out = tmp_path / "out"
    assert run_in_twos(repo, f"s3://bucket/{source}", out) == 0
    (out / "00001_stats.json").unlink()
    changed = {"photos": "photos/02.png", "x.tar": "x.tar"}[source]
    s3.pipe_file(f"bucket/{changed}", s3.cat_file(f"bucket/{changed}") + bytes(10))
    assert run_in_twos(repo, f"s3://bucket/{source}", out) == 3
    table = list(csv.reader((out / "errors.csv").read_text().splitlines()))
    assert len(table) == (2 if source == "photos" else 3)
    assert "has changed since the job listed it" in table[1][1]


def test_a_list_on_a_store_names_what_lies_beside_it(
    repo: Path, photos: Path, s3: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(s3, photos, "bucket/some/photos")
    s3.pipe_file("bucket/some/list.txt", b"photos/03.png\nphotos/nowhere.png\nphotos/01.png\n")
    assert run_in_twos(repo, "s3://bucket/some/list.txt", tmp_path / "out") == 3
    assert load_embeddings(tmp_path / "out")[0] == ["photos/03.png", "photos/01.png"]
    for line in ("../other.png", "/etc/x.png", "s3://other/x.png", f"file://{photos}/01.png"):
        s3.pipe_file("bucket/some/list.txt", f"photos/03.png\n{line}\n".encode())
        assert run_in_twos(repo, "s3://bucket/some/list.txt", tmp_path / "no", "--any-path") == 2
        assert "line 2: " in (said := capsys.readouterr().err)
        assert "a file on a remote store names only what lies beside it" in said


def test_a_cell_on_a_store_names_what_lies_beside_it(photos: Path, s3: Any, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    upload(s3, photos, "bucket/some/photos")
    cells = ["photos/03.png", "../other.png", str(photos / "01.png"), "s3://bucket/some/x.png"]
    parquet.write_table(arrow.table({"image": cells}), tmp_path / "x.parquet")
    s3.put_file(str(tmp_path / "x.parquet"), "bucket/some/x.parquet")
    good, *bad = find_files("s3://bucket/some/x.parquet")
    assert read(good) == (photos / "03.png").read_bytes()
    for file in bad:
        with pytest.raises(ValueError, match="names only what lies beside it"):
            read(file)


def test_images_of_the_web_are_files_lists_and_tar_files(
    hub: HubServer, photos: Path, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    folder = tmp_path / "web"
    folder.mkdir()
    for name in ("01.png", "02.png"):
        (folder / name).write_bytes((photos / name).read_bytes())
    write_tar(folder / "x.tar", 3)
    (folder / "list.txt").write_text("02.png\nx.tar\n")
    hub.push("owner/tower", folder)
    start = f"{hub.endpoint}/owner/tower/resolve/main"
    (one,) = find_files(f"{start}/01.png")
    assert (one.key, read(one)) == ("01.png", (photos / "01.png").read_bytes())
    files = find_files(f"{start}/list.txt")
    assert [file.key for file in files] == ["02.png", *(f"x.tar/{n}.png" for n in range(3))]
    tar = (folder / "x.tar").read_bytes()
    assert read(files[0]) == (photos / "02.png").read_bytes()
    assert read(files[2]) == tar[files[2].position : files[2].position + files[2].size]


def test_files_of_a_data_set_are_listed_and_read_at_one_commit(
    hub: HubServer, photos: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    (folder / "photos").mkdir(parents=True)
    for name in ("01.png", "02.png"):
        (folder / "photos" / name).write_bytes((photos / name).read_bytes())
    write_tar(folder / "x.tar", 3)
    commit = hub.push("owner/photos", folder)
    start = f"hf://datasets/owner/photos@{commit}"
    files = find_files("hf://datasets/owner/photos/photos")
    assert [file.key for file in files] == ["01.png", "02.png"]
    assert [file.path for file in files] == [f"{start}/photos/0{n}.png" for n in (1, 2)]
    assert read(files[1]) == (photos / "02.png").read_bytes()
    members = find_files("hf://datasets/owner/photos/*.tar")
    assert [file.key for file in members] == [f"x.tar/{n}.png" for n in range(3)]
    tar, last = (folder / "x.tar").read_bytes(), members[2]
    assert read(last) == tar[last.position : last.position + last.size]
    (one,) = find_files("hf://datasets/owner/photos/photos/01.png")
    assert read(one) == (photos / "01.png").read_bytes()
