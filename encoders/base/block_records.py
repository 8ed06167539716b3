"""The outputs of chosen blocks, which an encoder returns in ``extras`` beside its features.

An output is named as the module that makes it: ``"blocks.6"`` is the hidden state (the residual)
after block 6, ``"blocks.6.attn"`` and ``"blocks.6.mlp"`` are what its attention and its MLP return,
before a layer scale or a norm of the branch. ``"sam.blocks.6"`` is of the inner stack "sam". In
towers with rows before the patches, such as class tokens, ``"blocks.6.prefix"`` are these rows of
``"blocks.6"``, and ``"blocks.6.mlp.prefix"`` those of its MLP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..block_parts import CutsViews
from ..data import PREFIX
from ..layers.torch_internals import with_child

if TYPE_CHECKING:
    from ..contract import Step

_NAME = re.compile(r"(?:(.+)\.)?blocks\.(\d+)(?:\.(?:attn|mlp))?(?:\.prefix)?")
"""Stack (None for ``blocks``) and number of the block of an output."""
_CHILDREN = {"attn": ("attn", "self_attn"), "mlp": ("mlp",)}
"""The names that families give to the module of a branch."""


def check_names(
    names: Collection[str],
    stacks: Mapping[str, Sequence[nn.Module]],
    prefixed: Collection[str],
) -> None:
    """Check that blocks make the outputs ``names``.

    Args:
        names: names such as "blocks.6", "blocks.6.attn" or "sam.blocks.2".
        stacks: the blocks that a forward runs, by the beginning of their names: "" or "sam.".
        prefixed: the stacks whose outputs have rows before the patches.

    Raises:
        ValueError: no block makes one of these outputs; the message lists what blocks make.
    """
    if isinstance(names, str):
        raise ValueError(f"names={names!r}: must be a list of names, as [{names!r}]")
    known = {
        f"{stack}blocks.{number}{branch}{part}"
        for stack, blocks in stacks.items()
        for number, block in enumerate(blocks)
        for branch in ("", *(f".{name}" for name in _CHILDREN if _child(block, name)))
        for part in ("", f".{PREFIX}")[: 1 + (stack in prefixed)]
    }
    if unknown := [name for name in names if name not in known]:
        ranges = [
            f"{stack}blocks.0 to {stack}blocks.{len(blocks) - 1}"
            for stack, blocks in stacks.items()
            if blocks
        ]
        rows = ", and the rows before the patches, as blocks.0.prefix" if prefixed else ""
        raise ValueError(
            f"{unknown[0]!r} is no output of this encoder: its blocks make {', '.join(ranges)}, "
            f"and of each also the branches, as blocks.0.attn and blocks.0.mlp{rows}"
        )


class BlockRecorder:
    """Keeps the outputs of chosen blocks during one forward.

    Args:
        names: the outputs to keep, checked by :func:`check_names`.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._wanted = frozenset(names)
        self.outputs: dict[str, Tensor] = {}
        """The outputs kept so far, by name."""

    def numbers(self, stack: str) -> frozenset[int]:
        """Return the numbers of the blocks of a stack, "" or "sam.", with an output to keep."""
        return frozenset(
            int(match[2])
            for match in map(_NAME.fullmatch, self._wanted)
            if match is not None and (f"{match[1]}." if match[1] else "") == stack
        )

    def watched(self, stack: str, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the blocks, as copies where the result of a branch is kept when it is called."""
        return [self._watch(f"{stack}blocks.{n}", block) for n, block in enumerate(blocks)]

    def _watch(self, name: str, block: nn.Module) -> nn.Module:
        for branch in _CHILDREN:
            wanted = f"{name}.{branch}"
            if not self._wanted.isdisjoint((wanted, f"{wanted}.{PREFIX}")):
                child = _child(block, branch)
                if child is None:
                    raise ValueError(
                        f"{wanted!r}: the block of type {type(block).__name__} has no such module"
                    )
                keep = partial(self.outputs.__setitem__, wanted)
                block = with_child(block, child, _Kept(block.get_submodule(child), keep))
        return block

    def steps(
        self,
        stack: str,
        blocks: Sequence[nn.Module],
        steps: Iterable[Step],
        order: Callable[[Tensor], Tensor],
        prefix: Callable[[Tensor], Tensor],
    ) -> list[Step]:
        """Return steps that keep the wanted outputs of their blocks, in the order of pixels.

        Args:
            stack: the beginning of the names, "" or "sam.".
            blocks: the blocks that the steps run.
            steps: functions of the hidden state; of blocks with a wanted output they return it.
            order: brings rows of blocks into the order of ``pixel_values``.
            prefix: returns the rows before the patches among rows of blocks.
        """
        wanted, pairs = self.numbers(stack), enumerate(zip(blocks, steps, strict=True))
        return [
            partial(self._run, f"{stack}blocks.{number}", block, step, order, prefix)
            if number in wanted
            else step
            for number, (block, step) in pairs
        ]

    def _run(
        self,
        name: str,
        block: nn.Module,
        step: Step,
        order: Callable[[Tensor], Tensor],
        prefix: Callable[[Tensor], Tensor],
        hidden: Tensor,
    ) -> Tensor:
        """Run a block, and keep its output and the results of its branches that are wanted."""
        results = {name: step(hidden)}
        for branch in _CHILDREN:
            if (kept := f"{name}.{branch}") in self.outputs:
                results[kept] = self._rows(kept, branch, block, results[name])
        for kept, rows in results.items():
            for wanted, part in ((kept, order), (f"{kept}.{PREFIX}", prefix)):
                if wanted in self._wanted:
                    self.outputs[wanted] = part(rows)
        return results[name]

    def _rows(self, name: str, branch: str, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return the result of a branch with the rows of ``hidden``, also if it saw windows."""
        rows = self.outputs[name]
        if branch == "attn" and isinstance(block, CutsViews):
            return block.cut_views(lambda _: rows, hidden)
        return rows


class _Kept(nn.Module):
    """Calls a module, and passes its result to ``keep``."""

    def __init__(self, module: nn.Module, keep: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.module, self.keep = module, keep

    def forward(self, *inputs: object) -> Tensor:
        result: Tensor = self.module(*inputs)
        self.keep(result)
        return result


def _child(block: nn.Module, branch: str) -> str | None:
    """Return the name of the module of a branch in a block; None if it has none."""
    names: Iterator[str] = (name for name, _ in block.named_children())
    return next((name for name in names if name in _CHILDREN[branch]), None)
