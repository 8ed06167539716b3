"""Graphs from the command line: what is captured for which inputs, and what is printed of it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder
from graphwrap.budgets import Batch
from tests.support.commands.command_line import Cli, refusal
from vitgraph.commands.encode_graphs import graph_encoder, summary
from vitgraph.commands.graph_options import MODALITIES, GraphOptions, read_graph_options
from vitgraph.features import load_features
from vitgraph.seeded import SEEDED as RECIPES
from vitgraph.seeded import write_seeded_checkpoint
from vitgraph.video import write_video
from weights import FAMILIES, load_encoder
from weights.published import NO_VIDEO, PUBLISHED

SEEDED = {
    family.name: next(
        name
        for name, small in family.facts.small.items()
        if small.title and not RECIPES[name].layout.images_only
    )
    for family in FAMILIES.values()
}
KINDS = ["intern_vit", "qwen2_5_vl", "qwen3_vl", "siglip"]
"""Towers of tiles, of windows and with DeepStack, and one that takes no video."""
OVER_1024_TOKENS = ("intern_vit", "llava_next", "ernie4_5_vl")
"""Families of which the clip takes more tokens, or the image does."""
FRAMES = {"ernie4_5_vl": 4, "llava_onevision": 2, "molmo2": 2}
"""The number of frames of a clip whose frames are large, for a budget on the CPU."""
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        family: write_seeded_checkpoint(folder / family, seeded, width=32)
        for family, seeded in SEEDED.items()
    }


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a.png``, ``b.png`` of two sizes, and ``clip.mp4`` of 8 frames."""
    folder = tmp_path_factory.mktemp("media")
    draw = np.random.default_rng(0)
    for name, shape in (("a", (200, 300, 3)), ("b", (320, 260, 3))):
        Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"{name}.png")
    frames = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 3, 256, 256) * 30
    write_video(folder / "clip.mp4", frames.contiguous(), 4)
    return folder


def distance(ours: EncoderOutput, theirs: EncoderOutput) -> float:
    pairs = [*zip(ours[:2], theirs[:2], strict=True)]
    pairs += zip(ours[2] or (), theirs[2] or (), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if a is not None)


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_encode_through_graphs_writes_what_encode_without_writes(
    cli: Cli, checkpoints: dict[str, Path], media: Path, tmp_path: Path, family: str
) -> None:
    files = [media / "a.png", media / "b.png"]
    clips = [] if FAMILIES[family].facts.video == NO_VIDEO else ["--video", media / "clip.mp4"]
    common = [checkpoints[family], *files, *clips, "--dtype", "float64"]
    common += ["--max-tiles", 2] if family == "intern_vit" else []
    for name, options in (
        ("plain", ["--no-graph"]),
        ("graphed", ["--graph", "--budgets", "512,2048"]),
    ):
        features = tmp_path / f"{name}.safetensors"
        code, out, err = cli("encode", *common, *options, "--out", features)
        assert code == 0, err
    names = ("plain", "graphed")
    plain, graphed = (load_features(tmp_path / f"{name}.safetensors") for name in names)
    assert graphed.items == plain.items
    for ours, theirs in zip(graphed.outputs, plain.outputs, strict=True):
        assert len(ours.deepstack_features or ()) == len(theirs.deepstack_features or ())
        assert distance(ours, theirs) < 1e-10
    count = len(plain.items)
    said = rf"^graphs: {count} items? in [123] replays? with .* padding, 0 eagerly$"
    assert re.search(said, out, re.M)


def test_without_cuda_the_trial_is_said_to_be_one(
    cli: Cli, checkpoints: dict[str, Path], media: Path, tmp_path: Path
) -> None:
    arguments = (checkpoints["qwen3_vl"], media / "a.png", "--out", tmp_path / "f.safetensors")
    code, _, err = cli("encode", *arguments, "--graph")
    assert code == 0
    assert err.startswith("vitgraph: note: there are no CUDA graphs on cpu: ")
    assert "--device cuda" in err
    code, out, err = cli("encode", *arguments)
    assert (code, err) == (0, "")
    assert "graphs:" not in out


