"""The speed benchmark of the newer families, on tiny towers without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import family_speed
from encoders.base.encoder import Encoder
from encoders.base.paths_encoder import PathsEncoder
from tests.oracles import BY_NAME

SIZES = {"1x64": [(64, 64)], "mix": [(64, 96), (128, 64)]}
"""Widths and heights of images."""
TILED = {"1x64": [(64, 64)], "mix": [(64, 96), (768, 768)]}
"""Sizes of which LFM2-VL cuts one into tiles."""


def build(
    name: str, dtype: torch.dtype
) -> tuple[Encoder, nn.Module, dict[str, list[tuple[int, int]]]]:
    """Our tiny tower, transformers', and the sizes of the workloads."""
    encoder, reference = family_speed.build(name, BY_NAME[name].tiny, "cpu", dtype)
    assert reference is not None
    return encoder, reference, TILED if isinstance(encoder, PathsEncoder) else SIZES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4v", "lfm2_vl", "deepseek_ocr2", "minicpm_v"])
def test_a_newer_family_is_measured_beside_transformers(name: str) -> None:
    encoder, reference, sizes = build(name, torch.bfloat16)
    with torch.no_grad():
        row = family_speed.measure(name, encoder, reference, 1, sizes)
    assert [one["workload"] for one in row["workloads"]] == list(sizes)
    assert all(one["hf_ms"] > 0 and one["graphed_ms"] > 0 for one in row["workloads"])


@pytest.mark.slow
@pytest.mark.parametrize("name", family_speed.WITHOUT_PEER)
def test_a_family_without_a_peer_is_measured_beside_its_eager_encoder(name: str) -> None:
    encoder, none = family_speed.build(name, BY_NAME[name].tiny, "cpu")
    with torch.no_grad():
        row = family_speed.measure(name, encoder, none, 1, SIZES)
    assert all(one["own_ms"] > 0 and one["graphed_ms"] > 0 for one in row["workloads"])
    assert "(our eager: " in family_speed.table({"towers": [row]})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in family_speed.TOWERS if name != "siglip2"])
def test_the_measured_call_of_transformers_gives_our_tokens(name: str) -> None:
    """SigLIP2 is left out, because transformers leaves the padding in its tokens."""
    encoder, reference, sizes = build(name, torch.float32)
    load = family_speed.prepare(encoder, sizes["mix"])
    paths = encoder.paths if isinstance(encoder, PathsEncoder) else {"image": encoder}
    with torch.no_grad():
        theirs = family_speed.their_call(name, reference, load)()
        ours = [paths[key](*of[:2]).pooler_output for key, of in load.inputs.paths.items()]
    torch.testing.assert_close(theirs.flatten(0, -2), torch.cat(ours), atol=1e-5, rtol=1e-4)
