"""The cache on this disk: fetched towers, their configs, and the commits of branches.

- ``store``: the folders of the cache, by repo and commit
- ``kept_tower``: a tower in the cache, with its checksums
- ``listing``: the towers in the cache listed, checked and removed
"""
