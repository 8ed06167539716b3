"""Which attention kernel an accelerated encoder takes, and what it says about it."""

from __future__ import annotations

import json
import sys
import warnings
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from encoders.accelerated.attention import choices as choices_module
from encoders.accelerated.attention.candidates import REFERENCE, AttentionKernel
from encoders.accelerated.attention.choices import KernelChoices
from encoders.accelerated.shapes import AttentionShape
from encoders.layers.attention import attention
from tests.oracles import draw_pixels, tiny
from tests.support.accelerated.cases import (
    OURS,
    assert_close,
    fresh,
    needs_interpreter,
    needs_triton,
    run,
)

HALF = "torch.float16"
SHAPE = AttentionShape(heads=2, size=16, rows=40, segments=3, longest=20, equal=False, dtype=HALF)


def right(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, offsets: Tensor, shape: AttentionShape
) -> Tensor:
    longest = torch.tensor(max(shape.longest, 1), dtype=torch.int32)
    q, k, v = (x.float().nan_to_num() for x in (q, k, v))
    return attention(q, k, v, offsets, longest).to(out.dtype)


def wrong(*args: Any) -> Tensor:
    return 1.5 * right(*args)


def failing(*args: Any) -> Tensor:
    raise RuntimeError("no such tile\nand a second line")


def kernel(name: str, attend: Any = right, **settings: Any) -> AttentionKernel:
    settings = {"package": "torch", "takes": lambda *_: True, **settings}
    return AttentionKernel(name, attend=attend, **settings)


def put(monkeypatch: pytest.MonkeyPatch, *kernels: AttentionKernel) -> None:
    """Make these the table of kernels."""
    table = {each.name: each for each in kernels}
    for module in ("candidates", "choices"):
        monkeypatch.setattr(f"encoders.accelerated.attention.{module}.KERNELS", table)
    monkeypatch.setattr("encoders.accelerated.KERNELS", table)
    monkeypatch.setattr("encoders.accelerated.CHOICES", ("auto", "torch", *table))
    monkeypatch.setattr("encoders.accelerated.attention.choices.TORCH_KERNELS", tuple(table)[:2])


def timed(monkeypatch: pytest.MonkeyPatch, **milliseconds: float) -> list[AttentionShape]:
    """Time kernels by these numbers; the shapes that were timed."""
    shapes: list[AttentionShape] = []

    def time(self: KernelChoices, names: Any, *args: Any) -> dict[str, float]:
        shapes.append(args[-1])
        return {name: milliseconds[name] for name in names}

    monkeypatch.setattr(KernelChoices, "_time", time)
    return shapes


def pick(
    choices: KernelChoices, shape: AttentionShape = SHAPE, dtype: torch.dtype = torch.float16
) -> str:
    q = torch.zeros(shape.rows, shape.heads, shape.size, dtype=dtype)
    return choices.pick(q, shape._replace(dtype=str(dtype)))


# --- choosing -------------------------------------------------------------------------------------


def test_the_fastest_kernel_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernel("a"), kernel("b"), kernel("c"))
    shapes = timed(monkeypatch, a=3.0, b=1.0, c=2.0)
    choices = KernelChoices("auto")
    assert [pick(choices), pick(choices)] == ["b", "b"]
    assert shapes == [SHAPE]
    (row,) = choices.to_dict()["attention"]
    assert (row["kernel"], row["ms"]) == ("b", {"a": 3.0, "b": 1.0, "c": 2.0})


def test_torch_chooses_among_what_torch_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernel("a"), kernel("b"), kernel("c"))
    timed(monkeypatch, a=3.0, b=2.0, c=1.0)
    assert pick(KernelChoices("torch")) == "b"
    assert pick(KernelChoices("auto")) == "c"


def test_a_kernel_by_name_is_taken_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernel("a"), kernel("b"))
    assert timed(monkeypatch, a=1.0, b=2.0) == []
    assert pick(KernelChoices("b")) == "b"


