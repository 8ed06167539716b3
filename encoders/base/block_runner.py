"""How the transformer blocks of an encoder run: as the modules they are, or accelerated.

Shapes: P patches, D tower width.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..contract import Accelerator, Metadata
from ..layers.products import add_weighted_rows

Runner = TypeVar("Runner", bound="BlockRunner")


class BlockRunner(nn.Module, ABC):
    """The part of every encoder that runs its blocks."""

    blocks: nn.ModuleList
    gradient_checkpointing: bool = False
    accelerator: Accelerator | None = None
    """Runs the blocks of an accelerated encoder; None means that blocks are called as modules."""

    @abstractmethod
    def block_context(self, hidden: Tensor, metadata: Metadata) -> Any:
        """Everything that each block reads besides the hidden state, made once per forward."""

    def gradient_checkpointing_enable(self) -> None:
        """Recompute blocks in the backward instead of keeping their activations."""
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations of blocks for the backward."""
        self.gradient_checkpointing = False

    def run_blocks(
        self,
        hidden: Tensor,
        metadata: Metadata,
        wanted: Sequence[int],
        blocks: nn.ModuleList | None = None,
    ) -> Iterator[Tensor]:
        """The hidden state after each block in ``wanted``; blocks after the last are not run.

        An accelerated encoder runs fused blocks unless gradients are recorded.

        Args:
            hidden: [P, D], of towers over tiles [tiles, n, D], of SAM [views, h, w, D]; rows in
                the order that blocks work in.
            metadata: what ``prepare_encoder_metadata`` returns.
            wanted: block numbers from 0, ascending, each once.
            blocks: the stack that runs, of an encoder that has several; None: ``self.blocks``.
        """
        blocks = self.blocks if blocks is None else blocks
        if self.accelerator is None or self._records_gradients(hidden):
            return self.reference_blocks(hidden, metadata, wanted, blocks)
        return self.accelerator.run_blocks(self, hidden, metadata, wanted, blocks)

    def hidden_after(
        self, hidden: Tensor, metadata: Metadata, count: int, blocks: nn.ModuleList | None = None
    ) -> Tensor:
        """The hidden state after the first ``count`` blocks; ``hidden`` itself after none."""
        for state in self.run_blocks(hidden, metadata, [count - 1] if count else [], blocks):
            hidden = state
        return hidden

    def reference_blocks(
        self, hidden: Tensor, metadata: Metadata, wanted: Sequence[int], blocks: nn.ModuleList
    ) -> Iterator[Tensor]:
        """Yield the same states as ``run_blocks``, calling each block as a module."""
        context = self.block_context(hidden, metadata)
        for number, block in enumerate(islice(blocks, max(wanted, default=-1) + 1)):
            hidden = self.run_block(block, hidden, context)
            if number in wanted:
                yield hidden

    def add_weighted_rows(
        self, rows: Tensor, table: nn.Embedding, index: Tensor, weight: Tensor
    ) -> Tensor:
        """Rows plus a weighted sum of rows of a table: interpolated position embeddings.

        Args:
            rows: [P, D].
            table: [entries, D].
            index: int64 [P, taps], which entries.
            weight: [P, taps], float32 or wider.

        Returns:
            [P, D] in the dtype of ``rows``.
        """
        if self.accelerator is None or self._records_gradients(rows):
            return add_weighted_rows(rows, table, index, weight)
        return self.accelerator.add_weighted_rows(rows, table, index, weight)

    def _records_gradients(self, hidden: Tensor) -> bool:
        """Whether autograd records operations on ``hidden`` or on the weights."""
        if not torch.is_grad_enabled():
            return False
        return hidden.requires_grad or any(weight.requires_grad for weight in self.parameters())

    def run_block(self, block: nn.Module, *args: Any) -> Tensor:
        """Run one block; the backward recomputes it if ``gradient_checkpointing`` is on."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)
        return block(*args)

    def accelerated(self: Runner, kernels: str = "auto", precision: str = "bf16") -> Runner:
        """A faster form of this tower for inference on a GPU, over the same weights.

        An encoder of the same class with the same metadata, outputs and bounds, which fuses the
        element-wise steps and takes the fastest attention kernel for each shape. It shares modules,
        parameters and hooks with this one and sees updates of weights in place. Forwards that
        record gradients run the reference.

        Args:
            kernels: attention kernels to choose from: "auto" for all that are installed, "torch"
                for those that torch brings (Triton included), or the name of one kernel.
            precision: "bf16" keeps the encoder's own half or full precision.

        Returns:
            The accelerated encoder. Where it cannot accelerate (no CUDA, float64, a GPU older than
            compute capability 8.0, no Triton) it runs the reference, and ``kernel_choices()`` says
            why.

        Raises:
            ValueError: an unknown kernel or precision, or this encoder is accelerated already.

        Warns:
            UserWarning: a CUDA device that cannot be accelerated, or a kernel asked for by name
                that cannot run here.
        """
        from ..accelerated import accelerate  # only where it is asked for: it needs Triton

        if self.accelerator is not None:
            raise ValueError(
                "this encoder is accelerated already: call accelerated() on the encoder that it "
                "was made from"
            )
        view = copy.copy(self)  # shares modules, parameters and hooks
        weight = next(self.parameters())
        view.accelerator = accelerate(kernels, precision, weight.device, weight.dtype)
        return view

    def kernel_choices(self) -> dict[str, Any]:
        """Return the kernels that an accelerated encoder chose, and why, as plain data for JSON.

        An encoder that is not accelerated returns ``{"kernels": "reference"}``.
        """
        return {"kernels": "reference"} if self.accelerator is None else self.accelerator.choices()

    def load_kernel_choices(self, choices: Mapping[str, Any]) -> None:
        """Use the kernels that another process chose, instead of timing them here.

        Args:
            choices: the result of ``kernel_choices()`` in that process.

        Raises:
            ValueError: this encoder is not accelerated, the data are no kernel choices, or they
                name a kernel that cannot run here.
        """
        if self.accelerator is None:
            raise ValueError("this encoder is not accelerated: call accelerated() first")
        self.accelerator.load_choices(choices)
