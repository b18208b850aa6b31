"""The policies that the simulator compares, on a cluster of GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from simulation import original_rules
from simulation.simulator import SimulatedJob
from simulation.traces import GPUS

from edl_runtime.autoscale.policy.decide import decide
from edl_runtime.autoscale.policy.model import Node, Workload
from edl_runtime.autoscale.traffic.capacity import LEAD_S, TrainingCapacity, capacity_beside_web, declared_capacity
from edl_runtime.autoscale.traffic.forecast import (
    DAY_S,
    LEARN_EVERY_S,
    Forecast,
    ForecastOptions,
    Profile,
    Sample,
    learn_profile,
)
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.autoscale.traffic.windows import TrafficWindows

ORIGINAL_PAUSE_S = 30.0
PAUSE_S = 1.0
"""Of ours, rounded up from what `benchmarks/resize.py` measures for live and warm resizes."""

EVERY_S = 300.0
"""How often our policy decides, besides at each event."""

_TOTAL = {"gpu": float(GPUS)}
_MONDAY_S = 4 * DAY_S  # the first one since 1970: a trace's time 0


def declared(evening: float = 18, midday: float = 15, otherwise: float = 8, gpus: float = GPUS) -> TrafficWindows:
    """Return the traces' windows, given the GPUs kept for the web."""
    return to_windows(
        {
            "windows": [
                {"name": "midday", "start": "10:00", "end": "15:00", "sizes": {"cluster": {"gpu": gpus - midday}}},
                {"name": "evening", "start": "18:00", "end": "23:00", "sizes": {"cluster": {"gpu": gpus - evening}}},
            ],
            "default": {"cluster": {"gpu": gpus - otherwise}},
        }
    )


def always(kept: float, gpus: float = GPUS) -> TrafficWindows:
    """Return windows that always keep `kept` GPUs for the web."""
    return to_windows({"windows": [], "default": {"cluster": {"gpu": gpus - kept}}})


def _moment(now_s: float) -> datetime:
    return datetime.fromtimestamp(now_s + _MONDAY_S, UTC)


class _Declared:
    """What windows leave to training, cached until it may change."""

    def __init__(self, windows: TrafficWindows, lead_s: float = 0.0) -> None:
        self._windows = windows
        self._lead_s = lead_s
        self._room: TrainingCapacity | None = None
        self._until_s = -math.inf

    def room(self, now_s: float) -> TrainingCapacity:
        if self._room is None or now_s >= self._until_s:
            self._room = declared_capacity(self._windows, _TOTAL, now=_moment(now_s), lead_s=self._lead_s)
            until = self._room.until
            self._until_s = math.inf if until is None else until.timestamp() - _MONDAY_S
        return self._room

    def gpus(self, now_s: float) -> float:
        return self.room(now_s).capacity["gpu"]

    def until_s(self, now_s: float) -> float:
        self.room(now_s)
        return self._until_s


class FixedSizes:
    """Each job gets the middle of its bounds, first come, first served."""

    pause_s = ORIGINAL_PAUSE_S

    def __init__(self, windows: TrafficWindows) -> None:
        self._declared = _Declared(windows)

    def plan(self, now_s: float, jobs: Sequence[SimulatedJob], web: Sequence[Sample]) -> Mapping[str, int]:  # noqa: ARG002
        """Start jobs in order while they fit."""
        left = self._declared.gpus(now_s) - sum(one.instances for one in jobs)
        started: dict[str, int] = {}
        for one in jobs:
            middle = (one.job.bounds.min + one.job.bounds.max) // 2
            if one.instances:
                continue
            if middle > left:
                break
            started[one.job.name] = middle
            left -= middle
        return started

    def again_s(self, now_s: float) -> float:
        """At the next edge of a window."""
        return self._declared.until_s(now_s)


