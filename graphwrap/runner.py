"""What runs: a form of the encoder, and one budget with its views of the arena and its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from encoders.contract import (
    Accelerable,
    Accelerator,
    EncoderOutput,
    GraphableEncoder,
    Grid,
    Metadata,
    MultiPathEncoder,
    Output,
    VisionInputs,
)

from .budgets import Budget
from .buffers import PADDING, Arena, Layout, Memory
from .guards import MEMBERS, require_members
from .results import output_fields

Forward: TypeAlias = Callable[..., EncoderOutput]


class FormSettings(NamedTuple):
    """The user's settings that say which form of the encoder runs."""

    kernels: str = "auto"
    """"reference" for the module as it is, else what ``accelerated`` is asked for."""
    precision: str = "bf16"
    """What ``accelerated`` is asked for; the default is the encoder's own half or full precision,
    the only one that a reference runs in."""
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


class OnePath(NamedTuple):
    """An encoder that names no paths, as the only path of an encoder."""

    encoder: GraphableEncoder

    @property
    def paths(self) -> Mapping[str, GraphableEncoder]:
        """The encoder by the name of the only path."""
        return {"image": self.encoder}

    def join(self, outputs: Mapping[str, Output], inputs: VisionInputs) -> list[Output]:
        """Return one output per item: those of the only path, split."""
        return self.encoder.split(outputs["image"], inputs.grid_thw) if outputs else []


def with_paths(encoder: nn.Module) -> MultiPathEncoder:
    """Return the encoder by its paths; a module that names none is its own only path.

    A wrapper that passes on the attributes of an encoder of one path is its own path, too: the path
    of its module would leave out what the wrapper's own forward adds.

    Raises:
        TypeError: a path without the contract's members.
    """
    whole: MultiPathEncoder = OnePath(cast(Any, encoder))
    if isinstance(encoder, MultiPathEncoder):
        owner = getattr(encoder.join, "__self__", encoder)
        if owner is encoder or encoder.paths["image"] is not owner:
            whole = encoder
    for path in whole.paths.values():
        require_members(cast(nn.Module, path), MEMBERS, "see encoders.contract.GraphableEncoder")
    return whole


def choose_form(
    encoder: GraphableEncoder, settings: FormSettings
) -> tuple[GraphableEncoder, Accelerator | None]:
    """Return the form of an encoder that is captured and that runs eagerly beside the graphs."""
    accelerator = _find_accelerator(encoder)
    # A wrapper that passes on its module's attributes has no faster form of itself: that of its
    # module would leave out what the wrapper's own forward adds.
    own = any("accelerated" in vars(kind) for kind in type(encoder).__mro__)
    if accelerator is not None:
        why = "this encoder is accelerated already (pass the one accelerated() was called on)"
    elif not (own and isinstance(encoder, Accelerable)):
        why = f"{type(encoder).__name__} has no accelerated form"
    elif settings.compile or settings.kernels == "reference":
        why = 'compile=True and kernels="reference" take the encoder as it is'
    else:
        form = encoder.accelerated(settings.kernels, settings.precision)
        return form, _find_accelerator(form)
    for name, value in settings._asdict().items():
        default = FormSettings._field_defaults[name]
        allowed = accelerator is None and (name == "compile" or value == "reference")
        if value != default and not allowed:
            raise ValueError(
                f"{name}={value!r}: {why}, there is no choice: leave {name}={default!r}"
            )
    return encoder, accelerator


def _find_accelerator(encoder: GraphableEncoder) -> Accelerator | None:
    """Return the accelerator of an encoder, or of the encoder that a module wraps."""
    for module in cast(nn.Module, encoder).modules():
        if isinstance(module, Accelerable) and module.accelerator is not None:
            return module.accelerator
    return None


def captured_forward(target: Target, budgets: int) -> Forward:
    """Return what graphs are captured from: the form, or what ``torch.compile`` makes of it."""
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


@dataclass
class Runner:
    """Runs one budget on what lies in the arena; results lie in the arena afterwards.

    It refers to nothing that refers to it: a cycle would outlive ``release()`` until garbage is
    collected, and the arena and the graphs' pool with it.
    """

    budget: Budget
    layout: Layout
    forward: Forward
    arena: Arena
    wanted: tuple[str, ...]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Output buffers of this budget by field name, filled by the first run of the body."""
    graph: torch.cuda.CUDAGraph | None = None

    def __post_init__(self) -> None:
        self.pixels = self.arena.pixels[: self.budget.rows]
        self.block = self.arena.block[: self.layout.nbytes]
        self._metadata = {**self.layout.views(self.block), **self.layout.constants}
        self._padding = self._metadata.pop(PADDING)[:, None]
        flat = self.pixels.view(self.budget.rows, -1)
        wide = flat.shape[1] * flat.itemsize % torch.int64.itemsize == 0
        self._words = flat.view(torch.int64) if wide else flat
        """The pixels as rows of the widest words: four bfloat16 at a time are cleared faster."""

    def body(self) -> None:
        """Clear the padding, run the encoder, and put results into the arena."""
        self._words.masked_fill_(self._padding, 0)  # rows of an earlier call, whatever they held
        output = self.forward(self.pixels, encoder_metadata=self._metadata)
        for name, value in output_fields(output, self.wanted).items():
            self.outputs[name] = self.arena.output(name, value)
            self.outputs[name].copy_(value)

    def run(self) -> None:
        """Replay the graph, or run the body where there is none."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()

    def capture(self, memory: Memory) -> None:
        """Run the body once, then capture it; without graphs, run it once.

        ``torch.cuda.graph`` is not used: it collects garbage and empties the cache for every graph.
        Here the cache is emptied once, after the first run of the largest graph, because a capture
        cannot take from it.

        torch keeps a cuBLAS workspace (32 MiB on Hopper) for every stream that ever multiplied. It
        is dropped before capture, so that the graph's workspace lies in its pool and holds nobody
        else's work, and after capture, so that the next graph reuses it and ``release()`` frees it.
        """
        if memory.stream is None:
            return self.body()
        memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(memory.stream):
                self.body()
                torch._C._cuda_clearCublasWorkspaces()
                if memory.empty:
                    torch.cuda.empty_cache()
                memory.record(graph, self.body)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        self.graph = graph
        return None
