"""Encoders of several paths in their accelerated form."""

from __future__ import annotations

import pytest
import torch

from tests.oracles import distance
from tests.support.towers.step3_paths import IMAGES, shared, tokens


@pytest.mark.usefixtures("fused")
def test_the_accelerated_form_accelerates_every_path() -> None:
    encoder = shared("step3_vl")
    fast = encoder.accelerated()
    for one, other in zip(fast.encode(IMAGES), encoder.encode(IMAGES), strict=True):
        assert distance(tokens(one), tokens(other)) <= 2e-6
    choices = fast.kernel_choices()
    assert set(choices) == {"image", "tiles"}
    assert [choice["layers_called"] for choice in choices.values()] == [0, 0]
    encoder.accelerated().load_kernel_choices(choices)
    with pytest.raises(ValueError, match="for image: this encoder has the paths image, tiles"):
        fast.load_kernel_choices({"image": choices["image"]})
    with pytest.raises(ValueError, match="accelerated already"):
        fast.accelerated()


@pytest.mark.usefixtures("fused")
@torch.no_grad()
def test_fused_blocks_refuse_angles_of_larger_views() -> None:
    path = shared("step3_vl").paths["tiles"]
    pixels, metadata = torch.zeros(1, 3, 84, 84), path.prepare_encoder_metadata([[1, 8, 8]])
    for tower, words in (
        (path, "36 rows per view but encoder_metadata is for 64"),
        (path.accelerated(), "angles for views of 64 patches, and these pixels make views of 36"),
    ):
        with pytest.raises(ValueError, match=words):
            tower(pixels, encoder_metadata=metadata)


@pytest.mark.usefixtures("fused")
def test_blocks_with_norms_on_their_branches_run_as_the_reference() -> None:
    encoder = shared("step3")
    fast = encoder.accelerated()
    for one, other in zip(fast.encode(IMAGES), encoder.encode(IMAGES), strict=True):
        assert torch.equal(tokens(one), tokens(other))
    assert "norms on its branches" in fast.kernel_choices()["image"]["reference_because"]
