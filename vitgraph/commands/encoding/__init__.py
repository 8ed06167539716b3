"""``vitgraph encode``: writes the features of images and videos to a file.

- ``encode``: the command and its arguments
- ``checks``: the arguments checked before anything is fetched
- ``items``: the images and videos, opened and encoded as a stream
- ``graphs``, ``graph_options``: ``--graph``, and the options that say which graphs to capture
"""
