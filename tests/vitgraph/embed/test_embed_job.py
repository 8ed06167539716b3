"""What one job of ``vitgraph embed`` means: one source, one list of files, one checkpoint."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from tests.support.processes.own import start
from vitgraph import EmbedBatch
from vitgraph.cli import main
from vitgraph.embedding.manifest import FileList, Manifest, digest_keys, write_list
from vitgraph.embedding.records import JobSettings
from vitgraph.embedding.sources.listing import Source
from vitgraph.embedding.sources.reading import File
from vitgraph.embedding.storage import LocalFolder
from vitgraph.features import load_embeddings
from vitgraph.seeded import write_seeded_checkpoint

Command = list[str]


def manifest_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def with_source(command: Command, source: object) -> Command:
    return [*command[:2], str(source), *command[3:]]


# --- one job per folder ---------------------------------------------------------------------------


def test_the_head_is_the_pool_where_there_is_one(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(command) == 0
    assert manifest_of(out)["settings"]["pool"] == "mean"
    shutil.rmtree(out)
    command[1] = str(write_seeded_checkpoint(tmp_path / "clip", "clip", width=64))
    assert main(command) == 0
    assert manifest_of(out)["settings"]["pool"] == "head"
    assert main([*command, "--pool", "head"]) == 0
    shutil.rmtree(out)
    for pool in (["--pool", "mean"], []):  # resuming keeps the pool of the job
        assert main([*command, *pool]) == 0
    assert manifest_of(out)["settings"]["pool"] == "mean"


@pytest.mark.slow
def test_of_two_commands_started_together_one_is_refused(command: Command, tmp_path: Path) -> None:
    for pools in (("mean", "max"), ("max", "mean")):
        running = [start([*command, "--pool", pool]) for pool in pools]
        for process in running:
            process.join()
        codes = [process.exitcode for process in running]
        assert sorted(codes) == [0, 2]
        assert manifest_of(tmp_path / "out")["settings"]["pool"] == pools[codes.index(0)]
        assert main(["embed", "--verify", str(tmp_path / "out")]) == 0
        found = load_embeddings(tmp_path / "out")[1]
        alone = [*command, "--pool", pools[codes.index(0)]]
        alone[alone.index("--out") + 1] = str(tmp_path / "alone")
        assert main(alone) == 0
        assert np.allclose(found, load_embeddings(tmp_path / "alone")[1], atol=1e-5)
        for folder in ("out", "alone"):
            shutil.rmtree(tmp_path / folder)


def test_a_manifest_is_created_once_whatever_comes_at_the_same_time(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")
    assert folder.create("manifest.json", b"first")
    assert not folder.create("manifest.json", b"second")
    assert folder.names() == ["manifest.json"]
    assert folder.read("manifest.json") == b"first"


def test_the_list_of_a_job_has_one_line_per_file_whatever_its_name(tmp_path: Path) -> None:
    names = ['"], ["', '\\"], [\\"', 'a"', '["b', "c\n", "ü\udc80.png", 'd"], [', "d"]
    files = [File(name, f"/{name}", number, f"{number} 0") for number, name in enumerate(names)]
    folder, settings = LocalFolder(tmp_path), cast("JobSettings", {})
    listed = write_list(folder, files, items_per_shard=3)
    found = FileList(folder, Manifest(settings, listed.items, 3, listed.keys, listed.files))
    assert [file for number in range(3) for file in found.shard(number)] == files
    *lines, _ = folder.read(listed.files["name"]).decode().split("\n")[:-1]
    assert lines == [json.dumps(file) for file in files]
    assert (listed.items, listed.keys) == (len(files), digest_keys(names))
    assert listed.files["bytes"] == sum(range(len(files)))


def test_who_comes_second_compares_and_is_refused(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a file system without locks, the other worker is there between look and write."""
    assert main([*command, "--pool", "max"]) == 0
    kept = (tmp_path / "out" / "manifest.json").read_bytes()
    (tmp_path / "out" / "manifest.json").rename(tmp_path / "kept.json")
    for path in (tmp_path / "out").glob("0*"):
        path.unlink()
    plain: Callable[..., bool] = LocalFolder.create

    def come_first(self: LocalFolder, name: str, content: bytes) -> bool:
        if name == "manifest.json":
            shutil.copy(tmp_path / "kept.json", tmp_path / "out" / name)
        return plain(self, name, content)

    monkeypatch.setattr(LocalFolder, "create", come_first)
    assert main(command) == 2
    assert "was begun with pool max, now it is mean" in capsys.readouterr().err
    assert (tmp_path / "out" / "manifest.json").read_bytes() == kept
    assert list((tmp_path / "out").glob("0*")) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--column", "other"], "begun with column image, now it is other"),
        (["--any-path"], "begun with any_path False, now it is True"),
        (["--split", "test"], "begun with split train, now it is test"),
        (["--subset", "small"], "begun with subset None, now it is small"),
    ],
)
def test_another_column_or_split_is_another_job(
    command: Command,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    cells = [path.read_bytes() for path in sorted(photos.iterdir())]
    table = arrow.table({"image": cells, "other": cells[::-1]})
    parquet.write_table(table, tmp_path / "x.parquet")
    command = with_source(command, tmp_path / "x.parquet")
    assert main(command) == 0
    assert main([*command, *more]) == 2
    assert message in capsys.readouterr().err


def test_another_source_with_the_same_names_is_another_job(
    command: Command, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    shutil.copytree(photos, tmp_path / "copy")
    assert main(with_source(command, tmp_path / "copy")) == 2
    said = capsys.readouterr().err
    assert f"was begun with source {photos}, now it is {tmp_path / 'copy'}" in said


# --- files are listed once ------------------------------------------------------------------------


def test_only_the_first_worker_lists_the_files(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []
    plain = Source.__iter__
    monkeypatch.setattr(Source, "__iter__", lambda self: listed.append(self) or plain(self))
    for rank in (1, 0, 2):
        assert main([*command, "--shard", f"{rank}/3"]) == 0
    assert len(listed) == 1
    assert len(list((tmp_path / "out").glob("files.*.jsonl"))) == 1
    assert main(["embed", "--verify", str(tmp_path / "out")]) == 0


def test_a_list_on_standard_input_is_compared_by_its_lines(
    command: Command,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import io

    monkeypatch.chdir(photos)
    for lines, code in (("01.png\n02.png\n", 0), ("01.png\n02.png\n", 0), ("01.png\n", 2)):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(with_source(command, "-")) == code
    assert "was begun with source - (" in capsys.readouterr().err


def test_what_killed_workers_left_is_removed_and_what_live_ones_use_is_not(
    command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main([*command, "--shard", "0/2"]) == 0
    left = [".00001.npy.123.abcd.tmp", ".00000_stats.json.9.ef.tmp", ".manifest.json.1.a.tmp"]
    for name in (*left, ".00001.lock.tmp", ".00003.npy.5.ab.tmp"):
        (out / name).write_bytes(b"half")
    with LocalFolder(out).exclusive("00003"):  # a live worker writes this shard
        assert main([*command, "--shard", "0/2"]) == 0
        assert [path.name for path in sorted(out.glob(".*"))] == [
            ".00003.lock.tmp",
            ".00003.npy.5.ab.tmp",
        ]
    assert main([*command, "--shard", "1/2"]) == 0
    assert list(out.glob(".*")) == []


def test_hidden_files_of_others_in_the_folder_stay(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([*command, "--shard", "0/2"]) == 0
    others = [".notes.tmp", ".2024.tmp", ".0001.npy.7.ab.tmp", ".job.tmp", ".rsync.1.ab.tmp"]
    for name in others:
        (out / name).write_text("not of the job")
    assert main(command) == 0
    assert sorted(path.name for path in out.glob(".*")) == sorted(others)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / others[0]).write_text("not of the job")
    assert main([*command, "--out", str(tmp_path / "new")]) == 2


def test_workers_that_give_up_do_not_take_the_folder_from_others(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "out")

    def give_up(_: int) -> int:
        for _ in range(300):
            with folder.exclusive("job"):
                pass
        return 300

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(give_up, range(4))) == 1200
    assert not folder.folder.exists()


# --- one commit per job ---------------------------------------------------------------------------


@pytest.fixture
def pushed(hub: HubServer, tmp_path: Path) -> Callable[[int], str]:
    """Pushes a checkpoint with these weights to the main branch, and returns the commit."""

    def push(seed: int) -> str:
        folder = tmp_path / f"seed{seed}"
        return hub.push(REPO, write_seeded_checkpoint(folder, "qwen3_vl", width=64, seed=seed))

    return push


def test_all_workers_load_the_commit_of_the_manifest(
    command: Command, tmp_path: Path, pushed: Callable[[int], str]
) -> None:
    first = pushed(1)
    cache = ["--cache-dir", str(tmp_path / "cache")]
    command = [command[0], REPO, *command[2:], *cache]
    assert main([*command, "--shard", "0/2"]) == 0
    pushed(2)
    assert main([*command, "--shard", "1/2"]) == 0
    assert manifest_of(tmp_path / "out")["settings"]["commit"] == first
    alone = [command[0], str(tmp_path / "seed1"), *command[2:]]
    alone[alone.index("--out") + 1] = str(tmp_path / "alone")
    assert main(alone) == 0
    vectors = [load_embeddings(tmp_path / name)[1] for name in ("out", "alone")]
    assert np.allclose(*vectors, atol=1e-5)
    assert main([*command, "--revision", first]) == 0
    assert main([*command, "--revision", "main"]) == 2


def test_a_branch_that_moves_between_look_and_load_changes_nothing(
    command: Command,
    tmp_path: Path,
    pushed: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, plain, revisions = pushed(1), weights.load_encoder, []

    def move_then_load(*arguments: Any, **options: Any) -> Any:
        pushed(2)
        revisions.append(options["revision"])
        return plain(*arguments, **options)

    monkeypatch.setattr(weights, "load_encoder", move_then_load)
    command = [command[0], REPO, *command[2:], "--cache-dir", str(tmp_path / "cache")]
    assert main(command) == 0
    assert revisions == [first]
    assert manifest_of(tmp_path / "out")["settings"]["commit"] == first


def test_a_folder_that_changes_between_look_and_load_is_refused(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    repo, plain = write_seeded_checkpoint(tmp_path / "own", "qwen3_vl", width=64), None
    plain = weights.load_encoder

    def change_then_load(*arguments: Any, **options: Any) -> Any:
        write_seeded_checkpoint(repo, "qwen3_vl", width=64, seed=1)
        return plain(*arguments, **options)

    monkeypatch.setattr(weights, "load_encoder", change_then_load)
    assert main([command[0], str(repo), *command[2:]]) == 2
    assert "has changed while it was loaded; begin again" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_copies_of_an_embed_batch_load_the_same_commit(
    pushed: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, plain, revisions = pushed(1), weights.load_encoder, []

    def noting(*arguments: Any, **options: Any) -> Any:
        revisions.append(options["revision"])
        return plain(*arguments, **options)

    monkeypatch.setattr(weights, "load_encoder", noting)
    embed = EmbedBatch(REPO, dtype="float32")
    one = pickle.dumps(embed)
    pushed(2)
    for copy in (pickle.loads(one), pickle.loads(pickle.dumps(embed)), embed):
        copy({"image": []})
    assert revisions == [first] * 3
