"""``benchmarks/RESULTS.md`` and the charts of speed: ``python -m benchmarks.table``.

- ``charts``: the charts, drawn from committed results
- ``results``: reading the committed results
"""
