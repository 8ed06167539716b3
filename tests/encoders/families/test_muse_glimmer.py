"""Muse-Glimmer: positions, windows, packing, graphs, and the pixels of transformers' processor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers.models.muse_glimmer.image_processing_muse_glimmer import (
    MuseGlimmerImageProcessor,
    smart_resize,
)
from transformers.models.muse_glimmer.video_processing_muse_glimmer import (
    MuseGlimmerVideoProcessor,
)

from encoders.inputs.sampling import sample_frames
from encoders.meta.muse_glimmer import position_taps
from encoders.meta.muse_glimmer_pixels import CellPreprocessor, nearest_grid
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, build_pair, distance, distances, draw_pixels, tiny
from tests.oracles.versions import needs
from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.photographs import china, photographs
from vitgraph import attention_maps
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

GRIDS = [[1, 6, 10], [2, 4, 4], [1, 2, 14], [1, 12, 2]]
OURS = CellPreprocessor.muse(14, 2, 2)
with_lanczos = needs("torchvision", "0.27", "it has no Lanczos, and the processor goes bicubic")


def test_items_packed_together_are_those_of_the_source() -> None:
    encoder, reference = build_pair(BY_NAME["muse_glimmer"], BY_NAME["muse_glimmer"].tiny)
    pixels = draw_pixels(encoder, GRIDS)
    theirs = BY_NAME["muse_glimmer"].output(reference, pixels, torch.tensor(GRIDS))
    assert max(distances(encoder(pixels, GRIDS), theirs).values()) <= 1e-5


@pytest.mark.parametrize("form", ["graphed", "accelerated", "alone"])
def test_every_way_of_running_gives_the_same(form: str) -> None:
    encoder = tiny("muse_glimmer")
    pixels = draw_pixels(encoder, GRIDS)
    wanted = encoder(pixels, GRIDS)
    found: torch.Tensor | None
    if form == "alone":
        rows = pixels.split([t * h * w for t, h, w in GRIDS])
        parts = [encoder(part, [grid]) for part, grid in zip(rows, GRIDS, strict=True)]
        found = torch.cat([part.pooler_output for part in parts])
    elif form == "graphed":
        graphed = GraphedEncoder(encoder, backend="static", max_budget=64)
        found = graphed(pixels, GRIDS).pooler_output
    else:
        found = encoder.accelerated()(pixels, GRIDS).pooler_output
    assert found is not None
    assert distance(found, wanted.pooler_output) <= 2e-6


@pytest.mark.parametrize(("h", "w"), [(4, 4), (6, 10), (64, 2)])
def test_the_table_is_resized_with_rows_and_columns_exchanged(h: int, w: int) -> None:
    index, weight = position_taps([(2, h, w)], 4, 2 * h * w + 3, torch.float64)
    table = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = (table[index] * weight[..., None]).sum(1)
    y, x = ((torch.arange(n, dtype=torch.float64) + 0.5) * 2 / n - 1 for n in (w, h))
    places = torch.stack((x.expand(w, h), y[:, None].expand(w, h)), -1)
    maps = table.T.view(1, 5, 4, 4)
    wanted = F.grid_sample(maps, places[None], padding_mode="zeros", align_corners=False)
    wanted = wanted[0].flatten(1).T.repeat(2, 1)
    torch.testing.assert_close(found[: 2 * h * w], wanted)
    assert not found[2 * h * w :].any()


def test_attention_stays_in_windows_but_in_full_blocks() -> None:
    encoder = tiny("muse_glimmer")
    image = china().resize((8 * 14, 8 * 14))
    (maps,) = attention_maps(encoder, image, blocks=None, queries=[(0, 1, 6)])
    first, second, third = (maps[0] for maps in maps)
    window = torch.zeros(8, 8, dtype=torch.bool)
    window[:4, 4:] = True
    assert all(torch.equal(weights > 0, window) for weights in (first, third))
    assert (second > 0).all()


@pytest.mark.parametrize("most", [144, 4096])
def test_grids_are_those_of_the_source(most: int) -> None:
    generator = torch.Generator().manual_seed(most)
    sizes = torch.randint(1, 4000, (400, 2), generator=generator).tolist()
    sizes += [[n, n] for n in range(10, 3000, 61)] + [[1080, 1920], [10, 10], [100, 3000]]
    for height, width in sizes:
        rows, columns = nearest_grid(height, width, 28, most)
        assert (28 * rows, 28 * columns) == smart_resize(height, width, 28, most)


@with_lanczos
def test_pixels_are_those_of_the_processors() -> None:
    file = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1}
    files = {"processor_config": {"image_processor": {**file, "max_image_tokens": 64}}}
    files["processor_config"]["video_processor"] = {**file, "max_video_frame_tokens": 20}
    ours = OURS.with_files(files)
    images: list[Any] = [*photographs()[:3], china().resize((90, 333)), Image.new("RGB", (3, 5))]
    theirs = MuseGlimmerImageProcessor(max_image_tokens=64)(images, return_tensors="pt")
    found = ours(images)
    assert torch.equal(found.grid_thw, theirs["image_grid_thw"])
    torch.testing.assert_close(found.pixel_values, theirs["pixel_values"], rtol=0, atol=1e-5)
    frames = [china().resize((200, 120)).rotate(n) for n in range(5)]
    processor = MuseGlimmerVideoProcessor(max_video_frame_tokens=20, do_sample_frames=False)
    theirs = processor([frames], return_tensors="pt")
    found = ours([], [frames])
    assert torch.equal(found.grid_thw, theirs["video_grid_thw"])
    wanted = theirs["pixel_values_videos"]
    torch.testing.assert_close(found.pixel_values, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("total", "rate", "fps"), [(300, 30.0, 2), (9000, 25.0, 2), (3, 24.0, 2)])
def test_frames_are_sampled_as_the_source_does(total: int, rate: float, fps: float) -> None:
    metadata: Any = SimpleNamespace(fps=rate, total_num_frames=total)
    processor = MuseGlimmerVideoProcessor()
    wanted = processor.sample_frames(metadata, temporal_patch_size=2, fps=fps).tolist()
    rule = OURS.videos
    found = sample_frames(
        total, rule.sampling, fps=fps, source_fps=rate, max_frames=rule.max_frames
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resample": 3}, "resample=3 is not implemented: it must be 1"),
        ({"merge_size": 4}, "merge_size=4 but the tower has 2"),
        ({"max_image_tokens": 0}, "max_image_tokens=0 must be a positive integer"),
    ],
    ids=str,
)
def test_a_file_is_read_strictly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OURS.with_files({"preprocessor_config": change})


def test_few_fields_are_enough_and_strangers_are_refused(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "muse_glimmer", width=64)
    whole = load_encoder(folder)

    def thin(config: dict[str, Any]) -> None:
        kept = ("model_type", "num_attention_heads", "layer_types")
        section = {name: config["vision_config"][name] for name in kept}
        config.clear()
        config.update(model_type="muse_glimmer", vision_config=section)

    edit_config(folder, thin)
    found = load_encoder(folder)
    assert same_weights(found, whole)
    assert found.config == whole.config
    edit_tensors(folder, lambda t: t.update({"model.vision_adapter.fc3.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): model.vision_adapter.fc3"):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layer_types": ["chunked_attention"] * 2},
            "must name window_attention or full_attention",
        ),
        ({"layer_types": ["full_attention"]}, "for each of the 2 blocks"),
        ({"pos_emb_width": 16}, "pos_emb_width=16 is not implemented: must be 32"),
    ],
    ids=str,
)
def test_a_tower_that_runs_otherwise_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = write_seeded_checkpoint(tmp_path, "muse_glimmer", width=32)
    edit_config(folder, lambda config: config["vision_config"].update(fields))
    with pytest.raises(CheckpointError, match=message):
        load_encoder(folder)
