"""Rates of one core, one disk and one GPU, for ``docs/scale.md``: ``python -m benchmarks.scale``.

- ``measure``: the rates, which ``vitgraph embed --plan`` computes with
"""