@pytest.mark.parametrize(
    ("attend", "why"),
    [(failing, "RuntimeError: no such tile"), (wrong, "its result is 5.0e-01 from float32")],
)
def test_a_kernel_that_raises_or_disagrees_is_dropped(
    monkeypatch: pytest.MonkeyPatch, attend: Any, why: str
) -> None:
    put(monkeypatch, kernel("a", attend), kernel("b"), kernel("c"))
    timed(monkeypatch, a=1.0, b=2.0, c=3.0)
    choices = KernelChoices("auto")
    assert pick(choices) == "b"
    assert list(choices.to_dict()["dropped"]) == ["a"]
    assert choices.to_dict()["dropped"]["a"].startswith(why)


def test_a_kernel_that_lets_padding_leak_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(*args: Any) -> Tensor:
        return right(*args) + args[1].sum() * 0

    put(monkeypatch, kernel("a", leaking), kernel("b", leaking, reads_beyond=64))
    assert pick(KernelChoices("auto")) == "b"


def test_windows_and_many_segments_have_trials_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's kernel is compiled differently for each."""
    trials: list[tuple[int, int]] = []

    def noted(*args: Any) -> Tensor:
        trials.append((args[-1].longest, args[-1].segments))
        return right(*args)

    put(monkeypatch, kernel("a", noted), kernel("b", failing))
    choices, windows = KernelChoices("auto"), SHAPE._replace(rows=400, longest=64)
    assert [pick(choices, windows), pick(choices, windows._replace(rows=900))] == ["a", "a"]
    assert trials == [(64, 4)]
    for segments in (128, 129):
        trials.clear()
        assert pick(choices, windows._replace(longest=200, segments=segments)) == "a"
        assert all(longest > 64 for longest, _ in trials)
        assert all((tried > 128) == (segments > 128) for _, tried in trials)


def test_what_one_head_size_drops_another_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(*args: Any) -> Tensor:
        return (failing if args[-1].size == 16 else right)(*args)

    put(monkeypatch, kernel("a", picky), kernel("b"))
    timed(monkeypatch, a=1.0, b=2.0)
    choices = KernelChoices("auto")
    assert pick(choices) == "b"
    assert pick(choices, SHAPE._replace(size=32)) == "a"


@needs_triton
def test_a_kernel_that_needs_more_shared_memory_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime.errors import OutOfResources

    def large(*args: Any) -> Tensor:
        raise OutOfResources(196_608, 101_376, "shared memory")

    put(monkeypatch, kernel("a", large), kernel("b"))
    choices = KernelChoices("auto")
    assert pick(choices) == "b"
    assert choices.dropped["a"].startswith("OutOfResources: out of resource: shared memory")


def test_a_kernel_that_flash_attention_cannot_compile_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class DSLBaseError(Exception):
        """The base of the errors of flash-attn-4's compiler."""

    def refusing(*args: Any) -> Tensor:
        raise DSLBaseError("no such tile")

    compiler = ModuleType("cutlass.base_dsl.common")
    monkeypatch.setattr(compiler, "DSLBaseError", DSLBaseError, raising=False)
    monkeypatch.setitem(sys.modules, compiler.__name__, compiler)
    put(monkeypatch, kernel("a", refusing), kernel("b"))
    choices = KernelChoices("auto")
    assert pick(choices) == "b"
    assert choices.dropped["a"] == "DSLBaseError: no such tile"


def test_want_of_memory_in_a_trial_drops_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory is left")

    put(monkeypatch, kernel("a", short))
    choices = KernelChoices("auto")
    with pytest.raises(torch.OutOfMemoryError):
        pick(choices)
    assert not choices.dropped
    put(monkeypatch, kernel("a"))
    assert pick(choices) == "a"


