"""``vitgraph search``: the images of an embedding job that are nearest to a photograph."""
