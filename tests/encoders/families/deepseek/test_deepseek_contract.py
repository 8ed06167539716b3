"""The contract of DeepSeek's paths besides "image": padding, capacities, gradients, graphs.

The towers of the path "image" have rows in the table of towers, which the tests of the contract,
of parity and of graphs run for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from encoders import VisionEncoder
from graphwrap import GraphedEncoder
from tests.oracles import LiftFloat32, distance, draw_pixels
from tests.oracles.references.deepseek import ocr_keys, ocr_output
from tests.support.towers.deepseek import build, build_reference, draw_inputs

PATHS = [("deepseek_vl_hybrid", "high"), ("deepseek_ocr", "tiles")]


def path_of(name: str, path: str, dtype: torch.dtype = torch.float32) -> VisionEncoder:
    found: VisionEncoder = build(name, dtype).paths[path]
    return found


def items(path: VisionEncoder, *counts: int) -> list[list[int]]:
    return [[count, *path.grid_for(1)[1:]] for count in counts]


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_specs_count_what_forward_returns(name: str, path: str) -> None:
    encoder = path_of(name, path)
    grids = items(encoder, 2, 1)
    output = encoder(draw_pixels(encoder, grids), grids)
    for item, spec in zip(encoder.split(output, grids), encoder.item_specs(grids), strict=True):
        assert len(item.pooler_output) == spec.output_tokens
        assert len(item.last_hidden_state) == spec.input_size == spec.segments
    assert output.last_hidden_state.shape[-1] == encoder.num_features
    assert output.pooler_output.shape[-1] == encoder.out_features


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_views_together_match_views_alone(name: str, path: str) -> None:
    encoder = path_of(name, path)
    grids = items(encoder, 3)
    pixels = draw_pixels(encoder, grids)
    together = encoder(pixels, grids)
    alone = [encoder(view[None], items(encoder, 1)) for view in pixels]
    for field in ("last_hidden_state", "pooler_output"):
        rows = torch.cat([getattr(one, field) for one in alone])
        assert distance(getattr(together, field), rows) <= 2e-6


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_padding_of_nan_changes_no_real_row(name: str, path: str) -> None:
    encoder = path_of(name, path)
    grids = items(encoder, 1, 1)
    pixels = torch.cat((draw_pixels(encoder, grids), torch.full((2, *encoder.row_shape), 0.0)))
    capacities: Any = {"max_batch_size": 4, "max_input_size": 4}
    metadata = encoder.prepare_encoder_metadata(grids, **capacities)
    clean = encoder(pixels, encoder_metadata=metadata)
    pixels[2:] = float("nan")
    dirty = encoder(pixels, encoder_metadata=metadata)
    (spec,) = encoder.item_specs(items(encoder, 2))
    assert torch.equal(clean.last_hidden_state[:2], dirty.last_hidden_state[:2])
    real = slice(spec.output_tokens)
    assert torch.equal(clean.pooler_output[real], dirty.pooler_output[real])


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_shapes_of_metadata_depend_on_the_capacities_alone(name: str, path: str) -> None:
    encoder = path_of(name, path)
    capacities: Any = {"max_batch_size": 5, "max_input_size": 5, "max_seqlen_override": 9999}
    shapes = [
        {
            key: tuple(value.shape)
            for key, value in encoder.prepare_encoder_metadata(grids, **capacities).items()
        }
        for grids in ([], items(encoder, 1), items(encoder, 2, 3))
    ]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_no_views_make_no_tokens(name: str, path: str) -> None:
    encoder = path_of(name, path)
    output = encoder(torch.empty(0, *encoder.row_shape), [])
    assert output.pooler_output.shape == (0, encoder.out_features)
    assert len(output.last_hidden_state) == 0


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_inner_blocks_are_given_as_rows_and_as_maps(name: str, path: str) -> None:
    encoder = path_of(name, path)
    grids = items(encoder, 2, 1)
    pixels = draw_pixels(encoder, grids)
    rows = encoder.forward_intermediates(pixels, grids, 2)
    maps = encoder.forward_intermediates(pixels, grids, 2, output_fmt="NCHW")
    for state, per_item in zip(rows, maps, strict=True):
        laid = torch.cat([item.flatten(2).transpose(1, 2) for item in per_item])
        assert torch.equal(laid, state[:, state.shape[1] - laid.shape[1] :])


@pytest.mark.parametrize(("name", "path"), PATHS)
@torch.no_grad()
def test_a_path_replays_from_static_buffers(name: str, path: str) -> None:
    """Packed and padded in the buffers of graphs, each item has the tokens of its own call."""
    encoder = path_of(name, path)
    (one,) = encoder.item_specs(items(encoder, 1))
    budgets = [2 * one.output_tokens, 4 * one.output_tokens]
    graphed = GraphedEncoder(encoder, budgets=budgets, backend="static", max_batch_size=2)
    grids = items(encoder, 1, 3, 2)
    pixels = draw_pixels(encoder, grids)
    expected = encoder(pixels, grids).pooler_output
    assert distance(graphed(pixels, grids).pooler_output, expected) <= 2e-6
    assert sum(budget.items for budget in graphed.stats().budgets) == 3


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_half_precision_runs_and_is_near(name: str, path: str) -> None:
    encoder = path_of(name, path)
    grids = items(encoder, 1)
    pixels = draw_pixels(encoder, grids)
    expected = encoder(pixels, grids).pooler_output
    half = encoder.to(torch.bfloat16)(pixels, grids).pooler_output
    assert half.dtype == torch.bfloat16
    assert distance(half, expected) < 0.1


def test_gradients_match_transformers_in_float64() -> None:
    lift = LiftFloat32()
    encoder = build("deepseek_ocr", torch.float64)
    reference = build_reference("deepseek_ocr", encoder, torch.float64, lift).requires_grad_(True)
    path = encoder.requires_grad_(True).paths["tiles"]
    grids = items(path, 2)
    pixels = draw_pixels(path, grids, dtype=torch.float64)
    names, weights = zip(*path.named_parameters(), strict=True)
    gradients = torch.autograd.grad(weighted_sum(path(pixels, grids)), weights)
    ours = dict(zip(names, gradients, strict=True))
    with lift:
        weighted_sum(ocr_output(reference, pixels, torch.tensor(grids))).backward()
    theirs = dict(reference.named_parameters())
    for key, gradient in ocr_keys(ours).items():
        truth = theirs[key].grad
        if truth is not None:  # the path alone has no newlines
            scale = max(float(truth.norm()), 1e-3)
            assert float((gradient - truth).norm()) / scale <= 1e-9, key


def weighted_sum(output: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(
        output.pooler_output.shape, generator=generator, dtype=output.pooler_output.dtype
    )
    total: Tensor = (output.pooler_output * weights).sum()
    return total


def test_checkpointed_blocks_give_the_same_gradients() -> None:
    encoder = build("deepseek_ocr", torch.float64).requires_grad_(True)
    inputs = draw_inputs(encoder, [(2, 1, True)], torch.float64)

    def gradients() -> list[Tensor]:
        (item,) = encoder(inputs)
        return list(torch.autograd.grad(weighted_sum(item), tuple(encoder.parameters())))

    plain = gradients()
    encoder.gradient_checkpointing_enable()
    for one, other in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_path_compiles_into_one_graph() -> None:
    torch.compiler.reset()
    encoder = path_of("deepseek_ocr", "tiles")
    grids = items(encoder, 2, 1)
    pixels, metadata = draw_pixels(encoder, grids), encoder.prepare_encoder_metadata(grids)
    compiled = torch.compile(encoder.forward, fullgraph=True, backend="aot_eager")
    output = compiled(pixels, encoder_metadata=metadata)
    expected = encoder(pixels, encoder_metadata=metadata)
    assert distance(output.pooler_output, expected.pooler_output) <= 1e-6
