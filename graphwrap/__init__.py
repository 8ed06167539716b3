"""CUDA graphs for any encoder with the methods of ``GraphableEncoder``, one graph per token budget.

Nothing here is specific to a model: an encoder says how many rows and tokens each image or clip (an
item) has, items are padded to a budget, and its graph is replayed. Other packages import only the
names in ``__all__``. The modules, in the order in which a call passes through them:

- ``graphed_encoder``: :class:`GraphedEncoder`, the only class that users make
- ``settings``: checks the encoder and the settings; ``calling``: torch's modes, the lock and the
  pixels of a call; ``changes``: notices weights, modules and values that change after capture
- ``encoder_forms``: the form of the encoder that is captured, such as the accelerated one
- ``budgets``: how many graphs there are, and how much each one holds; ``budget_sizes``: the token
  counts that pad least
- ``capture``: captures a graph per budget, the largest first
- ``buffers``: the memory that graphs read and write, and one graph of one size
- ``measuring``: times replays and eager runs; ``costs``: holds and saves these times
- ``kept_tables``: the folder that keeps them for later processes
- ``packing``: puts the items of a call into the groups that cost least
- ``replay``: copies inputs in, replays, and copies results out; ``outputs``: names their tensors
- ``stats``: counts replays, padding and eager runs
- ``torch_internals``: the private functions of torch that are called
"""

from .budget_sizes import fit_budgets
from .budgets import Budget
from .encoder_forms import FormKernels, joins_paths, with_paths
from .graphed_encoder import GraphedEncoder
from .kept_tables import KeptTable, list_tables, remove_tables
from .settings import Backend, BackendInUse, OnOverflow, read_outputs, require_choice
from .stats import BudgetStats, GraphStats

__all__ = [
    "Backend",
    "BackendInUse",
    "Budget",
    "BudgetStats",
    "FormKernels",
    "GraphStats",
    "GraphedEncoder",
    "KeptTable",
    "OnOverflow",
    "fit_budgets",
    "joins_paths",
    "list_tables",
    "read_outputs",
    "remove_tables",
    "require_choice",
    "with_paths",
]
