"""CUDA graphs for any encoder that keeps the contract: one graph per token budget, padded exactly.

This package knows no model: it asks an encoder what items cost, prepares padded metadata, and
replays.
"""

from .bucketing import fit_budgets
from .budgets import Budget
from .graphed_encoder import GraphedEncoder
from .stats import BudgetStats, GraphStats

__all__ = ["Budget", "BudgetStats", "GraphStats", "GraphedEncoder", "fit_budgets"]
