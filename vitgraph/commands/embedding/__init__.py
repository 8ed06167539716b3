"""``vitgraph embed``: writes the features of a folder or list of images as the shards of a job.

- ``embed``: the command and its arguments
- ``options``: its options, read and checked
- ``plan``: ``--plan``
"""
