"""A repo of the Hub: resolving its revision, reading files by HTTP, fetching tensors.

- ``repo``: a repo at one revision: its commit, and the addresses of its files on Hub and disk
- ``hub_checkpoint``: a checkpoint on the Hub: its files, found in a cache or fetched
- ``http``: one remote file, read by byte ranges; ``ranges``: the ranges that a tower takes
- ``downloads``: a tower fetched to this disk, by byte ranges or as whole files
- ``messages``: errors of the Hub as one line each
"""
