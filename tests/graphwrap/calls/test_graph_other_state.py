"""Changes besides weights and modules: adapters, plain values, classes, metadata and outputs."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encoders.contract import EncoderOutput, GridLike, Metadata
from graphwrap import GraphedEncoder
from tests.support.graphs.cases import OVER, SMALL, new_tower, pixels_for, single, static
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits
from tests.support.towers.toy_encoder import WIDTH, ToyEncoder

BACKENDS = ["static", "eager"]


class LoraLinear(nn.Linear):
    """A linear layer with two adapters, which it chooses by plain values as peft's does."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("a", "b")})
        self.active = ["a"]
        self.scaling = {"a": 2.0, "b": 0.5}
        self.disabled = False
        self.merged: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        for name in () if self.disabled or self.merged else self.active:
            out = out + self.scaling[name] * self.adapters[name](x)
        return out


class AdaptedToy(ToyEncoder):
    """A toy with a layer of two adapters and a norm, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lora, self.norm = LoraLinear(), nn.LayerNorm(WIDTH)
        self.calls = 0
        self.requires_grad_(False)

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        self.calls += 1
        rows = self.norm(self.lora(pixel_values.to(self.weight)))
        return super().forward(rows, *args, **kwargs)


class LoudToy(AdaptedToy):
    """The same class by another name."""


CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object], str]] = {
    "another adapter": (
        lambda e: setattr(e.lora, "active", ["b"]),
        lambda e: setattr(e.lora, "active", ["a"]),
        "'lora.active' was changed from",
    ),
    "a second adapter in the same list": (
        lambda e: e.lora.active.append("b"),
        lambda e: e.lora.active.pop(),
        "'lora.active' was changed from",
    ),
    "an adapter disabled": (
        lambda e: setattr(e.lora, "disabled", True),
        lambda e: setattr(e.lora, "disabled", False),
        "'lora.disabled' was changed from",
    ),
    "an adapter scaled": (
        lambda e: e.lora.scaling.update(a=4.0),
        lambda e: e.lora.scaling.update(a=2.0),
        "'lora.scaling' was changed from",
    ),
    "an adapter merged": (
        lambda e: e.lora.merged.append("a"),
        lambda e: e.lora.merged.pop(),
        "'lora.merged' was changed from",
    ),
    "another eps": (
        lambda e: setattr(e.norm, "eps", 1e-2),
        lambda e: setattr(e.norm, "eps", 1e-5),
        "'norm.eps' was changed from 1e-05",
    ),
    "a tensor in the place of a number": (
        lambda e: setattr(e.norm, "eps", torch.ones(2)),
        lambda e: setattr(e.norm, "eps", 1e-5),
        "'norm.eps' was changed from 1e-05",
    ),
    "a forward on a layer": (
        lambda e: setattr(e.norm, "forward", lambda x: x),
        lambda e: delattr(e.norm, "forward"),
        "the forward of module 'norm' was replaced",
    ),
    "another class": (
        lambda e: setattr(e, "__class__", LoudToy),
        lambda e: setattr(e, "__class__", AdaptedToy),
        "the class of module '' was changed",
    ),
}


@pytest.mark.parametrize("grids", [SMALL, OVER], ids=["replay", "eager"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_value_or_class_is_refused_until_undone(how: str, grids: list[list[int]]) -> None:
    graphed = static(AdaptedToy(), [4], outputs=EVERY_FIELD)
    pixels = pixels_for(graphed.encoder, grids)
    expected = graphed(pixels, grids)
    change, undo, clause = CHANGES[how]
    change(graphed.encoder)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{clause}.* after capture.*release\(\)"):
            graphed(pixels, grids)
    undo(graphed.encoder)
    assert_same_bits(graphed(pixels, grids), expected)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("attribute", ["eps", "forward", "__class__"])
def test_a_changed_norm_of_a_tower_is_refused(name: str, attribute: str) -> None:
    encoder, grids = new_tower(name), single(name)[:1]
    norm = encoder.blocks[1].norm1
    graphed, pixels = static(encoder, [16]), pixels_for(encoder, grids)
    graphed(pixels, grids)
    values = {"eps": 0.5, "forward": lambda x: x, "__class__": type("Other", (type(norm),), {})}
    setattr(norm, attribute, values[attribute])
    with pytest.raises(RuntimeError, match=r"blocks\.1\.norm1.* after capture"):
        graphed(pixels, grids)


def test_a_capture_after_release_follows_the_adapter() -> None:
    graphed = static(AdaptedToy(), [4], outputs=EVERY_FIELD).capture(progress=False)
    graphed.encoder.lora.active = ["b"]
    graphed.release()
    pixels = pixels_for(graphed.encoder, SMALL)
    assert_same_bits(graphed(pixels, SMALL), graphed.encoder(pixels, SMALL))


def test_the_eager_backend_follows_the_adapter() -> None:
    graphed = GraphedEncoder(AdaptedToy(), [4], backend="eager", outputs=EVERY_FIELD)
    pixels = pixels_for(graphed.encoder, SMALL)
    graphed(pixels, SMALL)
    graphed.encoder.lora.active = ["b"]
    assert_same_bits(graphed(pixels, SMALL), graphed.encoder(pixels, SMALL))


def test_dropout_switched_on_after_capture_is_refused() -> None:
    encoder = AdaptedToy().eval()
    encoder.lora.adapters["a"] = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)).eval()
    encoder.requires_grad_(False)
    graphed, pixels = static(encoder, [4]), pixels_for(encoder, SMALL)
    graphed(pixels, SMALL)
    encoder.train()
    with pytest.raises(RuntimeError, match=r"'lora\.adapters\.a\.0\.training' was changed from"):
        graphed(pixels, SMALL)


# --- metadata that depend on weights, or that the encoder changes ---------------------------------


class TableToy(ToyEncoder):
    """A toy whose metadata has a table that is computed from a weight."""

    def prepare_encoder_metadata(self, grid_thw: GridLike, **capacities: Any) -> Metadata:
        metadata = super().prepare_encoder_metadata(grid_thw, **capacities)
        return {**metadata, "table": self.weight.exp().to(metadata["first"].device)}

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        metadata = encoder_metadata or self.prepare_encoder_metadata(grid_thw or [])
        rows = pixel_values * metadata["table"]
        return super().forward(rows, encoder_metadata=metadata)


class PoppingToy(TableToy):
    """Removes entries of the metadata that it is given."""

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        metadata = encoder_metadata or self.prepare_encoder_metadata(grid_thw or [])
        table, first = metadata.pop("table"), metadata.pop("first")
        return ToyEncoder.forward(self, pixel_values * table, encoder_metadata={"first": first})


class WritingToy(TableToy):
    """Writes to the tensors of the metadata that it is given, its numbers included."""

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Metadata | None = None,
    ) -> EncoderOutput:
        metadata = encoder_metadata or self.prepare_encoder_metadata(grid_thw or [])
        metadata["table"].mul_(metadata["max_seqlen"].add_(1))
        return super().forward(pixel_values, encoder_metadata=metadata)


GRIDS = {"replay": SMALL, "eager": OVER}


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_follow_weights_changed_in_place(backend: Any, grids: list[list[int]]) -> None:
    graphed = GraphedEncoder(TableToy(), [4], backend=backend, outputs=EVERY_FIELD)
    pixels = pixels_for(graphed.encoder, grids)
    for _ in range(3):
        assert_same_bits(graphed(pixels, grids), graphed.encoder(pixels, grids))
        graphed.encoder.weight.add_(0.25)


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [PoppingToy, WritingToy])
def test_an_encoder_may_change_the_metadata_it_gets(
    kind: type[TableToy], backend: Any, grids: list[list[int]]
) -> None:
    graphed = GraphedEncoder(kind(), [4], backend=backend, outputs=EVERY_FIELD)
    if kind is WritingToy:  # a number of the metadata is fixed at capture: the same in both
        graphed.encoder.prepare_encoder_metadata = MethodType(_numbered, graphed.encoder)
    pixels = pixels_for(graphed.encoder, grids)
    expected = graphed.encoder(pixels, grids)
    for _ in range(3):
        assert_same_bits(graphed(pixels, grids), expected)


def _numbered(encoder: TableToy, grid_thw: GridLike, **capacities: Any) -> Metadata:
    metadata = TableToy.prepare_encoder_metadata(encoder, grid_thw, **capacities)
    return {**metadata, "max_seqlen": torch.tensor(1, dtype=torch.int32)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_grids_are_prepared_once(backend: Any) -> None:
    """Also after a call of other grids, and for an encoder that is not the library's."""
    encoder, seen = ToyEncoder(), list[object]()
    prepare = encoder.prepare_encoder_metadata
    graphed = GraphedEncoder(encoder, [4], backend=backend).capture(progress=False)

    def counted(grid_thw: GridLike, **capacities: Any) -> Metadata:
        seen.append(grid_thw)
        return prepare(grid_thw, **capacities)

    encoder.prepare_encoder_metadata = counted  # type: ignore[method-assign]
    for grids in (SMALL, [[1, 1, 4]], SMALL, SMALL):
        graphed(pixels_for(encoder, grids), grids)
    assert len(seen) == 2


class KeepingToy(ToyEncoder):
    """Returns the tensors of the first call again, as an encoder with a buffer for outputs does."""

    kept: EncoderOutput | None = None

    def forward(self, *args: Any, **kwargs: Any) -> EncoderOutput:
        output = super().forward(*args, **kwargs)
        if self.kept is None:
            self.kept = output
        for kept, new in zip(_tensors(self.kept), _tensors(output), strict=True):
            kept.copy_(new)
        return self.kept


def _tensors(output: EncoderOutput) -> list[Tensor]:
    return [output.last_hidden_state, output.pooler_output, *output.deepstack_features]


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_outputs_that_an_encoder_keeps_are_copied(grids: list[list[int]]) -> None:
    graphed = GraphedEncoder(KeepingToy(), [4], backend="eager", outputs=EVERY_FIELD)
    pixels = pixels_for(graphed.encoder, grids)
    first = graphed(pixels, grids)
    graphed(2 * pixels, grids)
    assert_same_bits(first, ToyEncoder()(pixels, grids))
