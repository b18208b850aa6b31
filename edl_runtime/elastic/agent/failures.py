"""Whether a worker hangs, and whether a failed one is restarted, its instance gives up, or the job fails. Pure."""

from __future__ import annotations

from typing import Self

import msgspec

from edl_runtime.elastic.comm.agent_protocol import ScriptFailed
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.elastic.rendezvous.generation import GroupView
from edl_runtime.errors import EX_CONFIG, EX_DATAERR
from edl_runtime.exit_status import describe_exit
from edl_runtime.specs import Bounds

MAX_FAILURES = 3
"""How often a failed worker is restarted without progress in between. Failures of several instances in one generation
count once: when a rank ends, others may because of it."""

PROGRESS_AFTER_S = 60.0
"""A plain script does not report steps; one that ran for so long has made progress."""


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has ended unexpectedly, or has left without the checkpoint that it had to write.

    - `exit_code`: negative for a signal. `report`: the script's own report, if any. `killed`: why the agent killed it.
    - `elastic`: its script joins generations by itself, or imports what that takes. `called`: it has begun to.
    - `generation`: the last one assigned to its instance, 0 for none. `was_up`: this worker has entered that.
    - `stepped`: this worker has finished a step. `unwritten`: the checkpoint that it had to write is missing.
    """

    exit_code: int
    report: ScriptFailed | None
    killed: str
    elastic: bool
    generation: int
    was_up: bool
    stepped: bool
    lived_s: float
    called: bool = True
    unwritten: bool = False

    @property
    def reason(self) -> str:
        """Why, for people."""
        if self.killed:
            return f"its worker was killed: {self.killed}"
        if self.report:
            return self.report.reason
        if self.exit_code == 0 and self.elastic and not self.called:
            return str(InitNotCalledError())
        if self.exit_code == 0:
            return "its script ended before the end of its data, which every rank has to reach"
        return f"its worker {describe_exit(self.exit_code or 0)}"

    @property
    def final(self) -> bool:
        """Whether another worker would fail in the same way."""
        return self.exit_code == 0 or self.wrong_input

    @property
    def wrong_input(self) -> bool:
        """Whether the script reports invalid input, by its error or exit status."""
        return self.exit_code in (EX_CONFIG, EX_DATAERR) or (self.report is not None and self.report.final)

    @property
    def made_progress(self) -> bool:
        """Whether a plain script ran long enough."""
        return not self.elastic and self.lived_s >= PROGRESS_AFTER_S


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance knows of its job when its worker fails.

    - `step`: the highest of any worker, its own included. `stepped`: any worker has finished a step in this run.
    - `train`: the others have trained, and are enough to continue. `without`: in a generation without this instance.
    - `stay`: some instance has not been told to leave, so the job continues.
    """

    step: int = 0
    stepped: bool = False
    train: bool = False
    without: bool = False
    stay: bool = False

    @classmethod
    def of(cls, view: GroupView, me: str, bounds: Bounds, step: int, *, stepped: bool) -> Self:
        """Return what the view shows of others than `me`, which is at `step`, and may have `stepped` in this run."""
        others = [each.member for each in view.members if each.member.id != me]
        stay = [each for each in others if not each.leaving and not each.finished]
        train = len(stay) >= bounds.min and any(each.up and each.stepped for each in stay)
        return cls(
            step=max([step, *(each.step for each in others)]),
            stepped=stepped or any(each.stepped for each in others),
            train=train,
            without=train and view.state == "active" and view.rank(me) is None,
            stay=view.stop is None and bool(stay),
        )


class FailureStreak(msgspec.Struct, frozen=True):
    """How often in a row an instance's workers failed without a finished step, and the job's step at the first."""

    count: int = 0
    begun_at: int = 0

    def after(self, failure: WorkerFailure, step: int) -> FailureStreak:
        """Return the streak with this failure, at this step of the job."""
        if failure.stepped or not failure.elastic:
            return FailureStreak()
        return FailureStreak(self.count + 1, self.begun_at if self.count else step)


class FailureVerdict(msgspec.Struct, frozen=True):
    """The job has failed, or this instance gives up and the others continue: why, and the agent's exit status."""

    reason: str
    status: int
    others_go_on: bool = False


def judge_failure(
    failure: WorkerFailure, others: PeerState, streak: FailureStreak, count: int
) -> FailureVerdict | None:
    """Return the consequence of a failure, None if the worker is restarted.

    `streak`: with this failure. `count`: how many workers of the job failed without progress, this one included; 0 if
    unknown, or if it held up no other. An elastic script that fails before any worker of the job has finished a step
    fails the job at once.
    """
    if failure.unwritten:
        return None if others.stay else FailureVerdict(f"the last checkpoint is not written: {failure.reason}", 1)
    if failure.final and others.train and not failure.stepped:
        return _give_up(failure.reason)
    if failure.final or (failure.elastic and failure.exit_code > 0 and not others.stepped):
        return FailureVerdict(failure.reason, EX_DATAERR if failure.wrong_input else 1)
    if streak.count > MAX_FAILURES and others.train and (others.without or others.step > streak.begun_at):
        return _give_up(f"{failure.reason}; no step of its own in {MAX_FAILURES} restarts")
    if count <= MAX_FAILURES:
        return None
    return FailureVerdict(f"{failure.reason}; no progress in {MAX_FAILURES} restarts", 1)


def _give_up(reason: str) -> FailureVerdict:
    return FailureVerdict(f"{reason}; it gives up, and the others continue", EX_CONFIG, others_go_on=True)


# Hung workers

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
        *,
        was_heard: bool,
        stopped: bool,
        cpu_s: float,
        waits_for: int,
        moves: int,
        median_s: float,
        now: float,
    ) -> str:
        """Return why the worker counts as hung, "" while it does not. Call it again and again.

        - `was_heard`: it has sent something since the last check. `stopped`: its process is stopped.
        - `cpu_s`: processor time used so far.
        - `waits_for`: the step at which it waits itself, 0 for none.
        - `moves`: how many pieces of state it has moved: one that moves more of them does not hang.
        - `median_s`: of a step.
        """
        tick_s = min(now - self._checked_at, MAX_TICK_S) if self._checked_at is not None else 0.0
        self._checked_at = now
        self._silent_s = 0.0 if was_heard else self._silent_s + tick_s
        if was_heard or cpu_s < self._heard_at_cpu_s:  # less: another process
            self._heard_at_cpu_s = cpu_s
        computes = cpu_s - self._heard_at_cpu_s >= BUSY_CPU_SHARE * self._silent_s
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
            return f"it has sent no heartbeat for {self._silent_s:.1f} s, and others wait for it"
        if not waits_for and shortest > self._step_limit_s:
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
