"""The page of attention and nearest patches: its numbers, and what happens when one clicks."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zlib
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import vitgraph
from tests.support.chromium import CHROMIUM, open_page
from tests.support.commands.command_line import Cli, refusal
from tests.support.photographs import china, hopper
from tests.support.towers.streams import tower
from vitgraph.analysis.attention import spread_blocks
from vitgraph.analysis.cells import states_of_cells
from vitgraph.seeded import write_seeded_checkpoint

SMALL = {"qwen2_5_vl": china().resize((168, 112)), "intern_vit_300m": china().crop((0, 0, 96, 96))}
SIZES = ("--min-pixels", 4096, "--max-pixels", 20000)


@pytest.mark.parametrize("name", SMALL)
def test_states_of_patches_are_those_of_maps_and_blocks(name: str) -> None:
    encoder, image = tower(name), SMALL[name]
    inputs = encoder.preprocess([image])
    side, grid, states = states_of_cells(encoder, inputs, blocks=[1, 0], most_cells=4096)
    assert (side, [state.block for state in states]) == (1, [1, 0])
    maps = encoder.forward_intermediates(inputs, indices=[1, 0], output_fmt="NCHW")["image"]
    for state, (features,) in zip(states, maps, strict=True):
        assert state.features.shape[:2] == grid
        if len(features) == 1:  # else tiles are apart
            assert torch.allclose(state.features, features[0].movedim(0, -1), atol=1e-6)
    for point in ((0, 0, 0), (0, grid[0] - 1, grid[1] // 2)):
        (wanted,) = vitgraph.attention_maps(encoder, [image], blocks=[1, 0], queries=[point])
        for state, weights in zip(states, wanted, strict=True):
            found = state.attention[point[1] * grid[1] + point[2]]
            assert torch.allclose(found, weights[0], atol=1e-7)


def test_cells_sum_weights_and_average_queries_and_features() -> None:
    encoder, image = tower("qwen3_vl"), china().resize((160, 96))
    inputs = encoder.preprocess([image], min_pixels=160 * 96, max_pixels=160 * 96)
    side, (height, width), (state,) = states_of_cells(encoder, inputs, blocks=[0], most_cells=12)
    assert side == 3
    assert state.features.shape[:2] == (height // 3, -(-width // 3))
    _, _, (patches,) = states_of_cells(encoder, inputs, blocks=[0], most_cells=4096)
    corner = patches.features[:3, :3].mean((0, 1))
    assert torch.allclose(state.features[0, 0], corner, atol=1e-6)
    asked = [row * width + column for row in range(3) for column in range(3)]
    received = patches.attention[asked].mean(0)
    assert torch.allclose(state.attention[0, 0, 0], received[:3, :3].sum(), atol=1e-6)
    assert torch.allclose(state.attention[0, 0, -1], received[:3, 9:].sum(), atol=1e-6)
    assert torch.allclose(state.attention.sum((1, 2)), torch.ones(len(state.attention)))


def test_default_blocks_spread_from_the_first_to_the_last() -> None:
    encoder = tower("qwen3_vl")
    last = len(encoder.paths["image"].blocks) - 1
    assert spread_blocks(encoder, "image", 2) == [0, last]
    assert spread_blocks(encoder, "image", 99) == [*range(last + 1)]


def read_page(page: Path) -> tuple[str, dict[str, Any]]:
    """Return the HTML of a page, and the numbers in it."""
    html = page.read_text("utf-8")
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    numbers: dict[str, Any] = json.loads(text)
    return html, numbers


def unpack(text: str, cells: int, matches: int) -> list[Any]:
    content = zlib.decompress(base64.b64decode(text))
    parts, start = [], 0
    for kind, count in (("<f4", 1), ("<u2", matches), ("i1", matches), ("u1", cells)):
        array = np.frombuffer(content, kind, cells * count, start)
        parts.append(array.reshape(cells, count))
        start += array.nbytes
    assert start == len(content)
    return parts


def test_a_page_holds_attention_and_nearest_patches_of_every_patch(tmp_path: Path) -> None:
    encoder, images = tower("qwen3_vl"), [china().resize((96, 96)), hopper().resize((96, 64))]
    page = tmp_path / "maps.html"
    sizes = {"min_pixels": 4096, "max_pixels": 9216}
    vitgraph.write_explorer(page, encoder, images, blocks=[0, -1], progress=False, **sizes)
    _, data = read_page(page)
    assert data["blocks"] == [0, len(encoder.paths["image"].blocks) - 1]
    maps = [
        encoder.forward_intermediates(inputs, indices=[-1], output_fmt="NCHW")["image"][0][0]
        for inputs in (encoder.preprocess([image], **sizes) for image in images)
    ]
    rows = torch.cat([features.movedim(1, -1).flatten(0, 2) for features in maps])
    rows = torch.nn.functional.normalize(rows - rows.mean(0))
    cosines = (rows @ rows.T).fill_diagonal_(-2)
    start = 0
    for number, (entry, image) in enumerate(zip(data["images"], images, strict=True)):
        assert entry["name"] == f"image {number}"
        cells = entry["rows"] * entry["columns"]
        largest, nearest, values, levels = unpack(entry["states"][-1], cells, data["matches"])
        wanted = cosines[start : start + cells].topk(data["matches"])
        found = cosines[start : start + cells].gather(1, torch.tensor(nearest.astype(np.int64)))
        assert torch.allclose(found, wanted.values, atol=1e-5)
        assert np.abs(values / 100 - wanted.values.numpy()).max() <= 0.0051
        queries = [(0, 1, 2)]
        ((weights,),) = vitgraph.attention_maps(encoder, [image], queries=queries, **sizes)
        asked = entry["columns"] + 2
        shown = largest[asked] * (levels[asked] / 63.0) ** 2
        assert np.abs(shown - weights.flatten().numpy()).max() <= largest[asked] / 63
        start += cells


def test_a_page_loads_nothing_and_escapes_names(tmp_path: Path) -> None:
    photograph, page = tmp_path / "<b>&amp;</script>.png".replace("/", ""), tmp_path / "maps.html"
    china().crop((0, 0, 96, 96)).save(photograph)
    title = "<script>alert(1)</script>"
    vitgraph.write_explorer(page, tower("qwen3_vl"), [photograph], title=title, progress=False)
    html, data = read_page(page)
    assert data["images"][0]["name"] == photograph.name
    assert "<script>alert" not in html
    assert html.count("</script>") == 2
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<link|@import|url\(", html)
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', html)
    assert unescape(policy).startswith("default-src 'none'; img-src data:;")
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in unescape(policy)


@pytest.mark.parametrize("name", ["clip", "deepseek_vl2", "intern_vit_300m"])
def test_a_picture_is_what_the_tower_reads(name: str, tmp_path: Path) -> None:
    photograph, page = china().resize((120, 60)), tmp_path / "maps.html"
    vitgraph.write_explorer(page, tower(name), [photograph], blocks=[0], progress=False)
    (entry,) = read_page(page)[1]["images"]
    picture = Image.open(io.BytesIO(base64.b64decode(entry["picture"].partition(",")[2])))
    assert picture.width / picture.height == pytest.approx(entry["width"] / entry["height"])
    corner = np.array(picture)[2, 2].astype(int)
    if name == "deepseek_vl2":  # which lays the photograph into a square of one colour
        assert np.abs(corner - 127).max() < 6
    else:
        assert np.abs(corner - 127).max() > 20


@pytest.mark.parametrize(
    ("name", "path"), [("llava_next", "image"), ("llava_next", "tiles"), ("deepseek_vl2", "image")]
)
def test_a_picture_of_tiles_lies_as_their_maps(name: str, path: str, tmp_path: Path) -> None:
    """It had the whole image in the place of the first tile."""
    photograph, page = china().resize((900, 400)), tmp_path / "maps.html"
    encoder = tower(name)
    vitgraph.write_explorer(page, encoder, [photograph], blocks=[0], path=path, progress=False)
    (entry,) = read_page(page)[1]["images"]
    picture = Image.open(io.BytesIO(base64.b64decode(entry["picture"].partition(",")[2])))
    assert picture.width / picture.height == pytest.approx(entry["width"] / entry["height"])
    wanted = photograph.resize(picture.size)
    if name == "deepseek_vl2":
        wanted = ImageOps.pad(photograph, picture.size, color=(127, 127, 127))
    difference = np.array(picture).astype(float) - np.array(wanted).astype(float)
    assert np.abs(difference).mean() < 12


def test_a_wrapped_encoder_or_no_image_is_refused(tmp_path: Path) -> None:
    encoder, page = tower("qwen3_vl"), tmp_path / "maps.html"
    for wrong in (vitgraph.GraphedEncoder(encoder), encoder.accelerated("torch")):
        with pytest.raises(ValueError, match="gives no attention maps"):
            vitgraph.write_explorer(page, wrong, [china()], progress=False)
    with pytest.raises(ValueError, match="pass at least one"):
        vitgraph.write_explorer(page, encoder, [], progress=False)
    with pytest.raises(ValueError, match="block 99 does not exist"):
        vitgraph.write_explorer(page, encoder, [china()], blocks=[99], progress=False)
    assert not page.exists()


@pytest.fixture(scope="module")
def checkpoint_of_maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maps") / "tower"
    return write_seeded_checkpoint(folder, "qwen3_vl", depth=3, width=32)


@pytest.fixture
def photographs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "street.png", tmp_path / "face.png"]
    china().resize((160, 96)).save(paths[0])
    hopper().resize((96, 128)).save(paths[1])
    return paths


def test_the_command_writes_a_page_and_replaces_only_its_own(
    checkpoint_of_maps: Path, photographs: list[Path], cli: Cli, tmp_path: Path
) -> None:
    page = tmp_path / "maps.html"
    command = ("maps", checkpoint_of_maps, *photographs, "--html", page, "--no-progress")
    for blocks in ("0,-1", "1"):
        run = cli(*command, "--blocks", blocks, "--dtype", "float32", *SIZES)
        assert run.code == 0, run.err
        assert f"wrote {page}" in run.out
    data = read_page(page)[1]
    assert data["blocks"] == [1]
    assert [entry["name"] for entry in data["images"]] == ["street.png", "face.png"]
    page.write_text("notes")
    assert "exists and is not a maps page" in refusal(cli(*command))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--blocks", "a"), "--blocks a: must be numbers of blocks"),
        (("--html", "maps.png"), "let its name end in .html"),
        (("--max-pixels", "0"), "--max-pixels 0: must be positive"),
        (("--device", "x"), "--device x: must be"),
    ],
)
def test_mistakes_of_the_command_are_said_in_words(
    extra: tuple[str, str], message: str, photographs: list[Path], cli: Cli
) -> None:
    options = {"--html": "maps.html"} | dict([extra])
    arguments = [part for option in options.items() for part in option]
    assert message in refusal(cli("maps", "tower", photographs[0], *arguments))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as Debian's package chromium has it")
def test_a_click_shows_attention_and_nearest_patches(
    checkpoint_of_maps: Path, photographs: list[Path], tmp_path: Path
) -> None:
    encoder, file = vitgraph.load_encoder(checkpoint_of_maps, progress=False), tmp_path / "a.html"
    vitgraph.write_explorer(
        file, encoder, photographs, min_pixels=4096, max_pixels=20000, progress=False
    )
    first, second = read_page(file)[1]["images"]
    asked = "document.getElementById('asked').textContent"
    with open_page(tmp_path / "profile") as page:
        for width, dark in ((1200, False), (390, True)):
            page.open(file, width, 800, dark)
            page.wait_for("document.querySelectorAll('#matches li').length === 8")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            ink, paper = page.evaluate(
                "[getComputedStyle(document.body).color, getComputedStyle(document.body)"
                ".backgroundColor].map((text) => Number(text.match(/\\d+/)[0]))"
            )
            assert (ink > paper) == dark
        page.open(file, 1200, 800)
        page.wait_for("document.querySelectorAll('#matches li').length === 8")
        left, top, wide, high = page.evaluate(
            "(() => { const a = document.getElementById('nearest').getBoundingClientRect();"
            "return [a.left, a.top, a.width, a.height]; })()"
        )
        before = page.evaluate("document.querySelector('canvas.heat').toDataURL()")
        page.click(left + 2.5 * wide / first["width"], top + 1.5 * high / first["height"])
        page.wait_for(f"{asked}.startsWith('From row 1, column 2 of street.png')")
        assert page.evaluate("document.querySelector('canvas.heat').toDataURL()") != before
        page.evaluate("document.querySelectorAll('#blocks button')[0].click()")
        page.wait_for(f"{asked}.endsWith('block 0.')")
        page.evaluate("document.querySelectorAll('#images button')[1].click()")
        page.wait_for(f"{asked}.includes('of face.png')")
        columns = page.evaluate("document.querySelector('canvas.heat').width")
        assert columns == second["columns"]
        assert {*page.requests} == {file.as_uri()}
        assert not page.faults
