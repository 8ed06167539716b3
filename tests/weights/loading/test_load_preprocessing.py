"""A checkpoint without processor files loads with defaults and one warning; bad files raise."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from tests.support.hub.checkpoints import read_json
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def without_files(folder: Path, family: str) -> Path:
    """Write a checkpoint without processor files, as ``model.save_pretrained`` does."""
    write_seeded_checkpoint(folder, family, width=64)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    return folder


def said_once(source: Path | str, **options: object) -> str:
    with pytest.warns(UserWarning, match=r"says how images are prepared") as caught:
        load_encoder(source, progress=False, **options)  # type: ignore[arg-type]
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    return str(caught[0].message)


@pytest.mark.parametrize(
    ("family", "values", "keyword"),
    [
        (
            "qwen2_vl",
            "Qwen2-VL's defaults are used (min_pixels=3136, max_pixels=1003520, mean=",
            "max_pixels",
        ),
        (
            "qwen2_5_vl",
            "Qwen2.5-VL's defaults are used (min_pixels=3136, max_pixels=1003520, mean=",
            "max_pixels",
        ),
        (
            "qwen3_omni",
            "Qwen3-VL's defaults are used (min_pixels=65536, max_pixels=16777216, mean=",
            "max_pixels",
        ),
        (
            "intern_vit_hf",
            "InternViT's defaults are used (image_size=448, max_tiles=12, mean=",
            "max_tiles",
        ),
    ],
)
def test_defaults_that_stand_in_for_a_missing_file_are_said(
    tmp_path: Path, family: str, values: str, keyword: str
) -> None:
    folder = without_files(tmp_path / "tuned", family)
    message = said_once(folder)
    assert message.startswith(
        f"{folder}: no preprocessor_config.json or processor_config.json says"
    )
    assert values in message
    assert message.endswith(
        f": copy preprocessor_config.json from the original repo, or pass {keyword}=..."
    )


def test_what_the_config_says_of_tiles_is_not_called_a_default(tmp_path: Path) -> None:
    """The config of a chat repo describes tiling, so that only mean and std are defaults."""
    folder = without_files(tmp_path / "tuned", "intern_vit_300m")
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**config, "max_dynamic_patch": 3}))
    message = said_once(folder)
    assert "InternViT's defaults are used (mean=(0.485" in message
    assert message.endswith(": copy preprocessor_config.json from the original repo")


def test_the_defaults_said_are_those_used(tmp_path: Path) -> None:
    folder = without_files(tmp_path / "tuned", "qwen2_vl")
    with pytest.warns(UserWarning, match="max_pixels=1003520"):
        defaults = load_encoder(folder).preprocessor
    published = write_seeded_checkpoint(tmp_path / "published", "qwen2_vl", width=64)
    assert defaults != load_encoder(published).preprocessor


def test_a_file_that_only_names_a_class_says_nothing_of_images(tmp_path: Path) -> None:
    folder = without_files(tmp_path / "tuned", "qwen2_vl")
    (folder / "processor_config.json").write_text('{"processor_class": "Qwen2VLProcessor"}')
    said_once(folder)


def test_a_file_of_videos_says_nothing_of_images(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen3_vl", width=64)
    (folder / "preprocessor_config.json").unlink()
    said_once(folder)


def test_either_place_of_the_images_file_is_enough(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen2_vl", width=64)
    expected = load_encoder(folder).preprocessor.images  # type: ignore[attr-defined]
    images = read_json(folder / "preprocessor_config.json")
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": images}))
    assert load_encoder(folder).preprocessor.images == expected  # type: ignore[attr-defined]


def test_timm_publishes_no_such_file_and_none_is_missed(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "intern_vit_timm", width=64)
    assert not any((folder / name).exists() for name in FILES)
    load_encoder(folder)


def test_an_extracted_tower_says_what_its_checkpoint_said(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "whole", "qwen2_vl", width=64)
    tower = load_encoder(extract_encoder(folder, tmp_path / "tower"))
    assert tower.preprocessor == load_encoder(folder).preprocessor
    tuned = without_files(tmp_path / "tuned", "qwen2_vl")
    said_once(extract_encoder(tuned, tmp_path / "tuned-tower"))


def test_looking_at_a_checkpoint_prepares_no_images(tmp_path: Path) -> None:
    assert inspect_checkpoint(without_files(tmp_path, "qwen2_vl")).family == "qwen2_vl"


def test_a_repo_without_the_file_is_named_at_every_load(
    hub: HubServer, tmp_path: Path, cache: Path
) -> None:
    commit = hub.push(REPO, without_files(tmp_path / "tuned", "qwen2_vl"))
    for _ in range(2):
        message = said_once(REPO, cache_dir=cache)
        assert message.startswith(f"{REPO}@main ({commit[:10]}): no preprocessor_config.json")
        assert "connection" not in message
    message = said_once(REPO, cache_dir=cache, local_files_only=True)
    assert "in the cache says how" in message
    assert ": load once with a connection, copy preprocessor_config.json" in message


def edit(folder: Path, name: str, **values: object) -> Path:
    (folder / name).write_text(json.dumps({**read_json(folder / name), **values}))
    return folder


def test_an_area_over_the_limit_is_a_checkpoint_error(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen2_vl", width=64)
    edit(folder, "preprocessor_config.json", max_pixels=2**40, size=None)
    with pytest.raises(CheckpointError, match=r"processor files: .*max_pixels=.* must be at most"):
        load_encoder(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"force_image_size": 28672},
        {"force_image_size": 7168, "max_dynamic_patch": 6},
        {"force_image_size": 28672, "dynamic_image_size": False},
    ],
)
def test_tiles_over_the_limit_are_a_checkpoint_error(
    tmp_path: Path, values: dict[str, object]
) -> None:
    folder = write_seeded_checkpoint(tmp_path, "intern_vit_300m", width=64)
    edit(folder, "config.json", **values)
    with pytest.raises(CheckpointError, match=r"an image may be resized to at most 268435456"):
        load_encoder(folder)


def test_bad_video_rules_are_a_checkpoint_error_at_first_use(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen3_vl", width=64)
    large = {"shortest_edge": 4096, "longest_edge": 2**40}
    edit(folder, "video_preprocessor_config.json", size=large)
    encoder = load_encoder(folder)
    photo = torch.zeros(3, 64, 64, dtype=torch.uint8)
    assert len(encoder.encode([photo])) == 1
    with pytest.raises(CheckpointError, match=rf"^{folder}: processor files: video_preprocessor"):
        copy.deepcopy(encoder).encode(videos=[photo[None]])
