"""The report at the end of a ``vitgraph embed`` process: encoded images, and those with errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..terminal import counted
from .job import Job
from .records import JobReport, ShardStats
from .shard import csv_bytes
from .shards import missing_of, read_all_stats
from .storage import JOB

if TYPE_CHECKING:
    from weights import JsonObject


def finish(job: Job) -> JobReport:
    """Count the encoded images of a job; if some images failed, list them in ``errors.csv``.

    While other workers still write shards, only the images of this worker are counted, and no
    ``errors.csv`` is written.

    Returns:
        The counts as text, and the exit code: 0, or 3 if images could not be encoded.
    """
    missing = missing_of(job.shards)
    if missing:
        return _finish_own(job, missing)
    stats, name = read_all_stats(job.shards), job.storage.name
    errors = [(error["key"], error["error"]) for record in stats for error in record["errors"]]
    summary = _summary(job, stats, missing)
    files, shards = counted(job.manifest.items, "file"), counted(len(job.shards), "shard")
    line = f"{name}: {summary['rows']:,} of {files} in {shards}"
    if not errors:
        job.storage.delete(["errors.csv"])
        return JobReport([line], 0, summary)
    with job.storage.exclusive(JOB), job.storage.writing("errors.csv") as temporary:
        temporary.write_bytes(csv_bytes([("key", "error"), *errors]))
    failures = (
        f"{counted(len(errors), 'file')} could not be encoded: {name}/errors.csv; the same command "
        "with --retry-errors tries them again"
    )
    return JobReport([line, failures], 3, summary)


def _finish_own(job: Job, missing: Sequence[int]) -> JobReport:
    """Count the shards and errors of this worker, while other workers still write theirs."""
    own_shards = set(job.worker.shards_of_worker(range(len(job.shards)))).difference(missing)
    stats = read_all_stats([job.shards[number] for number in sorted(own_shards)])
    errors = sum(len(shard["errors"]) for shard in stats)
    shard_text = counted(len(own_shards), "shard")
    line = (
        f"{job.storage.name}: {job.worker} has written its {shard_text}, with "
        f"{counted(errors, 'error')}; {len(missing)} of all {len(job.shards)} are left "
        "to other workers"
    )
    return JobReport([line], 3 if errors else 0, _summary(job, stats, missing))


def _summary(job: Job, stats: Sequence[ShardStats], missing: Sequence[int]) -> JsonObject:
    """Return the counts of a report for programs."""
    return {
        "folder": job.storage.name,
        "files": job.manifest.items,
        "rows": sum(shard["rows"] for shard in stats),
        "errors": sum(len(shard["errors"]) for shard in stats),
        "shards": len(job.shards),
        "missing_shards": len(missing),
    }
