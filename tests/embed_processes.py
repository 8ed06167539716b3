"""Processes that run ``vitgraph embed``, for tests that kill them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from rank_cases import started_once
from vitgraph.cli import main


def start(arguments: Sequence[str]) -> Any:
    """A process that runs the command line with these arguments."""
    process = started_once().Process(target=_run, args=(list(arguments),))
    process.start()
    return process


def _run(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    sys.exit(main(arguments))
