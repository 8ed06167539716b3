"""The choice of an attention kernel per shape: each shape is timed once, and choices are saved.

Kernels are timed in a CUDA graph, so that the host's launch overhead is not measured, with two
typical distributions of segment lengths. A kernel that raises an error, or whose result is not
close to float32 attention, is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ...contract import Kernels, warn_caller
from ...cuda_streams import capture_stream
from ...layers.attention import attention
from ..shapes import AttentionShape, RelativeShape
from .candidates import (
    KERNELS,
    REFERENCE,
    SEARCHED,
    SHORT,
    TORCH_KERNELS,
    AttentionKernel,
    is_installed,
    kernel_errors,
)

ERROR = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest accepted relative L2 distance to float32 attention; 3e-3 is usual in bfloat16."""
RELATIVE = "triton, relative positions"
"""The key of the kernel for relative positions in ``KernelChoices.dropped``."""
RELATIVE_NEEDS = "relative positions need 'triton', half precision and heads of 16 to 128 columns"
ENOUGH_MS, LONG_MS = 20.0, 1.0
"""A kernel is not timed again once its timed runs have taken ``ENOUGH_MS``, nor in a graph if one
run takes ``LONG_MS``: a run that is queued behind another then does not wait for the host."""
REPEATS = 4
"""The calls in a graph that is timed."""
CLASS_BITS = 2
"""The significant bits of a size by which shapes are told apart."""
TRIALS = ((1, 17, 64, 200, 333), (2500, 60))
"""Segment lengths, in rows, of two trials for correctness: short and long, with partial tiles."""
SHORT_TRIALS = ((64, 1, 17, 64),)
"""Segment lengths in rows of the correctness trial for windows and other short segments."""


