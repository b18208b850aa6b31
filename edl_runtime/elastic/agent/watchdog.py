"""Whether an instance's worker hangs: stopped, silent, or missing where all other ranks wait for it. Pure."""

from __future__ import annotations

import msgspec

from edl_runtime.elastic.agent.reconciler import WorkerState
from edl_runtime.elastic.rendezvous.generation import GroupView

SILENT_S = 2.0
"""A worker sends two heartbeats a second; one that sends none for so long is stopped or stuck."""

BUSY_CPU_SHARE = 0.1
"""A silent process that has used this share of a processor since computes: something in it holds Python's GIL."""

MIN_WAIT_S = 1.5
WAIT_STEPS = 5.0
"""A silent worker is hung when others have waited for `MIN_WAIT_S`, and for so many median steps."""

STOPPED_WAIT_S = 1.0
"""How long others wait for one that is stopped, as by SIGSTOP; and its agent, where it has to leave."""

STOPPED_S = 5.0
"""How long a worker may be stopped while nobody is known to wait for it."""

MAX_TICK_S = 0.5
"""No check counts for more time: an agent that was stopped itself does not know what was sent meanwhile."""


class ProcessSample(msgspec.Struct, frozen=True):
    """What the system says of a process at one moment.

    - `status`: as psutil names it, "gone" without a process. `cpu_s`: processor time used so far.
    - `switches`: how often it has been switched off or on a processor; the same number means that it has not run.
    """

    status: str = "gone"
    cpu_s: float = 0.0
    switches: int = 0


class Watchdog:
    """Decides whether an instance's worker hangs: the first of these rules that holds is why.

    1. It has been stopped for a second, and others wait for it, or it has to leave.
    2. It has been stopped for `STOPPED_S`: alone, with all others, before it joins, or as a plain script.
    3. It is silent and idle, and others wait for it.
    4. It has called `elastic.init`, and is silent and idle for `step_limit_s`, whether others wait or not.
    5. It sends heartbeats, or computes, and all others have waited for `step_limit_s`.

    - Stopped: by SIGSTOP, at each check, and it has not run in between. So one that is throttled is not stopped, nor
      one that a debugger traces.
    - Silent: it sends nothing. Idle: it uses hardly any processor time.
    - Others wait at the end of a step, and where a generation forms.
    """

    def __init__(self, member: str, step_limit_s: float) -> None:
        self._member = member
        self._step_limit_s = step_limit_s
        self._checked_at: float | None = None
        self._silent_s = 0.0
        self._stopped_s = 0.0
        self._heard_at_cpu_s = 0.0
        self._last = ProcessSample()
        self._moves = 0
        self._view_at = 0.0
        self._waits: dict[str, tuple[int, int, float]] = {}

    def check(
        self,
        view: GroupView,
        worker: WorkerState,
        process: ProcessSample,
        *,
        was_heard: bool,
        median_s: float,
        now: float,
    ) -> str:
        """Return why the worker counts as hung, "" while it does not. Call it again and again.

        - `was_heard`: it has sent something since the last check.
        - `median_s`: of a step.

        One that moves more pieces of state than before does not hang. A reason is returned once; then all counts anew.
        """
        tick_s = min(now - self._checked_at, MAX_TICK_S) if self._checked_at is not None else 0.0
        self._checked_at = now
        was_heard = was_heard or worker.phase == "absent"
        self._silent_s = 0.0 if was_heard else self._silent_s + tick_s
        still = process.status == self._last.status == "stopped" and process.switches == self._last.switches
        self._stopped_s = self._stopped_s + tick_s if still and not was_heard else 0.0
        self._last = process
        if was_heard or process.cpu_s < self._heard_at_cpu_s:  # less: another process
            self._heard_at_cpu_s = process.cpu_s
        if worker.moves > self._moves:
            self._waits = {}
        self._moves = worker.moves
        idle = process.cpu_s - self._heard_at_cpu_s < BUSY_CPU_SHARE * self._silent_s
        reason = self._reason(worker, self._waited_s(view, tick_s), idle=idle, median_s=median_s)
        if reason:
            self._silent_s = self._stopped_s = 0.0
            self._waits = {}
        return reason

    def _reason(self, worker: WorkerState, waited_s: list[float], *, idle: bool, median_s: float) -> str:
        silent_s, stopped_s = self._silent_s, self._stopped_s
        waited_s = waited_s if worker.phase == "member" else []
        longest, shortest = max(waited_s, default=0.0), min(waited_s, default=0.0)
        is_stopped = stopped_s >= STOPPED_WAIT_S
        is_silent = silent_s > SILENT_S and idle
        rules = (
            (
                is_stopped and longest > STOPPED_WAIT_S,
                f"its process is stopped, and others have waited {longest:.1f} s for it",
            ),
            (is_stopped and worker.phase == "leaving", "its process is stopped, and it has to leave"),
            (stopped_s >= STOPPED_S, f"its process has been stopped for {stopped_s:.0f} s"),
            (
                is_silent and longest > max(MIN_WAIT_S, WAIT_STEPS * median_s),
                f"it has sent no heartbeat for {silent_s:.1f} s, and others wait for it",
            ),
            (
                is_silent and worker.called and silent_s > self._step_limit_s,
                f"it has sent no heartbeat and computed nothing for {silent_s:.0f} s",
            ),
            (
                not worker.waits_for and shortest > self._step_limit_s,
                f"all others have waited {shortest:.0f} s for it at the end of a step",
            ),
        )
        return next((reason for holds, reason in rules if holds), "")

    def _waited_s(self, view: GroupView, tick_s: float) -> list[float]:
        """Return how long each other member of the generation has waited at the same place."""
        members = view.generation.members if view.generation else ()
        # while Redis is unavailable the view is old, and nothing is known of the others
        waited_more_s = tick_s if view.now > self._view_at else 0.0
        self._view_at = view.now
        before, self._waits = self._waits, {}
        for member in members:
            there = view.find(member)
            if member == self._member or there is None or there.member.finished:
                continue
            step, up = there.member.waits_for, there.member.up
            *known, waited_s = before.get(member, (0, 0, 0.0))
            self._waits[member] = (step, up, waited_s + waited_more_s if step and [step, up] == known else 0.0)
        return [waited_s for *_, waited_s in self._waits.values()]
