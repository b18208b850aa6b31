"""What operators and sensors return, as XCom."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class CheckpointResult(TypedDict):
    """A checkpoint that has landed: what `EdlCheckpointSensor` returns, and an event of `EdlCheckpointTrigger` carries.

    `job`: which one wrote it; `checkpoint`: its URL; `at`: when it was complete, in Unix seconds.
    """

    job: str
    checkpoint: str
    step: int
    epoch: int
    metrics: dict[str, float]
    at: float


class WindowResult(TypedDict):
    """A window that holds, as tasks return it: from `start` to before `end`, in ISO 8601, and what training may have.

    A start or end is None where that is not within 400 days. `sizes` are as in the schema, {} for all there is.
    """

    window: str
    start: str | None
    end: str | None
    sizes: dict[str, Any]


class RescalingTarget(TypedDict):
    """How many `instances` a job or pool was asked to have, how many it should have (`target`), and why."""

    name: str
    kind: str
    instances: int
    target: int
    reason: str


class RescalingResult(TypedDict):
    """What `EdlAutoscaleOperator` returns.

    - `at`: of when it is, and `until`: the end of the traffic window, in Unix seconds; None for none.
    - `window`: the name of the traffic window, "default" between windows, empty without any; `why`: what decides how
      much training may use; `capacity`: that, by resource.
    - `targets`: of each job and pool that can be resized, by name.
    - `refused`: of those that could not be resized, as they have ended meanwhile, by name, why.
    - `notes`: what is odd about the windows.
    - `dry_run`: whether nothing was changed.
    """

    at: float
    window: str
    until: float | None
    why: str
    capacity: dict[str, float]
    targets: list[RescalingTarget]
    refused: dict[str, str]
    notes: list[str]
    dry_run: bool


class PoolResult(TypedDict):
    """What a pool's operator and sensor return: the pool's name and its teachers' addresses.

    `reason`: why it has so many, of a resize by traffic windows.
    """

    pool: str
    teachers: list[str]
    reason: NotRequired[str]


class RunningJob(TypedDict):
    """What a job's sensor and resize return: the job's name and how many instances train together.

    `reason`: why it has so many, of a resize by traffic windows.
    """

    job: str
    instances: int
    reason: NotRequired[str]


class JobResult(TypedDict):
    """What `EdlDistillOperator` returns.

    `checkpoint` and `metrics` are what the student left with `edl_runtime.result.write_result`; `answered` is the
    number of requests that each teacher answered, by address.
    """

    job: str
    pool: str
    checkpoint: str
    metrics: dict[str, Any]
    answered: dict[str, int]


class TrainResult(TypedDict):
    """What `EdlTrainOperator` returns.

    - `checkpoint`: what the script left with `edl_runtime.result.write_result`, else the URL of the newest checkpoint
      that this job has written; empty if there is none. `step`, `epoch`: that checkpoint's, or how far the script had
      come if it has left its own.
    - `metrics`: of the newest checkpoint that this job has written, and what the script left.
    - `stopped`: whether it was asked to end, as by `ends_by`, before it had trained all there is; `reason`: why.
    - `instances`: how many trained together at last; `generations`: how many memberships there were.
    """

    job: str
    checkpoint: str
    step: int
    epoch: int
    metrics: dict[str, Any]
    stopped: bool
    reason: str
    instances: int
    generations: int
