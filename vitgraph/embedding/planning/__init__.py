"""``vitgraph embed --plan``: what a job would take, said before anything is written.

- ``estimate``: the arithmetic, and the text that shows it
- ``sample``: what is measured: some images of the source, and the rate of a device
"""
