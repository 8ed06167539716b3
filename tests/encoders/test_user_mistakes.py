"""Mistakes in arguments of the public methods are answered with the value, the rule and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vitgraph
from encoders import VisionInputs
from graphwrap import GraphedEncoder
from tests.oracles import TOWERS, WHOLE, draw_pixels, tiny

GRID = [[1, 8, 8]]
IMAGE = torch.zeros(3, 64, 64, dtype=torch.uint8)


@pytest.mark.parametrize("name", TOWERS)
def test_metadata_of_another_family_are_refused(name: str) -> None:
    encoder = tiny(name)
    metadata = encoder.prepare_encoder_metadata(GRID)
    offsets = {key: metadata[key] for key in ("cu_seqlens", "max_seqlen")}
    if len(metadata) > len(offsets):
        with pytest.raises(ValueError, match=r"that has '\w+': pass what this encoder's prepare_"):
            encoder(draw_pixels(encoder, GRID), encoder_metadata=offsets)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_batch_size": "2"}, "max_batch_size='2': must be an integer of at least 1"),
        ({"max_frames_per_batch": 2.5}, r"max_frames_per_batch=2\.5: must be an integer of at"),
        (
            {"max_seqlen_override": "9"},
            "max_seqlen_override='9': must be an integer of at least 64",
        ),
        ({"max_seqlen_override": 5}, "max_seqlen_override=5: must be an integer of at least 64"),
        ({"max_input_size": "64"}, "max_input_size='64': must be a multiple of 4"),
        ({"max_input_size": 66}, "max_input_size=66: must be a multiple of 4"),
    ],
)
def test_capacities_are_integers(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("qwen2_vl").prepare_encoder_metadata(GRID, **keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"pool": "mean", "normalize": "yes"}, "normalize='yes': must be True or False"),
        ({"max_tokens_per_call": "3"}, "max_tokens_per_call='3': must be a positive number"),
    ],
)
def test_keywords_of_embed_are_shown_as_they_were_given(
    keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("qwen2_vl").embed(IMAGE, **keywords)


@pytest.mark.parametrize("name", WHOLE)
def test_features_of_other_inputs_name_the_fix(name: str) -> None:
    encoder = tiny(name)
    inputs = encoder.preprocess([IMAGE])
    for wrong, message in (
        (torch.zeros(5, 7), "features have 5 .*pass the inputs that these features were made of"),
        ([], "of type list: feature_maps takes one tensor .*, or a list with one tensor or output"),
    ):
        with pytest.raises(ValueError, match=message):
            encoder.feature_maps(wrong, inputs)
    with pytest.raises(ValueError, match=r"tiles was given with .*: leave it out"):
        encoder.feature_maps(torch.zeros(5, 7), inputs, [(1, 1, False)])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("", "image 0: '' is an empty path; pass the path of an image file"),
        ([None], "image 0: is of type NoneType, not an image: pass a PIL image"),
    ],
)
def test_what_is_no_image_is_told_what_is(image: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("qwen2_vl").preprocess(image)


def test_what_is_no_path_is_told_what_is(tmp_path: Path) -> None:
    encoder: Any = tiny("qwen2_vl")
    (tmp_path / "file").touch()
    wrong: Any = None
    for call, message in (
        (lambda: vitgraph.load_image(wrong), "is of type NoneType: pass the path of an image file"),
        (lambda: vitgraph.load_features("no"), "no: there is no such file; `vitgraph encode`"),
        (lambda: encoder.save_pretrained(""), "save_directory='': pass a folder"),
        (lambda: encoder.save_pretrained(tmp_path / "file"), "is a file; pass a folder"),
        (lambda: VisionInputs.from_processor(wrong), "the processor gave a NoneType: pass its"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_is_no_checkpoint_of_the_hub_is_told_what_is(tmp_path: Path) -> None:
    wrong: Any = 4
    for keywords, message in (
        ({"revision": wrong}, "revision=4: must be a string, or None"),
        ({"subfolder": wrong}, "subfolder=4: must be a string, or None"),
        ({"cache_dir": wrong}, "cache_dir=4: must be a path, or None"),
        ({"device": 3.5}, r"device='3\.5' is not one of this machine"),
        ({"subfolder": "no"}, "has no folder 'no'; pass one that it has, or leave subfolder out"),
    ):
        with pytest.raises(ValueError, match=message):
            vitgraph.load_encoder(tmp_path, **keywords)


def test_a_class_is_no_encoder_to_graph_and_a_number_no_pattern() -> None:
    wrong: Any = vitgraph.Qwen3VLEncoder
    with pytest.raises(TypeError, match="not a module: load one first"):
        GraphedEncoder(wrong)
    number: Any = 5
    with pytest.raises(TypeError, match=r"pattern=5: must be a string, such as 'qwen3\*'"):
        vitgraph.list_models(number)
