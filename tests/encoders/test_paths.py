"""Encoders of several input paths: each path is an encoder, and items are joined from them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from encoders import Encoder, PathsEncoder, Step3VLEncoder
from encoders.contract import (
    EncoderOutput,
    MultiPathEncoder,
    PartialOutput,
    PathInputs,
    VisionInputs,
)
from tests.oracles import distance
from tests.support.towers.step3_paths import COUNTS, IMAGES, NAMES, STEP3_VL, fresh, shared, tokens
from weights import FAMILIES as RECORDS
from weights.published import PUBLISHED

EVERY: dict[Any, Any] = {
    record.encoder: record.config.from_hf(model.config)
    for model in PUBLISHED
    if issubclass((record := RECORDS[model.family]).encoder, PathsEncoder)
}
"""A published config of each class of several paths."""

# --- what an encoder of paths is -----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_paths_are_encoders_over_the_same_parameters(name: str) -> None:
    encoder = shared(name)
    assert isinstance(encoder, Encoder)
    assert isinstance(encoder, MultiPathEncoder)
    assert list(encoder.paths) == ["image", "tiles"]
    own = dict(encoder.named_parameters())
    for path in encoder.paths.values():
        assert {key: id(weight) for key, weight in path.named_parameters()} == {
            key: id(weight) for key, weight in own.items()
        }
    assert encoder.state_dict().keys() == own.keys()
    assert encoder.paths["image"].row_shape == (3, 112, 112)
    assert encoder.paths["tiles"].row_shape == (3, 84, 84)
    assert (encoder.num_features, encoder.out_features) == (64, 48)
    assert (encoder.device, encoder.dtype) == (torch.device("cpu"), torch.float32)
    assert len(encoder.blocks) == encoder.config.depth


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_training_and_evaluation_reach_every_path(kind: type[PathsEncoder]) -> None:
    with torch.device("meta"):
        encoder = kind(EVERY[kind])
    for form in (encoder, encoder.accelerated()):
        assert not form.eval().training
        modules = [form, *form.paths.values()]
        assert not any(part.training for module in modules for part in module.modules())
        assert form.train() is form
        assert all(part.training for module in modules for part in module.modules())


@pytest.mark.parametrize("name", NAMES)
def test_paths_follow_casts_copies_and_new_weights(name: str) -> None:
    encoder = fresh(name)
    inputs = encoder.preprocess(IMAGES[:1])
    other = copy.deepcopy(encoder).to(torch.float64)
    assert (other.paths["tiles"].dtype, encoder.paths["tiles"].dtype) == (
        torch.float64,
        torch.float32,
    )
    assert distance(tokens(other(inputs)[0]), tokens(encoder(inputs)[0])) <= 1e-5
    zeros = {key: torch.zeros_like(value) for key, value in encoder.state_dict().items()}
    encoder.load_state_dict(zeros, assign=True)
    assert not tokens(encoder(inputs)[0]).any()


# --- running and joining -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_item_is_its_tiles_then_the_whole_image(name: str) -> None:
    encoder = shared(name)
    inputs = encoder.preprocess(IMAGES)
    whole, tiles = (encoder.paths[path](*inputs.paths[path][:2]) for path in ("image", "tiles"))
    outputs = encoder(inputs)
    assert [len(tokens(output)) for output in outputs] == [4 * (count + 1) for count in COUNTS]
    start = 0
    for number, (output, count) in enumerate(zip(outputs, COUNTS, strict=True)):
        first = tokens(tiles)[4 * start : 4 * (start + count)]
        last = tokens(whole)[4 * number : 4 * number + 4]
        assert torch.equal(tokens(output), torch.cat([first, last]))
        assert output.last_hidden_state is not None
        assert output.last_hidden_state.shape == (36 * count + 64, 64)
        assert torch.equal(output.last_hidden_state[-64:], whole.last_hidden_state[number, -64:])
        start += count


def test_items_without_tiles_run_one_path_only() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES[1::2])
    assert list(encoder.forward_intermediates(inputs, indices=1)) == ["image"]
    joined: list[set[str]] = []

    class Watched(Step3VLEncoder):
        def join(self, outputs: Any, inputs: VisionInputs) -> list[EncoderOutput]:
            joined.append(set(outputs))
            return super().join(outputs, inputs)

    watched = Watched(STEP3_VL)
    watched.load_state_dict(encoder.state_dict())
    watched.encode(IMAGES[1::2])
    watched(inputs)
    assert joined == [{"image"}] * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit", [None, 1, 5, 9, 21, 1000])
def test_encode_gives_the_items_of_forward_at_every_limit(name: str, limit: int | None) -> None:
    encoder = shared(name)
    expected = encoder(encoder.preprocess(IMAGES))
    for one, other in zip(encoder.encode(IMAGES, max_tokens_per_call=limit), expected, strict=True):
        assert distance(tokens(one), tokens(other)) <= 2e-6
        assert distance(one.last_hidden_state, other.last_hidden_state) <= 2e-6
        assert tokens(one).untyped_storage().nbytes() == tokens(one).nbytes


@pytest.mark.parametrize("batch_tokens", [1, 40, 1000])
def test_a_stream_gives_what_encode_gives(batch_tokens: int) -> None:
    encoder = shared("step3_vl")
    results = encoder.encode_many(IMAGES, batch_tokens=batch_tokens, progress=False)
    for one, other in zip(results, encoder.encode(IMAGES), strict=True):
        assert distance(tokens(one), tokens(other)) <= 2e-6


def test_an_encoding_owns_no_views_of_the_next_call() -> None:
    encoder = shared("step3_vl")
    item_encoder = replace(encoder.item_encoder(), owns_results=False)
    inputs = encoder.preprocess(IMAGES)
    for one, other in zip(item_encoder.encode(lambda: inputs), encoder(inputs), strict=True):
        assert distance(tokens(one), tokens(other)) <= 2e-6


def test_a_pool_is_over_the_tokens_of_every_path() -> None:
    encoder = shared("step3_vl")
    for vector, output in zip(
        encoder.embed(IMAGES, pool="mean"), encoder.encode(IMAGES), strict=True
    ):
        assert distance(vector, tokens(output).mean(0)) <= 2e-6
    with pytest.raises(ValueError, match="pool='cls': this encoder has no class token"):
        encoder.embed(IMAGES, pool="cls")


def test_fields_that_were_left_out_stay_out() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES[:1])
    outputs = {
        name: PartialOutput(None, encoder.paths[name](*path[:2]).pooler_output, None)
        for name, path in inputs.paths.items()
    }
    (joined,) = encoder.join(outputs, inputs)
    assert joined.last_hidden_state is joined.deepstack_features is None
    assert tokens(joined).shape == (52, 48)


def test_gradients_reach_the_tower_from_both_paths() -> None:
    encoder = fresh("step3_vl").requires_grad_(True)
    inputs = encoder.preprocess(IMAGES[:1])
    plain = gradient(encoder, inputs)
    encoder.gradient_checkpointing_enable()
    assert distance(gradient(encoder, inputs), plain) <= 1e-6
    encoder.gradient_checkpointing_disable()
    alone = inputs._replace(tiles=[(1, 1, False)], other_paths={"tiles": nothing()})
    assert distance(gradient(encoder, alone), plain) > 0.1


def gradient(encoder: PathsEncoder, inputs: VisionInputs) -> Tensor:
    weight = next(encoder.parameters())
    (found,) = torch.autograd.grad(tokens(encoder(inputs)[0]).square().sum(), weight)
    return found


def nothing() -> PathInputs:
    return PathInputs(torch.zeros(0, 3, 84, 84), torch.zeros(0, 3, dtype=torch.int64), ())
