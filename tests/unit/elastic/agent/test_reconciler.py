"""What an agent does with its worker: a table of situations, without processes."""

from __future__ import annotations

import msgspec
import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent.reconciler import (
    Action,
    DesiredState,
    KillWorker,
    RetireWorker,
    RunScript,
    SendMessage,
    StartStandby,
    StartWorker,
    TerminateWorker,
    WorkerState,
    reconcile,
)
from edl_runtime.elastic.comm.agent_protocol import AbortGeneration, Gear, JoinGeneration, Leave, SaveCheckpoint
from edl_runtime.elastic.rendezvous.generation import GroupView, JobOutcome, MemberLease, Suspicion, TrainerMember

ME, PEER, OTHER = "0-me", "1-peer", "2-other"
NOW = 100.0

DESIRED = DesiredState(member=ME, instances=4)


def view(
    number: int = 0,
    *members: str,
    gear: Gear = "live",
    writer: str = "",
    there: tuple[str, ...] = (ME, PEER, OTHER),
    leaving: tuple[str, ...] = (),
) -> GroupView:
    """Return the view of a group whose generation `number` has these members, or none for 0."""
    current = generation(number, members, store="127.0.0.1:1", gear=gear, reason="why", writer=writer)
    records = [TrainerMember(id=each, index=int(each[0]), ready=True, leaving=each in leaving) for each in there]
    presences = tuple(MemberLease(member=each, deadline=9e9, heartbeat_at=NOW, since=NOW) for each in records)
    return GroupView(now=NOW, members=presences, number=number, generation=current if number else None, state="active")


def member(**changes: object) -> WorkerState:
    """Return a worker that is up in generation 1 with PEER, with its standby loaded."""
    up = WorkerState(phase="member", since=NOW - 10, assigned=1, peers=(ME, PEER), up=1, standby="loaded")
    return msgspec.structs.replace(up, **changes)


def join(number: int, *members: str) -> JoinGeneration:
    return JoinGeneration(
        generation=number, rank=members.index(ME), world_size=len(members), store="127.0.0.1:1", instances=4
    )


def messages(found: list[Action]) -> list[object]:
    return [action.message if isinstance(action, SendMessage) else action for action in found]


def test_an_elastic_script_is_started_run_and_joined() -> None:
    """It runs until it is ready before there is a generation for it, so that no other waits."""
    assert reconcile(WorkerState(), DESIRED, view(), NOW) == [StartWorker()]
    assert reconcile(WorkerState(phase="loading"), DESIRED, view(), NOW) == []
    assert reconcile(WorkerState(phase="loaded"), DESIRED, view(1, PEER), NOW) == [RunScript()]
    assert reconcile(WorkerState(phase="starting"), DESIRED, view(1, ME, PEER), NOW) == []
    assert reconcile(WorkerState(phase="ready"), DESIRED, view(1, PEER), NOW) == []
    assert messages(reconcile(WorkerState(phase="ready"), DESIRED, view(2, PEER, ME), NOW)) == [join(2, PEER, ME)]


def test_a_worker_gets_the_token_of_its_generation() -> None:
    """By it the others know that it is one of them."""
    group = view(2, PEER, ME)
    assert group.generation is not None
    secret = msgspec.structs.replace(group.generation, token="secret")
    (sent,) = messages(
        reconcile(WorkerState(phase="ready"), DESIRED, msgspec.structs.replace(group, generation=secret), NOW)
    )
    assert sent == msgspec.structs.replace(join(2, PEER, ME), token="secret")


def test_a_plain_script_is_run_for_its_generation_only() -> None:
    """Once loaded it waits; it ends with its generation and is started again for the next."""
    assert reconcile(WorkerState(phase="loaded", elastic=False), DESIRED, view(1, PEER), NOW) == []
    both = view(2, ME, PEER)
    assert reconcile(WorkerState(phase="loaded", assigned=1, elastic=False), DESIRED, both, NOW) == [
        RunScript(both.generation)
    ]
    assert reconcile(member(elastic=False), DESIRED, view(1, ME, PEER), NOW) == []
    assert reconcile(member(elastic=False), DESIRED, both, NOW) == [TerminateWorker()]
    assert reconcile(member(phase="leaving", since=NOW - 6, elastic=False), DESIRED, both, NOW) == [
        KillWorker("it did not leave in time")
    ]


