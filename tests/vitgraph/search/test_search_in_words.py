"""``vitgraph search`` in words and ``--pairs``: of jobs pooled by the head of CLIP and SigLIP."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitgraph
from tests.support.commands.command_line import Cli, refusal
from tests.support.commands.embed_jobs import run_in_twos
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from tests.support.hub.two_towers import write_two_towers
from tests.support.photographs import china
from vitgraph.features import load_embeddings
from vitgraph.seeded import write_seeded_checkpoint

Job = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small whole SigLIP model, which no test changes."""
    return write_two_towers(tmp_path_factory.mktemp("models") / "siglip", "siglip")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, photos: Path, model: Path) -> Path:
    """A job of the model, whose pool is the default; no test changes it."""
    out = tmp_path_factory.mktemp("jobs") / "out"
    assert run_in_twos(model, photos, out) == 0
    return out


def assert_hits(said: str, out: Path, repo: Path, query: str) -> None:
    """The first lines are the images with the largest plain cosines, by the definition."""
    keys, matrix = load_embeddings(out)
    text = vitgraph.embed_texts(repo, [query], normalize=True)[0].numpy()
    cosines = matrix @ text / np.linalg.norm(matrix, axis=1)
    lines = [line.split() for line in said.splitlines()[2:5]]
    assert len(lines) == 3
    for line, row in zip(lines, np.argsort(-cosines, kind="stable"), strict=False):
        assert (line[2], float(line[1])) == (keys[row], pytest.approx(cosines[row], abs=1e-4))


def test_words_find_images_by_plain_cosines(
    job: Path, model: Path, cli: Cli, tmp_path: Path
) -> None:
    page, words = tmp_path / "page.html", "a red <car>"
    run = cli("search", job, words, "--top", 3, "--html", page, "--no-progress")
    assert run.code == 0, run.err
    assert_hits(run.out, job, model, words)
    assert "plain cosine with the text, over 12 vectors" in run.out
    assert "pool head" in run.out
    text = page.read_text()
    assert "Nearest to <bdi>a red &lt;car&gt;</bdi>" in text
    assert text.count("<img ") == 3
    assert "plain cosine" in text


def test_words_find_images_of_a_repo_offline(
    model: Path, photos: Path, hub: HubServer, cli: Cli, tmp_path: Path
) -> None:
    commit, out = hub.push(REPO, model), tmp_path / "out"
    assert run_in_twos(REPO, photos, out) == 0  # type: ignore[arg-type]
    settings = json.loads((out / "manifest.json").read_text())["settings"]
    assert (settings["pool"], settings["commit"]) == ("head", commit)
    hub.push(REPO, photos)  # another commit, which is not the job's
    assert cli("search", out, "blue sky", "--no-progress").code == 0
    hub.requests.clear()
    run = cli("search", out, "blue sky", "--top", 3, "--local-files-only", "--no-progress")
    assert run.code == 0, run.err
    assert hub.requests == []
    assert_hits(run.out, out, model, "blue sky")


@pytest.mark.parametrize("query", ["nowhere.jpg", "photos/street", "./a red car", "clip.MP4"])
def test_a_mistyped_path_is_no_text(job: Path, cli: Cli, query: str) -> None:
    said = refusal(cli("search", job, query))
    assert f"{query}: there is no such file" in said
    assert "a query in words has no / and does not end like an image" in said


