"""The speed of this library's towers inside vLLM: ``python -m benchmarks.engines``.

- ``models``: folders of models that an engine starts from
- ``measure``: engines in processes of their own, and the time to the first token
- ``check``: tokens, KV blocks and memory beside vLLM as it is
- ``processor``: vLLM's multi-modal processor alone, which needs no GPU
- ``table``: the tables of ``docs/engines.md``
"""
