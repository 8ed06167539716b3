"""Options of the plug-in: ``VITGRAPH_VLLM_OPTIONS`` or ``--additional-config``, both JSON.

``VITGRAPH_VLLM_OPTIONS='{"max_budget": 4096}'`` and ``--additional-config '{"vitgraph":
{"max_budget": 4096}}'`` have the same effect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

VARIABLE = "VITGRAPH_VLLM_OPTIONS"


@dataclass(frozen=True)
class PluginOptions:
    """The settings of a tower in vLLM; all but ``raw_images`` are arguments of ``GraphedEncoder``.

    None means the default of ``GraphedEncoder``; for ``table``, that nothing is kept.
    """

    kernels: str = "auto"
    precision: str = "bf16"
    backend: str = "auto"
    budgets: Sequence[int] | None = None
    min_budget: int | None = None
    max_budget: int | None = None
    max_batch_size: int | None = None
    max_frames_per_batch: int | None = None
    max_graphs: int = 48
    table: str | None = "auto"
    """Where times of graphs are kept: a file, "auto" for the folder of kept tables, or None."""
    raw_images: bool = True
    """Whether images are sent to the engine's process as uint8, and resized and cut there."""

    def backend_for(self, *, enforce_eager: bool) -> str:
        """Return the backend to use; vLLM's ``enforce_eager`` excludes CUDA graphs."""
        graphs = self.backend in ("auto", "cudagraph")
        return "eager" if enforce_eager and graphs else self.backend


def read_options(additional_config: object, environment: Mapping[str, str]) -> PluginOptions:
    """Read the options from ``additional_config`` or from ``VITGRAPH_VLLM_OPTIONS``.

    Args:
        additional_config: vLLM's ``additional_config``; options are under the key ``vitgraph``.
        environment: the environment variables of the process.

    Raises:
        ValueError: options in both places, a text that is no JSON object, an unknown key, a value
            of a wrong type, an unknown choice, or a number below 1.
    """
    options: object = None
    if isinstance(additional_config, Mapping):
        options = additional_config.get("vitgraph")
    source, text = "additional_config['vitgraph']", environment.get(VARIABLE)
    if text:
        if options is not None:
            raise ValueError(f"{VARIABLE} and {source} are both given: keep one of them")
        source, options = VARIABLE, _parse(text)
    if options is None:
        return PluginOptions()
    if not isinstance(options, Mapping):
        raise ValueError(f"{source}={options!r}: must be a JSON object of options")
    _check(source, options)
    return PluginOptions(**options)


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{VARIABLE}={text}: is not JSON ({error}); give an object, such as "
            '{"max_budget": 4096}'
        ) from error


def require_writable(table: str | None) -> None:
    """Check that a file for measured times could be written, before minutes of capturing.

    Raises:
        ValueError: its folder cannot be made or written, or it is a folder itself.
    """
    if table in (None, "auto"):
        return
    file = Path(table)
    problem = "is a folder" if file.is_dir() else ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"its folder cannot be made ({error})"
    if not problem and not os.access(file if file.exists() else file.parent, os.W_OK):
        problem = "this process may not write it"
    if problem:
        raise ValueError(
            f'vitgraph: option table={table!r}: {problem}: name a file, "auto" or null'
        )


def _check(source: str, options: Mapping[str, object]) -> None:
    from encoders.contract import Precision  # here, so that vLLM's processes start without torch
    from graphwrap import Backend, FormKernels

    choices: dict[str, tuple[object, ...]] = {
        "kernels": get_args(FormKernels),
        "precision": get_args(Precision),
        "backend": get_args(Backend),
    }
    types = {field.name: field.type for field in fields(PluginOptions)}
    for key, value in options.items():
        if key not in types:
            raise ValueError(f"{source}: unknown key {key!r}; known are {', '.join(types)}")
        if not _is_of(str(types[key]), value):
            raise ValueError(f"{source}: {key}={value!r} must be of type {types[key]}")
        if key in choices and value not in choices[key]:
            known = ", ".join(map(str, choices[key]))
            raise ValueError(f"{source}: {key}={value!r} must be one of {known}")
        numbers = value if isinstance(value, list) else [value]
        if value == [] or any(type(number) is int and number < 1 for number in numbers):
            raise ValueError(f"{source}: {key}={value!r} must be 1 or more")


def _is_of(kind: str, value: object) -> bool:
    if value is None:
        return kind.endswith("None")
    if kind.startswith("Sequence"):
        return isinstance(value, list) and all(type(item) is int for item in value)
    known = {"str": str, "bool": bool, "int": int}
    return type(value) is known[kind.split(" ")[0]]
