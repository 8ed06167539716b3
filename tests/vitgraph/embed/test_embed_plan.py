"""``vitgraph embed --plan``: the arithmetic of hours and bytes, the sample, and what is printed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.commands.command_line import Cli, refusal
from tests.support.photographs import china
from vitgraph.embedding.planning.estimate import Estimate, Rate, Sample, report
from vitgraph.embedding.planning.sample import sample_files, seconds_by_tokens, seconds_of
from vitgraph.embedding.sources.reading import File
from vitgraph.terminal import readable

SAMPLE = Sample(
    read_bytes=70e3,
    read_seconds=0.002,
    decode_seconds=0.008,
    written_bytes=8192,
    tokens=[300] * 4,
    unreadable=0,
)
"""One thread reads and decodes 100 images per second, 12 threads make 1,200."""


def estimate(rate: float | None, sample: Sample = SAMPLE) -> Estimate:
    return Estimate(10_000_000, sample, None if rate is None else Rate(rate, "as measured"), 12)


def rows_of(said: str) -> list[list[str]]:
    """The cells of the table."""
    lines = [line.split() for line in said.splitlines()]
    return [cells for cells in lines if len(cells) == 5 and cells[0].isdigit()]


# --- arithmetic -----------------------------------------------------------------------------------


def test_hours_follow_from_the_slower_of_gpu_and_threads() -> None:
    made = estimate(600.0)
    assert made.bottleneck == "encoding"
    assert made.hours(1) == pytest.approx(10_000_000 / 600 / 3600)
    assert made.hours(8) == pytest.approx(10_000_000 / 600 / 3600 / 8)
    assert made.cores == pytest.approx(600 * 0.008)
    made = estimate(2400.0)
    assert made.bottleneck == "decoding"
    assert made.per_second == pytest.approx(1200)
    assert made.hours(1) == pytest.approx(10_000_000 / 1200 / 3600)


def test_a_slow_store_binds_where_threads_wait_for_it() -> None:
    made = estimate(600.0, SAMPLE._replace(read_seconds=0.1))
    assert made.bottleneck == "reading"
    assert made.per_second == pytest.approx(12 / 0.108)


def test_without_a_rate_the_threads_alone_count() -> None:
    made = estimate(None)
    assert made.per_second == pytest.approx(1200)
    assert made.bottleneck == "decoding"
    assert "--device cuda measures it" in report(made, "photos", None, "vectors [2048]")


def test_the_report_names_hours_bytes_cores_and_what_binds() -> None:
    said = report(estimate(600.0), "photos", None, "vectors [2048] of float32")
    assert "photos: 10,000,000 images" in said
    assert "one device: 600 images per second, as measured" in said
    assert rows_of(said) == [
        ["1", "600", "4.63", "4.8", "42.0"],
        ["8", "4,800", "0.58", "38.4", "336.0"],
        ["64", "38,400", "0.07", "307.2", "2,688.0"],
    ]
    assert "bottleneck: encoding" in said
    assert "700.0 GB to read, about 81.9 GB to write (vectors [2048] of float32)" in said
    one = report(estimate(600.0, SAMPLE._replace(unreadable=2)), "photos", 3, "vectors")
    assert [row[0] for row in rows_of(one)] == ["3"]
    assert "sample: 4 images, 2 more cannot be encoded;" in one


def test_seconds_lie_on_a_line_between_measured_sizes_and_grow_in_proportion() -> None:
    sizes = [
        {"tokens": 100, "images per second": 100.0},
        {"tokens": 300, "images per second": 50.0},
        {"tokens": 300, "images per second": 25.0},
    ]
    known = seconds_by_tokens(sizes)
    assert known == {100: 0.01, 300: pytest.approx(0.03)}
    for tokens, seconds in ((10, 0.01), (100, 0.01), (200, 0.02), (300, 0.03), (600, 0.06)):
        assert seconds_of(tokens, known) == pytest.approx(seconds)


def test_every_file_has_the_same_chance_to_be_chosen() -> None:
    files = [File(f"{number}", "") for number in range(400)]
    count, chosen = sample_files(iter(files), 40)
    assert (count, len(chosen), len(set(chosen))) == (400, 40, 40)
    quarters = Counter(int(file.key) // 100 for file in chosen)
    assert min(quarters.values()) >= 5
    assert sample_files(iter(files), 40)[1] == chosen
    assert sample_files(files[:3], 40) == (3, files[:3])


def test_bytes_are_shown_with_the_unit_that_suits_them() -> None:
    assert [readable(count) for count in (999, 2e6, 81.92e9, 2.5e13)] == [
        "1.0 kB",
        "2.0 MB",
        "81.9 GB",
        "25.0 TB",
    ]


# --- command --------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(40):
        china().resize((96 + number, 64)).save(folder / f"{number:02d}.jpg")
    return folder


def test_a_plan_reads_a_sample_and_writes_nothing(
    cli: Cli, checkpoint: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.load.read_tensors", lambda *_: pytest.fail("reads weights"))
    before = sorted(tmp_path.rglob("*"))
    run = cli("embed", checkpoint, photos, "--plan", "--gpus", 2)
    assert run.code == 0, run.err
    assert f"{photos}: 40 images" in run.out
    assert "sample: 32 images; on average" in run.out
    assert "its rate is not known" in run.out
    assert [row[0] for row in rows_of(run.out)] == ["2"]
    assert "(vectors [" in run.out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_device_that_is_named_is_measured(
    cli: Cli, checkpoint: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitgraph.embedding.planning.sample.LEAST_SECONDS", 0.05)
    run = cli("embed", checkpoint, photos, "--plan", "--device", "cpu", "--dtype", "float32")
    assert run.code == 0, run.err
    assert "images per second, measured on this cpu" in run.out
    assert [row[0] for row in rows_of(run.out)] == ["1", "8", "64"]


def test_bytes_of_whole_outputs_are_those_that_the_job_writes(
    cli: Cli, checkpoint: Path, photos: Path, tmp_path: Path
) -> None:
    what = ("--pool", "none", "--fields", "pooler_output,last_hidden_state,deepstack_features")
    settings = (checkpoint, photos, *what, "--out-dtype", "float16")
    planned = cli("embed", *settings, "--plan")
    assert planned.code == 0, planned.err
    run = cli("embed", *settings, "--out", tmp_path / "vectors", "--format", "safetensors")
    assert run.code == 0, run.err
    stored = sum(path.stat().st_size for path in (tmp_path / "vectors").glob("*.safetensors"))
    told = float(planned.out.split("about ")[-1].split(" MB")[0])
    assert told == pytest.approx(stored / 1e6, rel=0.05)


def test_bad_images_of_the_sample_are_counted(cli: Cli, checkpoint: Path, photos: Path) -> None:
    for path in sorted(photos.iterdir())[::2]:
        path.write_bytes(b"no image")
    run = cli("embed", checkpoint, photos, "--plan")
    assert run.code == 0, run.err
    assert re.search(r"sample: 1\d images, 1\d more cannot be encoded;", run.out)
    for path in photos.iterdir():
        path.write_bytes(b"no image")
    told = refusal(cli("embed", checkpoint, photos, "--plan"))
    assert "none of 32 sampled images can be read; " in told


def test_options_of_a_plan_are_checked(cli: Cli, checkpoint: Path, photos: Path) -> None:
    assert "--gpus 0: must be" in refusal(cli("embed", checkpoint, photos, "--plan", "--gpus", 0))
    told = refusal(cli("embed", checkpoint, photos, "--out", photos / "x", "--gpus", 2))
    assert "--gpus 2: is for --plan" in told


def test_a_tower_with_committed_rates_is_planned_by_its_tokens() -> None:
    from benchmarks.scale.measure import without_weights
    from vitgraph.embedding.planning.sample import committed_rate

    known = without_weights("Qwen/Qwen3-VL-8B-Instruct")
    rate = committed_rate(known, [300, 300])
    assert rate is not None
    assert rate.per_second == pytest.approx(358.5)
    assert rate.known_by.startswith("as Qwen3-VL-8B on one NVIDIA H200 (")
    assert committed_rate(without_weights("Qwen/Qwen2-VL-2B-Instruct"), [300]) is None


def test_seconds_of_one_measured_number_are_in_proportion() -> None:
    from vitgraph.embedding.planning.sample import seconds_of

    assert [seconds_of(tokens, {500: 0.2}) for tokens in (250, 1000)] == [0.1, 0.4]
    assert [seconds_of(tokens, {100: 0.1, 500: 0.2}) for tokens in (50, 1000)] == [0.1, 0.4]
