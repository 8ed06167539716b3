"""The speed of this library's vision towers inside vLLM: ``python -m benchmarks.engines``.

- ``models``: writes the folders of models that vLLM engines load
- ``measure``: runs engines in separate processes, and measures the time to the first token
- ``check``: compares answers, KV blocks and memory with those of unmodified vLLM
- ``processor``: measures vLLM's multi-modal processor alone, which needs no GPU
- ``table``: the tables of ``docs/engines.md``
"""
