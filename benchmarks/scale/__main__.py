"""Measures images per second of a core and of a GPU, and computes the tables of ``docs/scale.md``.

    python -m benchmarks.scale --host --json benchmarks/results/scale_host.json
    python -m benchmarks.scale --gpu --json vitgraph/embedding/planning/scale_h200.json
    python -m benchmarks.scale --small --json vitgraph/embedding/planning/scale_small_h100.json
    python -m benchmarks.scale    (prints the tables; python -m benchmarks.pages writes them)

``--host`` measures one CPU core and needs no GPU: how many JPEG files of quality 90 are decoded and
resized, and how many files are listed, per second of CPU time. Run it on a host of the kind that
has the GPUs. ``--gpu`` measures ``encode_many`` over images in memory, with vision towers of real
size, random weights, bfloat16 and CUDA graphs, so that the GPU alone limits the speed.
``--small`` measures in the same way the towers of ``benchmarks.folders``, each of which makes every
image the same number of tokens, and writes the file after each tower; the page has a table of each
file ``scale_small_<gpu>.json``.
``vitgraph embed --plan`` uses these rates (``vitgraph/embedding/planning/estimate.py``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown

ROOT = Path(__file__).parents[2]
HOST = ROOT / "benchmarks" / "results" / "scale_host.json"
GPU = ROOT / "vitgraph" / "embedding" / "planning" / "scale_h200.json"
SMALL = GPU.with_name("scale_small_h100.json")
"""One of the files of ``--small``; those of other GPUs lie beside it."""
PARALLEL = ROOT / "benchmarks" / "results" / "data_parallel_h200.json"
SOAK = ROOT / "benchmarks" / "results" / "soak_h200.json"
IMAGES = 10_000_000
PENDING = "*Not measured yet: `{}` measures, `python -m benchmarks.pages` writes the table.*"
Body = Mapping[str, Any]


def read(path: Path) -> Body | None:
    """Return the results in a JSON file; None if there is no file."""
    return dict(json.loads(path.read_text())) if path.is_file() else None


def family(tower: str) -> str:
    """Return the name under which the results of ``--host`` have the preprocessing of a tower."""
    return "InternViT" if tower.startswith("Intern") else "Qwen"


# --- tables ---------------------------------------------------------------------------------------


def generated_parts() -> dict[str, str]:
    """Return every generated part of ``docs/scale.md`` by its name."""
    host, gpu, parallel, soak = map(read, (HOST, GPU, PARALLEL, SOAK))
    small = [read(path) for path in sorted(SMALL.parent.glob("scale_small_*.json"))]
    to_measure = {
        "scale --host": (host, HOST),
        "scale --gpu": (gpu, GPU),
        "scale --small": (small[0] if small else None, SMALL),
        "data_parallel": (parallel, PARALLEL),
        "soak": (soak, SOAK),
    }
    pending = {
        name: PENDING.format(f"python -m benchmarks.{name} --json {shown(path)}")
        for name, (body, path) in to_measure.items()
        if body is None
    }
    no_host, no_gpu = pending.get("scale --host"), pending.get("scale --gpu")
    return {
        "rates": no_gpu or rates(cast(Body, gpu)),
        "small rates": pending.get("scale --small")
        or "\n\n".join(small_rates(cast(Body, body)) for body in small),
        "decoding": no_host or decoding(cast(Body, host)),
        "cores": no_gpu or no_host or cores(cast(Body, gpu), cast(Body, host)),
        "parallel": pending.get("data_parallel") or share(cast(Body, parallel)),
        "soak": pending.get("soak") or soaked(cast(Body, soak)),
    }


def shown(path: Path) -> str:
    """Return a path as text, relative to the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def rates(gpu: Body) -> str:
    """Return the table of images per second of a GPU, by tower and image size."""
    about = gpu["about"]
    sizes = list(next(iter(gpu["towers"].values())))
    rows = [
        [
            tower,
            *(
                f"{found[size]['images per second']:,.0f} ({found[size]['tokens']})"
                for size in sizes
            ),
        ]
        for tower, found in gpu["towers"].items()
    ]
    text = (
        f"Images per second of one {about['gpu']}, in brackets the tokens of an image. "
        f"{measured(gpu)}."
    )
    return f"{text}\n\n{markdown(('tower', *sizes), rows)}"


def measured(gpu: Body) -> str:
    """Return how and when the images per second of a GPU were measured."""
    return (
        f"Measured: bfloat16, CUDA graphs, {software(gpu['about'])}, decoded images in memory, "
        f"{gpu['workers']} threads, {gpu['about']['date']}"
    )


