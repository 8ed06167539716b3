"""Modules that several benchmarks share: the machine, and the timing of calls.

- ``machine``: a description of the machine: GPU, driver, clocks, versions, commit, date
- ``results``: writes results as JSON, with four digits and one record a line
- ``timing``: wall-clock milliseconds of functions that run in turn
- ``torch_flash``: transformers' attention by torch's own flash-attention 2
"""
