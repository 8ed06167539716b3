"""What is noticed before a wrong answer could come: weights, hooks, modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from encoders import Qwen2_5VLEncoder
from encoders.contract import EncoderOutput
from encoders.qwen.qwen2_5_vl import Qwen2_5VLConfig
from graphwrap import GraphedEncoder, changes
from graphwrap.changes import WeightGuard, all_modules, plain_values
from tests.support.graphs.cases import (
    OVER,
    SMALL,
    executor_of,
    new_tower,
    pixels_for,
    single,
    static,
    tower,
)
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, fields, worst_distance
from tests.support.steps import lines_run
from tests.support.towers.toy_encoder import WIDTH, ToyEncoder

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 48,
}


class DeepToy(ToyEncoder):
    """A toy with what real towers have: submodules, an absent bias, a scalar, a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.factor = torch.ones(WIDTH)
        self.requires_grad_(False)

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        rows = self.inner(pixel_values.to(self.scale)) * self.scale * self.factor + self.offset
        return super().forward(rows, *args, **kwargs)


def frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 0.5), requires_grad=False)


def load_anew(encoder: nn.Module) -> None:
    encoder.load_state_dict({k: v.clone() for k, v in encoder.state_dict().items()}, assign=True)


REBINDINGS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a submodule replaced": (
        lambda e: setattr(e, "inner", nn.Sequential(nn.Linear(WIDTH, WIDTH))),
        "module 'inner'",
    ),
    "a submodule of a submodule replaced": (
        lambda e: e.inner.__setitem__(0, nn.Linear(WIDTH, WIDTH)),
        "module 'inner.0'",
    ),
    "a submodule appended": (lambda e: e.inner.append(nn.ReLU()), "module 'inner.1'"),
    "a submodule removed": (lambda e: e.inner.__delitem__(0), "module 'inner.0'"),
    "a bias where there was none": (
        lambda e: setattr(e.inner[0], "bias", frozen(WIDTH)),
        "weight 'inner.0.bias'",
    ),
    "a weight taken away": (lambda e: setattr(e.inner[0], "weight", None), "'inner.0.weight'"),
    "a parameter that is new": (lambda e: setattr(e, "gain", frozen(2)), "weight 'gain'"),
    "a scalar rebound to an equal one": (
        lambda e: setattr(e, "scale", nn.Parameter(torch.ones(1), requires_grad=False)),
        "weight 'scale'|tensor 'scale'",
    ),
    "a buffer rebound": (lambda e: setattr(e, "offset", torch.zeros(WIDTH)), "weight 'offset'"),
    "a plain tensor replaced": (
        lambda e: setattr(e, "factor", torch.ones(WIDTH)),
        "tensor 'factor'",
    ),
    "load_state_dict(assign=True)": (load_anew, "weight 'weight'"),
    ".data": (lambda e: setattr(e.weight, "data", e.weight.data.clone()), "weight 'weight'"),
    ".to('meta')": (lambda e: e.to("meta"), "weight"),
    ".double()": (lambda e: e.double(), "weight"),
    "a square weight transposed where it is": (
        lambda e: setattr(e.inner[0].weight, "data", e.inner[0].weight.data.t()),
        "weight 'inner.0.weight'",
    ),
    "a weight cut where it is": (
        lambda e: setattr(e.inner[0].weight, "data", e.inner[0].weight.data[:1]),
        "weight 'inner.0.weight'",
    ),
}


@pytest.mark.parametrize("grids", [SMALL, OVER], ids=["replay", "eager"])
@pytest.mark.parametrize("how", REBINDINGS)
def test_whatever_was_rebound_after_capture_is_named(how: str, grids: list[list[int]]) -> None:
    """Before ``forward``, which would raise less clearly."""
    graphed = static(DeepToy(), [4], outputs=EVERY_FIELD)
    pixels = pixels_for(graphed.encoder, grids)
    graphed(pixels, grids)
    rebind, name = REBINDINGS[how]
    rebind(graphed.encoder)
    with pytest.raises(RuntimeError, match=rf"({name}).* was rebound or moved .* release\(\)"):
        graphed(pixels, grids)


