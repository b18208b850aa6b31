"""Results of operators and sensors (XCom)."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class CheckpointResult(TypedDict):
    """A complete checkpoint: the result of `EdlCheckpointSensor`, and the payload of `EdlCheckpointTrigger`'s events.

    `job`: the job that wrote it; `checkpoint`: its URL; `at`: when it was complete, in Unix seconds.
    """

    job: str
    checkpoint: str
    step: int
    epoch: int
    metrics: dict[str, float]
    at: float


class WindowResult(TypedDict):
    """A traffic window, from `start` to before `end` in ISO 8601, and the `sizes` of training in it, {} for no limits.

    A start or end is None if it is more than 400 days away.
    """

    window: str
    start: str | None
    end: str | None
    sizes: dict[str, Any]


class RescalingTarget(TypedDict):
    """How many `instances` a job or pool had, how many it should have (`target`), and why."""

    name: str
    kind: str
    instances: int
    target: int
    reason: str


class RescalingResult(TypedDict):
    """The result of `EdlAutoscaleOperator`.

    - `at`: the time of the pass, and `until`: the end of the traffic window (None for none), in Unix seconds.
    - `window`: the name of the traffic window, "default" between windows, empty without windows.
    - `capacity`: what training may use, by resource; `why`: what decides that.
    - `targets`: of all jobs and pools that can be resized.
    - `refused`: why jobs could not be resized, by name, as they have ended meanwhile.
    - `notes`: warnings about the windows.
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
    """The result of a pool's operator and sensor: its name and its teachers' addresses.

    `reason`: of the size, after a resize by traffic windows.
    """

    pool: str
    teachers: list[str]
    reason: NotRequired[str]


class RunningJob(TypedDict):
    """The result of a job's sensor and resize: its name and how many instances train together.

    `reason`: of the size, after a resize by traffic windows.
    """

    job: str
    instances: int
    reason: NotRequired[str]


class JobResult(TypedDict):
    """The result of `EdlDistillOperator`.

    `checkpoint` and `metrics` come from the student's `edl_runtime.result.write_result`; `not_finite`: since which step
    the loss, the gradients or metrics are NaN or infinite, of those that are; `answered`: how many requests each
    teacher answered, by address.
    """

    job: str
    pool: str
    checkpoint: str
    metrics: dict[str, Any]
    not_finite: dict[str, int]
    answered: dict[str, int]


class TrainResult(TypedDict):
    """The result of `EdlTrainOperator`.

    - `checkpoint`: the one that the script gave to `edl_runtime.result.write_result`, else the URL of the job's newest;
      empty if there is none. `step`, `epoch`: of that checkpoint, or of the last progress if the script wrote its own.
    - `metrics`: of this job's newest checkpoint, and those that the script gave.
    - `not_finite`: since which step the loss, the gradients or metrics are NaN or infinite, of those that are.
    - `stopped`: whether it was asked to end, as by `ends_by`, before it was finished; `reason`: why.
    - `instances`: how many trained together at the end; `generations`: how many generations there were.
    """

    job: str
    checkpoint: str
    step: int
    epoch: int
    metrics: dict[str, Any]
    not_finite: dict[str, int]
    stopped: bool
    reason: str
    instances: int
    generations: int
