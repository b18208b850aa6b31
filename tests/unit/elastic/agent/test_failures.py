"""Trainers that fall: when they are replaced, and when that is the end of their instance, or of their job."""

from __future__ import annotations

import msgspec
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent.failures import MAX_FAILURES, FailureStreak, PeerState, WorkerFailure, judge_failure
from edl_runtime.elastic.comm.agent_protocol import ScriptFailed
from edl_runtime.elastic.rendezvous.generation import GroupView, MemberLease, TrainerMember
from edl_runtime.errors import EX_CONFIG, EX_DATAERR
from edl_runtime.exit_status import describe_exit
from edl_runtime.specs import Bounds

ERROR = WorkerFailure(
    exit_code=1,
    report=ScriptFailed(reason="ValueError: no", final=False),
    killed="",
    elastic=True,
    generation=0,
    was_up=True,
    stepped=False,
    lived_s=5.0,
)

WRONG = ScriptFailed(reason="lr: got -1", final=True)

TRAIN = PeerState(step=9, stepped=True, train=True, stay=True)
"""The others have trained and are enough."""

NOBODY = PeerState()


def fall(**changes: object) -> WorkerFailure:
    return msgspec.structs.replace(ERROR, **changes)


def among(**changes: object) -> PeerState:
    return msgspec.structs.replace(TRAIN, **changes)


def member(index: int, **changes: object) -> MemberLease:
    """Return an instance that trains in generation 4, unless changed."""
    there = {"ready": True, "up": 4, "stepped": 3, "step": 10 + index, **changes}
    record = msgspec.convert({"id": f"{index}-x", "index": index, **there}, TrainerMember)
    return MemberLease(member=record, deadline=103.0, heartbeat_at=100.0, since=90.0)


def view(*members: MemberLease, of: str = "0-x 1-x 2-x", **changes: object) -> GroupView:
    now = GroupView(now=100.0, members=members, number=4, generation=generation(4, of.split()), state="active")
    return msgspec.structs.replace(now, **changes)


def others(seen: GroupView, *, fewest: int = 1) -> PeerState:
    """Return what instance 2 knows of the others, which has done nothing itself."""
    return PeerState.of(seen, "2-x", Bounds(fewest, 4), 0, stepped=False)


@pytest.mark.parametrize(
    ("changes", "stepped", "reason", "status"),
    [
        ({"report": WRONG}, True, "lr: got -1", EX_DATAERR),
        ({"report": None, "exit_code": EX_CONFIG}, True, "its worker exited with 78", EX_DATAERR),
        ({"report": None, "exit_code": EX_DATAERR, "elastic": False}, True, "its worker exited with 65", EX_DATAERR),
        ({}, False, "ValueError: no", 1),
        ({"report": None, "exit_code": 0}, True, "its script ended before the end of its data", 1),
        (
            {"report": None, "exit_code": 0, "called": False},
            False,
            "the script imports edl_runtime.elastic and never",
            1,
        ),
    ],
)
def test_some_falls_are_the_end_of_the_job(
    changes: dict[str, object], reason: str, status: int, *, stepped: bool
) -> None:
    """Wrong input, an error before anybody did a step, and a rank that goes early: no other would fare better."""
    verdict = judge_failure(fall(**changes), PeerState(stepped=stepped), FailureStreak(), 1)
    assert verdict
    assert verdict.reason.startswith(reason)
    assert (verdict.status, verdict.others_go_on) == (status, False)


@pytest.mark.parametrize("changes", [{"report": WRONG}, {"report": None, "exit_code": 0}])
def test_a_newcomer_with_wrong_input_is_the_only_one_to_go(changes: dict[str, object]) -> None:
    """Where others train; one that has trained with them is no newcomer, and they meet the same."""
    verdict = judge_failure(fall(**changes), TRAIN, FailureStreak(1, 9), 1)
    assert verdict
    assert (verdict.status, verdict.others_go_on) == (EX_CONFIG, True)
    assert verdict.reason == f"{fall(**changes).reason}; it gives up, and the others continue"
    all_of_them = judge_failure(fall(**changes, stepped=True), TRAIN, FailureStreak(), 1)
    assert all_of_them
    assert not all_of_them.others_go_on


def test_the_fourth_fall_without_progress_fails_the_job() -> None:
    """Three are replaced."""
    told = [judge_failure(fall(stepped=True), TRAIN, FailureStreak(), count) for count in (1, 2, 3, 4)]
    assert told[:3] == [None] * 3
    assert told[3]
    assert told[3].reason == "ValueError: no; no progress in 3 restarts"
    assert (told[3].status, told[3].others_go_on) == (1, False)


