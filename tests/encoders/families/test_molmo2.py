"""Molmo2: crops of transformers' processor, tokens of windows that several crops share, loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image

from encoders import EncoderOutput, Molmo2Config, Molmo2Encoder, VisionInputs
from encoders.allenai.molmo2_pixels import OverlapPreprocessor, best_grid
from encoders.inputs.sampling import sample_frames
from encoders.streams.calls import select_items, split_inputs
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, NO_LIFT, LiftFloat32, distance, draw_weights
from tests.oracles.configs import edited
from tests.oracles.references.molmo2 import molmo2_keys, molmo2_model
from tests.support.hub.checkpoints import edit_config
from tests.support.photographs import china, flower, hopper
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

SIDE = 140
"""The side of a crop in pixels: ten patches, of which two are no margin."""
IMAGES = [
    china(),
    flower().resize((60, 200)),
    hopper().resize((300, 130)),
    china().resize((SIDE, SIDE)),
    hopper().resize((9, 7)),
    hopper().resize((500, 112)),
    flower().resize((150, 430)),
]
"""The fifth is smaller than the margins of a crop, and the sixth is as high."""
CLIPS = [[china(), flower().resize((640, 427)), hopper().resize((640, 427))], [hopper()]]
FILE = {"size": {"height": SIDE, "width": SIDE}}
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
GOLDEN = {
    (480, 640): ((2, 2), 725),
    (1080, 1920): ((4, 2), 1162),
    (224, 224): ((1, 1), 392),
}
"""Heights and widths of images, and their crops and tokens in transformers 5.23.0."""


def processor(**changes: Any) -> Any:
    module = pytest.importorskip("transformers.models.molmo2.image_processing_molmo2")
    return module.Molmo2ImageProcessor(**{**FILE, **changes})


def video_processor(**changes: Any) -> Any:
    module = pytest.importorskip("transformers.models.molmo2.video_processing_molmo2")
    normalised = {"do_rescale": True, "do_normalize": True}  # off in the class, which has no value
    return module.Molmo2VideoProcessor(**{**FILE, **normalised, **changes})


def build(dtype: torch.dtype = torch.float32, **changes: Any) -> Molmo2Encoder:
    row = BY_NAME["molmo2"]
    sizes = {**row.tiny, **changes}
    encoder = Molmo2Encoder(Molmo2Config.from_hf(edited(row.config, **sizes))).to(dtype)
    draw_weights(encoder)
    return encoder.eval().requires_grad_(False)


def published(encoder: Molmo2Encoder, dtype: torch.dtype, lift: Any) -> Any:
    """The model of transformers with the weights of an encoder."""
    with lift:
        model = molmo2_model(encoder.config).to(dtype).eval()
    state = encoder.state_dict()
    names = {f"vision_tower.{key}": value for key, value in molmo2_keys(state).items()}
    pool, mlp = (f"multi_modal_projector.image_{x}." for x in ("pooling_2d", "projector"))
    for kind in ("weight", "bias"):
        keys, values = state[f"pool.kv.{kind}"].chunk(2)
        parts = {"q": state[f"pool.q.{kind}"], "k": keys, "v": values}
        parts["o"] = state[f"pool.proj.{kind}"]
        names |= {f"{pool}{part}_proj.{kind}": value for part, value in parts.items()}
    for part in ("gate", "up", "down"):
        names[f"{mlp}{part}_proj.weight"] = state[f"projector.{part}.weight"]
    found = model.load_state_dict(names, strict=False)
    assert not found.unexpected_keys
    assert all(key.startswith("language_model.") for key in found.missing_keys)
    return model


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_tokens_are_the_image_features_of_transformers(dtype: torch.dtype) -> None:
    encoder = build(dtype)
    lift: Any = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    model = published(encoder, dtype, lift)
    theirs = processor()(IMAGES, return_tensors="pt")
    with lift, torch.no_grad():
        wanted = model.get_image_features(
            theirs["pixel_values"].to(dtype), theirs["image_token_pooling"], theirs["image_grids"]
        ).pooler_output
    ours = encoder(encoder.preprocess(IMAGES).to(dtype))
    assert [len(item.pooler_output) for item in ours] == [len(item) for item in wanted]
    for item, rows in zip(ours, wanted, strict=True):
        assert distance(item.pooler_output, rows) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_clips_beside_images_are_the_video_features(dtype: torch.dtype) -> None:
    encoder = build(dtype)
    lift: Any = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    model = published(encoder, dtype, lift)
    theirs = video_processor()(CLIPS, do_sample_frames=False, return_tensors="pt")
    with lift, torch.no_grad():
        wanted = model.get_video_features(
            *(theirs["pixel_values_videos"].to(dtype), theirs["video_token_pooling"]),
            theirs["video_grids"],
        ).pooler_output
    ours = encoder(encoder.preprocess(IMAGES[:2], CLIPS).to(dtype))[2:]
    assert [len(item.pooler_output) for item in ours] == [len(item) for item in wanted] == [48, 16]
    for item, rows in zip(ours, wanted, strict=True):
        assert distance(item.pooler_output, rows) <= BOUNDS[dtype]


@pytest.mark.parametrize("change", [{}, {"resample": 3, "image_mean": [0.4] * 3}], ids=str)
def test_frames_are_those_of_the_video_processor(change: dict[str, Any]) -> None:
    processed = video_processor(**change)(CLIPS, do_sample_frames=False, return_tensors="pt")
    files = {"preprocessor_config": FILE, "video_preprocessor_config": {**FILE, **change}}
    inputs = OverlapPreprocessor(14, image_size=SIDE).with_files(files)((), CLIPS)
    rows = inputs.pixel_values.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 4, 5, 1)
    assert torch.equal(rows.flatten(3).flatten(1, 2), processed["pixel_values_videos"])


def test_frames_are_sampled_as_by_the_video_processor() -> None:
    from transformers.video_utils import VideoMetadata

    theirs = video_processor()
    for total, rate, fps in [(90, 29.97, 2), (5, 24.0, 2), (7, 3.0, 24), (100, 3.7, 1.3)]:
        film = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
        wanted = theirs.sample_frames(film, fps=fps).tolist()
        assert sample_frames(total, "molmo2", fps=fps, source_fps=rate) == wanted
    slow = VideoMetadata(total_num_frames=10, fps=1.0, duration=10.0)
    assert sample_frames(10, "molmo2", num_frames=4) == theirs.sample_frames(slow, 4).tolist()


def test_a_video_file_of_other_windows_refuses_only_videos() -> None:
    files = {"preprocessor_config": FILE}
    files["video_preprocessor_config"] = {**FILE, "pooling_size": [2, 2]}
    rules = OverlapPreprocessor(14, image_size=SIDE).with_files(files)
    rules(IMAGES[:1])
    with pytest.raises(ValueError, match=r"pooling_size=\[2, 2\] .* must be \[3, 3\]"):
        rules((), CLIPS)


@pytest.mark.parametrize(
    "change", [{}, {"resample": 3, "image_mean": [0.4] * 3}, {"max_crops": 3}], ids=str
)
def test_crops_are_those_of_the_processor(change: dict[str, Any]) -> None:
    theirs = processor(**change)(IMAGES, return_tensors="pt")
    ours = OverlapPreprocessor(14, image_size=SIDE)
    inputs = ours.with_files({"preprocessor_config": {**FILE, **change}})(IMAGES)
    assert inputs.grid_thw[:, 0].tolist() == theirs["image_num_crops"].tolist()
    rows = inputs.pixel_values.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 4, 5, 1)
    assert torch.equal(rows.flatten(3).flatten(1, 2), theirs["pixel_values"])


def test_crops_of_any_size_are_those_of_the_processor() -> None:
    module = pytest.importorskip("transformers.models.molmo2.image_processing_molmo2")
    sizes = [*range(1, 130, 16), 112, *range(130, 900, 61), 1080, 1920, 4000]
    for height in sizes:
        for width in sizes:
            rows, columns, *_ = module.compute_crop_geometry(height, width, 8, [4, 4], 378, 14)
            assert best_grid(height - 112, width - 112, 8, 266) == (rows, columns)


def test_crops_and_tokens_are_as_published() -> None:
    encoder = build(image_default_input_size=[378, 378], image_num_pos=729)
    width = encoder.paths["image"].out_features
    for (height, width_of_image), (tiling, tokens) in GOLDEN.items():
        inputs = encoder.preprocess([Image.new("RGB", (width_of_image, height))])
        assert inputs.tiles == [(*tiling, True)]
        views = int(inputs.grid_thw[0, 0])
        rows, read = torch.zeros(views, 729, 1), torch.zeros(views * 729, width)
        (output,) = encoder.join({"image": EncoderOutput(rows, read, ())}, inputs)
        assert len(output.pooler_output) == tokens


def test_items_together_alone_and_in_graphs_agree() -> None:
    encoder, images = build(), IMAGES[1:5]
    inputs = encoder.preprocess(images, CLIPS)
    together = encoder(inputs)
    graphed = GraphedEncoder(encoder, backend="static", max_budget=1024)
    replayed = graphed(inputs)
    for number, alone in enumerate(split_inputs(inputs, encoder.paths)):
        (output,) = encoder(alone)
        assert distance(output.pooler_output, together[number].pooler_output) <= 2e-6
        of_graphs = replayed[number].pooler_output
        assert of_graphs is not None
        assert distance(output.pooler_output, of_graphs) <= 2e-6
        assert distance(output.last_hidden_state, together[number].last_hidden_state) <= 2e-6
    some = encoder(select_items(inputs, encoder.paths, [3, 1]))
    assert distance(some[1].pooler_output, together[1].pooler_output) <= 2e-6
    vectors = torch.stack([item.pooler_output.mean(0) for item in together])
    assert distance(encoder.embed(images, CLIPS), vectors) <= 2e-6
    assert encoder.encode([]) == []
    fewer = GraphedEncoder(encoder, backend="static", outputs=["last_hidden_state"])
    assert fewer(inputs)[0].pooler_output is None


def test_maps_show_the_image_once() -> None:
    encoder = build()
    inputs = encoder.preprocess(IMAGES, CLIPS)
    outputs = encoder(inputs)
    tokens = encoder.feature_maps([item.pooler_output for item in outputs], inputs)
    pixels = inputs.pixel_values.unfold(2, 14, 14).unfold(3, 14, 14)
    patches = pixels.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    views = encoder.feature_maps(patches, inputs)
    assert [tuple(maps["image"].shape[:3]) for maps in views[-2:]] == [(3, 10, 10), (1, 10, 10)]
    assert torch.equal(tokens[-2]["image"].flatten(0, 2), outputs[-2].pooler_output)
    for image, maps, of_tokens in zip(IMAGES, views[:-2], tokens[:-2], strict=True):
        rows, columns = maps["tiles"].shape[1:3]
        picture = rearrange(maps["tiles"], "1 h w (c p q) -> c (h p) (w q)", p=14, q=14)
        decoded = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        wanted = F.interpolate(decoded, (14 * rows, 14 * columns), mode="bilinear")[0]
        assert (127.5 * (picture + 1) - wanted).abs().max() < 0.51
        assert of_tokens["image"].shape == (1, 5, 5, 48)
        assert of_tokens["tiles"].shape == (1, rows // 2, columns // 2, 48)


def without_tiles(inputs: VisionInputs) -> VisionInputs:
    return inputs._replace(tiles=None)


def with_other_tiles(inputs: VisionInputs) -> VisionInputs:
    return inputs._replace(tiles=[(1, 1, True)] * len(inputs.grid_thw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_tiles, "inputs without tiles: .* pass what preprocess returned"),
        (with_other_tiles, "an item has 9 views of 10x10 patches, and its tiles make 2: pass what"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    encoder = build()
    inputs = change(encoder.preprocess(IMAGES[:2]))
    with pytest.raises(ValueError, match=message):
        encoder(inputs)
    with pytest.raises(ValueError, match="features have 3 rows: these inputs make"):
        encoder.feature_maps(torch.zeros(3, 48), encoder.preprocess(IMAGES[:2]))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"size": {"height": 378, "width": 378}}, "but the tower takes views of 140x140"),
        ({"overlap_margins": [4, 3]}, r"overlap_margins=\[4, 3\] is not implemented"),
        ({"pooling_size": [3, 3]}, r"pooling_size=\[3, 3\] is not implemented"),
        ({"patch_size": 16}, "patch_size=16 is not implemented"),
        ({"resample": 1}, "resample=1 is not implemented"),
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_is_refused(section: dict[str, Any], message: str) -> None:
    ours = OverlapPreprocessor(14, image_size=SIDE)
    with pytest.raises(ValueError, match=message):
        ours.with_files({"preprocessor_config": {**FILE, **section}})


def as_transformers_saves(config: dict[str, Any]) -> None:
    """Rename fields as ``Molmo2Config.save_pretrained`` of transformers 5.23.0 does."""
    vision, adapter = config.pop("vit_config"), config["adapter_config"]
    sides, blocks = vision.pop("image_default_input_size"), vision["num_hidden_layers"]
    layers = [layer % blocks for layer in adapter.pop("vit_layers")]
    config["vision_config"] = {
        **vision,
        "model_type": "molmo2_vision",
        "image_size": sides,
        "patch_size": vision.pop("image_patch_size"),
        "num_hidden_layers": max(layers) + 1,
        "num_position_embeddings": vision.pop("image_num_pos"),
    }
    adapter |= {"model_type": "molmo2_adapter", "vision_feature_layer": layers}
    adapter.pop("pooling_attention_mask")


def test_a_config_of_transformers_makes_the_same_encoder(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "molmo2", width=64)
    encoder = load_encoder(folder)
    edit_config(folder, as_transformers_saves)
    saved = load_encoder(folder)
    assert saved.config == encoder.config
    image = china().resize((200, 150))
    wanted, got = encoder.encode([image]), saved.encode([image])
    assert torch.equal(got[0].pooler_output, wanted[0].pooler_output)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("vit_config", {"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ("vit_config", {"num_key_value_heads": 1}, "num_key_value_heads=1 is not implemented"),
        ("vit_config", {"head_dim": 8}, "head_dim=8 is not implemented"),
        ("adapter_config", {"hidden_size": 32}, "hidden_size=32 is not implemented"),
        ("adapter_config", {"vit_layers": [-1, -9]}, r"vit_layers=\[-1, -9\]: must name some of 2"),
        ("adapter_config", {"pooling_attention_mask": False}, "pooling_attention_mask=False"),
        ("vit_config", {"image_default_input_size": [112, 112]}, "crops of 8 patches per side"),
        ("adapter_config", {"text_hidden_size": 32}, "image_projector.w2"),
    ],
    ids=str,
)
def test_a_config_that_differs_is_refused(
    tmp_path: Path, section: str, change: dict[str, Any], message: str
) -> None:
    folder = write_seeded_checkpoint(tmp_path, "molmo2", width=64)
    edit_config(folder, lambda config: config[section].update(change))
    with pytest.raises(CheckpointError, match=message):
        load_encoder(folder)
