"""The commands, one module each or a few; torch is imported when a command needs it.

- ``encode``: images and videos to a features file; ``encode_items`` encodes them, ``encode_graphs``
  with graphs, ``encode_checks`` and ``graph_options`` check what was asked for
- ``embed``: a folder or list to shards; ``embed_options`` and ``embed_plan`` are its ``--plan``
  and other options
- ``search``: the images of a job that are nearest to a photograph
- ``demo``: feature maps of photographs, which ``demo_pictures`` draws
- ``towers``: ``vitgraph list``; ``cache``: the towers kept on this disk
- ``benching``: ``vitgraph bench``
- ``arguments``: the arguments that several commands have
"""
