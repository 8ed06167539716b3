"""Writes ``benchmarks/RESULTS.md`` and the charts of speed: ``python -m benchmarks.table``.

- ``charts``: draws the charts from the result files in ``benchmarks/results``
- ``results``: reads these result files
"""
