"""Runs the blocks of a pre-norm tower with fused steps: the accelerated form of every family.

One block is nine kernel launches: residual + norm, the qkv product, rotary in place, attention, the
output product, residual + norm, the first MLP product, the activation (inside the product where
cuBLAS can), and the second MLP product. A layer that computes more than a product with its weight
(LoRA, hooks, quantised, parametrised) is called as a module; the steps around it stay fused.

Shapes: T rows, D width, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..block_parts import BlockParts, PartNorm
from ..data import Metadata
from ..layers.bounded_linear import BoundedLinear, Range
from ..layers.keyless_bias_linear import bias_of
from ..layers.torch_internals import gelu_tanh_product, is_plain
from .aligned import aligned_mlp
from .attention.choices import KernelChoices, graph_milliseconds
from .attention.fused import BlocksRun, FusedAttention
from .derived import DerivedWeights
from .obstacles import clamps, fusible_parts, is_norm, is_product, single_ranges
from .shapes import HALF_DTYPES

if TYPE_CHECKING:
    from ..contract import CallBlock, Step
    from .fp8 import Fp8Products
    from .triton_kernels.quantise import Rows8

Rows: TypeAlias = "Tensor | Rows8"
"""Rows [T, columns] in the encoder's dtype, or quantised to fp8."""


