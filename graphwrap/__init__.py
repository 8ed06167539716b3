"""CUDA graphs for any encoder with the methods of ``GraphableEncoder``, one graph per token budget.

Nothing here is specific to a model: an encoder says how many rows and tokens each image or clip (an
item) has, items are padded to a budget, and its graph is replayed. Other packages import only the
names in ``__all__``. These are the modules, in the order in which a call passes through them:

- ``graphed_encoder``: :class:`GraphedEncoder`, the only class that users make
- ``guards``: checks that raise errors, such as for gradients and weights changed after capture
- ``forward_state``: what else a forward depends on, such as the active adapter
- ``encoder_forms``: the form of the encoder that is captured, such as the accelerated one
- ``budgets``, ``budget_sizes``: the capacities of graphs, and how many tokens each one holds
- ``graphs``: the graphs themselves, captured, timed and replayed on static buffers
- ``costs``: times of replays and eager runs, saved and compared
- ``packing``: items put into the groups that cost least
- ``outputs``: outputs as tensors by field name
- ``stats``: counters of replays, padding and eager runs
- ``torch_internals``: the private functions of torch that this package calls
"""

from .budget_sizes import fit_budgets
from .budgets import Budget
from .encoder_forms import FormKernels, joins_paths, with_paths
from .graphed_encoder import GraphedEncoder
from .guards import Backend, BackendInUse, OnOverflow, read_outputs, require_choice
from .stats import BudgetStats, GraphStats

__all__ = [
    "Backend",
    "BackendInUse",
    "Budget",
    "BudgetStats",
    "FormKernels",
    "GraphStats",
    "GraphedEncoder",
    "OnOverflow",
    "fit_budgets",
    "joins_paths",
    "read_outputs",
    "require_choice",
    "with_paths",
]
