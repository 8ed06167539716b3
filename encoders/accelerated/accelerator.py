"""The accelerator of an encoder: it runs the blocks with fused kernels, on copies of weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..contract import is_library
from ..data import Grid, Metadata
from ..layers.torch_internals import any_fake, versions_of
from .attention.choices import KernelChoices
from .attention.fused import BlocksRun
from .derived import DerivedWeights
from .fused_blocks import FusedForward
from .obstacles import NO_PARTS, is_plain_table, names_its_parts, obstacle, obstacle_now

if TYPE_CHECKING:
    from ..contract import CallBlock, GraphableEncoder, Kernels, Precision, Step
    from .fp8 import Fp8Products


class FusedBlocks:
    """Runs an encoder's blocks with fused kernels, and keeps padded or fp8 copies of weights."""

    _last_metadata: tuple[object, Metadata, list[int]] | None = None

    def __init__(self, kernels: Kernels, precision: Precision, because: str | None = None) -> None:
        self.precision = precision
        self.attention = KernelChoices(kernels)
        self.derived = DerivedWeights()
        self.fp8 = _fp8_products() if precision == "fp8" else None
        self.run_records: WeakKeyDictionary[nn.ModuleList, dict[int, BlocksRun]] = (
            WeakKeyDictionary()
        )
        """The records of the last runs of each stack of blocks (``nn.ModuleList``), by the number
        of the first block that a run begins with."""
        self.because = because
        """Why device or dtype rule out fused kernels, so that blocks run as modules; else None."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle or copy only the settings of an accelerator; the copy chooses its kernels anew."""
        return type(self), (self.attention.requested, self.precision)

    @property
    def nbytes(self) -> int:
        """Bytes of the padded and quantised copies of the encoder's weights."""
        return self.derived.nbytes + (0 if self.fp8 is None else self.fp8.derived.nbytes)

    @property
    def kernels_used(self) -> str:
        """Names of the attention kernels that the last forward used, or "reference" if none."""
        names = set[str]().union(*(run_record.kernels for run_record in self._runs()))
        return ", ".join(sorted(names)) or "reference"

    @property
    def reference_because(self) -> str | None:
        """The reason why the last forward ran all blocks as modules; None if kernels ran any."""
        reasons = [run_record.because for run_record in self._runs()] or [self.because]
        return None if None in reasons else reasons[0]

    def _runs(self) -> list[BlocksRun]:
        return [record for runs in self.run_records.values() for record in runs.values()]

    def refresh(self) -> bool:
        """Update the copies of weights whose ``_version`` shows that they were written in place.

        Returns:
            Whether a weight was written since the last call.
        """
        was_written = self.derived.refresh()
        return (self.fp8 is not None and self.fp8.derived.refresh()) or was_written

    def settle(self) -> bool:
        """Choose the kernels that captures since the last call had to guess.

        Returns:
            Whether they guessed right; if not, the encoder has to run and be captured again.
        """
        timed = self.fp8 is None or self.fp8.settle()
        return self.attention.settle() and timed

    def choices(self) -> dict[str, object]:
        """Return the chosen kernels, with the times measured, as plain data for JSON."""
        return {
            **self.attention.to_dict(),
            "products": [] if self.fp8 is None else self.fp8.to_dict(),
            "precision": self.precision,
            "reference_because": self.reference_because,
            "layers_called": sum(run_record.called_count for run_record in self._runs()),
        }

    def load_choices(self, choices: Mapping[str, object]) -> None:
        """Use kernel choices that :meth:`choices` returned in another process; nothing is timed.

        Raises:
            ValueError: ``choices`` has another form, or names a kernel that is not installed here.
        """
        self.attention.load(choices)
        if self.fp8 is not None:
            self.fp8.load(choices.get("products", ()))

    def steps(
        self,
        stack: nn.ModuleList,
        blocks: Sequence[nn.Module],
        hidden: Tensor,
        metadata: Metadata,
        read_after: Collection[int],
        call_block: CallBlock,
        start: int = 0,
    ) -> Iterable[Step] | None:
        """Return fused ``blocks`` as functions that a ``forward`` calls one after the other.

        Args:
            stack: all blocks of one stack of the encoder.
            blocks: those to run, which follow one another in ``stack``.
            hidden: the rows that the first block reads, [rows, width] or [views, .., width].
            metadata: the result of the encoder's ``prepare_encoder_metadata``.
            read_after: indices into ``blocks``: these and the last return the hidden state.
            call_block: calls a block that cannot be fused.
            start: the number in ``stack`` of the first of ``blocks``.

        Returns:
            One function per block, or None if the blocks have to run as modules.
        """
        if _is_elsewhere(hidden):
            with torch.cuda.device(hidden.device):
                steps = self.steps(stack, blocks, hidden, metadata, read_after, call_block, start)
            return steps and [_on_device(step, hidden.device) for step in steps]
        because, called_count = obstacle(hidden.device, hidden.dtype) or obstacle_now(), 0
        if because is None and not any(map(names_its_parts, stack)):
            because, called_count = NO_PARTS, len(blocks)
        records = self.run_records.setdefault(stack, {})
        if because is not None or not len(hidden) or not blocks:
            records[start] = BlocksRun(called_count=called_count, because=because)
            return None
        self.derived.follow()
        if self.fp8 is not None:
            self.fp8.derived.follow()
        forward = FusedForward(self.attention, self.derived, call_block, hidden, metadata, self.fp8)
        records[start] = forward.run_record
        return forward.steps(blocks, read_after)

    def metadata_of(self, grids: list[Grid], weight: Tensor, encoder: GraphableEncoder) -> Metadata:
        """Return the metadata of ``grids``, made once for consecutive calls with equal grids.

        With 32 images of 448x448 an accelerated call took 57.9 ms when every call made its
        metadata, and a replay 51.3 ms (H200). The last grids and their metadata are kept in one
        tuple, so that a thread never pairs the grids of one call with the metadata of another. They
        are made anew once somebody, such as a hook, has written to their tensors. None is read or
        kept while torch compiles or exports: fake tensors have no data for later calls.
        A class that is not the library's gets metadata of its own in every call, because it may
        compute them from weights, and may write to them.

        Args:
            grids: ``(t, h, w)`` per item.
            weight: a weight of the encoder, which says device and dtype.
            encoder: makes the metadata.
        """
        compiled = torch.compiler.is_compiling() or any_fake([weight])
        if compiled or not is_library(encoder):
            return encoder.prepare_encoder_metadata(grids)
        on_cuda = weight.device.type == "cuda"
        stream = torch.cuda.current_stream(weight.device).stream_id if on_cuda else 0
        key = (tuple(grids), weight.device, weight.dtype, stream)
        last = self._last_metadata
        if last is None or last[0] != key or last[2] != versions_of([*last[1].values()]):
            with torch.inference_mode(False):  # inference tensors would make later training fail
                metadata = encoder.prepare_encoder_metadata(grids)
            last = key, metadata, versions_of([*metadata.values()])
            if not any_fake(metadata.values()):
                self._last_metadata = last
        return dict(last[1])

    def add_weighted_rows(
        self, rows: Tensor, table: nn.Embedding, index: Tensor, weight: Tensor
    ) -> Tensor | None:
        """Return rows plus a weighted sum of rows of a table (interpolated position embeddings).

        Args:
            rows: the rows to add to, [T, D].
            table: the embedding, [entries, D].
            index: numbers of the table rows to add to each row, int64 [T, taps].
            weight: the factor of each of these table rows, [T, taps].

        Returns:
            [T, D]; None if the kernel cannot run here, or if calling the table does more than look
            up its rows, so that the caller has to do it.
        """
        if _is_elsewhere(rows):
            with torch.cuda.device(rows.device):
                return self.add_weighted_rows(rows, table, index, weight)
        because = obstacle(rows.device, rows.dtype) or obstacle_now()
        if because is not None or not len(rows) or not is_plain_table(table):
            return None
        from .triton_kernels.positions import add_table_rows  # needs Triton

        entries = (rows, table.weight, index, weight)
        return add_table_rows(*(entry.contiguous() for entry in entries))


def _fp8_products() -> Fp8Products:
    from .fp8 import Fp8Products  # needs Triton

    return Fp8Products()


def _on_device(step: Step, device: torch.device) -> Step:
    """Return ``step``, run while ``device`` is the current GPU."""

    def run(hidden: Tensor) -> Tensor:
        with torch.cuda.device(device):
            return step(hidden)

    return run


def _is_elsewhere(rows: Tensor) -> bool:
    """Return whether rows are on another GPU than the current one, on which Triton launches."""
    return rows.is_cuda and rows.device.index != torch.cuda.current_device()
