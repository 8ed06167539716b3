"""The report of the GPU tests: runs them and writes what passed, on what, in how many seconds.

python -m benchmarks.gpu_tests --json benchmarks/results/gpu_tests_h200.json  (in a clone)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]


def run(report: Path, files: list[str]) -> int:
    """Run ``pytest -m gpu``; its exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"]
    return subprocess.run([*command, "--show-capture=no", *files], cwd=ROOT, check=False).returncode


def outcome(case: ElementTree.Element) -> str:
    """Whether a case passed, failed, broke or was skipped."""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            return child.tag
    return "passed"


def main() -> None:
    """Run, count, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("files", nargs="*", help="these alone; what others gave before is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run(report, options.files or ["tests/gpu"])
        cases = list(ElementTree.parse(report).iter("testcase"))
    about = {
        **describe_machine(),
        "gpus": torch.cuda.device_count(),
        "when": datetime.now(timezone.utc).isoformat(timespec="minutes"),
    }
    files: dict[str, Any] = {}
    if options.files and options.json.exists():
        files = json.loads(options.json.read_text())["files"]
    for name in {str(case.get("classname")) for case in cases}:
        files[name] = {"about": about, "tests": {}}
    for case in cases:
        files[str(case.get("classname"))]["tests"][case.get("name")] = {
            "outcome": outcome(case),
            "seconds": float(case.get("time", 0)),
        }
    every = [test["outcome"] for file in files.values() for test in file["tests"].values()]
    body = {"totals": Counter(every), "files": files}
    options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(dict(body["totals"]))
    sys.exit(any(outcome not in ("passed", "skipped") for outcome in every))


if __name__ == "__main__":
    main()
