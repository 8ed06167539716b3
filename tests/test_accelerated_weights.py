"""Accelerated encoders follow the weights of their encoder: copied, loaded, cast and written."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelerated_cases import (
    CLOSE,
    OURS,
    assert_close,
    assert_fused,
    fresh,
    needs_interpreter,
    needs_triton,
    run,
)
from oracles import FEW_FAST, ONE_FAST, distances, draw_pixels, slow

pytestmark = [
    needs_triton,
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_the_state_is_that_of_the_encoder(name: str, tmp_path: Path) -> None:
    encoder, untouched = fresh(name), fresh(name).state_dict()
    fast = encoder.accelerated()
    run(fast, name)
    for state in (encoder.state_dict(), fast.state_dict()):
        assert list(state) == list(untouched)
        for key, value in state.items():
            assert value.dtype == untouched[key].dtype
            assert torch.equal(value, untouched[key])
    save_file(fast.state_dict(), tmp_path / "tower.safetensors")
    assert list(load_file(tmp_path / "tower.safetensors")) == sorted(untouched)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_copies_and_pickles_run_on_their_own(name: str) -> None:
    encoder = fresh(name)
    fast, truth = encoder.accelerated(), run(encoder, name)
    run(fast, name)
    twins = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), copy.deepcopy(encoder)]
    for weight in encoder.parameters():
        weight.zero_()
    for twin in twins:
        assert_close(run(twin, name), truth)
    assert twins[2].accelerator is None
    for twin in twins[:2]:
        assert twin.accelerator is not fast.accelerator
        assert_fused(twin)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_a_state_loaded_later_is_taken(name: str) -> None:
    encoder, other = fresh(name), fresh(name)
    fast = encoder.accelerated()
    run(fast, name)
    for weight in other.parameters():
        weight.mul_(0.9)
    for assign in (False, True):
        encoder.load_state_dict(other.state_dict(), assign=assign)
        assert_close(run(fast, name), run(other, name))
        other.load_state_dict({key: 0.8 * x for key, x in other.state_dict().items()})


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FEW_FAST)
def test_an_encoder_cast_later_runs_in_its_new_dtype(name: str) -> None:
    encoder = fresh(name)
    fast = encoder.accelerated()
    for dtype in (torch.float32, torch.float16, torch.float32):
        encoder.to(dtype)
        output, half = run(fast, name), dtype == torch.float16
        assert output.pooler_output.dtype == dtype
        assert_close(output, run(encoder, name), 1e-2 if half else CLOSE)
        assert fast.accelerator.taken == ("triton" if half else "reference")


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ONE_FAST)
def test_each_parameter_written_in_place_is_seen_next_call(name: str) -> None:
    encoder, grids = fresh(name), [[1, 2, 2]]
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    truth = encoder(pixels, grids)
    assert_close(fast(pixels, grids), truth)
    for key, weight in encoder.named_parameters():
        before = weight.clone()
        weight.mul_(1.5)
        changed = fast(pixels, grids)
        assert_close(changed, encoder(pixels, grids))
        assert max(distances(changed, truth).values()) > 10 * CLOSE, key
        weight.copy_(before)
    assert_close(fast(pixels, grids), truth)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_a_weight_written_after_inference_mode_is_seen(name: str) -> None:
    encoder, grids = fresh(name), [[1, 2, 2]]
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    with torch.inference_mode():
        fast(pixels, grids)
    for weight in encoder.parameters():
        weight.mul_(0.9)
    assert_close(fast(pixels, grids), encoder(pixels, grids))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_weights_shared_by_two_blocks_stay_shared(name: str) -> None:
    encoder = fresh(name)
    first, last = (encoder.blocks[number].parts() for number in (0, 2))
    last.proj.weight = first.proj.weight
    encoder.blocks[2].mlp = encoder.blocks[0].mlp
    assert_close(run(encoder.accelerated(), name), run(encoder, name))


# --- weights of any strides -----------------------------------------------------------------------


@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize("name", [one if one == "intern_vit_300m" else slow(one) for one in OURS])
def test_weights_may_have_any_strides(name: str) -> None:
    """As views of a larger tensor have."""
    encoder = fresh(name)
    for parameter in encoder.parameters():
        parameter.data = torch.stack((parameter.data, parameter.data + 1.0), -1)[..., 0]
    fast = encoder.accelerated()
    assert_close(run(fast, name), run(encoder, name))
    assert_fused(fast)
