"""``vitgraph bench``: measures the speed and the numerical error of a checkpoint on this machine.

- ``bench``: the parser of the command
- ``bench_speed``: ``vitgraph bench speed``; ``bench_accuracy``: ``vitgraph bench accuracy``
"""
