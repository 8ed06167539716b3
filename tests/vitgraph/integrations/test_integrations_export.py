"""Programs and ONNX files: what they compute, and that they need nothing of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders.base.vision_encoder import VisionEncoder
from tests.oracles import Grids, distance, draw_pixels, fields_of, in_tokens_of, slow, tiny
from tests.support.comparisons import assert_all_equal
from vitgraph.integrations.export import export_onnx, export_program

IN_ONNX = ["intern_vit_300m", "qwen2_5_vl", "qwen3_vl"]
"""Towers of tiles, of windows and of DeepStack, whose dynamic programs ONNX Runtime runs."""


def grids_of(name: str) -> list[Grids]:
    """Calls that one dynamic program serves: several items, other ones, one item, a small one."""
    if "intern" in name:
        return [[[2, 8, 8], [1, 8, 8]], [[1, 8, 8]]]
    return [[[2, 4, 6], [1, 10, 6]], [[1, 14, 6], [3, 2, 4], [1, 4, 4]], [[1, 20, 12]], [[1, 2, 4]]]


def given(encoder: VisionEncoder, name: str, grids: Grids, dynamic: bool) -> dict[str, Any]:
    """The inputs by name."""
    inputs: dict[str, Any] = {"pixel_values": draw_pixels(encoder, grids)}
    if dynamic and "intern" not in name:
        metadata = encoder.prepare_encoder_metadata(grids)
        inputs |= {key: x for key, x in metadata.items() if not key.startswith("max_")}
    return inputs


def expected(encoder: VisionEncoder, pixels: Tensor, grids: Grids) -> list[Tensor]:
    with torch.no_grad():
        return list(fields_of(encoder(pixels, grids)).values())


@pytest.mark.parametrize("name", ["qwen2_5_vl", slow("qwen3_vl")])
def test_a_program_for_one_grid_has_the_encoders_bits(name: str) -> None:
    """With taps and without; ``test_exports.py`` exports every tower."""
    encoder, grids = tiny(name), grids_of(name)[0]
    program = export_program(encoder, grids)
    pixels = draw_pixels(encoder, grids)
    output = program.module()(pixels)
    wanted = fields_of(encoder(pixels, grids))
    assert [key.replace("features_", "features[") for key in output] == [
        key.rstrip("]") for key in wanted
    ]
    assert_all_equal(output.values(), wanted.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["intern_vit_6b", "qwen2_vl", "qwen3_5"])
def test_a_dynamic_program_takes_items_of_any_size(name: str) -> None:
    encoder = tiny(name)
    run = export_program(encoder).module()
    for grids in grids_of(name):
        pixels, *metadata = (inputs := given(encoder, name, grids, True)).values()
        del inputs["pixel_values"]
        output = run(pixels, inputs) if metadata else run(pixels)
        pairs = zip(output.values(), expected(encoder, pixels, grids), strict=True)
        assert max(distance(*pair) for pair in pairs) <= 2e-6, grids


@pytest.mark.slow
def test_saved_programs_run_without_this_library(tmp_path: Path) -> None:
    """One for items of any size, and one for the items of its grid."""
    encoder, kinds = tiny("qwen2_5_vl"), {"any": None, "fixed": [[1, 4, 6], [2, 4, 4]]}
    wanted = {}
    for name, grids in kinds.items():
        torch.export.save(export_program(encoder, grids), tmp_path / f"{name}.pt2")
        asked = grids or [[1, 8, 6]]
        inputs = given(encoder, "qwen2_5_vl", asked, grids is None)
        pixels = inputs.pop("pixel_values")
        torch.save((pixels, inputs) if inputs else (pixels,), tmp_path / f"{name}.in")
        wanted[name] = expected(encoder, pixels, asked)
    code = (
        "import sys, torch\n"
        "for name in sys.argv[1:]:\n"
        "    run = torch.export.load(f'{name}.pt2').module()\n"
        "    torch.save(run(*torch.load(f'{name}.in')), f'{name}.out')\n"
        "assert not {'encoders', 'vitgraph'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, *kinds], cwd=tmp_path, check=True)
    for name in kinds:
        pairs = zip(torch.load(tmp_path / f"{name}.out").values(), wanted[name], strict=True)
        assert max(distance(*pair) for pair in pairs) <= 2e-6, name


def test_tiles_of_another_size_are_exported_for_their_grid() -> None:
    encoder, grids = tiny("intern_vit_300m"), [[2, 6, 10]]
    pixels = draw_pixels(encoder, grids)
    output = export_program(encoder, grids).module()(pixels)
    assert torch.equal(output["pooler_output"], encoder(pixels, grids).pooler_output)


def test_what_cannot_be_exported_is_refused() -> None:
    encoder = tiny("qwen2_vl")
    with pytest.raises(ValueError, match="empty"):
        export_program(encoder, [])
    with pytest.raises(ValueError, match="accelerated"):
        export_program(encoder.accelerated(), [[1, 4, 4]])


@pytest.mark.slow
def test_a_tower_that_depends_on_sizes_asks_for_a_grid() -> None:
    with pytest.raises(ValueError, match=r"any size.*pass a grid"):
        export_program(tiny("lfm2_vl").paths["image"])


@pytest.mark.slow
def test_gemma_4_is_exported_for_items_of_any_size() -> None:
    encoder = tiny("gemma4")
    run = export_program(encoder).module()
    for grids in in_tokens_of(encoder, [[1, 4, 6], [1, 8, 4]]), in_tokens_of(encoder, [[1, 6, 6]]):
        metadata = given(encoder, "gemma4", grids, True)
        pixels = metadata.pop("pixel_values")
        pairs = zip(run(pixels, metadata).values(), expected(encoder, pixels, grids), strict=True)
        assert max(distance(*pair) for pair in pairs) <= 2e-6, grids


def test_without_onnxscript_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install 'onnx>=1\.19' 'onnxscript>=0\.5'"):
        export_onnx(tiny("qwen2_vl"), tmp_path / "tower.onnx", [[1, 4, 4]])


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")  # of onnxscript
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("qwen2_5_vl", False),
        *((name, True) for name in IN_ONNX),
    ],
)
def test_onnxruntime_computes_what_the_encoder_does(
    tmp_path: Path, name: str, dynamic: bool
) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    encoder = tiny(name)
    path = tmp_path / "tower.onnx"
    export_onnx(encoder, path, None if dynamic else grids_of(name)[0])
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for grids in grids_of(name) if dynamic else grids_of(name)[:1]:
        inputs = given(encoder, name, grids, dynamic)
        assert [entry.name for entry in session.get_inputs()] == list(inputs)
        output = session.run(None, {key: value.numpy() for key, value in inputs.items()})
        wanted = expected(encoder, inputs["pixel_values"], grids)
        assert len(names) == len(wanted)
        pairs = zip(map(torch.from_numpy, output), wanted, strict=True)
        assert max(distance(*pair) for pair in pairs) <= 5e-6, grids
