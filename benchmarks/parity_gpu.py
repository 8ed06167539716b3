"""How exact half precision is on this GPU, beside transformers' own sdpa run in the same dtype.

    python -m benchmarks.parity_gpu --out benchmarks/results/parity_gpu_h200.json  (in a clone)

Published widths, six blocks, weights and pixels rounded to the dtype; the truth is transformers in
float64 with its float32 casts lifted. ``ours`` and ``theirs`` are relative L2 errors pooled over
all grids (a thousand tokens or more each), ``ratio`` is ours over theirs, ``worst`` the largest
ratio of any one grid. The rule: ratio at most 1.1, worst at most 1.3.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from encoders.accelerated.attention_kernels import KERNELS, is_installed
from tests.oracles import BY_NAME
from tests.oracles.halves import LARGE_QWEN, LARGE_TILES, half_errors

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def rows_of(name: str, dtype: str) -> list[dict[str, Any]]:
    """A row a field of one family in one dtype."""
    rows = []
    for kernels, fields in half_errors(BY_NAME[name], DTYPES[dtype], forms_of(name)).items():
        for field, errors in fields.items():
            ours, theirs = errors.pooled
            rows.append(
                {
                    "family": name,
                    "dtype": dtype,
                    "kernels": kernels,
                    "field": field,
                    "ours": ours,
                    "theirs": theirs,
                    "ratio": errors.ratio,
                    "worst": errors.worst_ratio,
                }
            )
    return rows


def forms_of(name: str) -> list[str]:
    """The reference and every attention kernel that is installed and takes the family's shapes."""
    installed = [kernel for kernel in KERNELS if is_installed(KERNELS[kernel].package)]
    tiled = BY_NAME[name].tiled
    return ["reference", *(kernel for kernel in installed if kernel != "cudnn" or tiled)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--families", nargs="+", choices=BY_NAME, default=list(BY_NAME))
    options = parser.parse_args()
    rows = []
    print(
        f"{'family':16} {'dtype':9} {'kernels':9} {'field':22} {'ours':>10} {'theirs':>10} "
        f"{'ratio':>6} worst"
    )
    for name in options.families:
        for dtype in DTYPES:
            for row in rows_of(name, dtype):
                rows.append(row)
                print(
                    f"{name:16} {dtype:9} {row['kernels']:9} {row['field']:22} {row['ours']:10.3e} "
                    f"{row['theirs']:10.3e} {row['ratio']:6.3f} {row['worst']:.3f}",
                    flush=True,
                )
            torch.cuda.empty_cache()
    figures = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "grids": {"qwen": LARGE_QWEN, "intern_vit": LARGE_TILES},
        "rows": rows,
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
