"""``vitgraph bench``: figures of a clone, and times and errors that it measures."""
