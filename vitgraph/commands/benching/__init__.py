"""``vitgraph bench``: the times and the errors of a checkpoint on this machine.

- ``bench``: the parser of the command
- ``bench_speed``, ``bench_accuracy``: a checkpoint's speed and error on this machine
"""
