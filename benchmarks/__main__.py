"""``python -m benchmarks [speed] [OPTION...]`` measures the speeds in the README's table."""

from __future__ import annotations

import sys

from benchmarks.speed.__main__ import main

arguments = sys.argv[1:]
main(arguments[1:] if arguments[:1] == ["speed"] else arguments)
