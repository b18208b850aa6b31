"""Whether a failed worker is restarted, its instance gives up, or the job fails. Pure."""

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
"""So often a trainer that fell is replaced without progress in between. Those of several instances in one generation
are one: when a rank ends, others may because of it."""

PROGRESS_AFTER_S = 60.0
"""A plain script does not tell of its steps; one that ran for so long has come on."""


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer has ended that was not to, or has left without the checkpoint that it was to write.

    - `exit_code`: negative for a signal. `report`: what its script said last, if anything.
    - `killed`: why its agent killed it, "" if that did not.
    - `elastic`: its script joined generations by itself, or imports what that takes. `called`: it has begun to.
    - `generation`: the last that its instance was told to be in, 0 for none. `was_up`: this trainer was up in that.
    - `stepped`: this trainer has finished a step.
    - `unwritten`: it was told to leave with a checkpoint, which is not written.
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
        """Why, in words."""
        if self.killed:
            return f"its trainer was killed, for {self.killed}"
        if self.report:
            return self.report.reason
        if self.exit_code == 0 and self.elastic and not self.called:
            return str(InitNotCalledError())
        if self.exit_code == 0:
            return "its script ended before it had gone through all of its data, which every rank has to"
        return f"its trainer {describe_exit(self.exit_code or 0)}"

    @property
    def final(self) -> bool:
        """Whether no other trainer would fare better, whatever was before."""
        return self.exit_code == 0 or self.wrong_input

    @property
    def wrong_input(self) -> bool:
        """Whether the script says that what it was given is wrong, in words or by its exit status."""
        return self.exit_code in (EX_CONFIG, EX_DATAERR) or (self.report is not None and self.report.final)

    @property
    def made_progress(self) -> bool:
        """Whether it was of use for as long as it lived, though it does not tell of its steps."""
        return not self.elastic and self.lived_s >= PROGRESS_AFTER_S


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance knows of its job when its trainer falls.

    - `step`: the highest that anybody's trainer stands at, its own included.
    - `stepped`: whether anybody has finished a step in this run.
    - `train`: whether the others have trained, and are enough to go on.
    - `without`: they do, in a generation that this instance is not in.
    - `stay`: whether somebody is there who was not told to go, so that the job goes on.
    """

    step: int = 0
    stepped: bool = False
    train: bool = False
    without: bool = False
    stay: bool = False

    @classmethod
    def of(cls, view: GroupView, me: str, bounds: Bounds, step: int, *, stepped: bool) -> Self:
        """Return what the view says of others than `me`, who stands at `step`, and may have `stepped` in this run."""
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
    """The falls of an instance in a row of which no trainer had finished a step.

    How many, and the job's step at the first.
    """

    falls: int = 0
    begun_at: int = 0

    def after(self, failure: WorkerFailure, step: int) -> FailureStreak:
        """Return the row with this fall, at this step of the job."""
        if failure.stepped or not failure.elastic:
            return FailureStreak()
        return FailureStreak(self.falls + 1, self.begun_at if self.falls else step)


class FailureVerdict(msgspec.Struct, frozen=True):
    """The job has failed, or this instance gives up and the others go on: why, and what the agent exits with."""

    reason: str
    status: int
    others_go_on: bool = False


def judge_failure(
    failure: WorkerFailure, others: PeerState, streak: FailureStreak, count: int
) -> FailureVerdict | None:
    """Return what this fall is the end of, None if the trainer is to be replaced.

    `streak`: with this fall. `count`: how often trainers of the job have fallen without progress, this one included; 0
    if that is not known, or this one was in nobody's way. An elastic script that fails by itself before anybody of the
    job has finished a step fails the job at once.
    """
    if failure.unwritten:
        return None if others.stay else FailureVerdict(f"the last checkpoint is not written: {failure.reason}", 1)
    if failure.final and others.train and not failure.stepped:
        return _give_up(failure.reason)
    if failure.final or (failure.elastic and failure.exit_code > 0 and not others.stepped):
        return FailureVerdict(failure.reason, EX_DATAERR if failure.wrong_input else 1)
    if streak.falls > MAX_FAILURES and others.train and (others.without or others.step > streak.begun_at):
        return _give_up(f"{failure.reason}; no step of its own since {MAX_FAILURES} others were replaced")
    if count <= MAX_FAILURES:
        return None
    return FailureVerdict(f"{failure.reason}; no progress since {MAX_FAILURES} others were replaced", 1)


def _give_up(reason: str) -> FailureVerdict:
    return FailureVerdict(f"{reason}; it gives up, and the others go on", EX_CONFIG, others_go_on=True)
