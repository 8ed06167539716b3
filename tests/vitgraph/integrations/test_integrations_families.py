"""Families that an integration does not serve: the error says what to call instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders import PathsEncoder
from encoders.base.vision_encoder import VisionEncoder
from graphwrap import GraphedEncoder
from tests.oracles import distance, fields_of, tiny
from tests.support.towers import deepseek, step3_paths
from vitgraph.integrations.export import export_program
from vitgraph.integrations.transformers import as_vision_tower
from vitgraph.integrations.vllm import multi_modal_data

BUILD: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: step3_paths.fresh(name) for name in step3_paths.NAMES},
    **{
        name: lambda name=name: deepseek.build(name) for name in ("deepseek_vl", *deepseek.FAMILIES)
    },
}
PATHS = [
    ("step3_vl", "image"),
    ("step3_vl", "tiles"),
    ("step3", "image"),
    ("deepseek_vl", "image"),
    ("deepseek_vl_hybrid", "image"),
    ("deepseek_vl_hybrid", "high"),
    ("deepseek_vl2", "image"),
    ("deepseek_ocr", "tiles"),
]


@cache
def built(name: str) -> Any:
    """A tiny encoder that tests must not change."""
    return BUILD[name]()


def forms_of(name: str) -> list[Any]:
    """The encoder, its graphed form, and its paths."""
    encoder = built(name)
    return [encoder, GraphedEncoder(encoder, backend="eager"), *encoder.paths.values()]


@pytest.mark.parametrize("name", [name for name in BUILD if name != "deepseek_vl"])
def test_a_tower_for_transformers_is_refused_with_what_to_call(name: str) -> None:
    for form in forms_of(name):
        with pytest.raises(
            ValueError, match=r"does not take \w+, since .*: call encoder.encode\(images\)"
        ):
            as_vision_tower(form)


@pytest.mark.parametrize("name", BUILD)
def test_data_for_vllm_are_refused_with_what_to_call(name: str) -> None:
    """Before any image is read."""
    for form in forms_of(name):
        with pytest.raises(ValueError, match=r"not for \w+: .*call encoder.encode\(images\)"):
            multi_modal_data(form, ["no such file.png"])


@pytest.mark.parametrize("name", [name for name in BUILD if name != "deepseek_vl"])
def test_a_program_of_several_paths_is_refused_with_a_call_for_each(name: str) -> None:
    encoder = built(name)
    for grids in (None, [[1, 4, 4]]):
        with pytest.raises(ValueError, match=r"call export_program.*, and encoder.join") as info:
            export_program(encoder, grids)
        for path in encoder.paths:
            assert f"export_program(encoder.paths[{path!r}])" in str(info.value)


def test_a_program_of_a_graphed_encoder_is_refused_with_what_to_pass() -> None:
    graphed: Any = GraphedEncoder(tiny("qwen2_vl"), backend="eager")
    with pytest.raises(ValueError, match=r"of type GraphedEncoder: .* graphed.encoder"):
        export_program(graphed)


@pytest.mark.parametrize(
    ("name", "path", "dynamic"),
    [
        (*PATHS[0], False),
        (*PATHS[0], True),
        *(pytest.param(*case, True, marks=pytest.mark.slow) for case in PATHS[1:]),
    ],
)
def test_a_program_of_each_path_computes_what_the_path_does(
    name: str, path: str, dynamic: bool
) -> None:
    encoder = built(name)
    tower: VisionEncoder = encoder.paths[path] if isinstance(encoder, PathsEncoder) else encoder
    run = export_program(tower, None if dynamic else [[2, *tower.grid_for(1)[1:]]]).module()
    for tiles in (2, 5) if dynamic else (2,):
        generator = torch.Generator().manual_seed(tiles)
        pixels = torch.randn(tiles, *tower.row_shape, generator=generator)
        wanted = fields_of(tower(pixels, [[tiles, *tower.grid_for(1)[1:]]])).values()
        output: dict[str, Tensor] = run(pixels)
        assert max(map(distance, output.values(), wanted)) <= 2e-6
