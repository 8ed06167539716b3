"""Encoders under torch's transforms of functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from encoders.contract import EncoderOutput
from tests.oracles import BY_NAME, TOWERS, draw_pixels, fields_of
from tests.support.accelerated.wrapped_layers import fresh


def tokens_of(name: str) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """Return a float64 tower as a function of pixels alone, and three random inputs."""
    encoder, grids = fresh(name), [[1, 4, 4]] if BY_NAME[name].tiled else [[1, 4, 6]]
    metadata = encoder.prepare_encoder_metadata(grids)

    def tokens(pixels: Tensor) -> Tensor:
        output: EncoderOutput = encoder(pixels, encoder_metadata=metadata)
        return torch.cat([field.flatten() for field in fields_of(output).values()])

    return tokens, [draw_pixels(encoder, grids, seed, torch.float64) for seed in range(3)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # in torch's own jvp
@pytest.mark.parametrize("name", TOWERS)
def test_forward_mode_derivatives_are_those_of_finite_differences(name: str) -> None:
    tokens, (pixels, direction, _) = tokens_of(name)
    step = 1e-5
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel has no forward-mode derivative
        _, slope = torch.func.jvp(tokens, (pixels,), (direction,))
    ahead, behind = tokens(pixels + step * direction), tokens(pixels - step * direction)
    difference = (ahead - behind) / (2 * step)
    assert (slope - difference).norm() <= 1e-7 * difference.norm()


@pytest.mark.parametrize("name", TOWERS)
def test_vmap_over_pixels_is_a_loop_of_calls(name: str) -> None:
    tokens, every = tokens_of(name)
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel warns that it has no batching rule
        mapped = torch.func.vmap(tokens)(torch.stack(every))
    looped = torch.stack([tokens(pixels) for pixels in every])
    assert (mapped - looped).norm() <= 1e-13 * looped.norm()
