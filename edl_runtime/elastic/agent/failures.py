"""Whether a failed worker is restarted, its instance gives up, or the job fails. Pure."""

from __future__ import annotations

import signal
from typing import Self

import msgspec

from edl_runtime.elastic.comm.agent_protocol import ScriptFailed
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.elastic.rendezvous.generation import GroupView
from edl_runtime.errors import EX_CONFIG, EX_DATAERR
from edl_runtime.exit_status import OUT_OF_MEMORY, describe_exit
from edl_runtime.specs import Bounds

MAX_FAILURES = 3
"""How often a failed worker is restarted without progress in between. Failures of several instances in one generation
count once: when a rank ends, others may because of it."""

PROGRESS_AFTER_S = 60.0
"""A plain script does not report steps; one that ran for so long has made progress."""

NOT_WRITTEN = "the last checkpoint is not written"
"""What an agent says in its last line where nobody trains on, and the checkpoint to continue from is missing."""


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has ended unexpectedly, or has left without the checkpoint that it had to write.

    - `exit_code`: negative for a signal. `report`: the script's own report, if any. `killed`: why the agent killed it.
    - `elastic`: its script joins generations by itself, or imports what that takes. `called`: it has begun to.
    - `generation`: the last one assigned to its instance, 0 for none. `was_up`: this worker has entered that.
    - `stepped`: this worker has finished a step. `unwritten`: the checkpoint that it had to write is missing.
    - `hung`: it was killed because it hung.
    - `oom_killed`: the system has killed processes for want of memory while it lived.
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
    hung: bool = False
    oom_killed: bool = False

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
        return f"its worker {describe_exit(self.exit_code or 0, OUT_OF_MEMORY if self.out_of_memory else '')}"

    @property
    def final(self) -> bool:
        """Whether another worker would fail in the same way."""
        return self.exit_code == 0 or self.wrong_input

    @property
    def wrong_input(self) -> bool:
        """Whether the script reports invalid input, by its error or exit status, or can't import what it needs."""
        if self.exit_code in (EX_CONFIG, EX_DATAERR):
            return True
        return self.report is not None and (self.report.final or (self.report.cause == "import" and not self.begun))

    @property
    def out_of_memory(self) -> bool:
        """Whether it ended for want of memory, by its own error or killed by the system."""
        if self.report:
            return self.report.cause == "memory"
        return self.oom_killed and self.exit_code == -signal.SIGKILL and not self.killed

    @property
    def grouped(self) -> bool:
        """Whether another worker would fail in the same way only in a group with the same others."""
        return self.report is not None and self.report.cause == "group"

    @property
    def made_progress(self) -> bool:
        """Whether a plain script ran long enough."""
        return not self.elastic and self.lived_s >= PROGRESS_AFTER_S

    @property
    def begun(self) -> bool:
        """Whether this worker has finished a step or made progress, so that another one may, too."""
        return self.stepped or self.made_progress

    @property
    def certain_at_start(self) -> bool:
        """Whether another worker would fail in the same way, if none of the job has finished a step."""
        return not self.begun and (self.out_of_memory or (self.elastic and self.exit_code > 0))


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance knows of its job when its worker fails.

    - `step`: the highest of any worker, its own included. `stepped`: any worker has finished a step in this run.
    - `train`: the others have trained, and are enough to continue. `without`: in a generation without this instance.
    - `ahead`: those that have finished a step in a later generation than this instance are enough to continue.
    - `stop`: the job was told to end. `stay`: it was not, and some instance has not been told to leave.
    """

    step: int = 0
    stepped: bool = False
    train: bool = False
    without: bool = False
    ahead: bool = False
    stop: bool = False
    stay: bool = False

    @classmethod
    def of(cls, view: GroupView, me: str, bounds: Bounds, step: int, *, stepped: int) -> Self:
        """Return what the view shows of others than `me`, which is at `step`, and has last `stepped` in a generation.

        `stepped`: 0 for none in this run.
        """
        others = [each.member for each in view.members if each.member.id != me]
        stay = [each for each in others if not each.leaving and not each.finished]
        train = len(stay) >= bounds.min and any(each.up and each.stepped for each in stay)
        return cls(
            step=max([step, *(each.step for each in others)]),
            stepped=stepped > 0 or any(each.stepped for each in others),
            train=train,
            ahead=len([each for each in stay if each.stepped > stepped]) >= bounds.min,
            without=train and view.state == "active" and view.rank(me) is None,
            stop=view.stop is not None,
            stay=view.stop is None and bool(stay),
        )


class FailureStreak(msgspec.Struct, frozen=True):
    """How often in a row an instance's workers failed without a finished step, and the job's step at the first."""

    count: int = 0
    begun_at: int = 0

    def after(self, failure: WorkerFailure, step: int) -> FailureStreak:
        """Return the streak with this failure, at this step of the job. One that others had, too, does not count."""
        if failure.grouped:
            return self
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
    fails the job at once, and so does any that has too little memory to begin, or that can't import what it needs.
    A worker that hung as it left is lost, as by SIGKILL: the job continues from the last checkpoint once an instance
    joins, unless it was told to end. Where a group can't be formed, the instances that trained last are restarted, and
    continue without the others, which give up.
    """
    if failure.unwritten:
        goes_on = others.stay or (failure.hung and not others.stop)
        return None if goes_on else FailureVerdict(f"{NOT_WRITTEN}: {failure.reason}", 1)
    splits = failure.grouped and others.stepped
    gives_up = others.ahead if splits else failure.final and others.train and not failure.stepped
    if gives_up:
        return _give_up(failure.reason)
    if not splits and (failure.final or (failure.certain_at_start and not others.stepped)):
        return FailureVerdict(failure.reason, EX_DATAERR if failure.wrong_input else 1)
    if streak.count > MAX_FAILURES and others.train and (others.without or others.step > streak.begun_at):
        return _give_up(f"{failure.reason}; no step of its own in {MAX_FAILURES} restarts")
    if count <= MAX_FAILURES:
        return None
    return FailureVerdict(f"{failure.reason}; no progress in {MAX_FAILURES} restarts", 1)


def _give_up(reason: str) -> FailureVerdict:
    return FailureVerdict(f"{reason}; it gives up, and the others continue", EX_CONFIG, others_go_on=True)
