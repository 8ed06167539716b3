"""The command line: unusual streams and file names, bounded memory, the mode of what it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from vitgraph.cli import main
from vitgraph.features import load_features
from vitgraph.terminal import counted, format_table

ROOT = Path(__file__).parents[3]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "f.safetensors"


def photos(folder: Path, *names: str) -> list[str]:
    for name in names:
        Image.new("RGB", (64, 64), (90, 120, 30)).save(folder / name, "PNG")
    return [str(folder / name) for name in names]


def shell(command: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``vitgraph`` through a shell; ``{vitgraph}`` and ``"$@"`` stand in the command."""
    return subprocess.run(
        ["sh", "-c", command.format(vitgraph=f"'{sys.executable}' -m vitgraph"), "sh"]
        + [str(argument) for argument in arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
    )


@pytest.mark.slow
def test_file_names_that_stdout_cannot_print_are_escaped(
    checkpoint: Path, tmp_path: Path, out: Path
) -> None:
    names = photos(tmp_path, "\u5199.png", "\udcff.png", "a\nb\x1b[31m.png", "$\\foo$.png")
    plot = tmp_path / "maps.png"
    run = shell(
        '{vitgraph} encode "$@"',
        checkpoint,
        *names,
        "--out",
        out,
        "--plot",
        plot,
        PYTHONIOENCODING="ascii:strict",
        PYTHONUTF8="0",
    )
    assert run.returncode == 0, run.stderr
    assert [item.name for item in load_features(out).items] == names
    assert plot.stat().st_size > 10_000
    rows = run.stdout.splitlines()[2:6]
    escaped = ("\\u5199.png", "\\udcff.png", "a\\nb\\x1b[31m.png", "$\\foo$.png")
    assert [row.split()[0] for row in rows] == [f"{tmp_path}/{name}" for name in escaped]


def test_error_line_holds_no_control_characters(
    checkpoint: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["encode", str(checkpoint), f"{tmp_path}/\x1b[2Ja.png", "--out", str(out)]) == 2
    assert "\\x1b[2Ja.png: there is no such file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["list >&-", "list >&- 2>&-"])
def test_closed_streams_are_no_error(command: str) -> None:
    run = shell(f"{{vitgraph}} {command}")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_closed_stderr_keeps_errors_out_of_stdout() -> None:
    run = shell("{vitgraph} encode 2>&-")
    assert (run.returncode, run.stdout) == (2, "")


def test_images_after_two_dashes_may_begin_with_a_dash(
    checkpoint: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(tmp_path, "a.png", "-b.png", "--debug", "c.png")
    monkeypatch.chdir(tmp_path)
    tail = ["--", "-b.png", "--debug", "c.png"]
    assert main(["encode", str(checkpoint), "a.png", "--out", str(out), *tail]) == 0
    assert [item.name for item in load_features(out).items] == ["a.png", *tail[1:]]


def test_checkpoint_and_images_may_all_follow_two_dashes(
    checkpoint: Path, tmp_path: Path, out: Path
) -> None:
    assert (
        main(["encode", "--out", str(out), "--", str(checkpoint), *photos(tmp_path, "a.png")]) == 0
    )
    assert len(load_features(out).items) == 1


def test_arguments_after_two_dashes_are_no_options(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--", str(checkpoint), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "unrecognized arguments: ./--json" in said.err


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_features_file_has_the_mode_of_the_umask(
    checkpoint: Path, tmp_path: Path, out: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        assert main(["encode", str(checkpoint), *photos(tmp_path, "a.png"), "--out", str(out)]) == 0
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == mode


def test_size_of_a_photograph_taken_sideways_is_the_one_that_is_encoded(
    checkpoint: Path, tmp_path: Path, out: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    Image.new("RGB", (96, 64)).save(tmp_path / "a.jpg", exif=exif)
    assert main(["encode", str(checkpoint), str(tmp_path / "a.jpg"), "--out", str(out)]) == 0
    (item,) = load_features(out).items
    assert item.size == (64, 96)
    assert item.grid_thw[1] > item.grid_thw[2]


def test_damaged_image_of_a_replay_of_several_is_named(
    checkpoint: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = photos(tmp_path, "a.png", "b.png", "c.png")
    Path(names[1]).write_bytes(Path(names[1]).read_bytes()[:60])
    options = ["--out", str(out), "--graph", "--budgets", "64", "--max-batch-size", "3"]
    assert main(["encode", str(checkpoint), *names, *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"vitgraph: error: {names[1]}: ")
    assert error.count(names[1]) == 1
    assert not out.exists()


MEASURE = """
import sys
from vitgraph.cli import main

def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024

checkpoint, out, photo, *options = sys.argv[1:]
options = ["--out", out, "--max-pixels", "65536", *options]
assert main(["encode", checkpoint, *[photo] * 8, *options]) == 0
before = peak()
assert main(["encode", checkpoint, *[photo] * 40, *options]) == 0
print(peak() - before)
"""
BATCHES = ("--graph", "--budgets", "256", "--max-batch-size", "4")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' peak memory")
@pytest.mark.parametrize("options", [(), BATCHES], ids=["one by one", "batches of 4"])
def test_memory_does_not_grow_with_the_number_of_photographs(
    checkpoint: Path, tmp_path: Path, out: Path, options: tuple[str, ...]
) -> None:
    """Forty photographs take about as much memory as eight.

    Decoded, the 32 more would take 1,120 MiB. The peak differs by up to 270 MiB from run to run,
    since it depends on how many threads decode at the same moment.
    """
    Image.new("RGB", (4032, 3024)).save(tmp_path / "0.jpg")
    arguments = (checkpoint, out, tmp_path / "0.jpg", *options)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout.splitlines()[-1]) < 500, "MiB; decoded, each photograph has 35"


def test_a_plot_shows_the_first_items_and_says_so(
    checkpoint: Path,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("vitgraph.commands.encode.MOST_PLOTTED", 2)
    names, plot = photos(tmp_path, "a.png", "b.png", "c.png"), tmp_path / "maps.png"
    command = ["encode", str(checkpoint), *names, "--out", str(out), "--plot", str(plot)]
    assert main(command) == 0
    assert "the plot shows the first 2 of 3 items" in capsys.readouterr().out
    assert plot.is_file()


@pytest.mark.parametrize(("number", "said"), [(0, "0 files"), (1, "1 file"), (1000, "1,000 files")])
def test_a_count_of_one_is_singular(number: int, said: str) -> None:
    assert counted(number, "file") == said


def test_numbers_stand_to_the_right_in_a_table() -> None:
    lines = format_table(["name", "tokens"], [["a", "7"], ["bcdef", "1,234"]]).splitlines()
    assert lines == ["name   tokens", "-----  ------", "a           7", "bcdef   1,234"]
