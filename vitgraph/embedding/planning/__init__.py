"""``vitgraph embed --plan``: what a job would take, said before anything is written.

- ``report``: samples the source, asks for rates, and prints
- ``estimate``: the arithmetic, and the text that shows it
- ``sample``: what is measured: some images of the source, and the rate of a device

The arguments stand here, where nothing is imported that takes long.
"""

from __future__ import annotations

import argparse


def add_plan(group: argparse._ArgumentGroup) -> None:
    """Add the arguments of a plan to ``vitgraph embed``."""
    group.add_argument(
        "--plan",
        action="store_true",
        help="write nothing: read a sample of the images, and print hours, cores and bytes of the "
        "job, and what binds; a --device that is named is measured",
    )
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs to plan for; by default several")


def check_plan(options: argparse.Namespace) -> None:
    """Check the options that count in a plan.

    Raises:
        ValueError: a number of GPUs that cannot be, or without ``--plan``.
    """
    if options.gpus is None:
        return
    if not options.plan:
        raise ValueError(f"--gpus {options.gpus}: is for --plan; --shard starts several workers")
    if options.gpus < 1:
        raise ValueError(f"--gpus {options.gpus}: must be at least 1")
