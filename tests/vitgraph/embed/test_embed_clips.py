"""``vitgraph embed`` of clips: one row per clip, beside images, from every kind of source."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from encoders import Encoder
from tests.support.commands.command_line import Cli, refusal
from tests.support.commands.embed_jobs import close, run_job
from tests.support.hub.checkpoints import Written
from tests.support.photographs import china
from vitgraph.features import load_embeddings
from vitgraph.video import write_video

Embed = Callable[..., int]
SAMPLED = ("--num-frames", 4)
KEYS = ["a.png", "b.mp4", "c/d#1.mkv"]


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a photograph and two different clips of eight frames, at 4 per second."""
    folder = tmp_path_factory.mktemp("film")
    (folder / "c").mkdir()
    pixels = torch.from_numpy(np.array(china())).permute(2, 0, 1)
    china().crop((0, 0, 96, 64)).save(folder / KEYS[0])
    for key, top in (("b.mp4", 0), ("c/d#1.mkv", 200)):
        frames = [pixels[:, top : top + 64, 20 * n : 20 * n + 96] for n in range(8)]
        write_video(folder / key, torch.stack(frames), 4)
    return folder


@pytest.fixture(scope="module")
def wanted(encoder: Encoder, film: Path) -> torch.Tensor:
    """The vectors of the photograph and of four frames of each clip."""
    clips = [film / key for key in KEYS[1:]]
    return encoder.embed([film / KEYS[0]], clips, pool="mean", num_frames=4)