@pytest.mark.parametrize("how", [name for name in REBINDINGS if "meta" not in name])
def test_after_release_what_was_rebound_serves(how: str) -> None:
    graphed = static(DeepToy(), [4], outputs=EVERY_FIELD)
    graphed.capture(progress=False)
    REBINDINGS[how][0](graphed.encoder)
    if graphed.encoder.inner and graphed.encoder.inner[0].weight is None:
        return
    graphed.encoder.requires_grad_(False)
    graphed.release()
    pixels = pixels_for(graphed.encoder, SMALL)
    ours, theirs = graphed(pixels, SMALL), graphed.encoder(pixels, SMALL)
    if how == "a weight cut where it is":  # a product of one column sums padded rows otherwise
        assert worst_distance(ours, theirs) <= 2e-6
    else:
        assert_same_bits(ours, theirs)


def test_weights_changed_in_place_are_no_rebinding() -> None:
    graphed = static(DeepToy(), [4], outputs=EVERY_FIELD).capture(progress=False)
    for tensor in [*graphed.encoder.state_dict().values(), graphed.encoder.factor]:
        tensor.add_(0.25)
    graphed.encoder.load_state_dict(DeepToy().state_dict())
    graphed.encoder.train().eval()
    pixels = pixels_for(graphed.encoder, SMALL)
    assert_same_bits(graphed(pixels, SMALL), graphed.encoder(pixels, SMALL))


def test_old_weights_stay_while_a_checked_replay_may_run() -> None:
    """The check of a graph comes after its launch: what it reads must not be freed before."""
    graphed = static(DeepToy(), [4], outputs=EVERY_FIELD).capture(progress=False)
    for runner in executor_of(graphed).graphs.by_budget.values():
        runner.captured = SimpleNamespace(replay=runner.body)
    pixels = pixels_for(graphed.encoder, SMALL)
    assert_same_bits(graphed(pixels, SMALL), graphed.encoder(pixels, SMALL))
    weight = graphed.encoder.weight
    old = StorageWeakRef(weight.untyped_storage())
    weight.data = weight.data.clone()
    assert not old.expired()
    with pytest.raises(RuntimeError, match="weight 'weight' was rebound or moved"):
        graphed(pixels, SMALL)
    graphed.release()
    assert old.expired()


def test_a_check_executes_as_many_lines_for_any_number_of_blocks() -> None:
    """Whole dicts and lists are compared; ``benchmarks/host.py`` has the microseconds."""
    lines = set()
    for depth in (2, 32):
        with torch.device("meta"):
            encoder = Qwen2_5VLEncoder(Qwen2_5VLConfig.from_hf({**SIZES, "depth": depth}))
        values = plain_values(all_modules({"": encoder}))
        guard = WeightGuard({"": encoder}, values=values, hooks=True)
        lines.add(lines_run(guard.check, changes))
    assert len(lines) == 1


# --- hooks ----------------------------------------------------------------------------------------


def hook(*_: object) -> None:
    """A hook that does nothing, which no replay can know."""


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "before the encoder": lambda encoder: encoder.register_forward_pre_hook(hook),
    "after the encoder": lambda encoder: encoder.register_forward_hook(hook),
    "with keywords": lambda encoder: encoder.register_forward_hook(hook, with_kwargs=True),
    "inside it": lambda encoder: encoder.inner[0].register_forward_hook(hook),
}


@pytest.mark.parametrize("grids", [SMALL, OVER], ids=["replay", "eager"])
@pytest.mark.parametrize("where", REGISTER)
def test_a_hook_registered_after_capture_is_refused_until_removed(
    where: str, grids: list[list[int]]
) -> None:
    graphed = static(DeepToy(), [4], outputs=EVERY_FIELD)
    before = graphed.encoder.register_forward_hook(hook)
    captured = executor_of(graphed.capture(progress=False))
    captured.guard = WeightGuard({"": graphed.encoder}, hooks=True)  # as on the cudagraph backend
    for runner in captured.graphs.by_budget.values():
        runner.captured = SimpleNamespace(replay=runner.body)
    pixels = pixels_for(graphed.encoder, grids)
    expected = graphed(pixels, grids)
    handle = REGISTER[where](graphed.encoder)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was registered or removed after capture.*undo it"):
            graphed(pixels, grids)
    handle.remove()
    assert_same_bits(graphed(pixels, grids), expected)
    before.remove()  # replays would go on as if it were there
    with pytest.raises(RuntimeError, match="was registered or removed"):
        graphed(pixels, grids)


