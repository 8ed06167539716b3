"""Checkpoints of CLIP and LLaVA: layouts, sparse configs, decoys, strict errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from tests.oracles import distance
from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from tests.support.photographs import china, flower
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder

EXACT: dict[str, float] = {"rtol": 0, "atol": 1e-5}
"""What normalising in another order changes: less than a hundredth of one of 255 levels."""
LLAVA = ("llava", "llava_next")
KINDS = ("clip", "metaclip_2", *LLAVA)
TOWER = {name: "vision_tower." * (name in LLAVA) + "vision_model." for name in KINDS}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    return write_seeded_checkpoint(tmp_path / kind, kind, width=64)


def test_the_text_half_is_neither_read_nor_fetched(
    folder: Path, hub: HubServer, cache: Path
) -> None:
    hub.push(REPO, folder)
    fetched = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(fetched, load_encoder(folder))
    assert all(torch.isfinite(value).all() for value in fetched.state_dict().values())


@pytest.mark.parametrize("extra", ["embeddings.cls_token", "head.probe", "text.weight"])
def test_a_stranger_under_the_prefix_is_an_error(folder: Path, kind: str, extra: str) -> None:
    edit_tensors(folder, lambda t: t.update({TOWER[kind] + extra: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=rf"unexpected \(1\): .*{extra}"):
        load_encoder(folder)


def test_old_position_ids_are_ignored(folder: Path, kind: str) -> None:
    whole, name = load_encoder(folder), f"{TOWER[kind]}embeddings.position_ids"
    edit_tensors(folder, lambda t: t.update({name: torch.arange(4)[None]}))
    assert same_weights(load_encoder(folder), whole)


@pytest.mark.parametrize("name", ["visual_projection.weight", "vision_model.pre_layrnorm.weight"])
def test_a_missing_tensor_is_an_error(tmp_path: Path, name: str) -> None:
    folder = write_seeded_checkpoint(tmp_path / "clip", "clip", width=64)
    edit_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=rf"missing \(1\): {name}"):
        load_encoder(folder)


def test_a_sparse_config_is_filled_from_shapes(folder: Path) -> None:
    whole = load_encoder(folder)
    kept = {"model_type", "num_attention_heads", "hidden_act"}

    def thin(config: dict[str, Any]) -> None:
        section = config["vision_config"]
        config["vision_config"] = {key: section[key] for key in kept if key in section}
        config.pop("projection_dim", None)
        config["text_config"].pop("hidden_size", None)

    edit_config(folder, thin)
    found = load_encoder(folder)
    assert same_weights(found, whole)
    assert found.config == whole.config


def test_a_tower_alone_has_a_projection_if_its_file_has(tmp_path: Path) -> None:
    """Image encoders of other models are published as CLIPVisionModelWithProjection."""
    folder = write_seeded_checkpoint(tmp_path / "clip", "clip", width=64)
    whole = load_encoder(folder)

    def alone(config: dict[str, Any]) -> None:
        section = config.pop("vision_config")
        config.clear()
        config.update(section)

    edit_config(folder, alone)
    assert same_weights(load_encoder(folder), whole)
    edit_tensors(folder, lambda t: t.pop("visual_projection.weight"))
    assert load_encoder(folder).pooling_head is None


@pytest.mark.parametrize("kind", LLAVA)
@pytest.mark.parametrize("prefix", ["vision_tower.", "model.vision_tower."])
def test_llava_as_transformers_saves_it_loads(tmp_path: Path, prefix: str, kind: str) -> None:
    folder = write_seeded_checkpoint(tmp_path / "old", kind, width=64)
    new = write_seeded_checkpoint(tmp_path / "new", kind, width=64, prefix=prefix)
    assert same_weights(load_encoder(new), load_encoder(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": [-2, -5]}, r"vision_feature_layer=\[-2, -5\]: must be an int"),
        ({"vision_feature_layer": -9}, "select_layer=-9 must be from -3 to 2"),
        ({"vision_feature_select_strategy": "full"}, "select_strategy='full' is not implemented"),
        ({"multimodal_projector_bias": False}, "bias=False is not implemented"),
        ({"model_type": "vipllava"}, "'vipllava' is not supported: it reads several layers"),
        ({"model_type": "llava_llama"}, "leaves out the tower, which the repos of llava-hf"),
    ],
    ids=str,
)
def test_a_llava_that_differs_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "llava", "llava", width=64)
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_pinpoints": [[336, 400]]}, r"image_grid_pinpoints=.* multiples of 336"),
        ({"image_grid_pinpoints": 4}, r"image_grid_pinpoints=4 must be pairs"),
        ({"vision_feature_select_strategy": "full"}, "select_strategy='full' is not implemented"),
    ],
    ids=str,
)
def test_a_llava_next_that_differs_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_seeded_checkpoint(tmp_path / "next", "llava_next", width=64)
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(folder)


def test_llava_next_without_sizes_has_those_of_its_class(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "next", "llava_next", width=64)
    whole = load_encoder(folder)
    edit_config(folder, lambda config: config.pop("image_grid_pinpoints"))
    assert load_encoder(folder).config == whole.config


def timm_folder(tmp_path: Path, name: str, classes: int) -> tuple[Path, torch.nn.Module]:
    """A small checkpoint of timm, as its own code saves it."""
    from timm.models import save_for_hf

    torch.manual_seed(0)
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 64}
    model = timm.create_model(name, num_classes=classes, **sizes).eval()
    images = {
        "input_size": (3, 64, 64),
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.3, 0.4),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
    }
    model.pretrained_cfg = {**model.pretrained_cfg, **images}
    save_for_hf(model, str(tmp_path), model_args=sizes, safe_serialization=True)
    return tmp_path, model


@pytest.mark.parametrize("classes", [0, 24])
@pytest.mark.parametrize("kind", ["base_patch16_clip_", "base_patch32_clip_quickgelu_"])
def test_a_repo_of_timm_gives_what_timm_gives(tmp_path: Path, kind: str, classes: int) -> None:
    folder, model = timm_folder(tmp_path, f"vit_{kind}224", classes)
    encoder = load_encoder(folder, progress=False)
    photos = [china(), flower(), china().resize((101, 83)), flower().resize((40, 300))]
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    pixels = torch.stack([transform(photo) for photo in photos])
    torch.testing.assert_close(encoder.preprocess(photos).pixel_values, pixels, **EXACT)
    with torch.no_grad():
        wanted = model(pixels)
    assert distance(encoder.embed(photos, pool="head" if classes else "cls"), wanted) <= 1e-5
    saved = encoder.save_pretrained(tmp_path / "saved")
    state, stored = model.state_dict(), load_file(saved / "model.safetensors")
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)


def open_clip_folder(tmp_path: Path, resize: str, quick: bool) -> tuple[Path, Any]:
    """A small checkpoint of open_clip, in the form that its ``push_to_hf_hub`` writes."""
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    vision = {"image_size": 64, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16}
    text = {"context_length": 8, "vocab_size": 60, "width": 64, "heads": 2, "layers": 1}
    model_cfg = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text, "quick_gelu": quick}
    images = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"}
    config = {"model_cfg": model_cfg, "preprocess_cfg": {**images, "resize_mode": resize}}
    model, folder = open_clip.CLIP(**model_cfg).eval(), tmp_path / "whole"
    folder.mkdir()
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder, model


@pytest.mark.filterwarnings("default")  # of open_clip
@pytest.mark.parametrize("resize", ["shortest", "squash"])
@pytest.mark.parametrize("quick", [False, True])
def test_a_repo_of_open_clip_gives_its_image_vectors(
    tmp_path: Path, resize: str, quick: bool
) -> None:
    folder, model = open_clip_folder(tmp_path, resize, quick)
    from open_clip.transform import image_transform

    encoder = load_encoder(folder, progress=False)
    photos = [china(), flower(), china().resize((101, 83)), flower().resize((40, 300))]
    section = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "resize_mode": resize}
    transform = image_transform(64, is_train=False, interpolation="bicubic", **section)
    pixels = torch.stack([transform(photo) for photo in photos])
    torch.testing.assert_close(encoder.preprocess(photos).pixel_values, pixels, **EXACT)
    with torch.no_grad():
        wanted = model.encode_image(pixels)
    assert distance(encoder.embed(photos, pool="head"), wanted) <= 1e-5
    again = load_encoder(encoder.save_pretrained(tmp_path / "saved"), progress=False)
    assert same_weights(again, encoder)
    assert (again.config, again.preprocessor) == (encoder.config, encoder.preprocessor)
    stored, state = load_file(tmp_path / "saved" / "model.safetensors"), model.visual.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    out = extract_encoder(folder, tmp_path / "tower")
    assert same_weights(load_encoder(out, progress=False), encoder)


def test_a_repo_of_open_clip_is_fetched_and_kept(
    tmp_path: Path, hub: HubServer, cache: Path
) -> None:
    folder, _ = open_clip_folder(tmp_path, "shortest", True)
    hub.push(REPO, folder)
    fetched = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(fetched, load_encoder(folder))
    kept = load_encoder(REPO, cache_dir=cache, local_files_only=True)
    assert same_weights(fetched, kept)
    assert kept.preprocessor == fetched.preprocessor


def test_a_tower_of_another_form_in_open_clip_is_refused(tmp_path: Path) -> None:
    folder, _ = open_clip_folder(tmp_path, "shortest", True)
    path = folder / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["model_cfg"]["vision_cfg"]["attentional_pool"] = True
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="attentional_pool=True is not implemented"):
        inspect_checkpoint(folder)
