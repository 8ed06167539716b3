"""What runs: a form of the encoder, and one budget with its views of the arena and its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn

from encoders.contract import (
    Accelerable,
    Accelerator,
    EncoderOutput,
    GraphableEncoder,
    Grid,
    Metadata,
)

from .budgets import Budget
from .buffers import PADDING, Arena, Layout, Pool
from .results import output_fields

Forward: TypeAlias = Callable[..., EncoderOutput]
PRECISION = "bf16"
"""The encoder's own half or full precision, the only one that a reference runs in."""


class FormSettings(NamedTuple):
    """The user's settings that say which form of the encoder runs."""

    kernels: str = "auto"
    """"reference" for the module as it is, else what ``accelerated`` is asked for."""
    precision: str = PRECISION
    """What ``accelerated`` is asked for."""
    compile: bool = False
    """Whether the module as it is will be compiled."""


@dataclass(frozen=True)
class Target:
    """What is captured, where and with which outputs."""

    encoder: GraphableEncoder
    """The form of the encoder that is captured and runs eagerly."""
    accelerator: Accelerator | None
    device: torch.device
    dtype: torch.dtype
    outputs: tuple[str, ...]
    backend: str
    settings: FormSettings

    @property
    def has_graphs(self) -> bool:
        """Whether budgets are captured as CUDA graphs."""
        return self.backend == "cudagraph"


def choose_form(
    encoder: nn.Module, settings: FormSettings
) -> tuple[GraphableEncoder, Accelerator | None]:
    """Return the form of an encoder that is captured and that runs eagerly beside the graphs.

    Args:
        encoder: the user's module.
        settings: the user's settings.

    Returns:
        The accelerated form with its accelerator where the encoder has one. Otherwise the module,
        with an accelerator only if the user has accelerated it already.

    Raises:
        ValueError: settings that this encoder cannot follow.
    """
    accelerator = _find_accelerator(encoder)
    if accelerator is not None:
        for name, value in settings._asdict().items():
            default = FormSettings._field_defaults[name]
            if value != default:
                raise ValueError(
                    f"{name}={value!r}, but this encoder is accelerated already and runs as it is: "
                    f"leave {name}={default!r}, or pass the encoder that accelerated() was called "
                    "on"
                )
    elif _is_accelerable(encoder) and settings.kernels != "reference" and not settings.compile:
        form = encoder.accelerated(settings.kernels, settings.precision)
        return form, _find_accelerator(cast(nn.Module, form))
    else:
        _check_reference(encoder, settings)
    return cast(GraphableEncoder, encoder), accelerator


def _find_accelerator(encoder: nn.Module) -> Accelerator | None:
    """Return the accelerator of an encoder, or of the encoder that a module wraps."""
    for module in encoder.modules():
        if isinstance(module, Accelerable) and module.accelerator is not None:
            return module.accelerator
    return None


def _is_accelerable(encoder: nn.Module) -> TypeGuard[Accelerable]:
    """Return whether an encoder has a faster form of itself.

    A wrapper that passes on its module's attributes has none: the faster form would leave out what
    the wrapper's own forward adds.
    """
    own = any("accelerated" in vars(kind) for kind in type(encoder).__mro__)
    return own and isinstance(encoder, Accelerable)


def _check_reference(encoder: nn.Module, settings: FormSettings) -> None:
    """Raise on kernels or a precision asked of an encoder that runs as it is."""
    if settings.kernels not in ("auto", "reference"):
        if settings.compile and _is_accelerable(encoder):
            why, fix = "compile=True compiles the encoder as it is", " or compile=False"
        else:
            why, fix = f"{type(encoder).__name__} has no accelerated form to choose them for", ""
        raise ValueError(f'kernels={settings.kernels!r}: {why}; leave kernels="auto"{fix}')
    if settings.precision != PRECISION:
        raise ValueError(
            f"precision={settings.precision!r}: this encoder runs as it is, in the dtype of its "
            f'weights, only an accelerated one has a choice; leave precision="{PRECISION}"'
        )


