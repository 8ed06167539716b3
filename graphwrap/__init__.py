"""CUDA graphs for any encoder that keeps the contract: one graph per token budget, padded exactly.

This package knows no model: it asks an encoder what items cost, prepares padded metadata, and
replays. Other packages import the names in ``__all__``, and no module of this one. These are the
modules, in the order of a call's way through them:

- ``graphed_encoder``: :class:`GraphedEncoder`, the only class that users make
- ``guards``: what is refused, such as gradients and weights that have changed
- ``encoder_forms``: the form of the encoder that is captured, such as the accelerated one
- ``described_encoder``: its members that graphs do not need, such as the config
- ``budgets``, ``budget_sizes``: the capacities of graphs, and how many tokens each one holds
- ``graphs``: the graphs themselves, captured, timed and replayed on static buffers
- ``costs``: times of replays and eager runs, saved and compared
- ``packing``: items put into the groups that cost least
- ``outputs``: outputs as fields by name, and the tensors that a caller gives for them
- ``stats``: what was replayed, padded and run eagerly
- ``torch_internals``: the functions of torch that are called although they are not public
"""

from .budget_sizes import fit_budgets
from .budgets import Budget
from .described_encoder import FeatureMaps, Preprocess
from .encoder_forms import FormKernels, joins_paths, with_paths
from .graphed_encoder import GraphedEncoder
from .graphs.replay import OutTensors
from .guards import Backend, BackendInUse, OnOverflow, read_outputs, require_choice
from .stats import BudgetStats, GraphStats

__all__ = [
    "Backend",
    "BackendInUse",
    "Budget",
    "BudgetStats",
    "FeatureMaps",
    "FormKernels",
    "GraphStats",
    "GraphedEncoder",
    "OnOverflow",
    "OutTensors",
    "Preprocess",
    "fit_budgets",
    "joins_paths",
    "read_outputs",
    "require_choice",
    "with_paths",
]
