"""One call over several GPUs: items are shared out among the ranks of a process group.

- ``data_parallel``: :class:`DataParallelEncoder`, which is called as an encoder is
- ``shares``: which rank encodes which items, and where their rows lie in what all ranks gather
- ``rank_result``: the outputs that one rank has computed, and their row counts on all ranks
- ``rows``: the rows of all ranks, gathered on each
- ``status``: what ranks tell one another about a call, so that an error on one is raised on all
- ``torch_internals``: the function of torch that is called although it is not public
"""

from .data_parallel import DataParallelEncoder

__all__ = ["DataParallelEncoder"]
