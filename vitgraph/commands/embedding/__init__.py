"""``vitgraph embed``: writes features of the images of a folder or list, in files called shards.

- ``embed``: the command and its arguments
- ``options``: parsing and checks of its options
- ``plan``: ``--plan``, which estimates the time and the disk space
"""
