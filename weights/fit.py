"""The strict comparison of a tower's tensors with those of the encoder that its config makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from encoders import Encoder

from .errors import CheckpointError, legible, problem_line
from .files.adapter_file import ADAPTER_FILE
from .files.index import Contents
from .files.tower_folder import PROJECTOR
from .tower import FoundTower

MOST_IN_LIST = 1024
"""The most entries of a list in a config, because each may make a module of the tower."""


def build_encoder(tower: FoundTower) -> Encoder:
    """Return the tower's encoder on the meta device; raise a CheckpointError if tensors misfit."""
    label = tower.contents.checkpoint.label
    for name, value in asdict(tower.config).items():
        if isinstance(value, (list, tuple)) and len(value) > MOST_IN_LIST:
            raise CheckpointError(
                f"{label}: config.json: {name} has {len(value)} entries, at most "
                f"{MOST_IN_LIST} are read: use the config.json of the original repo"
            )
    try:
        encoder = tower.family.on_meta(tower.config)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{label}: config.json: {error}") from error
    _check_fit(tower, {name: tuple(value.shape) for name, value in encoder.state_dict().items()})
    return encoder


def _check_fit(tower: FoundTower, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a :class:`CheckpointError` that lists all tensors that do not fit the encoder.

    The encoder's tensors are ``expected``: name -> shape. Tensors of the checkpoint may be missing,
    unexpected or of a wrong shape.
    """
    layout, prefix, checkpoint = tower.layout, tower.prefix, tower.contents.checkpoint
    present = {tensor.name: tensor for tensor in tower.tensors}
    published: dict[str, tuple[int, ...]] = {}
    for encoder_name, encoder_shape in expected.items():
        parts = layout.published_names(encoder_name)
        shape = layout.published_shape(encoder_name, encoder_shape)
        for local in parts:
            rows = (shape[0] // len(parts), *shape[1:]) if shape else shape
            published[layout.full_name(prefix, local)] = rows
    extra = [name for name in present if name not in published]
    missing = [name for name in published if name not in present]
    wrong = [
        f"{name} is {list(tensor.entry.shape)}, the config makes {list(published[name])}"
        for name, tensor in present.items()
        if name in published and tensor.entry.shape != published[name]
    ]
    problems = [
        problem_line("missing", missing, extra or list(tower.contents.files), "nearest present"),
        problem_line("unexpected", extra, missing or list(published), "nearest expected"),
        problem_line("wrong shape", wrong),
    ]
    if mismatches := [problem for problem in problems if problem]:
        raise CheckpointError(
            f"{checkpoint.label}: the tensors do not fit the {tower.family.facts.title} tower of "
            f"its config.json (layout {layout.name}, prefix {prefix.full!r}):\n  "
            + "\n  ".join(mismatches)
            + _hint(tower, published, missing)
            + "\nUse the config.json and weights of one and the same repo, downloaded whole"
            + (checkpoint.advice or ".")
        )


def _hint(
    tower: FoundTower, published: Mapping[str, tuple[int, ...]], missing: Sequence[str]
) -> str:
    """Return a line that names a known cause of tensors that do not fit, or an empty string."""
    for tensor in tower.tensors:
        shape = published.get(tensor.name, ())
        if len(shape) > 2 and tensor.entry.shape == (shape[0], *shape[2:], shape[1]) != shape:
            return "\nKernels have channels last, as in conversions to MLX: use the original repo"
    return left_out(tower.contents) if missing else ""


def left_out(contents: Contents) -> str:
    """Return a line that names safetensors files that the index leaves out, or an empty string."""
    checkpoint = contents.checkpoint
    if checkpoint.weights or checkpoint.commit is not None:  # a list of a repo costs a request
        return ""
    known = {*contents.files.values(), ADAPTER_FILE, PROJECTOR}
    files = [
        name
        for name in checkpoint.names()
        if name.endswith(".safetensors") and "/" not in name and name not in known
    ]
    return f"\nThe index leaves out {', '.join(map(legible, files[:3]))}" if files else ""