def test_a_generation_is_entered_in_its_gear() -> None:
    """Live by the running worker; else it leaves, with a checkpoint if it is the writer, and another one enters."""
    assert messages(reconcile(member(), DESIRED, view(2, ME, PEER), NOW)) == [join(2, ME, PEER)]
    for gear in ("warm", "cold"):
        for writer in (ME, PEER):
            sent = messages(reconcile(member(), DESIRED, view(2, ME, PEER, gear=gear, writer=writer), NOW))
            assert sent == [Leave(reason="why", checkpoint=writer == ME)]
    gone = WorkerState(phase="absent", assigned=1, standby="loaded")
    assert reconcile(gone, DESIRED, view(2, ME, gear="warm"), NOW) == [StartWorker()]
    cold = view(2, ME, gear="cold")
    assert reconcile(gone, DESIRED, cold, NOW) == [StartWorker()]
    assert cold.generation is not None
    tried = msgspec.structs.replace(cold.generation, attempt=1)
    assert reconcile(gone, DESIRED, msgspec.structs.replace(cold, generation=tried), NOW) == [StartWorker(fresh=True)]


def test_a_worker_that_has_left_is_replaced_before_it_exits() -> None:
    """The interpreter's exit is no part of a pause, unless the next worker needs the same device."""
    left = member(phase="leaving", left=True)
    warm = view(2, ME, PEER, gear="warm")
    assert reconcile(left, DESIRED, warm, NOW) == [RetireWorker()]
    assert reconcile(msgspec.structs.replace(left, gpu=True), DESIRED, warm, NOW) != [RetireWorker()]
    assert reconcile(left, msgspec.structs.replace(DESIRED, leaving_since=NOW), warm, NOW) == []


def test_a_worker_outside_the_newer_generation_ends() -> None:
    """It leaves at the end of a step if it can, and is killed soon if not."""
    excluded = view(2, PEER, OTHER)
    assert messages(reconcile(member(), DESIRED, excluded, NOW)) == [
        Leave(reason="the others continue without it", checkpoint=False)
    ]
    leaving = member(phase="leaving", since=NOW - 2)
    assert reconcile(leaving, DESIRED, excluded, NOW) == [KillWorker("it did not leave in time")]


@pytest.mark.parametrize(
    "group",
    [
        view(1, ME, PEER, there=(ME,)),
        view(2, ME, there=(ME,)),
        msgspec.structs.replace(
            view(1, ME, PEER), suspicion=Suspicion(generation=1, by=PEER, reason="", since=NOW - 1)
        ),
    ],
    ids=["the peer is gone", "and the others go on", "a peer suspects"],
)
def test_no_worker_waits_for_a_member_that_is_gone(group: GroupView) -> None:
    """It gets AbortGeneration once, before it joins another generation."""
    assert messages(reconcile(member(), DESIRED, group, NOW))[0] == AbortGeneration(generation=1)
    for sent in ({"aborted": 1}, {"comm_failed": 1}):
        assert not any(
            isinstance(each, AbortGeneration) for each in messages(reconcile(member(**sent), DESIRED, group, NOW))
        )


def test_members_that_left_or_may_return_are_not_lost() -> None:
    """One that left as planned, or has not returned to an emptied Redis yet, does not break a generation."""
    alone = view(1, ME, PEER, there=(ME,))
    for known in ({"left": frozenset({PEER})}, {"finished": frozenset({PEER})}, {"granted": {PEER: NOW + 1}}):
        assert reconcile(member(), DESIRED, msgspec.structs.replace(alone, **known), NOW) == []