def test_no_progress_hides_the_bar_of_the_capture(
    cli: Cli,
    checkpoints: dict[str, Path],
    media: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = list[bool]()
    capture = GraphedEncoder.capture

    def recorded(graphed: GraphedEncoder, progress: bool) -> GraphedEncoder:
        shown.append(progress)
        return capture(graphed, progress=False)

    monkeypatch.setattr(GraphedEncoder, "capture", recorded)
    monkeypatch.setattr("vitgraph.commands.arguments.is_terminal", lambda: True)
    for options in ([], ["--no-progress"]):
        given = ["--graph", "--budgets", "64", "--out", tmp_path / "f.safetensors", *options]
        assert cli("encode", checkpoints["qwen3_vl"], media / "a.png", *given).code == 0
    assert shown == [True, False]


def test_budgets_are_captured_as_given_and_rounding_is_said(
    cli: Cli, checkpoints: dict[str, Path], media: Path, tmp_path: Path
) -> None:
    arguments = (media / "a.png", "--out", tmp_path / "f.safetensors", "--graph", "--budgets")
    code, out, _ = cli("encode", checkpoints["qwen3_vl"], *arguments, "256,64,1024")
    assert code == 0
    assert "static: 3 budgets of 64 to 1024 tokens" in out
    code, out, err = cli("encode", checkpoints["intern_vit"], *arguments, "300,1024")
    assert code == 0, err
    assert "note: budgets [300, 1024] rounded up to what items can make: [512, 1024]" in err
    assert "static: 2 budgets of 512 to 1024 tokens" in out


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--graph", "--budgets", "64,0"], ["--budgets 64,0", "'0'", "64,256,1024"]),
        (["--graph", "--budgets", "64,,128"], ["''", "commas"]),
        (["--graph", "--budgets", "6.5"], ["'6.5'", "positive integer"]),
        (["--graph", "--max-batch-size", "0"], ["--max-batch-size 0", "positive integer"]),
        (["--graph", "--modality", "audio"], ["--modality audio", "image, video, image+video"]),
        (["--budgets", "64"], ["--budgets 64", "--graph"]),
        (["--max-batch-size", "2", "--no-graph"], ["--max-batch-size 2", "--graph"]),
        (["--modality", "image"], ["--modality image", "--graph"]),
        (["--graph", "--modality", "video"], ["a.png: is an image", "--modality image+video"]),
    ],
)
def test_options_that_cannot_work_are_one_line_before_anything_is_read(
    cli: Cli, tmp_path: Path, options: list[str], parts: list[str]
) -> None:
    run = cli("encode", tmp_path / "no repo", "a.png", "--out", tmp_path / "f", *options)
    error = refusal(run)
    for part in parts:
        assert part in error


def test_video_where_graphs_are_for_images_is_one_line(cli: Cli, tmp_path: Path) -> None:
    options = ("--video", "clip.mp4", "--graph", "--modality", "image", "--out", tmp_path / "f")
    assert "clip.mp4: is a video" in refusal(cli("encode", tmp_path / "no repo", *options))


def test_more_items_a_replay_than_the_smallest_budget_holds_is_refused(
    checkpoints: dict[str, Path],
) -> None:
    encoder = load_encoder(checkpoints["qwen3_vl"])
    with pytest.raises(ValueError, match=r"max_batch_size=65.*smallest budget of 64"):
        graph_encoder(encoder, GraphOptions("image", (64, 256), 65), "bf16")


def test_modality_is_by_default_what_is_named() -> None:
    for images, videos, modality, items in (
        (["a.png"], [], "image", 1),
        ([], ["c.mp4"], "video", 1),
        (["a.png"], ["c.mp4"], "image+video", 2),
    ):
        options = read_graph_options(graph=True, images=images, videos=videos)
        assert options is not None
        assert (options.modality, options.items) == (modality, items)
    assert read_graph_options(graph=False, images=["a.png"]) is None


