"""Products in fp8: the kernels that quantise, and towers whose blocks run with them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoders.base.vision_encoder import VisionEncoder
from tests.oracles import ONE_FAST, add_noise
from tests.oracles.versions import needs
from tests.support.accelerated.cases import (
    ACTIVATIONS,
    OURS,
    assert_close,
    assert_fused,
    drawn,
    fresh,
    needs_interpreter,
    needs_triton,
    relative,
    rows8,
    run,
    run_steps_in_torch,
    same_bits,
)


def name_of(case: Any) -> str:
    """The name of a tower, whether or not it is marked as slow."""
    return case if isinstance(case, str) else str(case.values[0])


pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
E4M3 = torch.float8_e4m3fn
needs_products = needs("torch", "2.13", "on a CPU, _scaled_mm takes no scale per row")
FIT = [case for case in ONE_FAST if name_of(case) in ("intern_vit_300m", "qwen2_5_vl", "gemma4")]
"""One tower over tiles, one with a padded MLP, and one with norms behind its branches."""


@pytest.fixture(autouse=True)
def rounds_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to e4m3 as GPUs do; that of Triton 3.6 to 3.8 cuts digits off."""
    from triton.language import float8e4nv
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != float8e4nv or source.primitive_bitwidth != 32:
            return convert(x, source, target, mode)
        floats = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
        return floats.to(E4M3).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounding)


def rounded(rows: Tensor) -> Tensor:
    """Return rows as e4m3 holds them."""
    values, scales = rows8(rows)
    return values.float() * scales


@pytest.mark.parametrize("kind", [None, *ACTIVATIONS])
@pytest.mark.parametrize("gated", [False, True])
def test_rows_are_activated_and_quantised_in_one_pass(kind: str | None, gated: bool) -> None:
    from encoders.accelerated.triton_kernels.quantise import quantise

    both = drawn(5, 2 * 48, dtype=torch.bfloat16)
    x, up = both.chunk(2, dim=-1)
    truth = x.double() if kind is None else ACTIVATIONS[kind](x.double())
    truth = truth * up.double() if gated else truth
    values, scales = quantise(x, kind, up if gated else None)
    assert relative(scales, rows8(truth).scales) <= 1e-6
    assert relative(values.float() * scales, rounded(truth)) <= 1e-2  # few numbers round otherwise


def test_a_row_of_nan_changes_no_other_row() -> None:
    from encoders.accelerated.triton_kernels.quantise import quantise

    x = drawn(4, 32, dtype=torch.bfloat16)
    clean = quantise(x)
    x[2] = float("nan")
    spoilt = quantise(x)
    for row in (0, 1, 3):
        assert torch.equal(
            clean.values[row].view(torch.uint8), spoilt.values[row].view(torch.uint8)
        )
        assert clean.scales[row] == spoilt.scales[row]


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_norm_quantises_its_rows_and_keeps_the_sum(rms: bool, keep: bool) -> None:
    from encoders.accelerated.triton_kernels.norms import Norm, Sum, normalise_quantised

    hidden, branch = (drawn(5, 48, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    norm = Norm(drawn(48, seed=2).bfloat16(), None if rms else drawn(48, seed=3), 1e-6, rms)
    total, rows = normalise_quantised(Sum(hidden, branch), norm, keep)
    assert (total is not None) == keep
    whole = hidden.double() + branch.double()
    if total is not None:
        assert relative(total, whole) <= 4e-3
    weight = norm.weight.double()
    bias = None if norm.bias is None else norm.bias.double()
    truth = (
        F.rms_norm(whole, (48,), weight, 1e-6)
        if rms
        else F.layer_norm(whole, (48,), weight, bias, 1e-6)
    )
    assert relative(rows.values.float() * rows.scales, rounded(truth)) <= 1e-2


def quantised_reference(name: str) -> VisionEncoder:
    """Return the tower with products that round their rows and weights as e4m3 does."""
    encoder = fresh(name, torch.bfloat16)

    def rounding(layer: nn.Linear) -> None:
        def forward(rows: Tensor) -> Tensor:
            out = F.linear(rounded(rows), rounded(layer.weight), None)
            return (out if layer.bias is None else out + layer.bias.float()).to(rows.dtype)

        layer.forward = forward  # type: ignore[method-assign]

    for block in encoder.blocks:
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                rounding(layer)
    return encoder


@needs_products
@needs_interpreter
@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize("name", FIT)
def test_a_tower_in_fp8_computes_what_its_rounded_products_compute(name: str) -> None:
    encoder = fresh(name, torch.bfloat16)
    fast, truth = encoder.accelerated(precision="fp8"), run(fresh(name), name)
    ours, emulated = run(fast, name), run(quantised_reference(name), name)
    assert_fused(fast)
    assert {row["fp8"] for row in fast.kernel_choices()["products"]} == {True}
    error = relative(ours.last_hidden_state, truth.last_hidden_state)
    expected = relative(emulated.last_hidden_state, truth.last_hidden_state)
    plain = relative(run(encoder, name).last_hidden_state, truth.last_hidden_state)
    assert 2 * plain < error <= 1.2 * expected


@needs_products
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in OURS])
def test_every_tower_stays_near_bfloat16_in_fp8(name: str) -> None:
    encoder = fresh(name, torch.bfloat16)
    fast = encoder.accelerated(precision="fp8")
    assert_close(run(fast, name), run(encoder, name), 0.15)
    assert same_bits(run(fast, name), run(fast, name))