def kinds(out: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(out.glob("?????.csv")):
        for row in csv.DictReader(path.read_text().splitlines()):
            yield row["key"], row["kind"]


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_a_folder_of_images_and_clips_has_a_row_of_each(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor, cli: Cli, format: str
) -> None:
    assert embed(film, *SAMPLED, "--shard-items", 2, "--format", format) == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == KEYS
    assert close(matrix, wanted)
    assert list(kinds(tmp_path / "out")) == list(zip(KEYS, ("image", "clip", "clip"), strict=True))
    assert cli("embed", "--verify", tmp_path / "out").code == 0


def test_frames_are_sampled_by_rate(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor
) -> None:
    assert embed(film, "--fps", 2) == 0  # two seconds
    assert close(load_embeddings(tmp_path / "out")[1], wanted)


def test_all_tokens_of_a_clip_are_one_item(
    embed: Embed, film: Path, tmp_path: Path, encoder: Encoder
) -> None:
    assert embed(film, *SAMPLED, "--pool", "none") == 0
    keys, items = load_embeddings(tmp_path / "out")
    (output,) = encoder.encode(videos=[film / KEYS[1]], num_frames=4)
    assert keys == KEYS
    assert close(items[1], output.pooler_output)
    assert list(kinds(tmp_path / "out"))[1] == ("b.mp4", "clip")


def test_a_list_names_images_and_clips(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor
) -> None:
    shutil.copytree(film, tmp_path / "film")
    (tmp_path / "film" / "list.txt").write_text("c/d#1.mkv\na.png\n")
    assert embed(tmp_path / "film" / "list.txt", *SAMPLED) == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == ["c/d#1.mkv", "a.png"]
    assert close(matrix, wanted[[2, 0]])


def test_a_clip_alone_is_a_source(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor
) -> None:
    assert embed(film / "b.mp4", *SAMPLED) == 0
    assert close(load_embeddings(tmp_path / "out")[1], wanted[1:2])


def test_a_tar_file_holds_images_and_clips(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor
) -> None:
    with tarfile.open(tmp_path / "film.tar", "w") as tar:
        for key in KEYS:
            tar.add(film / key, key)
    assert embed(tmp_path / "film.tar", *SAMPLED) == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == [f"film.tar/{key}" for key in KEYS]
    assert close(matrix, wanted)


@pytest.mark.parametrize("cells", ["bytes", "dicts", "paths"])
def test_a_column_of_a_table_holds_clips(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor, cells: str
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    shutil.copytree(film, tmp_path / "film")
    contents = [(film / key).read_bytes() for key in KEYS[1:]]
    column = {
        "bytes": contents,
        "dicts": [{"bytes": content, "path": None} for content in contents],
        "paths": KEYS[1:],
    }[cells]
    parquet.write_table(arrow.table({"video": column}), tmp_path / "film" / "t.parquet")
    assert embed(tmp_path / "film" / "t.parquet", *SAMPLED, "--column", "video") == 0
    keys, matrix = load_embeddings(tmp_path / "out")
    assert keys == ["t.parquet/0", "t.parquet/1"]
    assert close(matrix, wanted[1:])
    assert [kind for _, kind in kinds(tmp_path / "out")] == ["clip", "clip"]


def test_a_data_set_of_videos_is_a_source(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor
) -> None:
    datasets = pytest.importorskip("datasets")
    cells = [{"bytes": (film / key).read_bytes(), "path": None} for key in KEYS[1:]]
    features = datasets.Features({"video": datasets.Video()})
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict({"video": cells}, features).to_parquet(
        tmp_path / "set" / "train.parquet"
    )
    assert embed(f"hf://datasets/{tmp_path}/set", *SAMPLED, "--column", "video") == 0
    assert close(load_embeddings(tmp_path / "out")[1], wanted[1:])


def test_without_a_choice_of_frames_clips_are_left_out(
    embed: Embed, film: Path, tmp_path: Path, cli: Cli, repo: Path
) -> None:
    run = cli("embed", repo, film, "--out", tmp_path / "out", "--no-progress")
    assert run.code == 0
    assert "1 .mkv" in run.out
    assert "--fps or --num-frames" in run.out
    assert load_embeddings(tmp_path / "out")[0] == ["a.png"]
    (tmp_path / "list.txt").write_text(f"{film / 'b.mp4'}\n")
    for source in (film / "c", film / "b.mp4", tmp_path / "list.txt"):
        options = ("--out", tmp_path / "other", "--any-path")
        assert "--fps or --num-frames" in refusal(cli("embed", repo, source, *options))


def test_the_choice_of_frames_is_a_setting_of_the_job(
    command: list[str], film: Path, tmp_path: Path, cli: Cli
) -> None:
    command[2] = str(film)
    assert cli(*command, *SAMPLED).code == 0
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    assert (settings["fps"], settings["num_frames"]) == (None, 4)
    assert "begun with num_frames 4, now it is 2" in refusal(cli(*command, "--num-frames", 2))
    for wrong in ((*SAMPLED, "--fps", 2), ("--fps", 0), ("--fps", "nan"), ("--num-frames", -1)):
        assert str(wrong[0]) in refusal(cli(*command, *wrong))
    assert "only images" in refusal(cli(*command, *SAMPLED, "--format", "vllm"))


def test_two_workers_embed_clips(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor
) -> None:
    for rank in (1, 0):
        assert embed(film, *SAMPLED, "--shard-items", 1, "--shard", f"{rank}/2") == 0
    assert close(load_embeddings(tmp_path / "out")[1], wanted)


def test_towers_without_videos_refuse_clips(
    written: Written, film: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_job(written("siglip"), film, tmp_path / "out", *SAMPLED) == 2
    said = capsys.readouterr().err
    assert "num_frames=4: this tower takes only images" in said
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_damaged_and_changed_clips_are_errors_of_their_items(
    embed: Embed, film: Path, tmp_path: Path, wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(film, tmp_path / "film")
    (tmp_path / "film" / "b.mp4").write_bytes(b"no clip")
    preprocess = Encoder.preprocess

    def touching(self: Encoder, *items: object, **limits: object) -> object:
        os.utime(tmp_path / "film" / "c" / "d#1.mkv", (1, 1))
        return preprocess(self, *items, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr(Encoder, "preprocess", touching)
    assert embed(tmp_path / "film", *SAMPLED) == 3
    assert load_embeddings(tmp_path / "out")[0] == ["a.png"]
    errors = (tmp_path / "out" / "errors.csv").read_text()
    assert "b.mp4" in errors
    assert "d#1.mkv: has changed since the job listed it" in errors


@pytest.mark.parametrize("inside", ["folder", "tar"])
def test_a_clip_is_searched_for_and_shown(
    embed: Embed, film: Path, tmp_path: Path, cli: Cli, inside: str
) -> None:
    source, start = film, ""
    if inside == "tar":
        source, start = tmp_path / "film.tar", "film.tar/"
        with tarfile.open(source, "w") as tar:
            for key in KEYS:
                tar.add(film / key, key)
    out, page = tmp_path / "out", tmp_path / "page.html"
    assert embed(source, *SAMPLED) == 0
    run = cli("search", out, film / KEYS[2], "--top", 3, "--html", page, "--no-progress")
    assert run.code == 0, run.err
    assert ["1", "1.0000", start + KEYS[2]] in [line.split() for line in run.out.splitlines()]
    assert "num frames 4" in run.out
    text = page.read_text()
    assert text.count('<img src="data:image/jpeg;base64,') == 4
    assert "no picture" not in text


def test_images_are_searched_by_a_clip(
    command: list[str], film: Path, tmp_path: Path, cli: Cli
) -> None:
    command[2] = str(film)
    assert cli(*command).code == 0  # the photograph alone
    search = ("search", tmp_path / "out", film / "b.mp4", "--no-progress")
    assert "say which frames to take with --fps or --num-frames" in refusal(cli(*search))
    assert "a.png" in cli(*search, *SAMPLED).out
    said = refusal(cli("search", tmp_path / "out", film / "a.png", *SAMPLED))
    assert "--num-frames 4: samples a clip" in said
