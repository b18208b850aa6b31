"""Whether an instance's worker hangs: it is silent, or does not arrive where all other ranks wait for it. Pure."""

from __future__ import annotations

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
"""How long others wait for one that is stopped, as by SIGSTOP."""

MAX_TICK_S = 0.5
"""No check counts for more time: an agent that was stopped itself does not know what was sent meanwhile."""


class Watchdog:
    """Decides whether an instance's worker hangs: it is silent, or does not arrive where all other ranks wait for it.

    Ranks wait at the end of a step, and where a generation forms. `step_limit_s`: how long others wait for one that
    sends heartbeats, or computes.
    """

    def __init__(self, member: str, step_limit_s: float) -> None:
        self._member = member
        self._step_limit_s = step_limit_s
        self._checked_at: float | None = None
        self._silent_s = 0.0
        self._heard_at_cpu_s = 0.0
        self._moves = 0
        self._view_at = 0.0
        self._waits: dict[str, tuple[int, int, float]] = {}

    def check(
        self,
        view: GroupView,
        worker: WorkerState,
        *,
        was_heard: bool,
        stopped: bool,
        cpu_s: float,
        median_s: float,
        now: float,
    ) -> str:
        """Return why the worker counts as hung, "" while it does not. Call it again and again.

        - `was_heard`: it has sent something since the last check. `stopped`: its process is stopped.
        - `cpu_s`: processor time used so far.
        - `median_s`: of a step.

        One that moves more pieces of state than before does not hang.
        """
        tick_s = min(now - self._checked_at, MAX_TICK_S) if self._checked_at is not None else 0.0
        self._checked_at = now
        self._silent_s = 0.0 if was_heard else self._silent_s + tick_s
        if was_heard or cpu_s < self._heard_at_cpu_s:  # less: another process
            self._heard_at_cpu_s = cpu_s
        computes = cpu_s - self._heard_at_cpu_s >= BUSY_CPU_SHARE * self._silent_s
        if worker.moves > self._moves:
            self._waits = {}
        self._moves = worker.moves
        waited_s = self._waited_s(view, tick_s)
        if not waited_s:
            return ""
        longest, shortest = max(waited_s), min(waited_s)
        if stopped and longest > STOPPED_WAIT_S:
            return f"its process is stopped, and others have waited {longest:.1f} s for it"
        if self._silent_s > SILENT_S and not computes and longest > max(MIN_WAIT_S, WAIT_STEPS * median_s):
            return f"it has sent no heartbeat for {self._silent_s:.1f} s, and others wait for it"
        if not worker.waits_for and shortest > self._step_limit_s:
            return f"all others have waited {shortest:.0f} s for it at the end of a step"
        return ""

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
