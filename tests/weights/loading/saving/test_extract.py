"""The tower cut out of a checkpoint: what writing it never harms."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from safetensors.torch import load_file

from tests.support.hub.checkpoints import edit_config, same_weights
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, load_encoder

ROOT = Path(__file__).parents[4]
TOWER = "model.safetensors"


def test_the_home_folder_may_be_written_as_a_tilde(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert extract_encoder(qwen3, "~/tower") == tmp_path / "home" / "tower"
    assert (tmp_path / "home" / "tower" / TOWER).is_file()
    assert not (tmp_path / "~").exists()
    with pytest.raises(CheckpointError, match=r"~nobody-at-all/x: .*pass another folder"):
        extract_encoder(qwen3, "~nobody-at-all/x")


def test_an_empty_folder_is_filled_and_a_tower_replaced_only_when_told(
    qwen3: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    extract_encoder(qwen3, out)
    other = write_seeded_checkpoint(tmp_path / "other", "qwen3_vl", width=64, seed=1)
    with pytest.raises(CheckpointError, match="exists already; pass overwrite=True"):
        extract_encoder(other, out)
    assert same_weights(load_encoder(out), load_encoder(qwen3))
    extract_encoder(other, out, overwrite=True)
    assert same_weights(load_encoder(out), load_encoder(other))
    assert hidden(tmp_path) == []


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["thesis.doc", "model.safetensors.index.json", "config.json/x"])
def test_a_folder_that_holds_anything_else_is_never_replaced(
    qwen3: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("precious")
    with pytest.raises(CheckpointError, match="is not an extracted tower but holds"):
        extract_encoder(qwen3, out, overwrite=True)
    assert (out / name).read_text() == "precious"


def test_links_and_files_are_refused_before_anything_is_opened(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    for name, message in {
        "link": "is a link",
        "dangling": "is a link",
        "file": "is a file",
    }.items():
        with pytest.raises(CheckpointError, match=f"{name}: {message}"):
            extract_encoder(tmp_path / "no checkpoint", tmp_path / name, overwrite=True)
    with pytest.raises(CheckpointError, match="cannot be"):
        extract_encoder(tmp_path / "no checkpoint", tmp_path / "file" / "deeper")


@pytest.mark.parametrize("where", [".", "..", "inside"])
def test_a_checkpoint_is_never_replaced_by_its_own_tower(tmp_path: Path, where: str) -> None:
    """One file and its configs: such a folder looks like an extracted tower."""
    source = write_seeded_checkpoint(tmp_path / "up" / "source", "intern_vit", width=64, shards=1)
    before = {path: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(CheckpointError, match=r"is the checkpoint itself|not an extracted tower"):
        extract_encoder(source, source / where, overwrite=True)
    with pytest.raises(CheckpointError, match="is the checkpoint itself"):
        extract_encoder(source / TOWER, source, overwrite=True)
    assert {path: path.read_bytes() for path in source.iterdir()} == before


def test_a_full_disk_names_the_path_and_leaves_no_debris(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = extract_encoder(qwen3, tmp_path / "out")
    before = {path: path.read_bytes() for path in out.iterdir()}

    def full(handle: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=rf"{out}: could not be written \(No space left"):
        extract_encoder(qwen3, out, overwrite=True)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert hidden(tmp_path) == []


def test_too_little_space_is_seen_before_anything_is_written(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage())
    with pytest.raises(CheckpointError, match=r"the disk is full: the tower needs \d"):
        extract_encoder(qwen3, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert hidden(tmp_path) == []


KILLED = """
import os, signal, sys
import weights.extraction as extraction
from pathlib import Path

extraction.extract_encoder(sys.argv[1], sys.argv[3])
left = 0

def watched(real):
    def step(*arguments, **keywords):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)
    return step

extraction._copy_tensor = watched(extraction._copy_tensor)
Path.rename = watched(Path.rename)
extraction.shutil.rmtree = watched(extraction.shutil.rmtree)
extraction.os.unlink = watched(os.unlink)
for line in sys.stdin:
    left = int(line)
    run = os.fork()
    if run == 0:
        extraction.extract_encoder(sys.argv[1], sys.argv[2], overwrite=True)
        os._exit(0)
    print(os.waitpid(run, 0)[1], flush=True)
"""
"""Forks a run for each line of its input, which is killed after so many steps, and says how it
ended. What a run imports is imported before: to do so in each run would take most of the time."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_run_killed_at_any_step_leaves_a_whole_tower(
    tmp_path: Path,
) -> None:
    """At most between two renames neither stands under the name; the next run brings one there."""
    old = write_seeded_checkpoint(tmp_path / "old", "intern_vit", width=32, depth=1)
    new = write_seeded_checkpoint(tmp_path / "new", "intern_vit", width=32, depth=1, seed=1)
    whole = [load_encoder(folder) for folder in (old, new)]
    shell = dict(os.environ, PYTHONPATH=str(ROOT))
    folder = tmp_path / "folder"
    folder.mkdir()
    out, ends = folder / "out", []
    tensors = len(load_file(extract_encoder(old, tmp_path / "t") / TOWER))
    command = [sys.executable, "-c", KILLED, str(new), str(out), str(tmp_path / "once")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=shell, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for step in (0, 1, tensors - 1, *range(tensors, tensors + 12)):
            extract_encoder(old, out, overwrite=True)
            assert hidden(folder) == []
            print(step, file=process.stdin, flush=True)
            ends.append(int(process.stdout.readline()))
            if out.exists():
                assert any(same_weights(load_encoder(out), tower) for tower in whole)
            else:  # between the renames: both are whole beside it
                (work,) = folder.iterdir()
                assert {path.name for path in work.iterdir()} == {"old", "new"}
            if ends[-1] == 0:
                break
        process.stdin.close()
    assert ends[-1] == 0
    assert ends.count(signal.SIGKILL) == len(ends) - 1 >= 5


def test_a_tower_moved_aside_comes_back_after_two_failed_runs(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    out = extract_encoder(qwen3, folder / "out")
    (folder / ".out.extract").mkdir()
    out.rename(folder / ".out.extract" / "old")
    with pytest.raises(CheckpointError, match="exists already"):
        extract_encoder(qwen3, out)
    assert same_weights(load_encoder(out), load_encoder(qwen3))
    assert hidden(folder) == []


def test_a_checkpoint_that_does_not_load_is_not_extracted(qwen3: Path, tmp_path: Path) -> None:
    edit_config(qwen3, lambda config: config["vision_config"].update(depth=3))
    with pytest.raises(CheckpointError, match="missing"):
        extract_encoder(qwen3, tmp_path / "out")
    assert not (tmp_path / "out").exists()
