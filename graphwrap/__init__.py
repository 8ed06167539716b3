"""CUDA graphs for any encoder that keeps the contract: one graph a token budget, padded exactly.

This package knows no model: it asks an encoder what items cost, prepares padded metadata, and
replays.
"""

from .budgets import Budget, fit_budgets
from .graphed_encoder import GraphedEncoder
from .stats import BudgetStats, GraphStats

__all__ = ["Budget", "BudgetStats", "GraphStats", "GraphedEncoder", "fit_budgets"]