class OriginalRules:
    """The original's controller, and a scheduler that places its pods one by one.

    Jobs whose pods all run are resized; while one is pending, all jobs are. GPUs kept for the web are not part of the
    cluster. The maximum load is 1, as in the controller's own tests: with its default it would not end.
    """

    pause_s = ORIGINAL_PAUSE_S
    every_s = 30.0

    def __init__(self, windows: TrafficWindows, max_load: float = 1.0) -> None:
        self._declared = _Declared(windows)
        self._max_load = max_load
        self._wanted: dict[str, int] = {}
        self._settled: tuple[object, ...] | None = None

    def plan(self, now_s: float, jobs: Sequence[SimulatedJob], web: Sequence[Sample]) -> Mapping[str, int]:  # noqa: ARG002
        """Run the controller if it is due, then place pods."""
        self._wanted = {one.job.name: self._wanted.get(one.job.name, one.job.bounds.min) for one in jobs}
        total = int(self._declared.gpus(now_s))
        placed = {one.job.name: min(one.instances, self._wanted[one.job.name]) for one in jobs}
        placed = _scheduled(placed, self._wanted, total)
        if now_s % self.every_s == 0:
            self._control(jobs, placed, total)
            placed = {name: min(pods, self._wanted[name]) for name, pods in placed.items()}
            placed = _scheduled(placed, self._wanted, total)
        return placed

    def again_s(self, now_s: float) -> float:
        """At the controller's next pass."""
        return (now_s // self.every_s + 1) * self.every_s

    def _control(self, jobs: Sequence[SimulatedJob], placed: Mapping[str, int], total: int) -> None:
        state = (total, tuple(placed.items()), tuple(self._wanted.items()))
        if state == self._settled:
            return
        self._settled = state
        pending = any(not pods for pods in placed.values())
        trainers = [
            original_rules.Trainers(
                name=one.job.name,
                min=one.job.bounds.min,
                max=one.job.bounds.max,
                wanted=self._wanted[one.job.name],
                gpu=1,
            )
            for one in jobs
            if pending or placed[one.job.name] == self._wanted[one.job.name]
        ]
        asked = sum(self._wanted.values())
        survey = original_rules.ClusterTotals(gpu=total, memory=1, gpu_asked=asked, nodes={"cluster": (0, 1)})
        self._wanted.update(original_rules.original_plan(trainers, survey, max_load=self._max_load).wanted)


def _scheduled(placed: Mapping[str, int], wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """Place pending pods, oldest jobs first; a job without pods starts when all of its pods fit."""
    left = max(0, total - sum(placed.values()))
    after = dict(placed)
    for name, pods in placed.items():
        more = max(0, wanted[name] - pods)
        if not pods and more > left:
            left = 0  # free GPUs are reserved for this job
        after[name] += min(more, left)
        left -= min(more, left)
    return after


class OurPolicy:
    """Our policy with declared windows; with `forecast_options` also with a learned profile.

    - `lead_s`: how long before a window with less for training jobs shrink.
    - `pause_s`: how long a resize stops a job.
    - `late_s`: the delay of the web's samples.
    """

    def __init__(
        self,
        windows: TrafficWindows,
        *,
        forecast_options: ForecastOptions | None = None,
        lead_s: float = LEAD_S,
        pause_s: float = PAUSE_S,
        late_s: float = 0.0,
    ) -> None:
        self.pause_s = pause_s
        self._late_s = late_s
        self._declared = _Declared(windows, lead_s)
        self._foresight = forecast_options
        self._profile = Profile(slots={})
        self._seen_s = math.inf
        self._learned_s = -math.inf

    def plan(self, now_s: float, jobs: Sequence[SimulatedJob], web: Sequence[Sample]) -> Mapping[str, int]:
        """Run the policy."""
        capacity = self._capacity(now_s, web)
        used = sum(one.instances for one in jobs)
        targets = decide(
            [_as_job(one) for one in jobs],
            [Node(name="cluster", free={"gpu": GPUS - used})],
            {"gpu": capacity},
            now_s=now_s,
            pause_s=self.pause_s,
        )
        return {name: target.instances for name, target in targets.items()}

    def again_s(self, now_s: float) -> float:
        """At the next interval, change of a window, or sample."""
        return min((now_s // EVERY_S + 1) * EVERY_S, self._declared.until_s(now_s), self._seen_s)

    def _capacity(self, now_s: float, web: Sequence[Sample]) -> float:
        """Return how many GPUs training may use."""
        forecast = self._forecast(now_s, web, self._foresight) if self._foresight else None
        room = capacity_beside_web(self._declared.room(now_s), _TOTAL, now=_moment(now_s), forecast=forecast)
        return room.capacity["gpu"]

    def _forecast(self, now_s: float, web: Sequence[Sample], forecast_options: ForecastOptions) -> Forecast:
        """Return the forecast by the samples so far."""
        self._seen_s = next((at_s for sample in web[-2:] if (at_s := sample.at_s + self._late_s) > now_s), math.inf)
        seen = [_moved(sample) for sample in web[-3:] if sample.at_s + self._late_s <= now_s]
        if now_s - self._learned_s >= LEARN_EVERY_S:
            self._learned_s = now_s
            past = map(_moved, web)
            self._profile = learn_profile(
                past, now_s=now_s - self._late_s + _MONDAY_S, forecast_options=forecast_options
            )
        return Forecast(resource="gpu", profile=self._profile, recent=seen, forecast_options=forecast_options)


def _moved(sample: Sample) -> Sample:
    """Return a sample with its time as Unix time."""
    return Sample(at_s=sample.at_s + _MONDAY_S, needed=sample.needed)


def _as_job(one: SimulatedJob) -> Workload:
    return Workload(
        name=one.job.name,
        bounds=one.job.bounds,
        resources={"gpu": 1},
        nodes=("cluster",) * one.instances,
        submitted_s=one.job.submitted_s,
        changed_s=one.changed_s,
        resized_s=one.resized_s,
        speedup=one.job.speedup,
    )
