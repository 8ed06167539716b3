"""Modules that several benchmarks share: the machine, and the timing of calls.

- ``machine``: what figures are measured on: GPU, driver, clocks, versions, commit, date
- ``timing``: wall milliseconds of calls that take turns
"""
