"""One call over several GPUs: images and videos are divided among the ranks of a process group.

- ``data_parallel``: :class:`DataParallelEncoder`, which is called like an encoder
- ``shares``: which rank encodes which items, and where their rows lie in the gathered tensor
- ``rank_result``: the outputs that one rank has computed, and their row counts on all ranks
- ``rows``: gathers the output rows of all ranks on each rank
- ``status``: exchanges the status of a call, so that an error on one rank is raised on all
- ``torch_internals``: a function of torch that is called although it is not public
"""

from .data_parallel import DataParallelEncoder

__all__ = ["DataParallelEncoder"]
