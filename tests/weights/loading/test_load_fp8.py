"""Towers in FP8 with scales: the weights are value times scale in float32, rounded once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.commands.command_line import Cli
from tests.support.hub.checkpoints import edit_config, edit_tensors, read_json, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder

PREFIX = "model.visual."
LAYER = "blocks.0.mlp.linear_fc1"  # 640 x 160, no multiples of 128
QKV = "blocks.1.attn.qkv"
WIDTH = 160

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSORS = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
}
COMPRESSED_BLOCKS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [128, 128]}}},
}
Shape = tuple[int, ...]


def grid(weight: Shape) -> Shape:
    return (-(-weight[0] // 128), -(-weight[1] // 128))


def expand(scale: Tensor, weight: Shape) -> Tensor:
    """Return one scale per weight, found for each place on its own."""
    rows, columns = torch.arange(weight[0]), torch.arange(weight[1])
    if scale.ndim == 2 and scale.numel() > 1:
        by_row = scale.shape[0] == weight[0]
        row = rows if by_row else rows // 128
        column = columns * 0 if by_row else columns // 128
        return scale[row][:, column]
    parts = scale.view(-1)
    return parts[rows * len(parts) // weight[0]][:, None].expand(weight)


FORMS: dict[str, tuple[dict[str, Any], str, Callable[[Shape], Shape], torch.dtype]] = {
    "blocks": (BLOCKS, "weight_scale_inv", grid, torch.float32),
    "blocks of powers of two": (BLOCKS, "weight_scale_inv", grid, torch.float8_e8m0fnu),
    "blocks of exponents": (
        BLOCKS | {"scale_fmt": "ue8m0"},
        "weight_scale_inv",
        grid,
        torch.uint8,
    ),
    "tensor of transformers": (TENSORS, "weight_scale_inv", lambda _: (), torch.float32),
    "tensor of vLLM": (TENSORS, "weight_scale", lambda _: (), torch.float32),
    "tensor of compressed-tensors": (COMPRESSED, "weight_scale", lambda _: (1,), torch.bfloat16),
    "rows": (COMPRESSED, "weight_scale", lambda weight: (weight[0], 1), torch.bfloat16),
    "compressed blocks": (COMPRESSED_BLOCKS, "weight_scale", grid, torch.float32),
}


def quantise(
    folder: Path,
    section: dict[str, Any] | None,
    name: str,
    shape: Callable[[Shape], Shape],
    dtype: torch.dtype,
    layers: tuple[str, ...] = (LAYER, QKV),
) -> dict[str, Tensor]:
    """Replace weights by FP8 ones with random scales; return what they stand for, in float32."""
    generator = torch.Generator().manual_seed(1)
    expected: dict[str, Tensor] = {}

    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in layers:
            full = f"{PREFIX}{layer}."
            weight = tuple(tensors[f"{full}weight"].shape)
            values = torch.randn(weight, generator=generator).to(torch.float8_e4m3fn)
            exponents = torch.randint(118, 124, shape(weight), generator=generator)
            scale = 0.01 + torch.rand(shape(weight), generator=generator) / 64
            if dtype in (torch.uint8, torch.float8_e8m0fnu):
                stored, scale = exponents.to(torch.uint8), 2.0 ** (exponents - 127)
                stored = stored.view(dtype)
            else:
                stored = scale.to(dtype)
                scale = stored.float()
            tensors[f"{full}weight"], tensors[f"{full}{name}"] = values, stored
            tensors[f"{full}input_scale"] = torch.tensor(0.5)
            expected[f"{layer}.weight"] = values.float() * expand(scale, weight)

    edit_tensors(folder, edit)
    if section is not None:
        edit_config(folder, lambda config: config.update(quantization_config=section))
    return expected


@pytest.fixture
def tower(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "tower", "qwen3_vl", width=WIDTH)


@pytest.mark.parametrize("form", FORMS)
def test_fp8_weights_are_value_times_scale_rounded_once(tower: Path, form: str) -> None:
    before = load_encoder(tower).state_dict()
    expected = quantise(tower, *FORMS[form])
    for dtype in (torch.bfloat16, torch.float32):
        state = load_encoder(tower, dtype=dtype).state_dict()
        assert state.keys() == before.keys()
        for name, weight in expected.items():
            assert torch.equal(state[name], weight.to(dtype))
        kept = [name for name in before if name not in expected]
        assert all(torch.equal(state[name], before[name].to(dtype)) for name in kept)


def test_a_fused_weight_may_have_a_scale_per_part(tower: Path) -> None:
    form = (TENSORS, "weight_scale", lambda _: (3,), torch.float32)
    expected = quantise(tower, *form, layers=(QKV,))
    assert torch.equal(
        load_encoder(tower).state_dict()[f"{QKV}.weight"], expected[f"{QKV}.weight"].bfloat16()
    )


def test_separate_parts_of_a_joined_weight_have_their_own_scales(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "intern_vit_hf", width=WIDTH)
    parts: list[Tensor] = []

    def edit(tensors: dict[str, Tensor]) -> None:
        names = [name for name in tensors if name.endswith("0.attention.q_proj.weight")]
        (query,) = names
        for number, part in enumerate("qkv", 1):
            name = query.replace("q_proj", f"{part}_proj")
            values, scale = tensors[name].to(torch.float8_e4m3fn), torch.tensor(0.3 * number)
            tensors[name], tensors[f"{name}_scale"] = values, scale
            parts.append(values.float() * scale)

    edit_tensors(folder, edit)
    edit_config(folder, lambda config: config.update(quantization_config=TENSORS))
    state = load_encoder(folder).state_dict()
    (joined,) = [state[name] for name in state if name.endswith("0.attn.qkv.weight")]
    assert torch.equal(joined, torch.cat(parts).bfloat16())


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"dtype": "float8_e4m3fn"}, torch.bfloat16),
        ({"vision_config": {"dtype": "float32"}, "dtype": "float16"}, torch.float32),
        ({}, torch.bfloat16),
    ],
)
def test_the_dtype_of_an_fp8_tower_is_that_of_its_config(
    tower: Path, named: dict[str, Any], expected: torch.dtype
) -> None:
    quantise(tower, *FORMS["blocks"])

    section = read_json(tower / "config.json")["vision_config"] | named.get("vision_config", {})
    edit_config(tower, lambda config: config.update(named | {"vision_config": section}))
    for dtype in (None, "auto"):
        encoder = load_encoder(tower, dtype=dtype)
        assert {value.dtype for value in encoder.state_dict().values()} == {expected}
    assert inspect_checkpoint(tower).dtype == str(expected).removeprefix("torch.")


def test_inspect_says_which_weights_are_in_fp8(tower: Path, cli: Cli) -> None:
    assert inspect_checkpoint(tower).quantisation == ""
    parameters = inspect_checkpoint(tower).parameters
    quantise(tower, *FORMS["blocks"])
    info = inspect_checkpoint(tower)
    assert info.parameters == parameters
    assert "2 tensors" in info.quantisation
    assert "2 with a scale per block" in info.quantisation
    assert info.bytes_by_dtype["F8_E4M3"] == (640 + 480) * 160
    assert info.quantisation in cli("inspect", tower).out


@pytest.mark.parametrize("form", ["blocks", "rows"])
def test_fp8_towers_come_by_ranges_as_from_the_folder(
    hub: HubServer, tower: Path, cache: Path, form: str
) -> None:
    quantise(tower, *FORMS[form])
    expected = load_encoder(tower)
    hub.push(REPO, tower)
    fetched = load_encoder(REPO, cache_dir=cache, progress=False, fetch="ranges")
    assert same_weights(fetched, expected)
    assert not any(name.endswith(".safetensors") for name in hub.files_sent())
    hub.requests.clear()
    info = inspect_checkpoint(REPO, cache_dir=cache)
    assert info.quantisation == inspect_checkpoint(tower).quantisation
    again = load_encoder(REPO, cache_dir=cache, progress=False, local_files_only=True)
    assert same_weights(again, expected)


def test_extracted_and_saved_towers_are_no_longer_in_fp8(tower: Path, tmp_path: Path) -> None:
    quantise(tower, *FORMS["blocks"])
    expected = load_encoder(tower)
    extract_encoder(tower, tmp_path / "extracted")
    expected.save_pretrained(tmp_path / "saved")
    for name in ("extracted", "saved"):
        assert same_weights(load_encoder(tmp_path / name), expected)
        assert set(inspect_checkpoint(tmp_path / name).bytes_by_dtype) == {"BF16"}
        assert "quantization_config" not in read_json(tmp_path / name / "config.json")


def test_a_tower_of_its_own_loses_the_config_of_its_scales(tower: Path, tmp_path: Path) -> None:
    """Otherwise transformers would look for scales in the folder."""
    alone = extract_encoder(tower, tmp_path / "alone")
    config = read_json(alone / "config.json")
    (alone / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))
    again = extract_encoder(alone, tmp_path / "again")
    assert "quantization_config" not in read_json(again / "config.json")


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("section", "name", "shape", "dtype", "reason"),
    [
        (MODELOPT, "weight_scale", lambda _: (), torch.float32, "ModelOpt"),
        (None, "weight_scale", lambda _: (), torch.float32, "no quantization_config"),
        (
            BLOCKS | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
            "weight_scale_inv",
            lambda weight: (weight[0] // 32, weight[1] // 32),
            torch.float8_e8m0fnu,
            r"other sizes than 128 x 128: \[\[32, 32\]\]",
        ),
        ({"quant_method": "fbgemm_fp8"}, "weight_scale", lambda _: (), torch.float32, "fbgemm_fp8"),
        (BLOCKS, "weight_scale_inv", lambda _: (), torch.float32, r"the shape \[\]"),
        (BLOCKS, "weight_scale_inv", lambda _: (6, 2), torch.float32, r"the shape \[6, 2\]"),
        (TENSORS, "weight_scale_inv", grid, torch.float32, r"the shape \[5, 2\]"),
        (TENSORS, "weight_scale", lambda weight: (weight[0],), torch.float32, r"\[640\]"),
        (TENSORS, "weight_scale", lambda _: (3,), torch.float32, r"\[3\] beside \[640, 160\]"),
        (COMPRESSED, "weight_scale_inv", lambda _: (1,), torch.float32, "compressed-tensors"),
        (COMPRESSED, "weight_scale", lambda _: (640, 2), torch.float32, r"\[640, 2\]"),
        (BLOCKS, "weight_scale_inv", grid, torch.float64, "a scale in F64"),
        (BLOCKS, "weight_scale_inv", grid, torch.uint8, "U8 without scale_fmt=ue8m0"),
        (TENSORS, "weight_scale", lambda _: (), torch.float8_e8m0fnu, "a scale in F8_E8M0"),
        (BLOCKS, "weight_scale_2", grid, torch.float32, "weight_scale_2"),
        (BLOCKS, "scale_weight", lambda _: (), torch.float32, "scale_weight"),
    ],
)
def test_other_forms_of_scales_are_refused_by_name(
    tower: Path,
    section: dict[str, Any] | None,
    name: str,
    shape: Callable[[Shape], Shape],
    dtype: torch.dtype,
    reason: str,
) -> None:
    quantise(tower, section, name, shape, dtype, layers=(LAYER,))
    for read in (load_encoder, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=rf"(?s)the tower is quantised.*{reason}"):
            read(tower)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float8_e5m2])
def test_scales_of_weights_in_other_dtypes_are_refused(tower: Path, dtype: torch.dtype) -> None:
    quantise(tower, *FORMS["tensor of compressed-tensors"])
    weight = f"{PREFIX}{LAYER}.weight"
    edit_tensors(tower, lambda tensors: tensors.update({weight: tensors[weight].float().to(dtype)}))
    with pytest.raises(CheckpointError, match=r"weight_scale is the scale of a weight in"):
        load_encoder(tower)


def test_fp8_weights_without_scales_stay_refused(tower: Path) -> None:
    quantise(tower, *FORMS["blocks"])
    edit_tensors(tower, lambda tensors: tensors.pop(f"{PREFIX}{LAYER}.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=rf"wrong dtype.*{LAYER}.weight is F8_E4M3"):
        load_encoder(tower)


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_fp8_weights_that_are_not_finite_are_refused(tower: Path, part: str) -> None:
    quantise(tower, *FORMS["blocks"])

    def edit(tensors: dict[str, Tensor]) -> None:
        tensor = tensors[f"{PREFIX}{LAYER}.{part}"].float()
        tensor[1, 1] = torch.nan
        tensors[f"{PREFIX}{LAYER}.{part}"] = tensor.to(tensors[f"{PREFIX}{LAYER}.{part}"].dtype)

    edit_tensors(tower, edit)
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight \(has nan\)"):
        load_encoder(tower)


def test_fp8_weights_beyond_float16_are_refused_by_name(tower: Path) -> None:
    quantise(tower, *FORMS["blocks"])
    scale = f"{PREFIX}{LAYER}.weight_scale_inv"
    edit_tensors(tower, lambda tensors: tensors.update({scale: tensors[scale] * 1e8}))
    assert load_encoder(tower).dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight \(largest [\d,.e+]+\)"):
        load_encoder(tower, dtype="float16")
