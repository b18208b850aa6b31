"""A rescaling task in a process of its own, as in a worker: prints its result as JSON.

    python rescaling_task.py '{"max_load": 0.5}'

Its policy stops the supervisor of a job between decision and resize.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.model import Node, Target, Workload
from edl_runtime.backends.local.job_folders import WorkFolder


def halts_one(
    jobs: Sequence[Workload], nodes: Sequence[Node], capacity: Mapping[str, float], *, now_s: float, pause_s: float
) -> Mapping[str, Target]:
    """Decide, and stop the supervisor of the job that EDL_HALTED names."""
    found = decide(jobs, nodes, capacity, now_s=now_s, pause_s=pause_s)
    os.kill(supervisor(_work_dir(), os.environ["EDL_HALTED"]), signal.SIGSTOP)
    return found


def _work_dir() -> Path:
    return Path(os.environ["EDL_WORK"])


def supervisor(work_dir: Path, name: str) -> int:
    """Return the process id of a job's supervisor."""
    return int(WorkFolder(work_dir).job(name).supervisor_lock.read_text())


def context() -> Any:
    """Return the used part of the context of `execute`; XComs are dropped."""
    return {"ti": SimpleNamespace(xcom_push=lambda **_: None)}


if __name__ == "__main__":
    from edl_airflow.operators.autoscale import EdlAutoscaleOperator

    operator = EdlAutoscaleOperator(task_id="rescale", **json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(operator.execute(context())))
