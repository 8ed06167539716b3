"""The report of the GPU tests: runs them and writes what passed, on what, in how many seconds.

python benchmarks/gpu_tests.py --json benchmarks/results/gpu_tests_h200.json
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
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]


def run(report: Path, processes: int) -> int:
    """Run ``pytest -m gpu``; its exit code."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/gpu",
        f"--junitxml={report}",
        f"-n{processes}",
    ]
    return subprocess.run([*command, "--show-capture=no"], cwd=ROOT, check=False).returncode


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
    parser.add_argument("--processes", type=int, default=0, help="that share the GPU; 0: this one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = run(report, options.processes)
        cases = list(ElementTree.parse(report).iter("testcase"))
    about = {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    tests = {
        f"{case.get('classname')}::{case.get('name')}": {
            "outcome": outcome(case),
            "seconds": float(case.get("time", 0)),
        }
        for case in cases
    }
    totals = Counter(test["outcome"] for test in tests.values())
    body = {"about": about, "exit_code": code, "totals": totals, "tests": tests}
    options.json.write_text(json.dumps(body, indent=1) + "\n")
    print(dict(totals))
    sys.exit(code)


if __name__ == "__main__":
    main()