@pytest.mark.parametrize("backend", ["static", "eager"])
def test_without_graphs_a_hook_registered_later_runs(backend: str) -> None:
    graphed = GraphedEncoder(DeepToy(), [4], backend=backend).capture(progress=False)
    seen: list[object] = []
    graphed.encoder.inner.register_forward_hook(lambda *_: seen.append(1))
    graphed(pixels_for(graphed.encoder, SMALL), SMALL)
    assert seen == [1]


# --- without graphs, weights may move -------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_without_graphs_a_cast_is_followed_in_full_precision(backend: str) -> None:
    """Metadata kept from before is in the old precision: 1e-9 off."""
    encoder, grids = new_tower("qwen2_vl"), single("qwen2_vl")[:1]
    graphed = GraphedEncoder(encoder, [16], backend=backend, outputs=EVERY_FIELD)
    pixels = pixels_for(encoder, grids).double() / 3
    graphed(pixels, grids)
    encoder.double()
    output = graphed(pixels, grids)
    assert_same_bits(output, encoder(pixels, grids))
    assert output.pooler_output.dtype == graphed.dtype == torch.float64
    assert graphed.stats().eager_calls == 2


@pytest.mark.parametrize("how", [name for name in REBINDINGS if "meta" not in name])
def test_without_graphs_what_is_rebound_serves_at_once(how: str) -> None:
    graphed = GraphedEncoder(DeepToy(), [4], backend="eager", outputs=EVERY_FIELD)
    pixels = pixels_for(graphed.encoder, SMALL)
    graphed(pixels, SMALL)
    REBINDINGS[how][0](graphed.encoder)
    if graphed.encoder.inner and graphed.encoder.inner[0].weight is None:
        return
    graphed.encoder.requires_grad_(False)
    assert_same_bits(graphed(pixels, SMALL), graphed.encoder(pixels, SMALL))


def test_without_graphs_the_device_is_read_again() -> None:
    graphed = GraphedEncoder(ToyEncoder(), [4], backend="eager")
    graphed(pixels_for(graphed.encoder, SMALL), SMALL)
    graphed.encoder.to("meta")
    output = graphed(torch.zeros(6, WIDTH, device="meta"), [[1, 1, 6]])
    assert output.pooler_output.device == graphed.device == torch.device("meta")


def test_a_new_submodules_gradients_are_noticed() -> None:
    graphed = GraphedEncoder(DeepToy(), [4], backend="eager")
    pixels = pixels_for(graphed.encoder, SMALL)
    graphed(pixels, SMALL)
    graphed.encoder.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with torch.enable_grad(), pytest.raises(ValueError, match="encoder parameters require grad"):
        graphed(pixels, SMALL)


# --- modes ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("where", ["capture", "call", "both"])
@pytest.mark.parametrize("backend", ["static", "eager"])
def test_autocast_around_changes_nothing(backend: str, where: str) -> None:
    encoder, grids = tower("qwen2_vl"), [[1, 4, 6], [1, 40, 40]]
    pixels = pixels_for(encoder, grids)
    graphed = GraphedEncoder(encoder, [16, 48], backend=backend, outputs=EVERY_FIELD)
    expected = encoder(pixels, grids)
    if where == "capture":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            graphed.capture(progress=False)
    elif where == "call":
        graphed.capture(progress=False)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where != "capture"):
        output = graphed(pixels, grids)
        assert torch.is_autocast_enabled("cpu") is (where != "capture")
    assert {value.dtype for value in fields(output).values()} == {torch.float32}
    assert worst_distance(output, expected) <= 2e-6


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("name", ["toy", "qwen2_5_vl", "intern_vit_300m"])
def test_a_default_device_changes_nothing(name: str, backend: str) -> None:
    encoder: Any = ToyEncoder() if name == "toy" else tower(name)
    grids = SMALL if name == "toy" else single(name)[:1]
    pixels = pixels_for(encoder, grids)
    graphed = GraphedEncoder(encoder, [16], backend=backend, outputs=EVERY_FIELD)
    with default_device("meta"):
        output = graphed(pixels, grids)
    assert worst_distance(output, encoder(pixels, grids)) <= 2e-6
