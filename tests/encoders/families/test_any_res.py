"""LLaVA-NeXT and OneVision: views, tokens of several views as one sequence, and maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.llava_next import (
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextModel,
)
from transformers.models.llava_onevision import (
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionModel,
    LlavaOnevisionVideoProcessor,
)

from encoders import EncoderOutput, VisionInputs
from encoders.base.any_res import AnyResEncoder
from encoders.inputs.any_res import AnyResPreprocessor
from encoders.streams.calls import select_items, split_inputs
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, NO_LIFT, LiftFloat32, distance, draw_weights
from tests.oracles.configs import edited
from tests.oracles.references.clip import clip_keys
from tests.oracles.references.siglip import onevision_keys
from tests.support.photographs import china, flower, hopper

NAMES = ("llava_next", "llava_onevision")
SIDES = {"llava_next": 112, "llava_onevision": 118}
"""Sides of views in pixels; patches of 14 leave 6 pixels of the second."""
IMAGES = [
    china(),
    flower().resize((64, 200)),
    hopper().resize((300, 90)),
    china().resize((112, 112)),
    hopper().resize((500, 3)),
]
"""The last one covers no whole row of its map."""
CLIPS = [[china(), flower().resize((640, 427)), hopper().resize((640, 427))], [hopper()]]
GOLDEN: dict[str, dict[tuple[int, int], tuple[tuple[int, int], int]]] = {
    "llava_next": {
        (1080, 1920): ((2, 2), 1948),
        (480, 640): ((2, 2), 2340),
        (4000, 3000): ((2, 2), 2352),
        (331, 500): ((2, 1), 1464),
        (224, 224): ((2, 1), 1176),
        (10, 10): ((2, 1), 1176),
        (20, 3000): ((3, 1), 576),
    },
    "llava_onevision": {
        (1080, 1920): ((5, 3), 7269),
        (480, 640): ((2, 2), 2929),
        (4000, 3000): ((5, 6), 7332),
        (384, 384): ((1, 1), 1485),
        (10, 10): ((1, 1), 1485),
        (20, 3000): ((6, 1), 892),
    },
}
"""Heights and widths of images, and their tiles and tokens in transformers 5.24.0."""
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def pinpoints(name: str) -> list[list[int]]:
    """Heights and widths in pixels of small sets of tiles."""
    shapes = [(1, 2), (2, 1), (2, 2), (3, 1)] + [(1, 1)] * (name == "llava_onevision")
    return [[SIDES[name] * rows, SIDES[name] * columns] for rows, columns in shapes]


def build(name: str = "llava_next", dtype: torch.dtype = torch.float32) -> Any:
    row = BY_NAME[name]
    sizes = {**row.tiny, "image_size": SIDES[name], "image_grid_pinpoints": pinpoints(name)}
    if name == "llava_onevision":
        sizes["vision_aspect_ratio"] = "anyres_max_2"
    config = row.config_class.from_hf(edited(row.config, **sizes))
    encoder = row.encoder_class(config).to(dtype)
    draw_weights(encoder)
    return encoder.eval().requires_grad_(False)


def published(name: str, encoder: Any, dtype: torch.dtype, lift: Any) -> Any:
    """The model of transformers with the weights of an encoder."""
    sizes = encoder.config
    vision = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.num_heads,
        "image_size": sizes.image_size,
        "patch_size": sizes.patch_size,
        "vision_use_head": False,
    }
    text = {"hidden_size": sizes.out_hidden_size, "intermediate_size": 32, "vocab_size": 60}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    outer = {"image_grid_pinpoints": pinpoints(name)}
    if name == "llava_next":
        make, make_config, kinds = LlavaNextModel, LlavaNextConfig, ("clip", "llama")
        state = clip_keys(encoder.state_dict())
    else:
        make, make_config, kinds = LlavaOnevisionModel, LlavaOnevisionConfig, ("siglip", "qwen2")
        state = onevision_keys(encoder.state_dict())
        outer["vision_aspect_ratio"] = "anyres_max_2"
    config = make_config(
        vision_config={**vision, "model_type": f"{kinds[0]}_vision_model"},
        text_config={**text, "model_type": kinds[1]},
        **outer,
    )
    with lift:
        model = make(config).to(dtype).eval()
    state = {_published_name(key): value for key, value in state.items()}
    state["image_newline"] = encoder.image_newline
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys
    assert all(key.startswith("language_model.") for key in found.missing_keys)
    return model


def _published_name(name: str) -> str:
    """Return the name that a model of transformers has for a tensor of a reference."""
    tail = name.partition(".")[2]
    if name.endswith("image_newline"):
        return "image_newline"
    return f"multi_modal_projector.{tail}" if name.startswith("proj") else f"vision_tower.{tail}"


def processor(name: str = "llava_next", **changes: Any) -> Any:
    side, sizes = SIDES[name], {"image_grid_pinpoints": pinpoints(name)}
    square = {"height": side, "width": side}
    if name == "llava_onevision":
        return LlavaOnevisionImageProcessor(**{"size": square, **sizes, **changes})
    short = {"size": {"shortest_edge": side}, "crop_size": square}
    return LlavaNextImageProcessor(**{**short, **sizes, **changes})


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_the_image_features_of_transformers(name: str, dtype: torch.dtype) -> None:
    encoder = build(name, dtype)
    lift: Any = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    model = published(name, encoder, dtype, lift)
    theirs = processor(name)(IMAGES, return_tensors="pt")
    with lift, torch.no_grad():
        wanted = model.get_image_features(
            theirs["pixel_values"].to(dtype), theirs["image_sizes"]
        ).pooler_output
    ours = encoder(encoder.preprocess(IMAGES).to(dtype))
    assert [len(item.pooler_output) for item in ours] == [len(item) for item in wanted]
    for item, rows in zip(ours, wanted, strict=True):
        assert distance(item.pooler_output, rows) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_clips_beside_images_are_the_video_features(dtype: torch.dtype) -> None:
    encoder = build("llava_onevision", dtype)
    lift: Any = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    model = published("llava_onevision", encoder, dtype, lift)
    ours = encoder(encoder.preprocess(IMAGES[:2], CLIPS).to(dtype))[2:]
    for clip, output in zip(CLIPS, ours, strict=True):
        pixels = frames_of(clip)[None].to(dtype)
        with lift, torch.no_grad():
            (wanted,) = model.get_video_features(pixels, vision_feature_layer=-1).pooler_output
        assert distance(output.pooler_output, wanted) <= BOUNDS[dtype]


def frames_of(clip: list[Any], **changes: Any) -> Tensor:
    """The pixels of the frames of a clip in transformers."""
    side = SIDES["llava_onevision"]
    size = {"size": {"height": side, "width": side}, **changes}
    made = LlavaOnevisionVideoProcessor(**size)([clip], return_tensors="pt")
    (pixels,) = made["pixel_values_videos"]
    return pixels  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [{}, {"resample": 2}, {"image_mean": [0.5] * 3}], ids=str)
def test_frames_are_those_of_the_video_processor(change: dict[str, Any]) -> None:
    side = SIDES["llava_onevision"]
    file = {"size": {"height": side, "width": side}, **change}
    encoder = build("llava_onevision")
    rules = encoder.preprocessor.with_files({"video_preprocessor_config": file})
    inputs = rules((), CLIPS)
    wanted = torch.cat([frames_of(clip, **change) for clip in CLIPS])
    assert torch.equal(inputs.pixel_values, wanted[:, :, :112, :112])
    assert torch.equal(rules((), CLIPS[0], num_frames=1).pixel_values, inputs.pixel_values[:1])


def test_a_video_file_of_other_rules_refuses_only_videos() -> None:
    rules = build("llava_onevision").preprocessor
    side = SIDES["llava_onevision"]
    rules = rules.with_files(
        {
            "preprocessor_config": {"size": side, "crop_size": side},
            "video_preprocessor_config": {"size": {"height": 56, "width": 56}},
        }
    )
    rules(IMAGES[:1])
    with pytest.raises(ValueError, match=r"video_preprocessor_config.json: size=.* of 118x118"):
        rules((), CLIPS)


@pytest.mark.parametrize("size", [118, {"shortest_edge": 118}], ids=str)
def test_a_shorter_side_is_refused_for_videos(size: object) -> None:
    rules = build("llava_onevision").preprocessor
    rules = rules.with_files({"video_preprocessor_config": {"size": size}})
    with pytest.raises(ValueError, match="is the length of the shorter side"):
        rules((), CLIPS)


@pytest.mark.parametrize(
    ("theirs", "side"), [(LlavaNextImageProcessor, 336), (LlavaOnevisionImageProcessor, 384)]
)
def test_pinpoints_that_a_file_leaves_out_are_those_of_its_class(theirs: Any, side: int) -> None:
    section = {"image_processor_type": theirs.__name__, "size": side, "crop_size": side}
    ours = AnyResPreprocessor(14, image_size=side, pinpoints=((side, side),))
    read = ours.with_files({"preprocessor_config": section})
    assert [list(size) for size in read.pinpoints] == theirs().image_grid_pinpoints


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [{}, {"resample": 2}, {"image_mean": [0.5] * 3}], ids=str)
def test_views_are_those_of_the_processor(name: str, change: dict[str, Any]) -> None:
    theirs, side = processor(name, **change)(IMAGES, return_tensors="pt"), SIDES[name]
    file = {"size": side, "crop_size": side, "image_grid_pinpoints": pinpoints(name)}
    ours = AnyResPreprocessor(14, image_size=side, pinpoints=((side, side),))
    inputs = ours.with_files({"preprocessor_config": {**file, **change}})(IMAGES)
    counts = inputs.grid_thw[:, 0].tolist()
    for views, wanted in zip(
        inputs.pixel_values.split(counts), theirs["pixel_values"], strict=True
    ):
        assert torch.equal(views, wanted[: len(views), :, :112, :112])
        assert not wanted[len(views) :].any()
    assert inputs.image_sizes == [tuple(size) for size in theirs["image_sizes"].tolist()]


@pytest.mark.parametrize("name", NAMES)
def test_tiles_and_tokens_are_as_published(name: str) -> None:
    row = BY_NAME[name]
    encoder: Any = row.encoder_class(row.config_class.from_hf(edited(row.config, **row.narrow)))
    rows_of_view = 577 if name == "llava_next" else 729
    whole = rows_of_view // 9 * 9
    for (height, width), (tiling, tokens) in GOLDEN[name].items():
        inputs = encoder.preprocess([Image.new("RGB", (width, height))])
        assert inputs.tiles == [(*tiling, True)]
        views = int(inputs.grid_thw[0, 0])
        rows, pooled = torch.zeros(views, rows_of_view, 1), torch.zeros(views * whole, 48)
        (output,) = encoder.join({"image": EncoderOutput(rows, pooled, ())}, inputs)
        assert len(output.pooler_output) == tokens


@pytest.mark.parametrize("name", NAMES)
def test_items_together_alone_and_in_graphs_agree(name: str) -> None:
    encoder = build(name)
    clips = CLIPS if name == "llava_onevision" else []
    inputs = encoder.preprocess(IMAGES, clips)
    together = encoder(inputs)
    graphed = GraphedEncoder(encoder, backend="static", max_budget=512)
    replayed = graphed(inputs)
    for number, alone in enumerate(split_inputs(inputs, encoder.paths)):
        (output,) = encoder(alone)
        assert distance(output.pooler_output, together[number].pooler_output) <= 2e-6
        assert distance(output.pooler_output, replayed[number].pooler_output) <= 2e-6
        assert distance(output.last_hidden_state, together[number].last_hidden_state) <= 2e-6
    some = encoder(select_items(inputs, encoder.paths, [3, 1]))
    assert distance(some[1].pooler_output, together[1].pooler_output) <= 2e-6
    vectors = torch.stack([item.pooler_output.mean(0) for item in together])
    assert distance(encoder.embed(IMAGES, clips), vectors) <= 2e-6
    if encoder.class_token:
        classes = torch.stack([item["prefix"][:, 0].mean(0) for item in together])
        assert distance(encoder.embed(IMAGES, pool="cls"), classes) <= 2e-6


def test_maps_show_the_image_without_its_border() -> None:
    encoder = build()
    inputs = encoder.preprocess(IMAGES)
    outputs = encoder(inputs)
    tokens = encoder.feature_maps([item.pooler_output for item in outputs], inputs)
    hidden = encoder.feature_maps([item.last_hidden_state for item in outputs], inputs)
    project = encoder.paths["image"].projector
    for of_tokens, of_rows in zip(tokens, hidden, strict=True):
        assert of_tokens["image"].shape[:3] == (1, 8, 8)
        for name, rows in of_rows.items():
            torch.testing.assert_close(of_tokens[name], project(rows), rtol=1e-4, atol=1e-5)
    shapes = [tuple(maps["tiles"].shape[1:3]) for maps in tokens]
    assert shapes == [(10, 16), (16, 6), (4, 16), (8, 8), (0, 16)]


def test_maps_of_a_clip_have_its_frames() -> None:
    encoder = build("llava_onevision")
    inputs = encoder.preprocess((), CLIPS)
    outputs = encoder(inputs)
    tokens = encoder.feature_maps([item.pooler_output for item in outputs], inputs)
    hidden = encoder.feature_maps([item.last_hidden_state for item in outputs], inputs)
    assert [tuple(maps["image"].shape[:3]) for maps in tokens] == [(3, 4, 4), (1, 4, 4)]
    assert [tuple(maps["image"].shape[:3]) for maps in hidden] == [(3, 8, 8), (1, 8, 8)]
    assert torch.equal(tokens[0]["image"].flatten(0, 2), outputs[0].pooler_output[:-1])


@pytest.mark.parametrize("most", [1, 2])
def test_an_image_has_at_most_max_tiles(most: int) -> None:
    encoder = build()
    inputs = encoder.preprocess(china(), max_tiles=most)
    assert inputs.tiles == [(1, 1, False) if most == 1 else (2, 1, True)]
    (output,) = encoder(inputs)
    if most == 1:
        (tokens,) = encoder.paths["image"](*inputs.paths["image"][:2]).pooler_output.split(64)
        assert torch.equal(output.pooler_output[:-1], tokens)
        assert torch.equal(output.pooler_output[-1], encoder.image_newline)
    (maps,) = encoder.feature_maps([output.pooler_output], inputs)
    assert set(maps) == ({"image"} if most == 1 else {"image", "tiles"})


def without_sizes(inputs: VisionInputs) -> VisionInputs:
    return inputs._replace(image_sizes=None)


def with_one_size(inputs: VisionInputs) -> VisionInputs:
    return inputs._replace(image_sizes=[(1, 1)])


def with_other_tiles(inputs: VisionInputs) -> VisionInputs:
    return inputs._replace(tiles=[(1, 1, True), (1, 1, False)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_sizes, "inputs without tiles or image_sizes: .* pass what preprocess returned"),
        (with_one_size, "image_sizes has 1 items, and grid_thw 2"),
        (
            with_other_tiles,
            "an item has 5 views, and its tiles make 2: pass what preprocess returned",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    encoder = build()
    inputs = change(encoder.preprocess(IMAGES[:2]))
    with pytest.raises(ValueError, match=message):
        encoder(inputs)


def test_features_of_other_inputs_have_no_maps() -> None:
    encoder: AnyResEncoder = build()
    features: Tensor = torch.zeros(7, 48)
    with pytest.raises(ValueError, match="features have 7 rows: these inputs make"):
        encoder.feature_maps(features, encoder.preprocess(IMAGES))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"size": {"shortest_edge": 224}}, r"size=\{'shortest_edge': 224\} and crop_size=336 but"),
        ({"crop_size": 224}, r"crop_size=224 but the tower takes views of 336x336"),
        ({"image_grid_pinpoints": [[336, 400]]}, r"image_grid_pinpoints=.* multiples of 336"),
        ({"do_resize": False}, r"do_resize=False is not implemented"),
        ({"resample": 0}, r"resample=0 is not implemented"),
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_is_refused(section: dict[str, Any], message: str) -> None:
    file = {"size": 336, "crop_size": 336, **section}
    with pytest.raises(ValueError, match=message):
        AnyResPreprocessor(14).with_files({"preprocessor_config": file})
