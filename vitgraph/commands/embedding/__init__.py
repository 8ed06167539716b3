"""``vitgraph embed``: a folder or list of images to the shards of a job.

- ``embed``: the command and its arguments
- ``options``: its options, read and checked
- ``plan``: ``--plan``
"""