def test_batch_size_by_default_is_one_one_and_two() -> None:
    assert {name: GraphOptions(name).items for name in MODALITIES} == {
        "image": 1,
        "video": 1,
        "image+video": 2,
    }
    assert {GraphOptions(name, None, 5).items for name in MODALITIES} == {5}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_graphs_for_images_hold_one_segment_per_item(tmp_path: Path, family: str) -> None:
    encoder = load_encoder(write_seeded_checkpoint(tmp_path, family, width=32, depth=1))
    budgets = {
        name: graph_encoder(encoder, GraphOptions(name), "bf16").budgets for name in MODALITIES
    }
    assert {budget.segments for budget in budgets["image"]} == {1}
    for name in ("video", "image+video"):
        assert {budget.segments for budget in budgets[name]} == {8, 64}
    clip = Batch.of(encoder.item_specs([[8, 16, 16]]))
    assert all(budget.exceeded_by(clip) for budget in budgets["image"])
    assert not all(budget.exceeded_by(clip) for budget in budgets["video"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_listed_family_replays_images_and_video_as_it_encodes_them(
    checkpoints: dict[str, Path], media: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``vitgraph list`` claims, seen to happen: nothing runs eagerly.

    Each budget costs a run of the encoder, so a path has two, hardly larger than the clip; in
    bfloat16, it takes ten times as long on a CPU.
    """
    monkeypatch.setattr("vitgraph.commands.encode_graphs.TRIAL_GRAPHS", 2)
    budget = 2048 if family in OVER_1024_TOKENS else 1024
    monkeypatch.setattr("vitgraph.commands.encode_graphs.TRIAL_BUDGET", budget)
    encoder = load_encoder(checkpoints[family], dtype=torch.float64)
    frames = FRAMES.get(family, 8)
    still, clip = Image.open(media / "a.png"), torch.zeros(frames, 3, 64, 96, dtype=torch.uint8)
    for kind, inputs in (("image", {"images": [still]}), ("video", {"videos": [clip]})):
        if FAMILIES[family].facts.replays[kind].startswith("no"):
            with pytest.raises(ValueError, match="video"):
                encoder.encode(**inputs)
            continue
        entries = sum(len(path.grid_thw) for path in encoder.preprocess(**inputs).paths.values())
        graphed = graph_encoder(encoder, GraphOptions(kind), "bf16")
        for ours, theirs in zip(graphed.encode(**inputs), encoder.encode(**inputs), strict=True):
            assert distance(ours, theirs) < 1e-10
        stats = graphed.stats()
        replayed = sum(budget.items for budget in stats.budgets)
        assert (stats.eager_items, replayed) == (0, entries), kind


def test_list_says_of_every_family_what_replays(cli: Cli) -> None:
    _, out, _ = cli("list")
    layouts = [layout for family in FAMILIES.values() for layout in family.layouts]
    images_only = {layout.name for layout in layouts if layout.images_only}
    for name in {model.layout for model in PUBLISHED}:
        assert f" {name}{' (no video)' * (name in images_only)}" in out
    for family in FAMILIES.values():
        said = f"graphs of images: {family.facts.replays['image']}"
        if family.facts.video != NO_VIDEO:
            said += f"; of videos: {family.facts.replays['video']}"
        assert f"\n{family.facts.title}: " in out
        assert f"{said}\n" in out


def test_summary_counts_what_was_replayed_and_why_not(checkpoints: dict[str, Path]) -> None:
    encoder = load_encoder(checkpoints["qwen3_vl"])
    graphed = graph_encoder(encoder, GraphOptions("image", (64, 128)), "bf16")
    grids = [[1, 16, 16], [1, 40, 40]]
    rows = sum(spec.input_size for spec in encoder.item_specs(grids))
    graphed(torch.zeros(rows, *encoder.row_shape), grids)
    first, second = summary(graphed.stats()).splitlines()
    assert first == "graphs: 1 item in 1 replay with 0.0% padding, 1 eagerly (over tokens: 1)"
    assert second.startswith("static: 2 budgets of 64 to 128 tokens in ")


def test_device_too_small_for_any_budget_is_one_line(
    cli: Cli,
    checkpoints: dict[str, Path],
    media: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("graphwrap.capture.Arena", full)
    out = tmp_path / "f.safetensors"
    arguments = (checkpoints["qwen3_vl"], media / "a.png", "--out", out)
    code, _, err = cli("encode", *arguments, "--graph", "--budgets", "64,256")
    assert code == 2
    assert "error: the device ran out of memory" in err
    assert "--budgets" in err
    assert not out.exists()
