"""The parser of ``vitgraph bench`` with its subcommands ``speed``, ``accuracy`` and ``features``.

The measurements that the documentation shows are in ``benchmarks/RESULTS.md`` of the repository.
"""

from __future__ import annotations

import argparse

from .arguments import DEVICE_HELP, add_source
from .bench_accuracy import add_accuracy
from .bench_features import add_features
from .bench_speed import add_speed


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands ``speed``, ``accuracy`` and ``features`` to ``parser``."""
    subjects = parser.add_subparsers(title="subjects", metavar="NAME", required=True)
    for name, add, summary in (
        ("speed", add_speed, "Measure the speed of a checkpoint on this machine."),
        (
            "accuracy",
            add_accuracy,
            "Compare precisions and kernels with float32 on your photographs.",
        ),
        ("features", add_features, "Measure what can be read off each block, on labelled images."),
    ):
        subject = subjects.add_parser(name, help=summary, description=summary)
        add_source(subject, several=name == "features")
        add(subject)
        subject.add_argument("--device", help=DEVICE_HELP)
        if name != "features":
            subject.add_argument(
                "--kernels",
                nargs="+",
                default=["auto"],
                metavar="NAME",
                help="attention kernels to measure one after another: auto, torch, or a kernel's "
                "name",
            )
        subject.add_argument("--json", action="store_true", help="print JSON")
        subject.add_argument("--debug", action="store_true", help="show the traceback of an error")
        subject.set_defaults(parser=subject)
