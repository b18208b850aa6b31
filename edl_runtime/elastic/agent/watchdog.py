"""Whether an instance's worker hangs: it is silent, or does not arrive where all other ranks wait for it. Pure.

Ranks wait at the end of a step, and where a generation forms: for bootstrap, and for the state.
"""

from __future__ import annotations

from edl_runtime.elastic.rendezvous.generation import GroupView

SILENT_S = 2.0
"""A trainer says twice a second that it lives; one that does not for so long is stopped or stuck."""

BUSY_CPU_SHARE = 0.1
"""A silent process that has used so much of a processor since its last word computes: something in it holds Python."""

MIN_WAIT_S = 1.5
WAIT_STEPS = 5.0
"""Others wait for it when they have waited so long, and so many times the time that a step takes."""

STOPPED_WAIT_S = 1.0
"""How long others have to wait for one that the system knows to be stopped, as by SIGSTOP."""

MAX_TICK_S = 0.5
"""An agent that was stopped itself does not know what was said meanwhile: no look counts for more."""


class Watchdog:
    """Watches over one instance's trainer. `step_limit_s`: how long others wait for one that lives, or computes."""

    def __init__(self, member: str, step_limit_s: float) -> None:
        self._member = member
        self._step_limit_s = step_limit_s
        self._looked_at: float | None = None
        self._silent_s = 0.0
        self._spoke_at_cpu_s = 0.0
        self._moves = 0
        self._seen_at = 0.0
        self._waits: dict[str, tuple[int, int, float]] = {}

    def check(
        self,
        view: GroupView,
        *,
        was_heard: bool,
        stopped: bool,
        cpu_s: float,
        waits_for: int,
        moves: int,
        median_s: float,
        now: float,
    ) -> str:
        """Return why the trainer counts as hung, "" while it does not. Look again and again.

        - `was_heard`: it has said something since the last look. `stopped`: the system has stopped its process.
        - `cpu_s`: how much processor time it has used so far.
        - `waits_for`: the step at which it waits itself, as it said last, 0 for none.
        - `moves`: how many pieces of state it has moved: nobody waits in vain for one that moves more of them.
        - `median_s`: what a step takes.
        """
        tick_s = min(now - self._looked_at, MAX_TICK_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        self._silent_s = 0.0 if was_heard else self._silent_s + tick_s
        if was_heard or cpu_s < self._spoke_at_cpu_s:  # less: another process
            self._spoke_at_cpu_s = cpu_s
        computes = cpu_s - self._spoke_at_cpu_s >= BUSY_CPU_SHARE * self._silent_s
        if moves > self._moves:
            self._waits = {}
        self._moves = moves
        waited_s = self._waited_s(view, tick_s)
        if not waited_s:
            return ""
        longest, shortest = max(waited_s), min(waited_s)
        if stopped and longest > STOPPED_WAIT_S:
            return f"its process is stopped, and others have waited {longest:.1f} s for it"
        if self._silent_s > SILENT_S and not computes and longest > max(MIN_WAIT_S, WAIT_STEPS * median_s):
            return f"it has said nothing for {self._silent_s:.1f} s, and others wait for it"
        if not waits_for and shortest > self._step_limit_s:
            return f"all others have waited {shortest:.0f} s for it at the end of a step"
        return ""

    def _waited_s(self, view: GroupView, tick_s: float) -> list[float]:
        """Return how long each other member of the generation has waited where it does.

        What they do is not known while Redis is away: the view is of before.
        """
        members = view.generation.members if view.generation else ()
        waited_more_s = tick_s if view.now > self._seen_at else 0.0
        self._seen_at = view.now
        before, self._waits = self._waits, {}
        for member in members:
            there = view.find(member)
            if member == self._member or there is None or there.member.finished:
                continue
            step, up = there.member.waits_for, there.member.up
            *known, waited_s = before.get(member, (0, 0, 0.0))
            self._waits[member] = (step, up, waited_s + waited_more_s if step and [step, up] == known else 0.0)
        return [waited_s for *_, waited_s in self._waits.values()]