def test_an_instance_that_leaves_waits_for_a_generation_without_it() -> None:
    """Its worker leaves at the step at which the others continue; alone when there is none in time, or all leave."""
    desired = msgspec.structs.replace(DESIRED, leaving_since=NOW)
    assert reconcile(member(), desired, view(1, ME, PEER), NOW) == []
    gone = [Leave(reason="told to leave", checkpoint=False)]
    assert messages(reconcile(member(), desired, view(2, PEER, gear="warm", writer=PEER), NOW + 0.2)) == gone
    alone = [Leave(reason="told to leave", checkpoint=True)]
    assert messages(reconcile(member(), desired, view(1, ME, PEER), NOW + 2)) == alone
    assert reconcile(member(up=0), desired, view(1, ME, PEER), NOW + 2) == []
    assert reconcile(member(since=NOW + 1), desired, view(1, ME, PEER), NOW + 2) == []
    assert messages(reconcile(member(peers=(ME,)), desired, view(1, ME, leaving=(ME,)), NOW)) == alone
    assert reconcile(WorkerState(phase="ready"), desired, view(1, PEER), NOW) == [
        KillWorker("it is not needed any more")
    ]
    stuck = member(phase="leaving", since=NOW)
    assert reconcile(stuck, desired, view(2, PEER), NOW + 7.9) == []
    assert reconcile(stuck, desired, view(2, PEER), NOW + 8) == [KillWorker("it did not leave in time")]


LEAVING = msgspec.structs.replace(DESIRED, leaving_since=NOW)


@pytest.mark.parametrize(
    ("group", "writes"),
    [
        (view(1, PEER, ME, leaving=(ME, PEER)), False),
        (view(1, PEER, ME, there=(ME,), leaving=(ME,)), True),
        (msgspec.structs.replace(view(1, PEER, ME, there=(ME,), leaving=(ME,)), left=frozenset({PEER})), False),
        (msgspec.structs.replace(view(1, PEER, ME), stop="why"), False),
        (msgspec.structs.replace(view(1, PEER, ME, there=(ME,)), stop="why"), True),
        (msgspec.structs.replace(view(2, ME, PEER, gear="warm", writer=ME), stop="why"), True),
        (msgspec.structs.replace(view(2, PEER, ME), stop="why"), False),
    ],
    ids=["the first", "it is gone", "it has left", "on a stop", "it is gone", "agreed on", "before a live one"],
)
def test_of_the_leaving_the_first_by_rank_writes_a_checkpoint(group: GroupView, *, writes: bool) -> None:
    """One of them, and one that is not lost."""
    desired = DESIRED if group.stop else LEAVING
    found = messages(reconcile(member(peers=(PEER, ME)), desired, group, NOW))
    assert [each.checkpoint for each in found if isinstance(each, Leave)] == [writes]


def test_an_instance_leaves_at_once_when_the_others_are_lost() -> None:
    """Else both sides would wait: the others are not added again before its checkpoint is written."""
    there = view(1, PEER, ME, leaving=(ME,))
    lost = tuple(
        msgspec.structs.replace(each, member=msgspec.structs.replace(each.member, lost=1))
        if each.member.id == PEER
        else each
        for each in there.members
    )
    found = messages(reconcile(member(up=0, aborted=1), LEAVING, msgspec.structs.replace(there, members=lost), NOW))
    assert found == [Leave(reason="told to leave", checkpoint=True)]


def test_a_stop_ends_all_with_a_checkpoint() -> None:
    """Workers that train leave at the end of the step; others are killed."""
    stopped = msgspec.structs.replace(view(1, ME, PEER), stop="deadline")
    assert messages(reconcile(member(), DESIRED, stopped, NOW)) == [Leave(reason="deadline", checkpoint=True)]
    for phase in ("loading", "loaded", "starting", "ready"):
        assert reconcile(WorkerState(phase=phase), DESIRED, stopped, NOW) == [KillWorker("it is not needed any more")]
    assert reconcile(WorkerState(), DESIRED, stopped, NOW) == []


def test_workers_that_are_done_may_finish_when_the_job_has_ended() -> None:
    """What a script does after its last step is its own; other workers are killed."""
    done = msgspec.structs.replace(view(1, ME, PEER), outcome=JobOutcome("done"))
    failed = msgspec.structs.replace(view(1, ME, PEER), outcome=JobOutcome("failed"))
    assert reconcile(member(phase="done"), DESIRED, done, NOW) == []
    assert reconcile(member(phase="done"), DESIRED, failed, NOW) == [KillWorker("the job has failed")]
    assert reconcile(member(), DESIRED, failed, NOW) == [KillWorker("the job has ended")]
    assert reconcile(WorkerState(), DESIRED, done, NOW) == []