class KernelChoices:
    """Chooses an attention kernel per shape, and records why a kernel was dropped."""

    def __init__(self, kernels: Kernels) -> None:
        self.requested = kernels
        self.dropped: dict[str, str] = {}
        self._chosen: dict[AttentionShape, str] = {}
        self._milliseconds: dict[AttentionShape, dict[str, float]] = {}
        self._agreements: dict[tuple[str, int, int, int, torch.dtype, bool, bool], bool] = {}
        self._relative: dict[RelativeShape, str] = {}
        self._warned = False
        self._guessed: dict[AttentionShape, tuple[Tensor, AttentionShape, str]] = {}
        """What captures since :meth:`settle` guessed: the arguments of ``pick`` and the kernel."""
        self._untried = False
        """Whether one of these captures left out relative positions, which a run has to try."""

    def pick(self, q: Tensor, shape: AttentionShape) -> str:
        """Return the name of the kernel for a shape; a new shape is timed on random rows.

        Args:
            q: queries [T, H, K]; only their dtype and device are read.
            shape: the shape of the attention.
        """
        key = _class_of(shape)
        name = self._chosen.get(key)
        if name is None:
            names = self._candidates(shape, q)
            if names and q.is_cuda and torch.cuda.is_current_stream_capturing():
                # A capture runs no kernel, so that all are tried and timed after it.
                guess = self._guess(names, key)
                self._guessed[key] = q.new_empty(0), shape, guess
                return guess
            names = [name for name in names if self._agrees(name, q, shape)]
            if len(names) > 1:
                self._milliseconds[key] = self._time(names, q, shape)
                names = sorted(self._milliseconds[key], key=self._milliseconds[key].__getitem__)
            name = names[0] if names else self._fall_back(shape, q.dtype)
            self._chosen[key] = name
        return name

    def _guess(self, names: Sequence[str], key: AttentionShape) -> str:
        """Return the one of ``names`` that was chosen for the shape most like ``key``."""

        def sizes(shape: AttentionShape) -> tuple[int, ...]:
            return shape.rows + 1, shape.segments + 1, shape.longest + 1

        def unlikeness(shape: AttentionShape) -> float:
            pairs = zip(sizes(shape), sizes(key), strict=True)
            return sum(abs(math.log(size / wanted)) for size, wanted in pairs)

        like = [shape for shape, name in self._chosen.items() if name in names]
        return self._chosen[min(like, key=unlikeness)] if like else names[0]

    def settle(self) -> bool:
        """Choose what captures since the last call had to guess; return whether all were right."""
        guessed, self._guessed = self._guessed.values(), {}
        tried, self._untried = not self._untried, False
        right = [self.pick(q, shape) == name for q, shape, name in guessed]  # picks for every shape
        return all(right) and tried

    def _candidates(self, shape: AttentionShape, q: Tensor) -> list[str]:
        names = list(KERNELS) if self.requested == "auto" else [self.requested]
        if self.requested == "torch":
            names = list(TORCH_KERNELS)
        capability = (9, 0) if not q.is_cuda else torch.cuda.get_device_capability(q.device)
        return [
            name
            for name in names
            if not shape.causal_half
            and is_installed(KERNELS[name].package)
            and KERNELS[name].takes(shape, q.dtype, capability)
        ]

    def _fall_back(self, shape: AttentionShape, dtype: torch.dtype) -> str:
        """Return the name of the reference attention, for a shape that no kernel takes.

        It is also the only one for halves that are causal: it is flash attention by torch's rule.

        If the user asked for a kernel by name, a warning says why that kernel cannot run.
        """
        reason = self.dropped.get(self.requested, "it does not take this shape, dtype or device")
        self._warn(f"{dtype} {shape}", reason)
        return REFERENCE.name

    def _warn(self, subject: str, reason: str) -> None:
        """Warn once, with the ``reason``, that the kernel the user named cannot run ``subject``."""
        if self.requested in KERNELS and not self._warned:
            self._warned = True
            warn_caller(
                f"attention kernel {self.requested!r} cannot run {subject} ({reason}): the "
                'reference\'s attention runs instead; use kernels="auto" to choose what can'
            )

    def _agrees(self, name: str, q: Tensor, shape: AttentionShape) -> bool:
        """Return whether the kernel ``name`` agrees with float32 attention for the dtype of ``q``.

        A kernel is tried once per number of heads, head size and dtype, and once each for short
        segments, long ones and many long ones, for which Triton's kernel is compiled differently.
        The trial has NaN in the rows beyond the last segment, unless the kernel needs zeros there.
        """
        is_short, is_searched = shape.longest <= SHORT, shape.segments > SEARCHED
        key = (
            name,
            shape.heads,
            shape.group,
            shape.size,
            q.dtype,
            is_short,
            is_searched and not is_short,
        )
        if key not in self._agreements:
            kernel, trials = KERNELS[name], SHORT_TRIALS if is_short else TRIALS
            self._agreements[key] = all(
                self._close(name, partial(_distance, kernel, lengths, q, shape), q.dtype)
                for lengths in ([(shape.longest,) * 2] if shape.equal else trials)
            )
        return self._agreements[key]

    def takes_relative(self, rows: Tensor, shape: RelativeShape) -> bool:
        """Return whether the Triton kernel for attention with relative positions takes a shape.

        A new shape is tried once on one view: the result must agree with float32 attention.

        Args:
            rows: hidden rows; only their dtype and device are read.
            shape: the shape of the attention.
        """
        if shape not in self._relative:
            from ..triton_kernels.relative_attention import distance, takes  # needs Triton

            agrees = self.requested in ("auto", "torch", "triton") and takes(shape, rows.dtype)
            if agrees and rows.is_cuda and torch.cuda.is_current_stream_capturing():
                self._untried = True
                return False  # a capture runs no kernel, so a later call tries it
            if agrees:
                trial = partial(distance, shape, rows.device, rows.dtype)
                agrees = self._close(RELATIVE, trial, rows.dtype)
            if not agrees:
                self._warn(str(shape), self.dropped.get(RELATIVE, RELATIVE_NEEDS))
            self._relative[shape] = "triton" if agrees else REFERENCE.name
        return self._relative[shape] != REFERENCE.name

    def _close(self, name: str, distance: Callable[[], float], dtype: torch.dtype) -> bool:
        """Return whether ``distance()``, a relative L2 error, is small enough for ``dtype``.

        If not, or if ``distance`` raises, the kernel ``name`` is recorded as dropped.
        """
        try:
            error_l2 = distance()
        except torch.OutOfMemoryError:  # running out of memory is no fault of the kernel
            raise
        except kernel_errors() as error:
            self.dropped[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return False
        if error_l2 <= ERROR[dtype]:  # a comparison with NaN is false, so NaN counts as an error
            return True
        self.dropped[name] = f"its result is {error_l2:.1e} from float32 attention"
        return False

    def _time(self, names: Sequence[str], q: Tensor, shape: AttentionShape) -> dict[str, float]:
        """Return the milliseconds of each kernel in ``names`` for one shape.

        Times are summed over two typical lists of segment lengths. Of ``q`` only dtype and device
        are read. The rows are random: with equal rows, as an empty image makes, another kernel may
        be faster. Without CUDA, all times are 0.
        """
        times = dict.fromkeys(names, 0.0)
        if not q.is_cuda:
            return times
        generator = torch.Generator(q.device).manual_seed(0)  # leaves the global generator alone
        sizes = (shape.rows, shape.heads + 2 * shape.shared, shape.size)
        qkv = torch.randn(sizes, device=q.device, dtype=q.dtype, generator=generator)
        q, k, v = qkv.split((shape.heads, shape.shared, shape.shared), 1)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for lengths in _fillings(shape):
            offsets = _offsets(lengths, shape.segments, q.device)
            for name in names:
                attend = KERNELS[name].attend
                times[name] += graph_milliseconds(
                    lambda: attend(q, k, v, out, offsets, shape)  # noqa: B023
                )
        return times

    def kernel(self, name: str) -> AttentionKernel:
        """Return the attention kernel whose name ``pick`` returned."""
        return REFERENCE if name == REFERENCE.name else KERNELS[name]

    def to_dict(self) -> dict[str, object]:
        """Return the choices of kernels as plain data for JSON."""
        return {
            "kernels": self.requested,
            "attention": [
                {**shape._asdict(), "kernel": name, "ms": self._milliseconds.get(shape, {})}
                for shape, name in self._chosen.items()
            ],
            "relative_positions": [
                {**shape._asdict(), "kernel": name} for shape, name in self._relative.items()
            ],
            "dropped": dict(self.dropped),
        }

    def load(self, choices: Mapping[str, object]) -> None:
        """Use the kernel choices that :meth:`to_dict` returned in another process.

        Raises:
            ValueError: ``choices`` has another form, or names a kernel that is not installed here.
        """
        chosen, relative = {}, {}
        try:
            for row in saved_rows(choices["attention"]):
                whole = {**AttentionShape._field_defaults, **row}  # older rows lack a field
                shape = AttentionShape._make(whole[name] for name in AttentionShape._fields)
                chosen[shape] = str(row["kernel"])
            for row in saved_rows(choices.get("relative_positions", ())):
                views = RelativeShape._make(row[name] for name in RelativeShape._fields)
                relative[views] = str(row["kernel"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"these are not kernel choices ({error!r}): pass the result of kernel_choices()"
            ) from error
        for name in sorted({*chosen.values(), *relative.values()} - {REFERENCE.name}):
            if name not in KERNELS or not is_installed(KERNELS[name].package):
                raise ValueError(
                    f"the choices name attention kernel {name!r}, which is not installed here: "
                    "install the package that provides it, or let this process choose its own"
                )
        self._chosen.update(chosen)
        self._relative.update(relative)


def saved_rows(rows: object) -> Iterator[Mapping[str, object]]:
    """Yield the dicts of ``rows``, a list of kernel choices that another process has saved.

    Raises:
        TypeError: ``rows`` is not a list of dicts.
    """
    if not isinstance(rows, Sequence):
        raise TypeError(f"{rows!r} is no list")
    for row in rows:
        if not isinstance(row, Mapping):
            raise TypeError(f"{row!r} is no dict")
        yield row


def _class_of(shape: AttentionShape) -> AttentionShape:
    """Return a shape with its rows, segments and longest length rounded up to two significant bits.

    Shapes that are equal after rounding share one choice of a kernel, so that the default budgets
    of a tower time each kernel about twenty times. The number of equal segments is rounded up to a
    power of two, and says how many rows there are.
    """
    rows, segments, longest = (
        rounded(number, CLASS_BITS) for number in (shape.rows, shape.segments, shape.longest)
    )
    if shape.equal:
        segments = rounded(shape.segments, 1)
        rows = segments * longest
    return shape._replace(rows=rows, segments=segments, longest=longest)


def rounded(number: int, bits: int = 3) -> int:
    """Return a number rounded up to so many significant bits."""
    step = 1 << max(number.bit_length() - bits, 0)
    return -(-number // step) * step


def _fillings(shape: AttentionShape) -> list[list[int]]:
    """Return one or two lists of segment lengths, in rows, with which a shape is timed.

    The first list has as many segments of the longest length as the rows allow. The second has up
    to eight equal segments; it is left out if it would be the same or its segments very short.
    """
    longest = max(shape.longest, 1)
    longest_first = [longest] * min(shape.rows // longest, shape.segments)
    rows_left = shape.rows - sum(longest_first)
    if rows_left and len(longest_first) < shape.segments:
        longest_first.append(min(rows_left, longest))
    count = min(shape.segments, 8)
    equal_length = min(shape.rows // max(count, 1), longest)
    if (
        shape.equal
        or equal_length * count == sum(longest_first) == longest * len(longest_first)
        or equal_length < 64
    ):
        return [longest_first]
    return [longest_first, [equal_length] * count]


def _offsets(lengths: Sequence[int], segments: int, device: torch.device) -> Tensor:
    ends = [0, *accumulate(lengths)]
    ends += ends[-1:] * (segments + 1 - len(ends))
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _distance(
    kernel: AttentionKernel, lengths: tuple[int, ...], q: Tensor, shape: AttentionShape
) -> float:
    """Return the relative L2 distance of a kernel's result to float32 attention.

    The rows are random, in segments of ``lengths`` rows, with the dtype and device of ``q`` and the
    heads of ``shape``.
    """
    rows, generator = sum(lengths), torch.Generator(q.device).manual_seed(0)
    padding = 0 if shape.equal else 40
    heads = (shape.heads, shape.shared, shape.shared)
    qkv = torch.randn(
        rows + padding, sum(heads), shape.size, device=q.device, generator=generator
    ).to(q.dtype)
    qkv[rows:] = 0.0 if kernel.reads_beyond else float("nan")
    segments = len(lengths) if shape.segments <= SEARCHED else SEARCHED + len(lengths)
    trial = shape._replace(rows=len(qkv), segments=segments, longest=max(lengths))
    offsets = _offsets(lengths, segments, q.device)
    q, k, v = qkv.split(heads, 1)
    result = kernel.attend(q, k, v, torch.zeros_like(q), offsets, trial)[:rows].float()
    longest = torch.tensor(max(lengths), dtype=torch.int32, device="cpu")
    qkv_float = [part[:rows].float() for part in (q, k, v)]
    qkv_float[1:] = [part.repeat_interleave(shape.group, 1) for part in qkv_float[1:]]
    truth = attention(qkv_float[0], qkv_float[1], qkv_float[2], offsets, longest)
    return float((result - truth).norm() / truth.norm())


def graph_milliseconds(call: Callable[[], object]) -> float:
    """Return the milliseconds per call of ``call`` in a CUDA graph of ``REPEATS`` calls.

    The graph is replayed up to three times, and the shortest time counts. A long call is timed once
    without a graph.
    """
    call()
    ms = _stream_milliseconds(call)
    if ms >= LONG_MS:
        return ms
    stream = capture_stream(torch.device("cuda", torch.cuda.current_device()))
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    times: list[float] = []
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(REPEATS):
                call()
        finally:  # or all later work of the stream would count as captured
            graph.capture_end()
        while len(times) < 3 and sum(times) * REPEATS < ENOUGH_MS:
            times.append(_stream_milliseconds(graph.replay) / REPEATS)
    torch.cuda.current_stream().wait_stream(stream)
    return min(times)


def _stream_milliseconds(call: Callable[[], object]) -> float:
    """Return the milliseconds between two events around a call, on the current CUDA stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