def test_the_name_of_a_folder_is_no_text(
    job: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cat").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "cat: is a folder, and a query is" in refusal(cli("search", job, "cat"))
    assert cli("search", job, "a cat", "--no-progress").code == 0


def test_jobs_that_cannot_be_asked_in_words_say_why(
    job: Path,
    model: Path,
    photos: Path,
    cli: Cli,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    askable = "CLIP, MetaCLIP, SigLIP and SigLIP2 repos, such as openai/clip-vit-large-patch14"
    out = tmp_path / "mean"
    assert run_in_twos(model, photos, out, "--pool", "mean") == 0
    capsys.readouterr()
    said = refusal(cli("search", out, "a red car"))
    assert "its vectors were pooled by --pool mean" in said
    assert askable in said
    out, tower = tmp_path / "tower", write_seeded_checkpoint(tmp_path / "vit", "siglip", width=64)
    assert run_in_twos(vitgraph.extract_encoder(tower, tmp_path / "alone"), photos, out) == 0
    capsys.readouterr()
    said = refusal(cli("search", out, "a red car"))
    assert "has no text half" in said
    assert askable in said
    for query, message in (("", "the query is empty"), ("  ", "the query is empty")):
        assert message in refusal(cli("search", job, query))
    assert "samples a clip, and a car is words" in refusal(cli("search", job, "a car", "--fps", 1))


def test_pairs_are_listed_in_a_table_and_on_a_page(job: Path, cli: Cli, tmp_path: Path) -> None:
    table, page = tmp_path / "pairs.csv", tmp_path / "page.html"
    run = cli("search", job, "--pairs", 0.99999, "--csv", table, "--html", page, "--no-progress")
    assert run.code == 0, run.err
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    same = {"00.png", "03.png", "07.png"}  # three equal photographs
    assert {frozenset((row["key"], row["other_key"])) for row in rows} == {
        frozenset(same - {key}) for key in same
    }
    assert all(float(row["cosine"]) == pytest.approx(1, abs=1e-5) for row in rows)
    assert "plain cosine, over 12 vectors; 3 pairs with a cosine of at least 0.99999" in run.out
    text = page.read_text()
    assert "<h1>Pairs of near-duplicates" in text
    assert text.count('<li class="set">') == 3
    assert text.count("<img ") == 6


def test_above_max_pairs_groups_are_listed(job: Path, cli: Cli, tmp_path: Path) -> None:
    out = Path(shutil.copytree(job, tmp_path / "out"))
    with (out / "00005.npy").open("rb+") as file:
        array = np.load(file)
        array[0] = np.nan
        file.seek(0)
        np.save(file, array)
    table, page = tmp_path / "groups.csv", tmp_path / "page.html"
    options: list[Any] = ["--pairs", 0.99999, "--max-pairs", 2, "--csv", table, "--html", page]
    run = cli("search", out, *options, "--no-progress")
    assert run.code == 0, run.err
    assert "3 pairs with a cosine of at least 0.99999, more than --max-pairs 2: 1 group" in run.out
    assert "skipped 1 vector with" in run.out
    assert table.read_text() == "group,key\n1,00.png\n1,03.png\n1,07.png\n"
    assert page.read_text().count("<img ") == 3
    run = cli("search", out, "--pairs", 0.9999999, "--max-pairs", 0, "--no-progress")
    assert run.code == 0, run.err


def test_mistakes_in_the_options_of_pairs_are_named(job: Path, cli: Cli, tmp_path: Path) -> None:
    photo, table = tmp_path / "photo.png", tmp_path / "pairs.csv"
    china().resize((64, 48)).save(photo)
    table.write_text("mine")
    for arguments, said in (
        ([], "give either a query"),
        ([photo, "--pairs", 0.9], "give either a query"),
        (["--pairs", 1], "--pairs 1.0: must lie between 0 and 1"),
        (["--pairs", 0.9, "--max-pairs", -1], "--max-pairs -1: must not be negative"),
        (["--pairs", 0.9, "--num-frames", 2], "samples a query, and --pairs has none"),
        (["--pairs", 0.9, "--csv", table], "must be a new file in a folder that exists"),
        (["--pairs", 0.9, "--csv", tmp_path / "pairs.txt"], "let its name end in .csv"),
        ([photo, "--csv", tmp_path / "new.csv"], "is written with --pairs only"),
    ):
        assert said in refusal(cli("search", job, *arguments))
    assert table.read_text() == "mine"
