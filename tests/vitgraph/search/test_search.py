"""``vitgraph search``: the nearest images of a job, and a page that shows them and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weights
from tests.support.commands.command_line import Cli, refusal
from tests.support.photographs import china
from vitgraph.features import load_embeddings
from vitgraph.search import vectors as module
from vitgraph.search.vectors import Vectors

Command = list[str]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of five small photographs, which a test may change."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(5):
        left = 40 * number
        china().crop((left, 0, left + 64, 64)).save(folder / f"{number:02d}.png")
    return folder


@pytest.fixture
def made(command: Command, cli: Cli) -> Callable[..., Path]:
    """Runs the job with more arguments, and returns its folder."""

    def run(*arguments: object) -> Path:
        assert cli(*command, *arguments).code == 0
        return Path(command[command.index("--out") + 1])

    return run


def expected(out: Path, vector: Any, top: int) -> list[tuple[str, float]]:
    """The definition, by whole matrices."""
    keys, matrix = load_embeddings(out)
    rows = matrix - matrix.mean(axis=0)
    query = vector - matrix.mean(axis=0)
    cosines = rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)
    return [(keys[row], float(cosines[row])) for row in np.argsort(-cosines)[:top]]


def test_an_image_of_the_job_is_nearest_to_itself(
    made: Callable[..., Path], photos: Path, cli: Cli
) -> None:
    out = made("--normalize", "--min-pixels", "4096", "--max-pixels", "20000")
    keys, matrix = load_embeddings(out)
    run = cli("search", out, photos / keys[1], "--top", 2, "--no-progress")
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    assert lines[0].split() == ["rank", "cosine", "key"]
    wanted = expected(out, matrix[1], 2)
    assert wanted[0][0] == keys[1]
    for line, (key, cosine) in zip(lines[2:4], wanted, strict=True):
        _, value, name = line.split(maxsplit=2)
        assert name == key
        assert float(value) == pytest.approx(cosine, abs=2e-4)
    assert "after subtracting the mean vector of the folder" in run.out
    assert "pool mean, length 1, min pixels 4096, max pixels 20000" in run.out
    commit = json.loads((out / "manifest.json").read_text())["settings"]["commit"]
    assert commit in run.out


@pytest.mark.parametrize("format", ["npy", "safetensors", "parquet"])
def test_cosines_are_those_of_the_definition_in_every_format(
    made: Callable[..., Path], format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    out = made("--format", format)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 1)
    query = np.random.default_rng(0).normal(size=load_embeddings(out)[1].shape[1])
    hits = Vectors(str(out)).nearest(query, 3)
    for hit, (key, cosine) in zip(hits, expected(out, query, 3), strict=True):
        assert hit.key == key
        assert hit.cosine == pytest.approx(cosine, abs=1e-5)
        assert hit.file is not None
        assert hit.file.key == key


def test_of_images_with_equal_cosines_the_first_are_returned(
    made: Callable[..., Path], photos: Path
) -> None:
    for number in range(60):
        shutil.copy(photos / "03.png", photos / f"{number + 10}.png")
    out = made("--shard-items", "100")
    keys, matrix = load_embeddings(out)
    equal = np.eye(*matrix.shape, dtype=np.float32)
    equal[3:] = equal[3]
    np.save(out / "00000.npy", equal)
    hits = Vectors(str(out)).nearest(equal[3], 7, centred=False)
    assert [hit.key for hit in hits] == keys[3:10]


def test_vectors_that_are_not_finite_are_left_out_and_counted(
    made: Callable[..., Path], photos: Path, cli: Cli
) -> None:
    out = made()
    keys, matrix = load_embeddings(out)
    with (out / "00001.npy").open("rb+") as file:
        array = np.load(file)
        array[0, 3], array[1] = np.nan, np.inf
        file.seek(0)
        np.save(file, array)
    finite = np.isfinite(load_embeddings(out)[1]).all(axis=1)
    assert finite.sum() == 3
    kept = matrix[finite] - matrix[finite].mean(axis=0)
    query = matrix[0] - matrix[finite].mean(axis=0)
    wanted = kept @ query / np.linalg.norm(kept, axis=1) / np.linalg.norm(query)
    vectors = Vectors(str(out))
    hits = vectors.nearest(matrix[0], 100)
    assert (vectors.count, vectors.left_out) == (3, 2)
    assert [hit.key for hit in hits] == list(np.array(keys)[finite][np.argsort(-wanted)])
    assert np.allclose([hit.cosine for hit in hits], np.sort(wanted)[::-1], atol=1e-5)
    run = cli("search", out, photos / keys[0], "--no-progress")
    assert run.code == 0
    assert "skipped 2 vectors" in run.out


def test_more_images_than_there_are_give_all(made: Callable[..., Path]) -> None:
    out = made()
    keys, matrix = load_embeddings(out)
    hits = Vectors(str(out)).nearest(matrix[0], 100)
    assert sorted(hit.key for hit in hits) == sorted(keys)


class Tags(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


NASTY = "<img src=x onerror=alert(1)> & \"q\" 'a'.jpg"


@pytest.mark.skipif(os.name == "nt", reason="such names are none there")
def test_page_shows_pictures_of_the_job_and_asks_nothing_of_others(
    made: Callable[..., Path], photos: Path, tmp_path: Path, cli: Cli
) -> None:
    china().resize((64, 48)).save(photos / NASTY)
    (photos / os.fsdecode(b"b\xff\nc.jpg")).write_bytes((photos / NASTY).read_bytes())
    out, page = made(), tmp_path / "page.html"
    run = cli("search", out, photos / NASTY, "--html", page, "--no-progress")
    assert run.code == 0, run.err
    assert f"wrote {page}" in run.out
    text = page.read_text(encoding="utf-8")
    found = Tags(text)
    pictures = [attributes for tag, attributes in found.tags if tag == "img"]
    assert len(pictures) == 1 + len(load_embeddings(out)[0])
    assert all(picture["src"].startswith("data:image/jpeg;base64,") for picture in pictures)
    assert all("onerror" not in picture for picture in pictures)
    assert pictures[0]["alt"] == NASTY
    assert NASTY in found.text
    assert "b\\udcff\\nc.jpg" in found.text
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "link", "iframe", "base", "form"})
    assert not re.search(r"src=\"(?!data:)|url\(|@import", text)
    links = [attributes["href"] for tag, attributes in found.tags if "href" in attributes]
    assert set(links) == {path.as_uri() for path in photos.iterdir()}
    assert "#1 · 1.000" in found.text
    (policy,) = [a["content"] for t, a in found.tags if t == "meta" and "http-equiv" in a]
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert f"style-src 'sha256-{digest}'" in policy
    assert "style=" not in text
    assert "after subtracting the mean vector of the folder" in found.text


def test_page_has_no_picture_of_a_file_that_is_another_one_now(
    made: Callable[..., Path], photos: Path, tmp_path: Path, cli: Cli
) -> None:
    out, page = made(), tmp_path / "page.html"
    keys = load_embeddings(out)[0]
    query = tmp_path / "query.png"
    china().save(query)
    (photos / keys[0]).write_bytes((photos / keys[1]).read_bytes() + b"more")
    (photos / keys[1]).unlink()
    os.mkfifo(photos / keys[1])
    run = cli("search", out, query, "--html", page, "--no-progress")
    assert run.code == 0, run.err
    found = Tags(page.read_text(encoding="utf-8"))
    assert len([tag for tag, _ in found.tags if tag == "img"]) == 1 + len(keys) - 2
    assert found.text.count("no picture:") == 2


def test_page_fetches_no_address(made: Callable[..., Path], tmp_path: Path, cli: Cli) -> None:
    from vitgraph.embedding.sources.reading import File, ImageReader, SourceOptions
    from vitgraph.search.page import write_page
    from vitgraph.search.vectors import Hit

    query = tmp_path / "query.png"
    china().save(query)
    hit = Hit("a", 0.5, File("a", "https://example.org/a.jpg", kind="url"))
    reader = ImageReader(SourceOptions(fetch_urls=True))
    write_page(tmp_path / "page.html", query, [hit, Hit("b", 0.4, None)], {}, reader)
    text = (tmp_path / "page.html").read_text()
    assert text.count("nothing is fetched for a page") == 1
    assert text.count("the job does not say where it was read") == 1


def test_a_page_replaces_a_page_and_no_other_file(
    made: Callable[..., Path], photos: Path, tmp_path: Path, cli: Cli
) -> None:
    out, page = made(), tmp_path / "page.html"
    photograph = photos / load_embeddings(out)[0][0]
    for _ in range(2):
        assert cli("search", out, photograph, "--html", page, "--no-progress").code == 0
    page.write_text("<p>mine</p>")
    for target, said in (
        (page, "exists and is not a search page"),
        (tmp_path / "page.txt", "let its name end in .html"),
        (tmp_path / "none" / "page.html", "a folder that exists"),
    ):
        assert said in refusal(cli("search", out, photograph, "--html", target))
    assert page.read_text() == "<p>mine</p>"


def test_the_encoder_is_that_of_the_manifest(
    made: Callable[..., Path], photos: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = made()
    manifest = json.loads((out / "manifest.json").read_text())
    local = manifest["settings"]["checkpoint"]
    manifest["settings"] |= {"checkpoint": "owner/name", "commit": "c" * 40, "dtype": "float64"}
    manifest["settings"]["precision"] = "fp8"
    (out / "manifest.json").write_text(json.dumps(manifest))
    asked: dict[str, Any] = {}
    load = weights.load_encoder

    def loading(repo: str, **keywords: Any) -> Any:
        asked.update(keywords, repo=repo)
        return load(local, dtype=keywords["dtype"], progress=False)

    monkeypatch.setattr(weights, "load_encoder", loading)
    photograph = photos / load_embeddings(out)[0][0]
    run = cli("search", out, photograph, "--no-progress", "--local-files-only")
    assert run.code == 0
    assert "the job ran products in fp8, the query none" in run.out
    wanted = {"repo": "owner/name", "revision": "c" * 40, "dtype": "float64"}
    assert {name: asked[name] for name in wanted} == wanted
    assert asked["local_files_only"] is True


def test_a_checkpoint_that_changed_is_refused(
    command: Command, made: Callable[..., Path], photos: Path, tmp_path: Path, cli: Cli
) -> None:
    repo = shutil.copytree(command[1], tmp_path / "repo")
    command[1] = str(repo)
    out = made()
    photograph = photos / load_embeddings(out)[0][0]
    path = repo / "config.json"
    path.write_text(path.read_text() + "\n")
    assert "has changed since the job was begun" in refusal(cli("search", out, photograph))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["settings"]["checkpoint"] = str(repo / "nowhere")
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert "is not there any more" in refusal(cli("search", out, photograph))


def test_jobs_that_cannot_be_searched_are_refused(
    made: Callable[..., Path], photos: Path, tmp_path: Path, cli: Cli
) -> None:
    photograph = photos / "c.jpg"
    china().resize((64, 48)).save(photograph)
    assert "has no manifest.json" in refusal(cli("search", tmp_path, photograph))
    out = made()
    (out / "00000_stats.json").unlink()
    assert "1 of 3 shards missing, the first is 0" in refusal(cli("search", out, photograph))


def test_all_tokens_of_images_are_no_vectors(
    made: Callable[..., Path], photos: Path, cli: Cli
) -> None:
    out = made("--pool", "none")
    photograph = photos / "00.png"
    assert "holds all tokens of every image" in refusal(cli("search", out, photograph))


def test_mistakes_in_the_arguments_are_named(tmp_path: Path, cli: Cli) -> None:
    photograph = tmp_path / "photo.png"
    china().resize((64, 48)).save(photograph)
    (tmp_path / "text.jpg").write_text("hello")
    for arguments, said in (
        ((photograph, "--top", 0), "--top 0: must be at least 1"),
        ((tmp_path / "none.jpg",), "there is no such file"),
        ((tmp_path / "text.jpg",), "cannot be read as an image"),
        ((tmp_path,), "is a folder"),
        ((photograph, "--device", "gpu"), "--device gpu"),
    ):
        assert said in refusal(cli("search", tmp_path, *arguments))