def test_a_kernel_is_asked_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernel("a", takes=lambda shape, dtype, _: dtype == torch.float16))
    choices = KernelChoices("auto")
    assert pick(choices) == "a"
    assert pick(choices, dtype=torch.float32) == REFERENCE.name
    assert pick(choices) == "a"


def test_without_any_kernel_the_reference_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernel("a", takes=lambda *_: False), kernel("b", package="no_such_package"))
    assert pick(KernelChoices("auto")) == REFERENCE.name


@pytest.mark.parametrize("attend", [failing, right])
def test_a_kernel_by_name_that_cannot_run_warns_once(
    monkeypatch: pytest.MonkeyPatch, attend: Any
) -> None:
    put(monkeypatch, kernel("a", attend, takes=lambda *_: attend is failing), kernel("b"))
    choices = KernelChoices("a")
    with pytest.warns(UserWarning, match="attention kernel 'a' cannot run") as caught:
        assert pick(choices) == REFERENCE.name
    assert [warning.filename for warning in caught] == [__file__]
    assert pick(choices) == REFERENCE.name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pick(choices, SHAPE._replace(rows=400)) == REFERENCE.name


# --- captures -------------------------------------------------------------------------------------


def test_a_capture_takes_what_a_like_shape_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs no kernel: whether that is the fastest is asked afterwards."""
    put(monkeypatch, kernel("a"), kernel("b"))
    choices, queries = KernelChoices("auto"), MagicMock(is_cuda=True)
    queries.new_empty = lambda count: torch.empty(count, dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    small, large = SHAPE, SHAPE._replace(rows=4000, longest=2000)
    times = {small: {"a": 1.0, "b": 2.0}, large: {"a": 2.0, "b": 1.0}}
    for shape, milliseconds in times.items():
        timed(monkeypatch, **milliseconds)
        pick(choices, shape)
    shapes = timed(monkeypatch, a=2.0, b=1.0)
    for rows, guess, is_right in ((60, "a", False), (3000, "b", True), (3000, "b", True)):
        assert choices.pick(queries, SHAPE._replace(rows=rows, longest=rows // 2)) == guess
        assert choices.settle() == is_right
    assert [shape.rows for shape in shapes] == [60, 3000]


# --- shape classes --------------------------------------------------------------------------------


def test_shapes_of_two_equal_bits_share_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernel("a"), kernel("b"))
    shapes = timed(monkeypatch, a=1.0, b=2.0)
    choices = KernelChoices("auto")
    for rows in (1025, 1536, 1537, 2048, 1024):
        pick(choices, SHAPE._replace(rows=rows))
    assert [shape.rows for shape in shapes] == [1025, 1537, 1024]
    for change in ({"equal": True}, {"heads": 3}, {"size": 24}, {"segments": 9}, {"longest": 39}):
        pick(choices, SHAPE._replace(rows=1024, **change))
    assert len(shapes) == 8
    for rows in (5 * 260, 6 * 260):
        segments = rows // 260
        pick(choices, SHAPE._replace(rows=rows, segments=segments, longest=260, equal=True))
    assert len(shapes) == 9


@pytest.mark.parametrize(
    ("number", "rounded"), [(0, 0), (1, 1), (7, 7), (9, 10), (17, 20), (1000, 1024), (1025, 1280)]
)
def test_sizes_round_up_to_three_bits(number: int, rounded: int) -> None:
    assert choices_module.rounded(number) == rounded


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        SHAPE._replace(rows=0, segments=0, longest=0),
        SHAPE._replace(rows=4096, segments=300, longest=64),
        SHAPE._replace(rows=1000, segments=2, longest=100),
        SHAPE._replace(rows=1024, segments=4, longest=256, equal=True),
        SHAPE._replace(rows=9000, segments=64, longest=9000),
    ],
)
def test_typical_fillings_fit_their_shape(shape: AttentionShape) -> None:
    fillings = choices_module._fillings(shape)
    assert fillings
    for lengths in fillings:
        assert len(lengths) <= shape.segments
        assert sum(lengths) <= shape.rows
        assert max(lengths, default=0) <= shape.longest


# --- saving and loading ---------------------------------------------------------------------------


def test_choices_survive_json(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernel("a"), kernel("b"))
    timed(monkeypatch, a=2.0, b=1.0)
    first, second = KernelChoices("auto"), KernelChoices("auto")
    pick(first)
    second.load(json.loads(json.dumps(first.to_dict())))
    shapes = timed(monkeypatch, a=1.0, b=2.0)
    assert pick(second) == "b"
    assert not shapes
    rows = [[r["kernel"] for r in each.to_dict()["attention"]] for each in (first, second)]
    assert rows == [["b"], ["b"]]


def test_choices_of_a_kernel_that_is_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, kernel("a"))
    choices = KernelChoices("auto")
    pick(choices)
    saved = choices.to_dict()
    for others in ((kernel("b"),), (kernel("a", package="no_such_package"),)):
        put(monkeypatch, *others)
        with pytest.raises(ValueError, match="kernel 'a', which is not installed here"):
            KernelChoices("auto").load(saved)


OTHER_DATA: list[Any] = [
    {},
    {"attention": [{}]},
    {"attention": 3},
    {"attention": [3]},
    {"attention": [], "relative_positions": [{}]},
]


@pytest.mark.parametrize("data", OTHER_DATA)
def test_other_data_is_no_choices(data: Any) -> None:
    with pytest.raises(ValueError, match="these are not kernel choices"):
        KernelChoices("auto").load(data)


@needs_triton
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_an_encoder_takes_the_choices_of_another(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, kernel("a"), kernel("b"))
    timed(monkeypatch, a=2.0, b=1.0)
    encoder = tiny(name, torch.float16)
    first, second = encoder.accelerated(), encoder.accelerated()
    run(first, name)
    shapes = timed(monkeypatch, a=1.0, b=2.0)
    second.load_kernel_choices(json.loads(json.dumps(first.kernel_choices())))
    assert_close(run(second, name), run(encoder, name), 1e-2)
    assert not shapes
    assert second.accelerator.kernels_used == "b"
    with pytest.raises(ValueError, match="this encoder is not accelerated: call accelerated"):
        encoder.load_kernel_choices(first.kernel_choices())


@needs_triton
@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_a_kernel_that_fails_in_a_call_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def later(*args: Any) -> Tensor:
        calls.append(len(calls))
        return (failing if len(calls) > 1 else right)(*args)

    put(monkeypatch, kernel("a", later))
    encoder = fresh(name, torch.float16)
    fast, pixels = encoder.accelerated("a"), draw_pixels(encoder, [[1, 2, 2]])
    with pytest.raises(RuntimeError, match="attention kernel 'a' failed on AttentionShape"):
        fast(pixels, [[1, 2, 2]])


def test_a_long_call_is_timed_once_and_in_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, calls = MagicMock(), list[int]()
    monkeypatch.setattr("encoders.accelerated.attention.choices.torch.cuda", cuda)
    cuda.Event.return_value.elapsed_time.return_value = 1.5
    assert choices_module.graph_milliseconds(lambda: calls.append(1)) == 1.5
    assert len(calls) == 2
    assert not cuda.CUDAGraph.called


def test_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the stream would record all later work, too."""
    cuda, calls = MagicMock(), iter([None, None])
    cuda.Event.return_value.elapsed_time.return_value = 0.1
    monkeypatch.setattr("encoders.accelerated.attention.choices.torch.cuda", cuda)
    cuda.current_device.return_value = 0
    monkeypatch.setattr(choices_module, "capture_stream", cuda.Stream)
    with pytest.raises(StopIteration):  # from the third call, the first in the capture
        choices_module.graph_milliseconds(lambda: next(calls))
    graph = cuda.CUDAGraph.return_value
    assert [call[0] for call in graph.method_calls] == ["capture_begin", "capture_end"]
