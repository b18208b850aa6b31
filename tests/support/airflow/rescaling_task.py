"""A rescaling task in a process of its own, as a worker runs it: prints what it returns as JSON.

    python rescaling_task.py '{"max_load": 0.5}'

The policy here interferes as nothing outside could in time.
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
    """Decide, and let the job that EDL_HALTED names answer nobody from then on."""
    found = decide(jobs, nodes, capacity, now_s=now_s, pause_s=pause_s)
    os.kill(supervisor(_work_dir(), os.environ["EDL_HALTED"]), signal.SIGSTOP)
    return found


def _work_dir() -> Path:
    return Path(os.environ["EDL_WORK"])


def supervisor(work_dir: Path, name: str) -> int:
    """Return the process that answers for a job."""
    return int(WorkFolder(work_dir).job(name).supervisor_lock.read_text())


def context() -> Any:
    """Return what Airflow gives to `execute`, as far as it is used; what is pushed goes nowhere."""
    return {"ti": SimpleNamespace(xcom_push=lambda **_: None)}


if __name__ == "__main__":
    from edl_airflow.operators.autoscale import EdlAutoscaleOperator

    operator = EdlAutoscaleOperator(task_id="rescale", **json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(operator.execute(context())))
