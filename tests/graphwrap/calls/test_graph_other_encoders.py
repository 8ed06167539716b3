"""Encoders and calls that nobody here wrote: each works, or is told what it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from encoders.contract import EncoderOutput
from graphwrap import GraphedEncoder
from graphwrap.settings import resolve_backend
from tests.support.graphs.cases import executor_of, pixels_for, static, tower, toy
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, fields, worst_distance
from tests.support.towers.toy_encoder import ToyEncoder

GRIDS = [[1, 1, 6], [2, 1, 4], [1, 4, 30]]
"""The last is over the budgets of 8 and 16 tokens."""


class Scaled(ToyEncoder):
    """A toy with a layer that torch's utilities can rewrite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False).requires_grad_(False)

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        return super().forward(self.layer(pixel_values.to(self.weight)), *args, **kwargs)


class Plain(Scaled):
    """One that leaves dtypes to its caller, as an encoder of thirty lines does."""

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        return ToyEncoder.forward(self, self.layer(pixel_values), *args, **kwargs)


def graphed_of(encoder: nn.Module, backend: str, **settings: Any) -> GraphedEncoder:
    return GraphedEncoder(encoder, [8, 16], backend=backend, outputs=EVERY_FIELD, **settings)


# --- encoders whose attributes change as they run -------------------------------------------------


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.4)  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize(
    "rewrite", [pruned, nn.utils.weight_norm, nn.utils.spectral_norm], ids=lambda f: f.__name__
)
def test_weights_made_anew_by_every_forward_are_no_weights_that_moved(
    rewrite: Any, backend: str
) -> None:
    encoder = Scaled().eval()
    rewrite(encoder.layer)
    encoder.requires_grad_(False)
    graphed = graphed_of(encoder, backend).capture(progress=False)
    executor = executor_of(graphed)
    for _ in range(3):
        pixels = pixels_for(encoder, GRIDS)
        assert_same_bits(graphed(pixels, GRIDS), encoder(pixels, GRIDS))
    assert executor_of(graphed) is executor
    made_of = next(name for name in encoder.layer._parameters if name.startswith("weight_"))
    setattr(encoder.layer, made_of, nn.Parameter(torch.ones(3, 3), requires_grad=False))
    if backend == "static":
        with pytest.raises(RuntimeError, match=f"{made_of}.*rebound"):
            graphed(pixels, GRIDS)


# --- dtypes, results, members ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pixels_of_any_dtype_serve_an_encoder_that_casts_nothing(dtype: torch.dtype) -> None:
    """Items over every budget, which run eagerly, too."""
    encoder = Plain()
    pixels = pixels_for(encoder, GRIDS).to(dtype)
    expected = encoder(pixels.float(), GRIDS)
    assert_same_bits(graphed_of(encoder, "static")(pixels, GRIDS), expected)


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_an_eager_encoder_of_several_dtypes_gets_pixels_as_they_are(
    first: torch.dtype,
) -> None:
    class Mixed(ToyEncoder):
        def __init__(self) -> None:
            super().__init__()
            weight = self._parameters.pop("weight")
            self.scale = nn.Parameter(torch.ones(2).to(first), requires_grad=False)
            self.weight = weight

    encoder = Mixed()
    pixels = pixels_for(encoder, GRIDS)
    assert_same_bits(graphed_of(encoder, "eager")(pixels, GRIDS), encoder(pixels, GRIDS))
    if first.itemsize == 1:  # pixels in 8 bits would be another picture
        assert_same_bits(graphed_of(encoder, "static")(pixels, GRIDS), encoder(pixels, GRIDS))


@pytest.mark.parametrize("backend", ["static", "eager"])
def test_a_forward_that_returns_something_else_is_told_what_to_return(backend: str) -> None:
    class Loose(ToyEncoder):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return tuple(super().forward(*args, **kwargs))

    with pytest.raises(TypeError, match=r"returned a tuple: a forward returns .*EncoderOutput"):
        graphed_of(Loose(), backend)(torch.ones(6, 3), [[1, 1, 6]])


