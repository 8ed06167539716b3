"""A repo of the Hub: resolving its revision, reading files by HTTP, fetching tensors.

- ``repo``: how to talk to a repo, which commit is read, how its files are addressed
- ``repo_snapshot``: a checkpoint at one commit
- ``http``: one remote file, read by byte ranges; ``ranges``: the ranges that a tower takes
- ``downloads``: a tower brought to this disk
- ``messages``: errors of the Hub as one line each
"""
