"""What benchmarks share that measure.

- ``machine``: what figures are measured on: GPU, driver, clocks, versions, commit, date
- ``timing``: wall milliseconds of calls that take turns
"""