@pytest.mark.parametrize("there", [among(step=10), among(without=True)])
def test_an_instance_that_never_comes_to_a_step_gives_up(there: PeerState) -> None:
    """Its fourth trainer in a row falls, while the others make steps, or train in a generation without it."""
    told = [judge_failure(fall(), there, FailureStreak(falls, begun_at=9), 1) for falls in (1, 2, 3, 4)]
    assert told[:3] == [None] * 3
    assert told[3]
    assert (told[3].status, told[3].others_go_on) == (EX_CONFIG, True)
    assert told[3].reason == ("ValueError: no; no step of its own in 3 restarts; it gives up, and the others continue")


def test_where_nobody_makes_steps_no_instance_gives_up_for_itself() -> None:
    """It is the job that has failed, once its trainers have fallen too often."""
    assert judge_failure(fall(), among(step=9), FailureStreak(4, begun_at=9), MAX_FAILURES) is None
    verdict = judge_failure(fall(), among(step=9), FailureStreak(4, begun_at=9), MAX_FAILURES + 1)
    assert verdict
    assert not verdict.others_go_on


def test_a_step_of_its_own_ends_an_instances_row() -> None:
    """The row knows where the job stood when it began; plain scripts do not tell of steps."""
    row = FailureStreak().after(fall(), 5).after(fall(), 7)
    assert row == FailureStreak(2, begun_at=5)
    assert row.after(fall(stepped=True), 8) == FailureStreak()
    assert row.after(fall(elastic=False), 8) == FailureStreak()


@pytest.mark.parametrize(
    ("seen", "train", "without"),
    [
        (view(member(0), member(1), member(2)), True, False),
        (view(member(0), member(1), member(2), of="0-x 1-x"), True, True),
        (view(member(0), member(1), member(2), of="0-x 1-x", state="forming"), True, False),
        (view(member(0), member(1, leaving=True), member(2)), False, False),
        (view(member(0, up=0), member(1, stepped=0), member(2)), False, False),
        (view(member(2)), False, False),
    ],
)
def test_others_train_when_enough_are_there_and_one_has_done_a_step(
    seen: GroupView, *, train: bool, without: bool
) -> None:
    """With the trainer that it has now; those who leave are no more to be counted on."""
    found = others(seen, fewest=2)
    assert (found.train, found.without) == (train, without)
    assert found.step == max((each.member.step for each in seen.members if each.member.index != 2), default=0)


def test_a_checkpoint_that_is_not_written_fails_a_job_that_ends() -> None:
    """Where somebody stays, or will go on from an older one, it is only told."""
    killed = fall(unwritten=True, stepped=True, killed="it did not leave in time")
    verdict = judge_failure(killed, NOBODY, FailureStreak(), 0)
    assert verdict
    told = "the last checkpoint is not written: its worker was killed: it did not leave in time"
    assert (verdict.reason, verdict.status, verdict.others_go_on) == (told, 1, False)
    assert judge_failure(killed, TRAIN, FailureStreak(), 0) is None


@pytest.mark.parametrize(
    ("seen", "stay"),
    [
        (view(member(0), member(2)), True),
        (view(member(0), member(2), stop="Ctrl-C"), False),
        (view(member(0, leaving=True), member(2)), False),
        (view(member(2)), False),
    ],
)
def test_a_job_ends_when_it_was_asked_to_or_all_go(seen: GroupView, *, stay: bool) -> None:
    """Whoever loads stays, too."""
    assert others(seen).stay is stay


def test_a_plain_script_that_ran_for_long_has_come_on() -> None:
    """It does not tell of its steps."""
    assert fall(elastic=False, lived_s=61.0).made_progress
    assert not fall(elastic=False, lived_s=59.0).made_progress
    assert not fall(lived_s=61.0).made_progress


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"killed": "it hangs"}, "its worker was killed: it hangs"),
        ({"report": None, "exit_code": -9}, f"its worker {describe_exit(-9)}"),
        ({"report": None, "exit_code": 3}, "its worker exited with 3"),
    ],
)
def test_a_fall_is_told_in_words(changes: dict[str, object], said: str) -> None:
    """The agent's own reason first, then the script's, then what the system knows."""
    assert fall(**changes).reason == said