def test_a_script_that_runs_on_after_the_end_is_killed_when_its_instance_leaves() -> None:
    """Within the grace, so that its agent can still report that it leaves."""
    sent = msgspec.structs.replace(DESIRED, leaving_since=NOW - 5, grace_s=10.0)
    assert reconcile(member(phase="done"), sent, view(1, ME, PEER), NOW) == []
    assert reconcile(member(phase="done"), sent, view(1, ME, PEER), NOW + 3) == [
        KillWorker("its script did not end in time")
    ]


def test_a_standby_is_started_once_the_worker_is_up() -> None:
    """Not while it joins, not where no generation is entered by one, and not again after it failed."""
    up = member(standby="absent")
    group = view(1, ME, PEER)
    assert reconcile(up, DESIRED, group, NOW) == [StartStandby()]
    assert reconcile(msgspec.structs.replace(up, up=0), DESIRED, group, NOW) == []
    assert reconcile(msgspec.structs.replace(up, since=NOW), DESIRED, group, NOW) == []
    assert reconcile(msgspec.structs.replace(up, standby="failed"), DESIRED, group, NOW) == []
    assert reconcile(up, msgspec.structs.replace(DESIRED, gear="cold"), group, NOW) == []


def test_a_finished_instance_starts_nothing() -> None:
    """It waits for the job's end."""
    assert reconcile(WorkerState(finished=True), DESIRED, view(2, ME, PEER), NOW) == []


def asked(group: GroupView, **saving: int) -> GroupView:
    """Return the view after request 7 for a checkpoint, which these members are to answer."""
    members = tuple(
        msgspec.structs.replace(
            each, member=msgspec.structs.replace(each.member, saving=saving.get(each.member.id[2:], 0))
        )
        for each in group.members
    )
    return msgspec.structs.replace(group, members=members, checkpoint_asked=7, checkpoint_asked_in=1)


def test_rank_0_is_sent_a_request_for_a_checkpoint_once() -> None:
    """Whoever is rank 0 while it is open; a worker that has it already, and one that is answered, are left alone."""
    both = asked(view(1, ME, PEER))
    request = SaveCheckpoint(request=7, asked_in=1)
    assert messages(reconcile(member(), DESIRED, both, NOW)) == [request]
    assert messages(reconcile(member(saving=6), DESIRED, both, NOW)) == [request]
    assert reconcile(member(saving=7), DESIRED, both, NOW) == []
    assert reconcile(member(), DESIRED, msgspec.structs.replace(both, checkpoint_answered=7), NOW) == []
    assert reconcile(member(), DESIRED, asked(view(1, PEER, ME)), NOW) == []
    for worker in (member(keeps=False), member(elastic=False), member(comm_failed=1), member(up=0)):
        assert request not in messages(reconcile(worker, DESIRED, both, NOW))


def test_a_request_waits_for_the_one_that_may_still_answer_it() -> None:
    """Rank 0 of the generation before writes its checkpoint as it leaves; once it is gone, the next rank 0 does."""
    alone = member(assigned=2, up=2, peers=(ME,))
    request = SaveCheckpoint(request=7, asked_in=1)
    assert reconcile(alone, DESIRED, asked(view(2, ME), peer=7), NOW) == []
    assert messages(reconcile(alone, DESIRED, asked(view(2, ME, there=(ME,))), NOW)) == [request]
    dead = asked(view(2, ME), peer=7)
    assert dead.generation is not None
    late = msgspec.structs.replace(dead.generation, proposed_at=NOW + 1.1)
    assert messages(reconcile(alone, DESIRED, msgspec.structs.replace(dead, generation=late), NOW)) == [request]
    both = member(assigned=2, up=2, peers=(ME, PEER))
    assert messages(reconcile(both, DESIRED, asked(view(2, ME, PEER), peer=7), NOW)) == [request], "it is rank 1 now"
