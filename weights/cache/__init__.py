"""The cache on this disk: fetched towers, their small files, and the commits of branches.

- ``store``: the folders of the cache, by repo and commit
- ``kept_tower``: a kept tower, with its checksums
- ``listing``: kept towers listed, checked and removed
"""
