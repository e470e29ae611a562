"""The port as it is on several prompts: what correct runs read at each gate. A process of its own.

`python -m mlxkv.engines.calibrate JOB.json RESULT.json ORACLE ...`: one model, an oracle folder for each prompt; the job's
own plans are not looked at.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxkv.commands.selftest import readings
from mlxkv.commands.selftest.worker import Bench, Loaded, load
from mlxkv.engines import oracle
from mlxkv.engines.job import Job
from mlxkv.engines.progress import bar
from mlxkv.judge.case import read_case
from oracle.formats.disk import write_text


def follow(job: Job, folders: list[Path]) -> dict[str, Any]:
    """Of each folder: the outcome with its reasons, and the readings, as plain values."""
    loaded, runs = load(job), []
    with bar(f"calibrate: {Path(job.folder).name}", len(folders)) as advance:
        for folder in folders:
            runs.append(_run(loaded, folder))
            advance(1)
    return {"runs": runs, "environment": loaded.meta.environment}


def _run(loaded: Loaded, folder: Path) -> dict[str, Any]:
    case = read_case(folder)
    verdict, _ = Bench(case, oracle.judged(case.manifest, folder), loaded).judged()
    return {
        "outcome": verdict.outcome,
        "reasons": verdict.reasons,
        "readings": [asdict(reading) for reading in readings.read(case, verdict)],
    }


def main() -> None:
    """The process's entry."""
    from mlxkv.engines.job import serve

    result, *folders = sys.argv[2:]
    serve(
        lambda job: write_text(
            Path(result), json.dumps(follow(job, [Path(folder) for folder in folders]))
        )
    )


if __name__ == "__main__":
    main()
