"""Search in what an embedding job wrote; ``vitgraph search`` is the command.

- ``vectors``: the vectors of a job, searched by cosine
- ``page``: the result as one HTML file
"""
