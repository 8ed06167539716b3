"""``vitgraph bench``: figures of a clone, and times and errors that it measures.

- ``bench``: the command, and the tables of committed figures
- ``bench_speed``, ``bench_accuracy``: a checkpoint's speed and error on this machine
"""
