"""MiniCPM-V: rows before and after the merger inside its tower, slices, and strict loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from encoders import MiniCPMVEncoder, VisionInputs
from graphwrap import GraphedEncoder
from tests.oracles import (
    BY_NAME,
    build_pair,
    distance,
    distances,
    draw_pixels,
    draw_weights,
    fresh,
    tiny,
)
from tests.oracles.configs import edited, vision_of
from tests.oracles.versions import MINICPM_V, needs
from tests.support.accelerated.cases import (
    assert_close,
    assert_fused,
    needs_interpreter,
    needs_triton,
)
from tests.support.graphs.cases import static
from tests.support.graphs.outputs import worst_distance
from tests.support.hub.checkpoints import edit_config, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from tests.support.photographs import china
from vitgraph.analysis.attention import maps_of_inputs
from vitgraph.analysis.cells import states_of_cells
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

GRIDS = [[1, 4, 8], [2, 8, 4], [1, 12, 4]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "repo", "minicpm_v", width=64, shards=1)


def test_the_last_hidden_state_has_a_quarter_of_the_rows() -> None:
    encoder = tiny("minicpm_v")
    output = encoder(draw_pixels(encoder, GRIDS), GRIDS)
    assert output.last_hidden_state.shape == (36, 64)
    parts = encoder.split(output, GRIDS)
    assert [len(part.last_hidden_state) for part in parts] == [8, 16, 12]
    assert [len(part.pooler_output) for part in parts] == [2, 4, 3]
    maps = encoder.feature_maps(output.last_hidden_state, GRIDS)
    assert [tuple(part.shape[:3]) for part in maps] == [(1, 2, 4), (2, 4, 2), (1, 6, 2)]


def test_every_row_is_kept_in_the_other_mode() -> None:
    family, grids = BY_NAME["minicpm_v"], [[1, 2, 2], [1, 6, 10], [2, 4, 6], [1, 34, 2]]
    changes = {**family.tiny, "downsample_mode": "4x"}
    encoder, reference = build_pair(family, changes, torch.float64)
    pixels = draw_pixels(encoder, grids, dtype=torch.float64)
    output = encoder(pixels, grids)
    assert len(output.last_hidden_state) == 4 * len(output.pooler_output) == 180
    wanted = family.output(reference, pixels, torch.tensor(grids))
    assert max(distances(output, wanted).values()) <= 1e-10


def test_outputs_of_blocks_have_a_row_per_patch() -> None:
    family, names, seen = BY_NAME["minicpm_v"], ["blocks.0", "blocks.2"], list[torch.Tensor]()
    encoder, reference = build_pair(family, family.tiny)
    for layer in reference.get_submodule("tower.encoder.layers").children():
        layer.register_forward_hook(lambda *args: seen.append(args[2][0]))
    pixels = draw_pixels(encoder, GRIDS)
    output = encoder.with_extras(names)(pixels, GRIDS)
    first, last = (output.extras[name] for name in names)
    family.output(reference, pixels, torch.tensor(GRIDS))
    assert distance(first, seen[0]) <= 1e-5
    assert distance(output.last_hidden_state, seen[2]) <= 1e-5
    assert first.shape == last.shape == (144, 64)
    before, after = encoder.forward_intermediates(pixels, GRIDS, indices=[0, 2])
    assert torch.equal(before, first)
    assert torch.equal(after, last)
    whole = encoder.feature_maps(last, GRIDS)[0]
    halves = encoder.feature_maps(output.last_hidden_state, GRIDS)[0]
    assert torch.equal(whole[:, ::2, ::2], halves)
    assert torch.equal(whole[:, 1::2, 1::2], halves)


def test_merged_patches_share_the_attention_of_their_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, grid, kept = BY_NAME["minicpm_v"], [1, 4, 8], list[torch.Tensor]()
    encoder, reference = build_pair(family, family.tiny)
    inputs = VisionInputs(draw_pixels(encoder, [grid]), torch.tensor([grid]))
    found = maps_of_inputs(encoder, inputs, blocks=[0, 2], queries=[(0, 3, 5)])[0]
    [everywhere] = maps_of_inputs(encoder, inputs, blocks=[2])[0]
    side, _, [state] = states_of_cells(encoder, inputs, blocks=[2], most_cells=8)
    softmax = F.softmax

    def keep(*args: Any, **kwargs: Any) -> torch.Tensor:
        kept.append(softmax(*args, **kwargs))
        return kept[-1]

    reference.get_submodule("tower").config._attn_implementation = "eager"  # type: ignore[union-attr]
    monkeypatch.setattr(F, "softmax", keep)
    with torch.no_grad():
        family.output(reference, inputs.pixel_values, inputs.grid_thw)
    first, *_, last = (weights[0].mean(0) for weights in kept)  # over the heads, [rows, rows]
    windows = last[1 * 4 + 2].view(2, 4).repeat_interleave(2, 0).repeat_interleave(2, 1) / 4
    for ours, wanted in zip(found, (first[3 * 8 + 5].view(4, 8), windows), strict=True):
        assert (ours[0] - wanted).abs().max() <= 1e-5
    assert (everywhere.sum() - 1).abs() <= 1e-5
    assert side == 2
    assert (state.attention.flatten(1) - last).abs().max() <= 1e-5


@needs_triton
@needs_interpreter
@pytest.mark.usefixtures("fused")
def test_layers_called_before_the_merger_are_counted() -> None:
    fast = fresh("minicpm_v").accelerated()
    fast.blocks[0].get_submodule("mlp.fc1").register_forward_hook(lambda *_: None)
    with torch.no_grad():
        fast(draw_pixels(fast, GRIDS), GRIDS)
    assert fast.kernel_choices()["layers_called"] == 1


def test_packed_padded_and_empty_grids_of_both_lengths() -> None:
    encoder = tiny("minicpm_v")
    pixels = draw_pixels(encoder, GRIDS)
    whole = encoder.split(encoder(pixels, GRIDS), GRIDS)
    alone = [
        encoder(rows, [grid]) for rows, grid in zip(pixels.split([32, 64, 48]), GRIDS, strict=True)
    ]
    assert max(worst_distance(*pair) for pair in zip(whole, alone, strict=True)) <= 2e-6
    metadata = encoder.prepare_encoder_metadata(GRIDS, max_batch_size=9, max_input_size=192)
    padded = encoder(F.pad(pixels, (0, 0, 0, 48)), encoder_metadata=metadata)
    assert worst_distance(encoder.split(padded, GRIDS)[2], alone[2]) <= 2e-6
    empty = encoder(pixels[:0], [])
    assert empty.last_hidden_state.shape == (0, 64)


@pytest.mark.slow
def test_both_lengths_compile_and_train() -> None:
    encoder = fresh("minicpm_v").requires_grad_()
    pixels, metadata = draw_pixels(encoder, GRIDS), encoder.prepare_encoder_metadata(GRIDS)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        output = compiled(pixels, encoder_metadata=metadata)
        assert worst_distance(output, encoder(pixels, GRIDS)) <= 2e-6
    encoder(pixels, GRIDS).pooler_output.square().sum().backward()
    assert all(weight.grad is not None for weight in encoder.parameters())


@pytest.mark.slow
@needs_triton
@needs_interpreter
@pytest.mark.usefixtures("fused_in_interpreter")
@torch.no_grad()
def test_fused_blocks_of_both_lengths_are_the_references() -> None:
    encoder, pixels = tiny("minicpm_v"), draw_pixels(tiny("minicpm_v"), GRIDS)
    fast = encoder.accelerated()
    assert_close(fast(pixels, GRIDS), encoder(pixels, GRIDS))
    assert_fused(fast)


def test_graphs_replay_both_lengths_of_rows() -> None:
    encoder = tiny("minicpm_v")
    graphed = static(encoder, [16], outputs=("last_hidden_state", "pooler_output"))
    pixels = draw_pixels(encoder, GRIDS)
    assert worst_distance(graphed(pixels, GRIDS), encoder(pixels, GRIDS)) <= 2e-6
    assert graphed.stats().eager_items == 0


def test_the_whole_image_comes_before_its_slices(folder: Path) -> None:
    encoder = load_encoder(folder, dtype=torch.float32)
    inputs = encoder.preprocess([china()])
    assert inputs.tiles is not None
    columns, rows, tiled = inputs.tiles[0]
    assert (columns * rows, tiled) == (2, True)
    [output] = encoder(inputs)
    whole = encoder.paths["image"](inputs.pixel_values, inputs.grid_thw)
    count = len(whole.pooler_output)
    assert torch.equal(output.pooler_output[:count], whole.pooler_output)
    maps = encoder.feature_maps(output.last_hidden_state, inputs)[0]
    assert torch.equal(maps["image"].flatten(0, 2), whole.last_hidden_state)


@needs(*MINICPM_V)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_clips_beside_images_are_the_video_features(dtype: torch.dtype) -> None:
    from transformers.models.minicpmv4_6 import (
        MiniCPMV4_6Config,
        MiniCPMV4_6Model,
        video_processing_minicpmv4_6,
    )

    row = BY_NAME["minicpm_v"]
    config, encoder = edited(row.config, **row.tiny), MiniCPMVEncoder(row.small_config())
    draw_weights(encoder)
    text = {"model_type": "qwen3_5_text", "hidden_size": 48, "num_hidden_layers": 1}
    text |= {"intermediate_size": 32, "vocab_size": 60, "layer_types": ["full_attention"]}
    model = MiniCPMV4_6Model(
        MiniCPMV4_6Config(vision_config=vision_of(config), text_config=text, insert_layer_id=0)
    )
    state = row.keys(encoder.state_dict())
    model.load_state_dict(
        {key.replace("tower.", "vision_tower."): x for key, x in state.items()}, strict=False
    )
    encoder, model = (part.to(dtype).eval() for part in (encoder, model))
    processor = video_processing_minicpmv4_6.MiniCPMV4_6VideoProcessor()
    clips = [[china(), china().rotate(180)], [china().resize((200, 100))] * 3, [china()]]
    inputs = encoder.preprocess([china()], clips).to(dtype)
    graphed = GraphedEncoder(encoder, backend="static", max_budget=512, max_graphs=4)
    with torch.no_grad():
        outputs, replayed = encoder(inputs)[1:], graphed(inputs)[1:]
        for clip, *ours in zip(clips, outputs, replayed, strict=True):
            made = processor([clip], do_sample_frames=False, return_tensors="pt")
            wanted = model.get_video_features(
                made["pixel_values_videos"].to(dtype), made["target_sizes_videos"]
            ).pooler_output
            for output in ours:
                bound = 1e-5 if dtype == torch.float32 else 1e-10
                assert distance(output.pooler_output, torch.cat(wanted)) <= bound


def test_maps_of_a_clip_are_those_of_its_frames(folder: Path) -> None:
    encoder, frames = load_encoder(folder, dtype=torch.float32), [china(), china().rotate(180)]
    inputs, still = encoder.preprocess((), [frames]), encoder.preprocess(frames[1])
    for field in ("last_hidden_state", "pooler_output"):
        [clip] = encoder.feature_maps([item[field] for item in encoder(inputs)], inputs)
        [image] = encoder.feature_maps([item[field] for item in encoder(still)], still)
        assert clip.keys() == image.keys() == {"image", "tiles"}
        for name, maps in clip.items():
            assert len(maps) == 2
            assert distance(maps[1:], image[name]) <= 2e-6


def test_a_repo_id_loads_the_tower_alone(hub: HubServer, folder: Path) -> None:
    hub.push(REPO, folder)
    encoder = load_encoder(REPO, progress=False)
    assert isinstance(encoder, MiniCPMVEncoder)
    assert same_weights(encoder, load_encoder(folder))


@pytest.mark.parametrize("kind", ["minicpmv4_7", "minicpm_ocr"])
def test_its_relatives_load_by_their_type(folder: Path, kind: str) -> None:
    edit_config(folder, lambda config: config.update(model_type=kind))
    edit_config(folder, lambda config: config.pop("downsample_mode"))
    file = folder / "preprocessor_config.json"
    file.write_text("{}")
    config = load_encoder(folder).config
    assert config.spatial_merge_size == (2 if kind == "minicpm_ocr" else 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("merger_times", 2),
        ("merge_kernel_size", [3, 3]),
        ("drop_vision_last_layer", True),
        ("insert_layer_id", 5),
        ("insert_layer_id", -1),
        ("downsample_mode", "8x"),
    ],
)
def test_another_kind_of_merger_is_refused(folder: Path, name: str, value: object) -> None:
    edit_config(folder, lambda config: config.update({name: value}))
    with pytest.raises(CheckpointError, match=name):
        load_encoder(folder)
