"""How outputs and inputs of a call are shown, and outputs as NumPy arrays."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from encoders import EncoderOutput, PartialOutput, VisionInputs
from encoders.contract import PathInputs

TOKENS = torch.arange(6.0).view(2, 3)


def test_an_output_is_shown_by_shapes_and_dtypes() -> None:
    output = EncoderOutput(torch.zeros(8, 4), TOKENS.bfloat16(), (TOKENS, TOKENS))
    assert repr(output) == (
        "EncoderOutput(last_hidden_state=float32 [8, 4], pooler_output=bfloat16 [2, 3], "
        "deepstack_features=(float32 [2, 3], float32 [2, 3]))"
    )
    assert repr(PartialOutput(None, TOKENS.to("meta"), ())) == (
        "PartialOutput(last_hidden_state=None, pooler_output=float32 [2, 3] on meta, "
        "deepstack_features=())"
    )


def test_inputs_are_shown_by_shapes_and_dtypes_of_every_path() -> None:
    grid = torch.ones(9, 3, dtype=torch.int64)
    tiles = PathInputs(torch.zeros(4, 3), grid[:2], (0, 8))
    inputs = VisionInputs(torch.zeros(36, 3).half(), grid, [(1, 1, False)] * 9, {"tiles": tiles})
    assert repr(inputs) == (
        "VisionInputs(pixel_values=float16 [36, 3], grid_thw=int64 [9, 3], tiles=9 entries, "
        "other_paths={'tiles': PathInputs(pixel_values=float32 [4, 3], grid_thw=int64 [2, 3], "
        "items=(0, 8))})"
    )


def test_an_output_in_bfloat16_becomes_arrays_of_float32() -> None:
    weights = TOKENS.clone().requires_grad_()
    arrays = EncoderOutput(weights * 2, TOKENS.bfloat16(), (TOKENS.half(),)).numpy()
    assert list(arrays) == ["last_hidden_state", "pooler_output", "deepstack.0"]
    assert [str(array.dtype) for array in arrays.values()] == ["float32", "float32", "float16"]
    assert np.array_equal(arrays["pooler_output"], TOKENS.numpy())


@pytest.mark.parametrize("kind", [EncoderOutput, PartialOutput])
def test_extras_of_an_output_are_its_own(kind: type[EncoderOutput]) -> None:
    changed = kind(TOKENS, TOKENS, ())
    assert isinstance(changed.extras, dict)
    changed.extras["blocks.0"] = TOKENS
    assert kind(TOKENS, TOKENS, ()).extras == {}
    assert pickle.loads(pickle.dumps(changed)).extras.keys() == {"blocks.0"}
    assert changed._replace(pooler_output=TOKENS + 1).extras is changed.extras


def test_arrays_leave_out_fields_that_are_none() -> None:
    assert list(PartialOutput(None, TOKENS, None).numpy()) == ["pooler_output"]
