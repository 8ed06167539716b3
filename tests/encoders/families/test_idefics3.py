"""Idefics3 and SmolVLM: pixels of transformers' processors, videos, positions, loading."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor
from transformers.models.smolvlm.image_processing_smolvlm import SmolVLMImageProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata

from encoders.idefics.idefics3 import nearest_below
from encoders.idefics.idefics3_pixels import SplitPreprocessor
from encoders.inputs.exact_resize import torch_has_lanczos
from encoders.inputs.intake import to_rgb
from encoders.inputs.resizing import resize
from encoders.inputs.sampling import sample_frames
from tests.oracles import BY_NAME, build_encoder, build_pair, distance, draw_pixels
from tests.oracles.references.idefics3 import idefics3_output
from tests.oracles.versions import needs
from tests.support.hub.checkpoints import edit_tensors, read_json, same_weights
from tests.support.photographs import china, flower, photographs
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def section(tile: int, tiles: int, **more: Any) -> dict[str, Any]:
    longest = {"size": {"longest_edge": tile * tiles}, "max_image_size": {"longest_edge": tile}}
    return {**longest, **HALF, "resample": 1, **more}


with_lanczos = needs("torchvision", "0.27", "it has no Lanczos, and the processor goes bicubic")


@with_lanczos
@pytest.mark.parametrize("processor", [Idefics3ImageProcessor, SmolVLMImageProcessor])
@pytest.mark.parametrize(("tile", "tiles"), [(56, 4), (60, 3), (98, 1)])
def test_tiles_are_those_of_the_processor(processor: Any, tile: int, tiles: int) -> None:
    rng = random.Random(tile)
    drawn = [china().resize((rng.randint(8, 400), rng.randint(8, 400))) for _ in range(8)]
    file = section(tile, tiles)
    ours = SplitPreprocessor(14, image_size=tile).with_files({"preprocessor_config": file})
    cut, reference = tile // 14 * 14, processor(**file, return_row_col_info=True)
    for image in [*photographs()[:4], *drawn]:
        wanted = reference([image], return_tensors="pt")
        got = ours([image])
        assert torch.equal(got.pixel_values, wanted["pixel_values"][0, :, :, :cut, :cut])
        rows, columns = wanted["rows"][0][0], wanted["cols"][0][0]
        assert got.tiles == [(columns, rows, True) if rows else (1, 1, False)]


@with_lanczos
def test_without_splitting_there_is_the_whole_image_alone() -> None:
    file = section(70, 4, do_image_splitting=False)
    ours = SplitPreprocessor(14, image_size=70).with_files({"preprocessor_config": file})
    wanted = Idefics3ImageProcessor(**file)([flower()], return_tensors="pt")["pixel_values"]
    assert torch.equal(ours([flower()]).pixel_values, wanted[0])


SAMPLING = {"fps": 1, "max_frames": 3, "video_size": {"longest_edge": 112}}


@with_lanczos
@pytest.mark.parametrize("size", [(40, 60), (300, 90), (112, 112)])
@pytest.mark.parametrize("files", ["own", "published", "without size"])
def test_frames_are_those_of_the_video_processor(size: tuple[int, int], files: str) -> None:
    clip = torch.stack([to_rgb(china().resize(size)), to_rgb(flower().resize(size))])
    image, video = section(56, 4), {**section(56, 2), "image_mean": [0.4] * 3}
    if files == "own":
        texts = {"preprocessor_config": image, "video_preprocessor_config": video}
    else:
        video = {**image, "video_sampling": SAMPLING}
        if files == "without size":
            del video["size"]
        texts = {"preprocessor_config": video}
    ours = SplitPreprocessor(14, image_size=56).with_files(texts)
    wanted = SmolVLMVideoProcessor(**json.loads(json.dumps(video)))([clip], return_tensors="pt")
    got = ours(videos=[clip])
    assert torch.equal(got.pixel_values, wanted["pixel_values"][0])
    assert (got.grid_thw.tolist(), got.tiles) == ([[2, 4, 4]], [(1, 1, False)])
    both = ours([china()], [clip])
    assert torch.equal(both.pixel_values[-2:], got.pixel_values)
    if files != "own":
        assert ours.max_frames == 3


@pytest.mark.parametrize("total", [1, 7, 90, 400, 5000])
@pytest.mark.parametrize("fps", [0.1, 1, 2.5])
def test_frames_are_chosen_as_by_the_video_processor(total: int, fps: float) -> None:
    processor = SmolVLMVideoProcessor(num_frames=16, fps=1)
    for rate in (12.0, 23.976, 30.0):
        about = VideoMetadata(total, fps=rate, duration=total / rate)
        wanted = processor.sample_frames(about, fps=fps).tolist()
        assert sample_frames(total, "smolvlm", fps=fps, source_fps=rate, max_frames=16) == wanted


def test_a_bad_rule_for_videos_is_told_with_the_first_video() -> None:
    files = {"preprocessor_config": section(56, 4), "video_preprocessor_config": section(70, 4)}
    ours = SplitPreprocessor(14, image_size=56).with_files(files)
    assert len(ours([china()]).pixel_values) > 1
    with pytest.raises(ValueError, match="max_image_size=70 but the tower takes tiles of 56"):
        ours(videos=[torch.zeros(1, 3, 9, 9, dtype=torch.uint8)])
    with pytest.raises(ValueError, match="none of these"):
        ours.without_videos(ValueError("none of these"))(videos=["clip.mp4"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_image_size": {"longest_edge": 70}}, "max_image_size=70 but the tower takes tiles"),
        ({"size": {"height": 9}}, "must have longest_edge"),
        ({"size": {"longest_edge": 5000}}, "size=5000 must be at most 4096"),
    ],
)
def test_a_file_is_read_strictly(change: dict[str, Any], message: str) -> None:
    ours = SplitPreprocessor(14, image_size=60)
    with pytest.raises(ValueError, match=message):
        ours.with_files({"preprocessor_config": {**section(60, 3), **change}})


@pytest.mark.parametrize("entries", [14, 16, 24, 26, 27, 32])
def test_a_tile_of_the_published_size_has_the_table_as_its_positions(entries: int) -> None:
    """The source finds them by divisions in float32, which could miss an entry."""
    assert nearest_below(entries, entries).tolist() == list(range(entries))


@pytest.mark.parametrize(("side", "scale"), [(384, 3), (364, 2)])
def test_tokens_of_a_published_tile_are_those_of_transformers(side: int, scale: int) -> None:
    family = BY_NAME["idefics3"]
    changes = {**family.tiny, "num_hidden_layers": 1, "image_size": side}
    config = {**family.config, "scale_factor": scale}
    encoder, reference = build_pair(type(family)(**{**vars(family), "config": config}), changes)
    patches = side // 14
    pixels, grid = draw_pixels(encoder, [[2, patches, patches]]), [[2, patches, patches]]
    ours, theirs = encoder(pixels, grid), idefics3_output(reference, pixels, torch.tensor(grid))
    assert distance(ours.pooler_output, theirs.pooler_output) <= 1e-5
    assert len(ours.pooler_output) == 2 * (patches // scale) ** 2


def test_colmodernvbert_has_the_model_in_a_section(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "one", "modernvbert", width=64)
    inner = write_seeded_checkpoint(
        tmp_path / "col", "modernvbert", width=64, prefix="vlm.vision_model."
    )
    model = read_json(folder / "config.json")
    del model["pixel_shuffle_factor"], model["text_config"]["hidden_size"]
    (inner / "config.json").write_text(
        json.dumps({"model_type": "colmodernvbert", "vlm_config": model})
    )
    whole, found = load_encoder(folder), load_encoder(inner)
    assert same_weights(found, whole)
    assert found.config == whole.config


def test_modernvbert_without_its_connector_is_refused(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "modernvbert", width=64)
    edit_tensors(folder, lambda t: t.pop("model.connector.modality_projection.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): model.connector"):
        load_encoder(folder)


def test_maps_join_the_tiles_and_leave_the_whole_image_out() -> None:
    encoder = build_encoder(BY_NAME["idefics3"], BY_NAME["idefics3"].tiny)
    inputs = encoder.preprocess([china().resize((300, 150))])
    (columns, rows, whole) = (inputs.tiles or [])[0]
    assert whole
    outputs = encoder(inputs)
    (maps,) = encoder.feature_maps(outputs, inputs)
    assert maps["image"].shape == (1, 8 * rows, 8 * columns, 64)


def test_images_are_resized_by_lanczos_where_torch_has_no_kernel_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(batch: Tensor, **settings: Any) -> Tensor:
        raise ValueError("Anti-alias option is restricted to bilinear and bicubic modes")

    image = to_rgb(china())
    sizes = ((100, 333), (700, 900), (427, 64))
    wanted = [resize(image, *size, mode="lanczos") for size in sizes]
    monkeypatch.setattr("encoders.inputs.exact_resize.F.interpolate", refuses)
    without = torch_has_lanczos.__wrapped__  # else it would remember what the real torch has
    monkeypatch.setattr("encoders.inputs.exact_resize.torch_has_lanczos", without)
    for size, pixels in zip(sizes, wanted, strict=True):
        resized = resize(image, *size, mode="lanczos")
        apart = (resized.int() - pixels.int()).abs()
        assert resized.shape == pixels.shape
        assert apart.max() <= 2
        assert (apart > 0).double().mean() < 0.01
        assert (apart > 1).double().mean() < 1e-4