def captured_forward(target: Target, budgets: int) -> Forward:
    """Return what graphs are captured from: the form, or what ``torch.compile`` makes of it.

    Args:
        target: says the form, and whether to compile it, anew for each budget.
        budgets: how many budgets there are.
    """
    if not target.settings.compile:
        return target.encoder
    many = 2 * budgets  # torch gives up compiling one function after eight times
    limits = torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)
    return cast(Forward, limits(torch.compile(cast(nn.Module, target.encoder), dynamic=False)))


def capacity_metadata(encoder: GraphableEncoder, budget: Budget, grids: Sequence[Grid]) -> Metadata:
    """Return a call's metadata on the host, padded to a budget's capacities."""
    return encoder.prepare_encoder_metadata(
        list(grids),
        max_batch_size=budget.segments,
        max_frames_per_batch=budget.segments,
        max_seqlen_override=budget.longest_segment,
        max_input_size=budget.rows,
        max_windows_per_batch=budget.windows or None,
        device="cpu",
    )


@dataclass(frozen=True)
class Body:
    """What a graph captures: clear the padding, run the encoder, put results into the arena.

    It does not refer to its runner: a cycle would outlive ``release()`` until garbage is collected,
    and the arena and the graphs' pool with it. It is not a closure either: an error that somebody
    holds keeps the closures of its frames.
    """

    forward: Forward
    arena: Arena
    wanted: tuple[str, ...]
    pixels: Tensor
    padding: Tensor
    metadata: Metadata
    outputs: dict[str, Tensor]

    def __call__(self) -> None:
        padding = self.padding.view(-1, *[1] * (self.pixels.ndim - 1))
        self.pixels.masked_fill_(padding, 0.0)  # rows of an earlier call, whatever they held
        output = self.forward(self.pixels, encoder_metadata=self.metadata)
        for name, field in output_fields(output, self.wanted).items():
            self.outputs[name] = self.arena.output(name, field)
            self.outputs[name].copy_(field)


@dataclass
class Runner:
    """Runs one budget on what lies in the arena; results lie in the arena afterwards."""

    budget: Budget
    layout: Layout
    pixels: Tensor
    block: Tensor
    body: Callable[[], None]
    outputs: dict[str, Tensor]
    """Output buffers of this budget by field name, filled by the first run of the body."""
    graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def of(
        cls,
        forward: Forward,
        budget: Budget,
        layout: Layout,
        arena: Arena,
        wanted: tuple[str, ...],
    ) -> Runner:
        """Return a runner whose buffers are prefixes of the arena's."""
        block = arena.block[: layout.nbytes]
        metadata = layout.views(block)
        padding = metadata.pop(PADDING)
        metadata.update(layout.constants)
        pixels = arena.pixels[: budget.rows]
        body = Body(forward, arena, wanted, pixels, padding, metadata, {})
        return cls(budget, layout, pixels, block, body, body.outputs)

    def run(self) -> None:
        """Replay the graph, or run the body where there is none."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()

    def capture(self, pool: Pool, stream: torch.cuda.Stream) -> None:
        """Run the body once, then capture it into ``pool``.

        ``torch.cuda.graph`` is not used: it collects garbage and empties the cache for every graph.
        Here the cache is emptied once, after the first run of the largest graph, because a capture
        cannot take from it.

        torch keeps a cuBLAS workspace (32 MiB on Hopper) for every stream that ever multiplied. It
        is dropped before capture, so that the graph's workspace lies in its pool and holds nobody
        else's work, and after capture, so that the next graph reuses it and ``release()`` frees it.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                self.body()
                torch._C._cuda_clearCublasWorkspaces()
                if pool.empty:
                    torch.cuda.empty_cache()
                pool.record(graph, self.body)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        self.graph = graph
