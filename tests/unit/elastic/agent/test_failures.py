"""Failed workers: when they are restarted, and when their instance gives up or their job fails."""

from __future__ import annotations

import msgspec
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent.failures import MAX_FAILURES, FailureStreak, PeerState, WorkerFailure, judge_failure
from edl_runtime.elastic.comm.agent_protocol import ScriptFailed
from edl_runtime.elastic.errors import NoGroupError
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

NO_MODULE = ScriptFailed(reason="ModuleNotFoundError: No module named 'nets'", final=False, cause="import")

NO_MEMORY = ScriptFailed(reason="MemoryError", final=False, cause="memory")

WRONG = ScriptFailed(reason="lr: got -1", final=True)

NO_GROUP = ScriptFailed.of(NoGroupError("NCCL error(5), invalid usage"))

TRAIN = PeerState(step=9, stepped=True, train=True, stay=True)
"""The others have trained and are enough."""

NOBODY = PeerState()


def failure(**changes: object) -> WorkerFailure:
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
    return PeerState.of(seen, "2-x", Bounds(fewest, 4), 0, stepped=0)


@pytest.mark.parametrize(
    ("changes", "stepped", "reason", "status"),
    [
        ({"report": WRONG}, True, "lr: got -1", EX_DATAERR),
        ({"report": None, "exit_code": EX_CONFIG}, True, "its worker exited with 78", EX_DATAERR),
        ({"report": None, "exit_code": EX_DATAERR, "elastic": False}, True, "its worker exited with 65", EX_DATAERR),
        ({"report": NO_MODULE}, False, "ModuleNotFoundError: No module named 'nets'", EX_DATAERR),
        ({"report": NO_MODULE, "elastic": False}, False, "ModuleNotFoundError: No module named 'nets'", EX_DATAERR),
        ({"report": NO_MEMORY, "elastic": False}, False, "MemoryError", 1),
        (
            {"report": None, "exit_code": -9, "oom_killed": True, "elastic": False},
            False,
            "its worker was killed by SIGKILL (out of memory: try a smaller batch)",
            1,
        ),
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
def test_some_failures_fail_the_job(changes: dict[str, object], reason: str, status: int, *, stepped: bool) -> None:
    """Wrong input, an error before any step, and a rank that exits early: another worker would fail in the same way."""
    verdict = judge_failure(failure(**changes), PeerState(stepped=stepped), FailureStreak(), 1)
    assert verdict
    assert verdict.reason.startswith(reason)
    assert (verdict.status, verdict.others_go_on) == (status, False)


@pytest.mark.parametrize(
    ("changes", "stepped"),
    [
        ({"report": NO_MODULE, "stepped": True}, True),
        ({"report": NO_MODULE, "elastic": False, "lived_s": 61.0}, False),
        ({"report": NO_MEMORY}, True),
        ({"report": NO_MEMORY, "elastic": False, "lived_s": 61.0}, False),
        ({"report": None, "exit_code": -9, "oom_killed": True}, True),
        ({"report": None, "exit_code": -9, "oom_killed": True, "killed": "it hangs"}, False),
        ({"report": None, "exit_code": -9}, False),
    ],
)
def test_what_may_pass_is_tried_again(changes: dict[str, object], *, stepped: bool) -> None:
    """A training that has made steps, or has run for long, may have memory and modules again."""
    assert judge_failure(failure(**changes), PeerState(stepped=stepped), FailureStreak(), 1) is None


@pytest.mark.parametrize("changes", [{"report": WRONG}, {"report": NO_MODULE}, {"report": None, "exit_code": 0}])
def test_a_newcomer_with_wrong_input_gives_up_alone(changes: dict[str, object]) -> None:
    """Where others train. An instance that has trained with them is no newcomer: they would fail as well."""
    verdict = judge_failure(failure(**changes), TRAIN, FailureStreak(1, 9), 1)
    assert verdict
    assert (verdict.status, verdict.others_go_on) == (EX_CONFIG, True)
    assert verdict.reason == f"{failure(**changes).reason}; it gives up, and the others continue"
    all_of_them = judge_failure(failure(**changes, stepped=True), TRAIN, FailureStreak(), 4)
    assert all_of_them
    assert not all_of_them.others_go_on


def test_instances_that_can_form_no_group_leave_it_to_those_that_trained_last() -> None:
    """They are restarted, and the others give up at once; the job fails if nobody has trained."""
    together = failure(report=NO_GROUP)
    newcomer = judge_failure(together, among(ahead=True), FailureStreak(), 1)
    assert newcomer
    assert (newcomer.status, newcomer.others_go_on) == (EX_CONFIG, True)
    assert judge_failure(together, among(ahead=False), FailureStreak(), 1) is None
    nobody = judge_failure(together, PeerState(), FailureStreak(), 1)
    assert nobody
    assert (nobody.status, nobody.others_go_on) == (EX_DATAERR, False)
    assert "can't sum gradients with others: NCCL error(5), invalid usage" in nobody.reason
    again = judge_failure(together, among(ahead=False), FailureStreak(), MAX_FAILURES + 1)
    assert again
    assert not again.others_go_on
    assert FailureStreak(2, begun_at=5).after(together, 7) == FailureStreak(2, begun_at=5)


def test_others_are_ahead_that_stepped_in_a_later_generation_and_are_enough() -> None:
    """Their workers may have failed in the same group since."""
    trained = [member(number, up=0, stepped=3) for number in range(2)]
    seen = view(*trained, member(2, up=0, stepped=0), state="forming")
    assert [others(seen, fewest=fewest).ahead for fewest in (1, 2, 3)] == [True, True, False]
    assert not PeerState.of(seen, "0-x", Bounds(1, 4), 10, stepped=3).ahead
    assert not others(view(member(0, stepped=3, leaving=True), member(2))).ahead


def test_the_fourth_failure_without_progress_fails_the_job() -> None:
    """Three are restarted."""
    told = [judge_failure(failure(stepped=True), TRAIN, FailureStreak(), count) for count in (1, 2, 3, 4)]
    assert told[:3] == [None] * 3
    assert told[3]
    assert told[3].reason == "ValueError: no; no progress in 3 restarts"
    assert (told[3].status, told[3].others_go_on) == (1, False)


@pytest.mark.parametrize("there", [among(step=10), among(without=True)])
def test_an_instance_that_never_finishes_a_step_gives_up(there: PeerState) -> None:
    """Its fourth worker in a row fails, while the others finish steps, or train in a generation without it."""
    told = [judge_failure(failure(), there, FailureStreak(falls, begun_at=9), 1) for falls in (1, 2, 3, 4)]
    assert told[:3] == [None] * 3
    assert told[3]
    assert (told[3].status, told[3].others_go_on) == (EX_CONFIG, True)
    assert told[3].reason == ("ValueError: no; no step of its own in 3 restarts; it gives up, and the others continue")


def test_no_instance_gives_up_while_no_other_finishes_steps() -> None:
    """The job fails once its workers have failed too often."""
    assert judge_failure(failure(), among(step=9), FailureStreak(4, begun_at=9), MAX_FAILURES) is None
    verdict = judge_failure(failure(), among(step=9), FailureStreak(4, begun_at=9), MAX_FAILURES + 1)
    assert verdict
    assert not verdict.others_go_on


def test_a_finished_step_ends_an_instances_streak() -> None:
    """The streak has the job's step at its first failure; plain scripts report no steps."""
    row = FailureStreak().after(failure(), 5).after(failure(), 7)
    assert row == FailureStreak(2, begun_at=5)
    assert row.after(failure(stepped=True), 8) == FailureStreak()
    assert row.after(failure(elastic=False), 8) == FailureStreak()


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
def test_others_train_when_enough_are_there_and_one_has_finished_a_step(
    seen: GroupView, *, train: bool, without: bool
) -> None:
    """With its present worker; those that leave do not count."""
    found = others(seen, fewest=2)
    assert (found.train, found.without) == (train, without)
    assert found.step == max((each.member.step for each in seen.members if each.member.index != 2), default=0)


def test_a_checkpoint_that_is_not_written_fails_a_job_that_ends() -> None:
    """Where an instance stays, or continues from an older one, it is only reported."""
    killed = failure(unwritten=True, stepped=True, killed="it did not leave in time")
    verdict = judge_failure(killed, NOBODY, FailureStreak(), 0)
    assert verdict
    told = "the last checkpoint is not written: its worker was killed: it did not leave in time"
    assert (verdict.reason, verdict.status, verdict.others_go_on) == (told, 1, False)
    assert judge_failure(killed, TRAIN, FailureStreak(), 0) is None


def test_a_worker_that_hung_as_it_left_is_lost_and_fails_no_job() -> None:
    """The job continues from the last checkpoint once an instance joins, unless it was told to end."""
    hung = failure(unwritten=True, stepped=True, hung=True, killed="its process is stopped, and it has to leave")
    assert judge_failure(hung, NOBODY, FailureStreak(), 0) is None
    assert judge_failure(hung, TRAIN, FailureStreak(), 0) is None
    verdict = judge_failure(hung, PeerState(stop=True), FailureStreak(), 0)
    assert verdict
    assert verdict.reason.startswith(
        "the last checkpoint is not written: its worker was killed: its process is stopped"
    )


@pytest.mark.parametrize(
    ("seen", "stay"),
    [
        (view(member(0), member(2)), True),
        (view(member(0), member(2), stop="Ctrl-C"), False),
        (view(member(0, leaving=True), member(2)), False),
        (view(member(2)), False),
    ],
)
def test_a_job_ends_when_it_is_stopped_or_all_leave(seen: GroupView, *, stay: bool) -> None:
    """An instance that loads stays, too."""
    assert (others(seen).stay, others(seen).stop) == (stay, seen.stop is not None)


def test_a_plain_script_that_ran_for_long_has_made_progress() -> None:
    """It reports no steps."""
    assert failure(elastic=False, lived_s=61.0).made_progress
    assert not failure(elastic=False, lived_s=59.0).made_progress
    assert not failure(lived_s=61.0).made_progress


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"killed": "it hangs"}, "its worker was killed: it hangs"),
        ({"report": None, "exit_code": -9}, f"its worker {describe_exit(-9)}"),
        ({"report": None, "exit_code": 3}, "its worker exited with 3"),
    ],
)
def test_a_failure_has_a_reason_for_people(changes: dict[str, object], reason: str) -> None:
    """The agent's own reason first, then the script's, then the exit status."""
    assert failure(**changes).reason == reason