def small_rates(small: Body) -> str:
    """Return the table of images per second of towers that make all images equally many tokens."""
    ((size, _),) = next(iter(small["towers"].values())).items()
    rows = [
        (tower, str(found[size]["tokens"]), f"{found[size]['images per second']:,.0f}")
        for tower, found in small["towers"].items()
    ]
    text = (
        f"Images per second of one {small['about']['gpu']}, photographs of {size}. "
        f"{measured(small)}."
    )
    return f"{text}\n\n{markdown(('tower', 'tokens', 'images per second'), rows)}"


def decoding(host: Body) -> str:
    """Return the table of images per second that one core decodes and resizes."""
    rows = [
        [size, f"{row['kilobytes']:,.0f}", f"{row['Qwen']:,.0f}", f"{row['InternViT']:,.0f}"]
        for size, row in host["decoding"].items()
    ]
    text = (
        f"Images per second of one core, decoded and resized. Measured: {host['cpu']}, one thread, "
        f"CPU time, JPEG of quality 90, torch {host['torch']}, {host['date']}."
    )
    header = ("size", "kB per file", "Qwen towers", "InternViT")
    listed = ", ".join(
        f"{name} in {IMAGES / rate:,.0f} s (at {rate:,} per second)"
        for name, rate in host["per second"].items()
    )
    after = (
        f"Before a job begins, one worker lists all images. One core ({host['listed on']}) "
        f"lists {IMAGES:,} {listed}, on "
        f"a local disk; that takes {IMAGES * host['bytes per listed file'] / 1e9:.1f} GB of its "
        f"memory ({host['bytes per listed file']} bytes per file of a folder). Rates were "
        "measured, the rest computed."
    )
    return f"{text}\n\n{markdown(header, rows)}\n\n{after}"


def cores(gpu: Body, host: Body) -> str:
    """Return the table of the number of cores that decode fast enough for one GPU."""
    sizes = [size for size in next(iter(gpu["towers"].values())) if size in host["decoding"]]
    rows = [
        [
            tower,
            *(
                f"{found[size]['images per second'] / host['decoding'][size][family(tower)]:.1f}"
                for size in sizes
            ),
        ]
        for tower, found in gpu["towers"].items()
    ]
    text = "Cores that keep one GPU busy. Computed: the rate of the GPU over the rate of one core."
    return f"{text}\n\n{markdown(('tower', *sizes), rows)}"


def share(body: Body) -> str:
    """Return the text and table about one call spread over several GPUs."""
    from benchmarks.data_parallel import table

    about = body["about"]
    text = (
        f"{body['tower']} in bfloat16 on {body['ranks']} {about['gpu']}, {software(about)}, "
        "CUDA graphs, inputs on each GPU. Measured: medians in milliseconds."
    )
    return f"{text}\n\n{table(dict(body))}"


def software(about: Body) -> str:
    """Return the versions of torch and, if it was installed, of flash-attn-4 in a measurement."""
    flash = about["extras"]["flash-attn-4"]
    extra = f"flash-attn-4 {flash}" if flash else "without flash-attn-4"
    return f"torch {about['torch']}, {extra}"


def soaked(body: Body) -> str:
    """Return a sentence with the result of the soak run (``benchmarks/soak.py``)."""
    from benchmarks.soak import sentence

    return sentence(body)


def main() -> None:
    """Measure rates, or print the tables, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--host", action="store_true", help="measure one core of this machine")
    parser.add_argument("--gpu", action="store_true", help="measure this machine's GPU")
    parser.add_argument("--small", action="store_true", help="measure small towers on this GPU")
    parser.add_argument("--towers", nargs="+", help="the towers to measure (--small)")
    parser.add_argument("--images", type=int, help="by default 100 per size, on a GPU 4096")
    parser.add_argument("--listed", type=int, default=20_000, help="files to list (--host)")
    parser.add_argument("--workers", type=int, default=16, help="threads (--gpu)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each size (--gpu)")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    options = parser.parse_args()
    if options.small:
        from benchmarks.scale.measure import measure_small_towers

        found = measure_small_towers(
            options.images or 4096, options.workers, options.repeats, options.towers
        )
        for body in found:
            print(json.dumps(body["towers"]), flush=True)
            if options.json:
                write_results(options.json, body)
    elif options.host or options.gpu:
        from benchmarks.scale.measure import measure_gpu, measure_host

        body = (
            measure_host(options.images or 100, options.listed)
            if options.host
            else measure_gpu(options.images or 4096, options.workers, options.repeats)
        )
        print(json.dumps(body, indent=1))
        if options.json:
            write_results(options.json, body)
    else:
        print("\n\n".join(generated_parts().values()))


if __name__ == "__main__":
    main()
