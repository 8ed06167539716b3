"""Rows before the patches of packed segments: class tokens and registers."""

from __future__ import annotations

import pytest
import torch

from encoders.layers.segments import prefix_metadata


def test_each_segment_begins_with_its_prefix() -> None:
    places = prefix_metadata([2, 3], 2, 2, 5)
    assert places["prefix_index"].tolist() == [[0, 1], [4, 5]]
    assert places["patch_index"].tolist() == [2, 3, 6, 7, 8]
    rows = torch.tensor([10, 11, 20, 21, 0, 1, 2, 3, 4])  # both prefixes, then all patches
    assert rows[places["packed_index"]].tolist() == [10, 11, 0, 1, 20, 21, 2, 3, 4]


@pytest.mark.parametrize("lengths", [[], [3], [2, 1, 4]])
def test_padding_of_prefixes_and_patches_stands_at_the_end(lengths: list[int]) -> None:
    plain = prefix_metadata(lengths, 2, len(lengths), sum(lengths))
    padded = prefix_metadata(lengths, 2, 5, 12)
    assert {name: tuple(x.shape) for name, x in padded.items()} == {
        "prefix_index": (5, 2),
        "patch_index": (12,),
        "packed_index": (22,),
    }
    assert torch.equal(padded["prefix_index"][: len(lengths)], plain["prefix_index"])
    assert torch.equal(padded["patch_index"][: sum(lengths)], plain["patch_index"])
    real = sum(lengths) + 2 * len(lengths)
    beyond = [padded["prefix_index"][len(lengths) :], padded["patch_index"][sum(lengths) :]]
    assert sorted(torch.cat([x.flatten() for x in beyond]).tolist()) == list(range(real, 22))
    assert sorted(padded["packed_index"].tolist()) == list(range(22))
