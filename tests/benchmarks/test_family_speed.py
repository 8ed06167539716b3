"""The speed benchmark of the newer families, on tiny towers without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import family_speed
from oracles import BY_NAME


@pytest.mark.slow
@pytest.mark.parametrize("name", family_speed.TOWERS)
def test_a_newer_family_is_measured_beside_transformers(name: str) -> None:
    encoder, reference = family_speed.build(name, BY_NAME[name].tiny, "cpu")
    sizes = {"1x64": [(64, 64)], "mix": [(64, 96), (128, 64)]}
    with torch.no_grad():
        row = family_speed.measure(name, encoder, reference, 1, sizes)
    assert [one["workload"] for one in row["workloads"]] == list(sizes)
    assert all(one["hf_ms"] > 0 and one["graphed_ms"] > 0 for one in row["workloads"])
