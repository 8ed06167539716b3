"""The parser of ``vitgraph bench``, whose two subjects are measured on this machine.

The figures that the documents show are in ``benchmarks/RESULTS.md`` of a clone.
"""

from __future__ import annotations

import argparse

from .bench_accuracy import add_accuracy
from .bench_speed import add_speed


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the subjects of the command and their arguments to ``parser``."""
    subjects = parser.add_subparsers(title="subjects", metavar="NAME", required=True)
    for name, add, summary in (
        ("speed", add_speed, "Measure your own checkpoint on this machine."),
        (
            "accuracy",
            add_accuracy,
            "Compare precisions and kernels with float32 on your photographs.",
        ),
    ):
        subject = subjects.add_parser(name, help=summary, description=summary)
        add(subject)
        subject.add_argument("--debug", action="store_true", help="show the traceback of an error")
        subject.set_defaults(parser=subject)
