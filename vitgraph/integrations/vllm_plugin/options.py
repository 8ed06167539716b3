"""Options of the plug-in: ``VITGRAPH_VLLM_OPTIONS`` or ``--additional-config``, both JSON.

``VITGRAPH_VLLM_OPTIONS='{"max_budget": 4096}'`` and ``--additional-config '{"vitgraph":
{"max_budget": 4096}}'`` have the same effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

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
        ValueError: options in both places, a text that is no JSON object, an unknown key, or a
            value of a wrong type.
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
        raise ValueError(f"{VARIABLE}={text}: is not JSON ({error})") from error


def _check(source: str, options: Mapping[str, object]) -> None:
    types = {field.name: field.type for field in fields(PluginOptions)}
    for key, value in options.items():
        if key not in types:
            raise ValueError(f"{source}: unknown key {key!r}; known are {', '.join(types)}")
        if not _is_of(str(types[key]), value):
            raise ValueError(f"{source}: {key}={value!r} must be of type {types[key]}")


def _is_of(kind: str, value: object) -> bool:
    if value is None:
        return kind.endswith("None")
    if kind.startswith("Sequence"):
        return isinstance(value, list) and all(type(item) is int for item in value)
    known = {"str": str, "bool": bool, "int": int}
    return type(value) is known[kind.split(" ")[0]]
