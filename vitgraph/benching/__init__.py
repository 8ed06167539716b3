"""``vitgraph bench``: figures that were measured before, and measuring a checkpoint here."""