@pytest.mark.slow
@needs_products
@needs_interpreter
@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize("write", ["counted", "data"])
def test_weights_written_in_place_are_quantised_anew(
    write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel finds them, and the other steps run in torch."""
    run_steps_in_torch(monkeypatch)
    name = "qwen2_5_vl"
    encoder = fresh(name, torch.bfloat16)
    fast = encoder.accelerated(precision="fp8")
    before = run(fast, name)
    add_noise(*(x.data if write == "data" else x for x in encoder.parameters()))
    after = run(fast, name)
    assert not same_bits(after, before)
    assert same_bits(after, run(encoder.accelerated(precision="fp8"), name))


@needs_products
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FIT)
def test_a_hooked_layer_is_called_while_others_stay_in_fp8(name: str) -> None:
    encoder = fresh(name, torch.bfloat16)
    encoder.blocks[1].parts().proj.register_forward_hook(lambda *_: None)
    fast = encoder.accelerated(precision="fp8")
    run(fast, name)
    assert_fused(fast, layers_called=1)
    assert {row["step"] for row in fast.kernel_choices()["products"]} == {"qkv", "proj", "mlp"}


@pytest.mark.slow
@needs_products
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FIT)
def test_a_product_with_outlier_columns_stays_in_bfloat16(name: str) -> None:
    encoder = fresh(name, torch.bfloat16)
    for block in encoder.blocks:
        block.parts().qkv.weight[:, 3] *= 50.0
    fast = encoder.accelerated(precision="fp8")
    run(fast, name)
    assert {row["step"] for row in fast.kernel_choices()["products"]} == {"proj", "mlp"}


@pytest.mark.slow
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FIT)
def test_choices_of_products_are_saved_and_loaded(name: str) -> None:
    encoder = fresh(name, torch.bfloat16)
    fast, other = (encoder.accelerated(precision="fp8") for _ in range(2))
    run(fast, name)
    choices = json.loads(json.dumps(fast.kernel_choices()))
    for row in choices["products"]:
        row["fp8"] = row["step"] == "mlp"
    other.load_kernel_choices(choices)
    run(other, name)
    assert other.kernel_choices()["products"] == [{**row, "ms": {}} for row in choices["products"]]
    with pytest.raises(ValueError, match="are not choices of products"):
        other.load_kernel_choices({**choices, "products": [{"step": "mlp"}]})


@pytest.mark.slow
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FIT)
def test_quantised_weights_have_half_the_bytes_of_the_blocks(name: str) -> None:
    encoder = fresh(name, torch.bfloat16)
    fast = encoder.accelerated(precision="fp8")
    run(fast, name)
    layers = [x for block in encoder.blocks for x in block.modules() if isinstance(x, nn.Linear)]
    weights = sum(layer.weight.nbytes for layer in layers)
    assert 0.5 * weights < fast.accelerator.fp8.derived.nbytes <= 0.7 * weights  # with scales


def test_fp8_is_refused_where_the_device_has_no_such_products() -> None:
    encoder = fresh(name_of(FIT[0]))
    with pytest.raises(ValueError, match=r'precision="fp8".*H100') as error:
        encoder.accelerated(precision="fp8")
    assert "bf16" in str(error.value)
    with pytest.raises(ValueError, match="must be one of bf16, fp8"):
        encoder.accelerated(precision="int8")
