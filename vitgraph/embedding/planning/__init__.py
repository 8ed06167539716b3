"""``vitgraph embed --plan``: estimates the time, disk space and cores that a job would take.

- ``estimate``: the arithmetic, and the text of the estimate
- ``sample``: the measurements: reading and decoding a sample of the images, and a device's speed
"""
