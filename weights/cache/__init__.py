"""Towers, small files and the commits of branches that fetching keeps on this disk.

- ``store``: the folders that hold them, by repo and commit
- ``kept``: a kept tower, with its checksums
- ``listing``: kept towers listed, checked and removed
"""