class FusedForward:
    """One forward pass over the blocks of an encoder.

    ``residual`` holds the hidden state and what is still to be added to it. If a branch
    (attention or MLP) has no layer scale, its last product adds to the residual in place, and the
    next norm adds the bias of that product. Otherwise the next norm adds the whole branch.

    Args:
        choices: chooses the attention kernels.
        derived: keeps padded copies of weights.
        call_block: calls a block that cannot be fused.
        hidden: the rows that the first block reads, [T, D] or views [B, .., D].
        metadata: the result of the encoder's ``prepare_encoder_metadata``.
        fp8: the quantised weights; None computes all products in the encoder's dtype.
    """

    def __init__(
        self,
        choices: KernelChoices,
        derived: DerivedWeights,
        call_block: CallBlock,
        hidden: Tensor,
        metadata: Metadata,
        fp8: Fp8Products | None = None,
    ) -> None:
        from .triton_kernels import activations, norms  # need Triton

        self.activations, self.norms = activations, norms
        self.derived, self.fp8, self.call_block = derived, fp8, call_block
        self.run_record = BlocksRun()
        self.attention = FusedAttention(choices, hidden, metadata, self.run_record)
        self.shape = hidden.shape
        self.residual = norms.Sum(hidden.flatten(0, -2).contiguous())
        self.kept_residual = self.residual.hidden
        """The complete residual [T, D] before the last norm that was applied with ``keep``."""
        self.writable = False
        """Whether the residual may be overwritten: it was made here, and no caller holds it."""
        self.handed: Tensor = hidden
        """What the last block returned; the next one is called with it."""
        self.normed: Rows | None = None
        """The input of the next block's attention, if it was made to complete a state."""

    def steps(self, blocks: Sequence[nn.Module], read_after: Collection[int]) -> list[Step]:
        """Return one function per block.

        The last, and those in ``read_after``, return the hidden state. The others return the
        residual as it is, to which something is still to be added.
        """
        self.blocks, self.read_after = blocks, read_after
        self.parts = [self._fusible_parts(block) for block in blocks]
        return [partial(self._run_block, number) for number in range(len(blocks))]

    def _run_block(self, number: int, hidden: Tensor) -> Tensor:
        """Run a block on the residual, or on ``hidden`` if the caller has changed it."""
        if hidden is not self.handed:
            self.residual, self.writable = self.norms.Sum(hidden.flatten(0, -2).contiguous()), False
            self.normed = None
        parts = self.parts[number]
        if parts is None:
            self._complete_residual()
            self._call_block(self.blocks[number])
        else:
            rows, self.normed = self.normed, None
            if rows is None:
                rows = self._apply_norm(parts.norm1, quantised=self._in_fp8("qkv", parts))
            self._project(parts, self._attend(parts, rows), self._in_fp8("proj", parts))
            self._mlp(parts, self._in_fp8("mlp", parts))
        self.handed = self._hand_on(number)
        return self.handed

    def _hand_on(self, number: int) -> Tensor:
        """Return the hidden state after the block ``number``, or the residual if nobody reads it.

        The first norm of the next block adds the output of the MLP to the residual, so that a state
        that is read is complete after that norm.
        """
        if number + 1 == len(self.blocks):
            # Weights copied for the first time in this pass are entered into the table of addresses
            # by which captured graphs compare them; it cannot be written during a capture.
            self.derived.refresh()
            if self.fp8 is not None:
                self.fp8.derived.refresh()
            self._complete_residual()
            return self.residual.hidden.view(self.shape)
        if number not in self.read_after:
            return cast("Tensor", self.residual)
        following = self.parts[number + 1]
        if following is None:
            self._complete_residual()
            return self.residual.hidden.view(self.shape)
        self.normed = self._apply_norm(following.norm1, True, self._in_fp8("qkv", following))
        return self.kept_residual.view(self.shape)

    def _fusible_parts(self, block: nn.Module) -> BlockParts | None:
        """Return the layers of a block to run in fused steps, or None to call its module."""
        parts = fusible_parts(block)
        if parts is None or not self.attention.takes(parts, self.residual.hidden):
            return None
        return parts

    def _complete_residual(self) -> None:
        """Add to the residual the branch output and bias that are still missing from it."""
        if not self.residual.complete:
            self._go_on_from(self.norms.add(self.residual))

    def _go_on_from(self, hidden: Tensor) -> None:
        """Set the residual to ``hidden`` [T, D], to which nothing is still to be added."""
        self.residual, self.writable = self.norms.Sum(hidden), True

    def _call_block(self, block: nn.Module) -> None:
        """Run a block by calling its module on the complete residual."""
        hidden = self.call_block(block, self.residual.hidden.view(self.shape))
        self.residual, self.writable = self.norms.Sum(hidden.flatten(0, -2).contiguous()), False
        self.run_record.called_count += 1

    def _in_fp8(self, step: str, parts: BlockParts) -> bool:
        """Return whether one step of a block, "qkv", "proj" or "mlp", runs in fp8."""
        if self.fp8 is None:
            return False
        return self.fp8.takes(step, parts, self.residual.hidden, partial(self._time, step, parts))

    def _time(self, step: str, parts: BlockParts, fp8: bool) -> float:
        """Return the milliseconds of one step of a block, in fp8 or not, with the norms near it."""
        trial, hidden = copy(self), self.residual.hidden
        trial.run_record = BlocksRun()
        generator = torch.Generator(hidden.device).manual_seed(0)

        def random_rows(columns: int) -> Tensor:
            rows = torch.empty(len(hidden), columns, device=hidden.device, dtype=hidden.dtype)
            return rows.normal_(generator=generator)

        residual, attended = random_rows(hidden.shape[1]), random_rows(parts.proj.weight.shape[1])

        def call() -> None:
            trial.residual, trial.writable = self.norms.Sum(residual), True
            if step == "qkv":
                trial._project_heads(parts, trial._apply_norm(parts.norm1, quantised=fp8))
            elif step == "proj":
                trial._project(parts, attended, fp8)
                trial._apply_norm(parts.norm2)
            else:
                trial._mlp(parts, fp8)
                trial._apply_norm(parts.norm1)

        return graph_milliseconds(call)

    def _apply_norm(self, norm: PartNorm, keep: bool = False, quantised: bool = False) -> Rows:
        """Return ``norm`` of the residual, [T, D], in fp8 if ``quantised``.

        With ``keep``, ``self.kept_residual`` is the residual before the norm, and no later step
        overwrites it.
        """
        if not is_norm(norm):
            self.run_record.called_count += 1
            self._complete_residual()
            # A hook of the norm may hold the residual, which no later step overwrites then.
            self.kept_residual, self.writable = self.residual.hidden, False
            normed: Tensor = norm(self.residual.hidden.view(self.shape)).flatten(0, -2).contiguous()
            return self.fp8.quantise(normed) if quantised and self.fp8 is not None else normed
        rows: Rows
        residual, self.residual = self.residual, self.residual.as_read()
        summed, kernel_norm = residual.branch is not None, self.norms.Norm.of(norm)
        if quantised:
            kept_residual, rows = self.norms.normalise_quantised(
                residual, kernel_norm, keep or summed
            )
        elif keep or summed:
            kept_residual, rows = self.norms.add_normalise(residual, kernel_norm)
        else:
            return self.norms.normalise(residual, kernel_norm)
        if kept_residual is not None:
            self.kept_residual = kept_residual
        if summed:
            self._go_on_from(self.kept_residual)
            self.writable = not keep
        return rows

    def _add(
        self,
        layer: nn.Linear,
        rows: Rows,
        scale: Tensor | None,
        norm: PartNorm | None,
        weight: Tensor | None = None,
        is_clamped: bool = False,
    ) -> None:
        """Add the last product of a branch (attention or MLP) to the residual."""
        if not isinstance(rows, Tensor) or not is_plain(layer):
            self._defer_branch(
                self._apply_linear(layer, rows, is_clamped), scale, norm, single_ranges(layer)[1]
            )
            return
        weight = layer.weight if weight is None else weight
        if scale is not None or norm is not None:
            self._defer_branch(F.linear(rows, weight, layer.bias), scale, norm)
            return
        hidden = self.residual.hidden
        if self.writable:
            hidden.addmm_(rows, weight.t())
        else:
            hidden, self.writable = torch.addmm(hidden, rows, weight.t()), True
        self.residual = self.residual._replace(hidden=hidden)
        if layer.bias is not None:
            self.residual = self.residual.plus_bias(layer.bias)

    def _defer_branch(
        self,
        branch: Tensor,
        scale: Tensor | None,
        norm: PartNorm | None,
        limits: Range | None = None,
    ) -> None:
        """Keep the output of a branch, which the next norm adds to the residual."""
        inner = None
        if norm is not None and is_norm(norm) and isinstance(norm, nn.RMSNorm):
            inner = self.norms.Norm.of(norm)
        elif norm is not None:
            self.run_record.called_count += 1
            branch, limits = branch if limits is None else branch.clamp_(*limits), None
            branch = norm(branch.view(self.shape)).flatten(0, -2).contiguous()
        self.residual = self.residual._replace(
            branch=branch, scale=scale, branch_norm=inner, branch_range=limits
        )

    def _attend(self, parts: BlockParts, rows: Rows) -> Tensor:
        """Return a block's attention before the output product, from its normed input [T, D]."""
        return self.attention.attend(parts, self._project_heads(parts, rows))

    def _project_heads(self, parts: BlockParts, rows: Rows) -> Tensor:
        """Return queries, keys and values [T, columns], which attention may overwrite."""
        qkv = self._apply_linear(parts.qkv, rows)
        if parts.key_value is not None:
            others = (self._apply_linear(layer, rows) for layer in parts.key_value)
            return torch.cat((qkv, *others), dim=-1)
        if not self._is_own(parts.qkv):  # a hook may hold this result, which attention overwrites
            qkv = qkv.clone(memory_format=torch.contiguous_format)
        return qkv

    def _project(self, parts: BlockParts, attended: Tensor, fp8: bool) -> None:
        """Apply a block's output product to ``attended``, and add it to the residual."""
        if not self._is_own(parts.proj):  # a hook may hold it, and the next block overwrites it
            attended = attended.clone()
        rows = self.fp8.quantise(attended) if fp8 and self.fp8 is not None else attended
        self._add(parts.proj, rows, parts.scale1, parts.post_norm1)

    def _mlp(self, parts: BlockParts, fp8: bool) -> None:
        """Apply the second norm and the MLP of a block; add the result to the residual."""
        rows = self._apply_norm(parts.norm2, quantised=fp8)
        if isinstance(rows, Tensor):
            inner, weight = self._activate_mlp(parts, rows)
            self._add(parts.down, inner, parts.scale2, parts.post_norm2, weight, is_clamped=True)
        else:
            assert self.fp8 is not None
            branch = self.fp8.mlp(parts, rows, partial(aligned_mlp, self.derived, parts))
            self._defer_branch(branch, parts.scale2, parts.post_norm2)

    def _activate_mlp(self, parts: BlockParts, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the MLP's last product, and the padded weight of that product.

        ``rows`` are the normed input of the MLP, [T, D]. The weight is None if it needs no padding:
        the caller then uses the weight of the layer ``down``.
        """
        up, down, kind = parts.up, parts.down, parts.activation
        if parts.gate is not None:
            return self._activate_gated_mlp(parts, parts.gate, rows)
        if parts.gate_in_up:
            gate_rows, up_rows = self._apply_linear(up, rows).chunk(2, dim=-1)
            limits = None, None, single_ranges(down)[0]
            in_place = self._is_own(up)
            return self.activations.activate(
                gate_rows, kind, up=up_rows, ranges=limits, in_place=in_place
            ), None
        fuses_gelu = rows.is_cuda and rows.dtype in HALF_DTYPES  # cuBLAS is less exact in float32
        fuses_gelu = fuses_gelu and is_plain(up) and not clamps(down)
        if kind == "gelu_tanh" and fuses_gelu and up.bias is not None:
            return gelu_tanh_product(rows, up.weight, up.bias), None
        inner, in_place = self._apply_linear(up, rows), self._is_own(up)
        ranges = single_ranges(up)[1], None, single_ranges(down)[0]
        return self.activations.activate(inner, kind, ranges=ranges, in_place=in_place), None

    def _activate_gated_mlp(
        self, parts: BlockParts, gate: nn.Linear, rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        up, down = parts.up, parts.down
        activate = partial(self.activations.activate, kind=parts.activation, limit=parts.gate_limit)
        if is_plain(gate, up, down) and down.weight.shape[1] % 8:
            gate_and_up, bias, weight = aligned_mlp(self.derived, parts, gate)
            gated, up_rows = F.linear(rows, gate_and_up, bias).chunk(2, dim=-1)
            return activate(gated, up=up_rows, in_place=True), weight
        gated, up_rows = self._apply_linear(gate, rows), self._apply_linear(up, rows)
        ranges = (single_ranges(gate)[1], single_ranges(up)[1], single_ranges(down)[0])
        return activate(gated, up=up_rows, ranges=ranges, in_place=self._is_own(gate)), None

    def _apply_linear(self, layer: nn.Linear, rows: Rows, is_clamped: bool = False) -> Tensor:
        """Apply a linear layer to rows [T, columns], as one product if the layer is plain.

        ``is_clamped`` says that ``rows`` are already clamped to the layer's input range, if any.
        """
        if not isinstance(rows, Tensor):
            assert self.fp8 is not None
            return self.fp8.linear(layer, rows)
        if is_product(layer):
            return F.linear(rows, layer.weight, bias_of(layer))
        if clamps(layer):
            return self._apply_bounded(layer, rows, is_clamped)
        self.run_record.called_count += 1
        if len(self.shape) > 2:  # the layer gets views, as it would from its block
            views: Tensor = layer(rows.view(*self.shape[:-1], -1))
            return views.flatten(0, -2).contiguous()
        out: Tensor = layer(rows)
        return out.contiguous()

    def _apply_bounded(self, layer: BoundedLinear, rows: Tensor, is_clamped: bool) -> Tensor:
        """Apply a layer that clamps to rows [T, columns], which ``is_clamped`` says are clamped.

        The output is left to the next kernel to clamp, unless the layer joins several layers.
        """
        clamp, count = self.activations.activate, len(layer.bounds)
        out = rows.new_empty(len(rows), len(layer.weight))
        parts = zip(layer.weight.chunk(count), out.chunk(count, 1), strict=True)
        for input_limits, output_limits, (weight, part) in zip(
            layer.inputs, layer.outputs, parts, strict=True
        ):
            single = count == 1
            inner = (
                rows
                if is_clamped and single
                else clamp(rows, None, ranges=(input_limits, None, None))
            )
            torch.mm(inner, weight.t(), out=part)
            if not single:
                clamp(part, None, ranges=(output_limits, None, None), in_place=True)
        return out

    @staticmethod
    def _is_own(layer: nn.Module) -> bool:
        """Return whether the result of a layer may be overwritten, because no hook can hold it."""
        return is_product(layer) or clamps(layer)