def test_what_is_no_encoder_is_told_what_it_lacks() -> None:
    with pytest.raises(
        TypeError, match=r"'Qwen/Qwen2-VL-2B' is a str, not .*vitgraph\.load_encoder"
    ):
        GraphedEncoder("Qwen/Qwen2-VL-2B")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError,
        match=r"Linear cannot .* no attribute 'budget_range'; .* row_shape, grid_for.* split",
    ):
        GraphedEncoder(nn.Linear(3, 3))
    with pytest.raises(
        TypeError, match=r"ToyEncoder.* no attribute 'preprocess'.*call graphed\(pixel_"
    ):
        toy().encode(images=[torch.zeros(3, 8, 8, dtype=torch.uint8)])


class Wrapper(nn.Module):
    """Gives on what it is asked for, as adapters and compilers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> EncoderOutput:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("backend", ["static", "eager"])
def test_a_module_that_passes_attributes_on_is_an_encoder(backend: str) -> None:
    encoder, pixels = ToyEncoder(), pixels_for(ToyEncoder(), GRIDS)
    expected = encoder(pixels, GRIDS)
    assert_same_bits(graphed_of(Wrapper(encoder), backend)(pixels, GRIDS), expected)


def test_an_allocator_without_pools_is_refused_before_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    gpu = torch.device("cuda", 0)
    for backend in ("auto", "cudagraph"):
        with pytest.raises(ValueError, match=r"this is cudaMallocAsync.*PYTORCH_ALLOC_CONF"):
            resolve_backend(backend, gpu)
    assert resolve_backend("eager", gpu) == "eager"
    assert resolve_backend("auto", torch.device("cpu")) == "eager"


# --- calls from inside a call ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("captured", [True, False], ids=["in a call", "in a capture"])
@pytest.mark.parametrize("what", ["call", "capture"])
def test_a_call_from_inside_its_own_encoder_is_refused_unlocked(
    what: str, captured: bool, backend: str
) -> None:
    """The inner call would overwrite the rows and metadata that the outer one is working on."""
    encoder, pixels, grids = ToyEncoder(), torch.ones(6, 3), [[1, 1, 6]]
    graphed = graphed_of(encoder, backend)
    if captured:
        graphed.capture(progress=False)

    def again(*_: object) -> None:
        if what == "call":
            graphed(torch.ones(4, 3), [[1, 1, 4]])
        else:
            graphed.capture()

    handle = encoder.register_forward_pre_hook(again)
    with pytest.raises(RuntimeError, match="from inside its own encoder"):
        graphed(pixels, grids)
    handle.remove()
    assert_same_bits(graphed(pixels, grids), encoder(pixels, grids))


# --- results that are passed back, and kept -------------------------------------------------------


def test_views_passed_back_as_pixels_are_read_before_they_are_overwritten() -> None:
    """With ``clone=False``: the first of two replays would write where the second one reads."""
    graphed = static(ToyEncoder(), [8], max_batch_size=1, clone=False, outputs=EVERY_FIELD)
    one, two = [[1, 1, 16]], [[1, 1, 8], [1, 1, 8]]
    views = graphed(pixels_for(graphed.encoder, one), one).last_hidden_state
    assert views is not None
    expected = graphed.encoder(views.clone(), two)
    assert_same_bits(graphed(views, two), expected)


@pytest.mark.parametrize("backend", ["static", "eager"])
def test_encoded_items_own_their_memory_unless_clone_is_off(backend: str) -> None:
    """One result of twenty, kept or saved, would keep all."""
    dice = torch.Generator().manual_seed(0)
    sizes = [(64, 96), (96, 64)]
    photos = [torch.randint(256, (3, *s), generator=dice, dtype=torch.uint8) for s in sizes]
    encoder = tower("qwen3_vl")
    for clone in (True, False):
        graphed = GraphedEncoder(encoder, [16, 48], backend=backend, clone=clone)
        results = graphed.encode(images=photos)
        expected = encoder.encode(images=photos)
        for ours, theirs in zip(results, expected, strict=True):
            assert worst_distance(ours, theirs._replace(last_hidden_state=None)) < 2e-6
        own = [
            x.untyped_storage().nbytes() == x.nbytes for r in results for x in fields(r).values()
        ]
        assert all(own) if clone else not any(own)
