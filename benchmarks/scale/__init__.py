"""Images per second of one CPU core and one GPU, for ``docs/scale.md``.

- ``measure``: the measurements, which ``vitgraph embed --plan`` uses for its estimates
"""
