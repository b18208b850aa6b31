"""Each rule by which agents agree on the next generation."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs
from support.elastic import generations

from edl_runtime.elastic.agent.agent import advance_rendezvous
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.elastic.rendezvous.generation import (
    Generation,
    GroupView,
    JobOutcome,
    MemberLease,
    Suspicion,
    TrainerMember,
)
from edl_runtime.elastic.rendezvous.planner import WaitReason, job_outcome, plan_generation
from edl_runtime.elastic.rendezvous.redis_store import Event, RendezvousStore
from edl_runtime.specs import Bounds

NOW = 1000.0
BOUNDS = Bounds(1, 4)


def there(index: int, *, since: float = NOW - 60, heartbeat_at: float = NOW - 0.1, **fields: Any) -> MemberLease:
    """A member that has been ready for a while, and has just sent a heartbeat."""
    given = {"ready": True, "live": True, "standby": True, "store_port": 7000 + index, "trainer_port": 8000 + index}
    member = TrainerMember(id=f"{index}-a", index=index, fence=index, **{**given, **fields})
    return MemberLease(member=member, deadline=heartbeat_at + 3.0, heartbeat_at=heartbeat_at, since=since)


def generation(*indexes: int, **fields: Any) -> Generation:
    return generations.generation(4, [f"{index}-a" for index in indexes], proposed_at=NOW - 30, **fields)


def view(*members: MemberLease, of: Generation | None, **fields: Any) -> GroupView:
    """A group whose generation, if it has one, became active a while ago."""
    given = {"number": of.number if of else 0, "state": "active", "since": NOW - 20}
    return GroupView(now=NOW, members=members, generation=of, **{**given, **fields})


def up(*indexes: int, **fields: Any) -> tuple[MemberLease, ...]:
    """Members that train in generation 4."""
    return tuple(there(index, up=4, stepped=4, **fields) for index in indexes)


def suspected(ago_s: float, by: int = 0) -> Suspicion:
    return Suspicion(generation=4, by=f"{by}-a", reason="connection reset", since=NOW - ago_s)


def planned(seen: GroupView, bounds: Bounds = BOUNDS, me: str = "0-a") -> Generation:
    draft = plan_generation(seen, bounds, me)
    assert isinstance(draft, Generation), draft
    return draft


def following(seen: GroupView, bounds: Bounds = BOUNDS) -> tuple[str, str]:
    """Return the instances of the next generation, and its reason."""
    draft = planned(seen, bounds)
    assert draft.after == (seen.generation.number if seen.generation else 0)
    return " ".join(member.partition("-")[0] for member in draft.members), draft.reason


def held(seen: GroupView, bounds: Bounds = BOUNDS) -> WaitReason:
    """Return why there is no next generation, and for how long to the millisecond."""
    wait = plan_generation(seen, bounds, "0-a")
    assert isinstance(wait, WaitReason), wait
    return msgspec.structs.replace(wait, for_s=round(wait.for_s, 3) if wait.for_s < math.inf else math.inf)


def test_the_first_generation_has_all_ready_members() -> None:
    """In the order in which they registered; rank 0 gives the store."""
    draft = planned(view(there(1), there(0), there(2, ready=False), of=None), me="1-a")
    assert draft == Generation(
        number=1,
        members=("1-a", "0-a"),
        store="127.0.0.1:7001",
        endpoints=("127.0.0.1:8001", "127.0.0.1:8000"),
        gear="live",
        reason="instances 0 and 1 have joined",
        proposed_by="1-a",
        proposed_at=NOW,
    )


def test_a_number_is_above_all_that_any_member_has_seen() -> None:
    """Also those of earlier runs and of checkpoints."""
    draft = planned(view(there(0, seen=17), there(1, seen=3), of=None, number=12))
    assert draft.number == 18


FRESH = (there(0, up=4), there(1, up=4))
SILENT = there(1, up=4, heartbeat_at=NOW - 2.0)
THROUGH = (*up(0, done=True, elastic=True), *up(1, elastic=True, comm_failed=4), there(2))


@pytest.mark.parametrize(
    ("seen", "members", "reason"),
    [
        (view(there(2), there(0), *up(3, 1), of=generation(3, 1)), "3 1 2 0", "instances 0 and 2 have joined"),
        (
            view(*up(1), there(0, lost=4), of=generation(0, 1)),
            "1 0",
            "the worker of instance 0 has ended; instance 0 has joined",
        ),
        (
            view(*up(0), SILENT, of=generation(0, 1), suspicion=suspected(2.1)),
            "0 1",
            "instance 0 lost the others: connection reset",
        ),
        (view(*up(0, 1), of=generation(0, 1, 2), suspicion=suspected(0.2)), "0 1", "instance 2 is gone"),
        (view(*THROUGH, of=generation(0, 1, 3), suspicion=suspected(1.0)), "1", "instance 3 is gone"),
    ],
    ids=[
        "newcomers follow the survivors by fence",
        "one that was replaced is a newcomer",
        "one that has beaten since is not suspected again",
        "a loss explains a suspicion",
        "after a loss at the end those go on who are not through",
    ],
)
def test_members_and_reason_of_the_next_generation(seen: GroupView, members: str, reason: str) -> None:
    """Members that stay keep their order."""
    assert following(seen, Bounds(2, 4)) == (members, reason)


@pytest.mark.parametrize(
    ("seen", "wait"),
    [
        (view(*up(0), there(1, up=3), of=generation(0)), WaitReason()),
        (
            view(*up(0), there(1, leaving=True), there(2), of=generation(0, 1), state="forming", since=NOW - 5),
            WaitReason("instance 1 is not up yet in generation 4", 15.0),
        ),
        (
            view(*FRESH, of=generation(0, 1), suspicion=suspected(0.4)),
            WaitReason("the lost instance is not known yet", 0.6),
        ),
    ],
    ids=[
        "one that trained elsewhere has yet to stop its trainer",
        "nobody comes or goes while a generation forms",
        "a gear is not at fault before a loss may show",
    ],
)
def test_the_reason_to_wait(seen: GroupView, wait: WaitReason) -> None:
    """There is no next generation yet."""
    assert held(seen) == wait


@pytest.mark.parametrize(
    "of", [(0, 1), (1,)], ids=["all is trained", "it is told to leave, and others wait for its checkpoint"]
)
def test_a_last_checkpoint_that_can_not_be_written_is_what_all_wait_for(of: tuple[int, ...]) -> None:
    """In place of what follows from it, and as an event: nobody can know how long it takes."""
    others, writer = up(*of[:-1]), up(1, leaving=of == (1,), unsaved="no space left in /kept")
    seen = view(*others, *writer, of=generation(*of))
    why = "instance 1 waits to write its last checkpoint: no space left in /kept"
    assert (held(seen).why, held(seen).announced) == (why, True)


def test_a_join_waits_for_others_at_the_same_time() -> None:
    """The first one waits; those that come meanwhile join with it."""
    seen = view(*up(0), there(1, since=NOW - 0.2), of=generation(0))
    assert held(seen) == WaitReason("others may join or leave at the same time", 0.1)
    seen = view(*up(0), there(1, since=NOW - 0.3), there(2, since=NOW), of=generation(0))
    assert following(seen)[0] == "0 1 2"


def test_a_generation_has_no_more_than_the_maximum() -> None:
    """The rest joins when others leave."""
    assert held(view(*up(0, 1), there(2), of=generation(0, 1)), Bounds(1, 2)) == WaitReason()
    seen = view(*up(0, 1, 2), of=generation(0, 1, 2))
    assert following(seen, Bounds(1, 2)) == ("0 1", "instance 2 exceeds the job's maximum")


def test_a_leave_is_soon_followed_by_a_generation() -> None:
    """Without the one that leaves, and with others that are ready."""
    seen = view(*up(0), *up(1, leaving=True, since=NOW - 0.05), of=generation(0, 1))
    assert held(seen).for_s == 0.05
    seen = view(*up(0), *up(1, leaving=True, since=NOW - 0.1), there(2, since=NOW), of=generation(0, 1))
    assert following(seen) == ("0 2", "instance 1 was told to leave; instance 2 has joined")


@pytest.mark.parametrize(
    ("members", "fields", "why"),
    [
        (up(0), {}, "instance 1 is gone"),
        (up(0), {"left": frozenset({"1-a"})}, "instance 1 has left"),
        ((*up(0), there(1, up=4, ready=False)), {}, "the worker of instance 1 has ended"),
        ((*up(0), there(1, ready=False)), {}, "the worker of instance 1 joins again"),
        ((*up(0), there(1, up=4, lost=4, ready=False)), {}, "the worker of instance 1 has ended"),
        ((*up(0), there(1, leaving=True, ready=False)), {}, "instance 1 has left"),
    ],
)
def test_a_loss_is_followed_by_a_generation_at_once(
    members: tuple[MemberLease, ...], fields: dict[str, Any], why: str
) -> None:
    """There is nothing to wait for: the current one can't continue."""
    assert following(view(*members, of=generation(0, 1), **fields)) == ("0", why)


def test_an_instance_that_was_restarted_is_a_newcomer() -> None:
    """Its earlier agent is gone with its state."""
    anew = msgspec.structs.replace(there(0), member=msgspec.structs.replace(there(0).member, id="0-b", fence=9))
    seen = view(*up(1), anew, of=generation(0, 1))
    draft = planned(seen, me="1-a")
    assert draft.members == ("1-a", "0-b")
    assert draft.reason == "instance 0 was restarted; instance 0 has joined"


def test_suspected_members_have_to_send_a_heartbeat() -> None:
    """Within a second, however long their lease lasts."""
    silent = there(1, up=4, heartbeat_at=NOW - 0.5)
    seen = view(*up(0), silent, of=generation(0, 1), suspicion=suspected(0.4))
    assert held(seen) == WaitReason("instance 1 may be lost", 0.6)
    silent = there(1, up=4, heartbeat_at=NOW - 1.1)
    seen = view(*up(0), silent, of=generation(0, 1), suspicion=suspected(1.0))
    assert following(seen) == ("0", "instance 1 does not respond")


def test_a_loss_ends_a_generation_that_forms() -> None:
    """The others would wait for ever; workers that are replaced as planned are waited for."""
    forming = {"state": "forming", "since": NOW - 5}
    seen = view(there(0), there(2), of=generation(0, 1, 2), **forming)
    assert following(seen) == ("0 2", "instance 1 is gone")
    seen = view(there(0), there(2, ready=False), of=generation(0, 1, 2), **forming)
    assert held(seen) == WaitReason("instance 2 is not ready yet", 15.0)


def test_a_generation_that_does_not_form_is_followed_by_one_without_the_late() -> None:
    """In the next slower gear; they are added again with another worker only."""
    late = {"state": "forming", "since": NOW - 20}
    seen = view(*up(0, 1), there(2), of=generation(0, 1, 2), **late)
    draft = planned(seen)
    assert draft.members == ("0-a", "1-a")
    assert draft.reason == "generation 4 did not form: instance 2 was not up, without progress for 20 s"
    assert (draft.gear, draft.attempt, draft.excluded) == ("warm", 1, ("2-a",))
    active = {"number": 5, "state": "active", "since": NOW}
    then = msgspec.structs.replace(draft, number=5)
    trained = (there(0, up=5), there(1, up=5))
    assert held(view(*trained, there(2), of=then, **active)) == WaitReason()
    later = msgspec.structs.replace(view(*trained, there(2, since=NOW + 5), of=then, **active), now=NOW + 6)
    assert following(later)[0] == "0 1 2"


def test_none_is_excluded_when_none_or_too_few_are_up() -> None:
    """The gear or the time is at fault then: the next one has twice as much."""
    late = {"state": "forming", "since": NOW - 20}
    assert following(view(there(0), there(1), of=generation(0, 1), **late))[0] == "0 1"
    assert following(view(*up(0), there(1), of=generation(0, 1), **late), Bounds(2, 4))[0] == "0 1"
    second = generation(0, 1, attempt=1, gear="warm")
    assert held(view(there(0), there(1), of=second, **late)).for_s == 20.0


@pytest.mark.parametrize(
    ("fields", "gear"),
    [
        ({}, "live"),
        ({"live": False}, "warm"),
        ({"gear": "warm"}, "warm"),
        ({"gear": "warm", "standby": False}, "cold"),
        ({"live": False, "standby": False}, "cold"),
        ({"gear": "cold"}, "cold"),
    ],
)
def test_the_gear_is_the_fastest_that_all_are_capable_of(fields: dict[str, Any], gear: str) -> None:
    """And allowed."""
    draft = planned(view(there(0), there(1, **fields), of=None))
    assert draft.gear == gear


@pytest.mark.parametrize(("failed", "gear"), [("live", "warm"), ("warm", "cold"), ("cold", "cold")])
def test_a_gear_that_failed_is_followed_by_a_slower_one(failed: str, gear: str) -> None:
    """Until a generation has made progress."""
    late = {"state": "forming", "since": NOW - 20}
    draft = planned(view(there(0), there(1), of=generation(0, 1, gear=failed), **late))
    assert draft.gear == gear
    draft = planned(view(*up(0, 1), there(2), of=generation(0, 1, gear=failed)))
    assert draft.gear == "live"


def test_a_gear_is_at_fault_when_all_are_alive_without_a_step() -> None:
    """After a loss it is not."""
    fresh = (there(0, up=4), there(1, up=4))
    drafts = [
        planned(view(*fresh, of=generation(0, 1), suspicion=suspected(1.0))),
        planned(view(*up(0, 1), of=generation(0, 1), suspicion=suspected(1.0))),
        planned(view(*fresh, of=generation(0, 1, 2), suspicion=suspected(1.0))),
    ]
    assert [draft.gear for draft in drafts] == ["warm", "live", "live"]


def test_no_gear_is_slower_where_the_state_is_kept_nowhere_else() -> None:
    """Without checkpoints it would be lost with the workers that have it."""
    members = there(0, up=4, keeps=False), there(1, up=4, keeps=False)
    draft = planned(view(*members, of=generation(0, 1), suspicion=suspected(1.0)))
    assert draft.gear == "live"


def test_a_member_that_failed_waits_before_it_joins_others_that_train() -> None:
    """Longer with each failure; where no other trains, it is tried at once."""
    seen = view(*up(0), there(1, failures=1, since=NOW - 9), of=generation(0))
    assert held(seen).for_s == 1.0
    assert following(view(*up(0), there(1, failures=1, since=NOW - 10), of=generation(0)))[0] == "0 1"
    assert held(view(*up(0), there(1, failures=3, since=NOW - 10), of=generation(0))).for_s == 30.0
    assert following(view(there(1, failures=3, since=NOW - 1), of=None))[0] == "1"


def test_a_member_that_failed_does_not_join_early_with_others() -> None:
    """Another join or loss does not shorten its wait."""
    failed = there(2, failures=1, since=NOW - 9)
    assert following(view(*up(0), there(1), failed, of=generation(0))) == ("0 1", "instance 1 has joined")
    assert following(view(*up(0), failed, of=generation(0, 1))) == ("0", "instance 1 is gone")


def test_below_the_minimum_there_is_no_generation() -> None:
    """The rest waits, and the reason says for what."""
    assert held(view(there(0), of=None), Bounds(2, 4)) == WaitReason("1 of at least 2 instances is ready")
    assert held(view(*up(0), of=generation(0, 1)), Bounds(2, 4)).why == "1 of at least 2 instances is ready"
    seen = view(*up(0), there(2), of=generation(0, 1))
    assert following(seen, Bounds(2, 4)) == ("0 2", "instance 1 is gone; instance 2 has joined")


SETBACKS = "3 generations in a row lost an instance before they made progress; the next comes 6 s after generation 4"


@pytest.mark.parametrize(
    "members",
    [
        (*up(0), there(2)),
        (*up(0), there(1, up=4, lost=4, ready=False), there(2)),
        (*up(0), there(1, up=4, heartbeat_at=NOW - 2.0)),
    ],
    ids=["one is gone", "a trainer has ended", "one does not answer"],
)
def test_generations_without_progress_are_followed_later_and_later(members: tuple[MemberLease, ...]) -> None:
    """At once after the first two, then doubled; the wait has a reason."""
    suspicion = suspected(1.5) if len(members) == 2 else None
    for setbacks, apart_s in ((0, 0.0), (1, 3.0), (2, 6.0), (3, 12.0), (5, 48.0), (50, 48.0)):
        of = generations.generation(4, ["0-a", "1-a"], proposed_at=NOW - 1.0, setbacks=setbacks)
        seen = view(*members, of=of, since=NOW - 1.0, suspicion=suspicion)
        if apart_s:
            assert held(seen).for_s == apart_s - 1.0
            assert held(seen).announced
        else:
            assert planned(seen)
        later = planned(msgspec.structs.replace(seen, now=NOW + apart_s))
        assert later.setbacks == setbacks + 1
    of = generations.generation(4, ["0-a", "1-a"], proposed_at=NOW - 1.0, setbacks=2)
    assert held(view(*members, of=of, suspicion=suspicion)).why.startswith(SETBACKS)


def test_a_member_that_returns_in_time_ends_a_setback() -> None:
    """Its worker has not noticed that its lease expired, so nothing starts again."""
    of = generations.generation(4, ["0-a", "1-a"], proposed_at=NOW - 1.0, setbacks=2)
    assert held(view(*up(0), of=of)).announced
    assert held(view(*up(0, 1), of=of)) == WaitReason()


def test_a_newcomer_after_setbacks_waits_until_training_continues() -> None:
    """Until a step; with plain scripts, which report none, for a minute."""
    of = generations.generation(4, ["0-a"], proposed_at=NOW - 1.0, setbacks=3)
    joins = view(*up(0, elastic=True), there(1, elastic=True), of=of)
    assert held(joins).for_s == 5.0
    draft = planned(msgspec.structs.replace(joins, resumed=True))
    assert draft.setbacks == 0
    plain = view(there(0, up=4), there(1), of=of, since=NOW - 60)
    assert following(plain)[0] == "0 1"
    assert held(msgspec.structs.replace(plain, since=NOW - 59)).for_s == 5.0


def test_setbacks_delay_neither_a_leave_nor_a_job_that_ends() -> None:
    """Both have little time; and a leave is no setback."""
    of = generations.generation(4, ["0-a", "1-a", "2-a"], proposed_at=NOW - 1.0, setbacks=3)
    leaves = view(*up(0, 2), *up(1, leaving=True), of=of)
    assert following(leaves)[0] == "0 2"
    draft = planned(leaves)
    assert draft.setbacks == 3
    assert following(view(*up(0, 2), of=of, left=frozenset({"1-a"})))[0] == "0 2"
    assert following(view(*up(0, 2), of=of, stop="deadline"))[0] == "0 2"


def test_a_group_whose_agents_are_late_waits_longer_for_reports() -> None:
    """By as much as leases last longer."""
    silent = there(1, up=4, heartbeat_at=NOW - 2.0)
    seen = view(*up(0), silent, of=generation(0, 1), suspicion=suspected(1.5), stretch=4.0)
    assert held(seen) == WaitReason("instance 1 may be lost", 2.5)
    forming = view(*up(0), there(1), of=generation(0, 1), state="forming", since=NOW - 30, stretch=4.0)
    assert held(forming) == WaitReason("instance 1 is not up yet in generation 4", 50.0)


def test_one_reason_names_all_its_instances() -> None:
    """And each kind of loss is one reason."""
    ended = [there(index, up=4, lost=4, ready=False) for index in (1, 5)]
    seen = view(*up(0), *ended, of=generation(0, 1, 2, 3, 4, 5), left=frozenset({"4-a"}))
    reason = "the workers of instances 1 and 5 have ended; instances 2 and 3 are gone; instance 4 has left"
    assert following(seen)[1] == reason


async def test_the_wait_after_setbacks_is_an_event() -> None:
    """Other waits that end by themselves are not."""
    told: list[str] = []

    async def announce(event: Event) -> None:
        told.append(event.reason)

    membership = cast("RendezvousStore", SimpleNamespace(announce=announce))
    of = generations.generation(4, ["0-a", "1-a"], proposed_at=NOW - 1.0, setbacks=2)
    assert await advance_rendezvous(membership, view(*up(0), of=of), BOUNDS, "0-a", None) == 5.0
    assert await advance_rendezvous(membership, view(there(0, since=NOW), of=None), BOUNDS, "0-a", None) > 0.0
    assert told == [f"{SETBACKS} at the earliest"]


def runs(index: int, for_s: float, **fields: Any) -> MemberLease:
    """A member whose script runs, and has not called `elastic.init`."""
    return there(index, ready=False, elastic=True, uncalled_since=NOW - for_s, **fields)


@pytest.mark.parametrize(
    ("seen", "bounds", "warns"),
    [
        (view(runs(0, 600), of=None), Bounds(1, 2), False),
        (view(runs(0, 600), runs(1, 9.9), of=None), Bounds(2, 2), False),
        (view(runs(0, 600), runs(1, 10), of=None), Bounds(2, 2), True),
        (view(runs(0, 600), runs(1, 10), of=None), Bounds(1, 2), True),
        (view(runs(0, 600), runs(1, 10), there(2, ready=False), of=None), Bounds(1, 4), True),
        (view(runs(0, 600), runs(1, 10), there(2, ready=False, called=True), of=None), Bounds(1, 4), False),
        (view(runs(0, 600), runs(1, 10), of=generation(0, 1)), Bounds(2, 2), False),
    ],
    ids=["alone", "just begun", "two", "two of one or more", "a third that loads", "a third that called", "trained"],
)
def test_a_script_that_runs_twice_without_init_is_a_reason_to_warn(
    seen: GroupView, bounds: Bounds, *, warns: bool
) -> None:
    """Not at once, since it imports and loads first; nor where any instance has called it."""
    wait = held(seen, bounds)
    assert (wait.warns, str(InitNotCalledError()) in wait.why) == (warns, warns)
    assert wait.for_s == math.inf, "nothing ends it by itself"


async def test_the_log_warns_once_that_no_instance_calls_init() -> None:
    """Only the agent whose event Redis takes first logs it."""
    told: list[str] = []

    async def announce(event: Event) -> bool:
        told.append(event.reason)
        return told.count(event.reason) == 1

    store = cast("RendezvousStore", SimpleNamespace(announce=announce))
    with capture_logs() as logs:
        for since in (1, 10, 11):
            await advance_rendezvous(store, view(runs(0, since), runs(1, since), of=None), Bounds(2, 2), "0-a", None)
    assert [(entry["event"], entry["reason"]) for entry in logs] == [("job.blocked", told[-1])]


def test_no_member_is_added_to_a_job_that_stops() -> None:
    """Those that train continue without a lost one, so that they write their checkpoint."""
    assert held(view(*up(0, 1), there(2), of=generation(0, 1), stop="deadline")) == WaitReason()
    assert following(view(*up(0, 1), there(2), of=generation(0, 1, 3), stop="deadline"))[0] == "0 1"


def test_finished_members_are_not_lost() -> None:
    """The others continue, also below the minimum, and no member joins any more."""
    done = there(0, up=4, finished=True, ready=False)
    finished = {"finished": frozenset({"0-a"})}
    assert held(view(done, *up(1), there(2), of=generation(0, 1), **finished)) == WaitReason(
        "others have yet to finish"
    )
    seen = view(done, there(1, lost=4), of=generation(0, 1), **finished)
    assert following(seen, Bounds(2, 4))[0] == "1"


def test_no_member_joins_a_training_that_is_over() -> None:
    """Its members have trained everything; their scripts may run on."""
    done = up(0, 1, done=True, elastic=True)
    assert held(view(*done, there(2), of=generation(0, 1))) == WaitReason("others have yet to finish")
    seen = view(*up(0, done=True, elastic=True), there(1, lost=4, stepped=4), there(2), of=generation(0, 1))
    assert following(seen, Bounds(2, 4))[0] == "1 2"


def test_a_member_that_has_yet_to_finish_waits_for_no_other() -> None:
    """Its training is over and its script still runs, as one that evaluates."""
    assert held(view(*up(0, done=True, elastic=True), of=generation(0))) == WaitReason()
    assert held(view(*up(0, 1, done=True, elastic=True), of=generation(0, 1))) == WaitReason()
    done = there(1, up=4, done=True, elastic=True, finished=True, ready=False)
    waits = view(*up(0, done=True, elastic=True), done, of=generation(0, 1), finished=frozenset({"1-a"}))
    assert held(waits) == WaitReason("others have yet to finish")


def test_a_generation_that_forms_after_the_end_is_followed_by_one_without_newcomers() -> None:
    """It never forms; nothing is trained again."""
    forming = {"state": "forming", "since": NOW - 30}
    done, came = up(0, 1, done=True, elastic=True), there(2, elastic=True)
    seen = view(*done, came, of=generation(0, 1, 2), **forming)
    assert following(seen, Bounds(3, 4)) == ("0 1", "the others came after everything had been trained")
    assert held(view(*done, came, of=generation(0, 1), **forming)) == WaitReason("others have yet to finish")
    behind = up(3, elastic=True, comm_failed=4)
    assert following(view(*done, *behind, came, of=generation(0, 1, 2, 3), **forming))[0] == "3"
    assert following(view(*done, of=generation(0, 1, 2), **forming))[0] == "0 1"


def test_a_script_that_fails_after_the_end_is_run_again() -> None:
    """Its new worker starts from the last checkpoint, whichever others have ended meanwhile."""
    forming = {"state": "forming", "since": NOW - 30, "finished": frozenset({"0-a"})}
    again = there(1, done=True, lost=4, elastic=True, ready=False)
    seen = view(again, of=generation(0, 1), **forming)
    assert job_outcome(seen) is None
    assert held(seen) == WaitReason("instance 1 is not ready yet")
    ready = msgspec.structs.replace(again, member=msgspec.structs.replace(again.member, ready=True))
    assert following(view(ready, of=generation(0, 1), **forming))[0] == "1"


def test_nothing_is_decided_in_a_redis_that_was_empty() -> None:
    """Other agents may know of a higher generation, or return as members."""
    assert held(view(there(0), of=None, quiet_until=NOW + 0.4)).for_s == 0.4
    seen = view(*up(0), of=generation(0, 1, 2), granted={"1-a": NOW + 2.0})
    assert held(seen) == WaitReason("instance 1 may return", 2.0)


def test_the_job_is_done_when_all_members_are() -> None:
    """Those that left as planned are not waited for; lost ones are."""
    done = [there(index, up=4, finished=True, ready=False) for index in (0, 1)]
    both = {"finished": frozenset({"0-a", "1-a"})}
    one = {"finished": frozenset({"0-a"})}
    assert job_outcome(view(*done, of=generation(0, 1), **both)) == JobOutcome("done")
    assert job_outcome(view(done[0], *up(1), of=generation(0, 1), **one)) is None
    assert job_outcome(view(done[0], of=generation(0, 1), **one)) is None
    assert job_outcome(view(done[0], of=generation(0, 1), left=frozenset({"1-a"}), **one)) == JobOutcome("done")
    assert job_outcome(view(of=generation(0, 1), left=frozenset({"0-a", "1-a"}))) is None


def test_the_job_is_stopped_when_no_worker_continues() -> None:
    """After a request to stop; it ends only once."""
    ended = (there(0, ready=False), there(1, ready=False))
    assert job_outcome(view(*ended, of=generation(0, 1), stop="deadline")) == JobOutcome("stopped", "deadline")
    assert job_outcome(view(*ended, of=generation(0, 1))) is None
    assert job_outcome(view(ended[0], *up(1), of=generation(0, 1), stop="deadline")) is None
    assert job_outcome(view(ended[0], of=generation(0, 1), stop="deadline", granted={"1-a": NOW + 1})) is None
    over = view(*ended, of=generation(0, 1), stop="deadline", outcome=JobOutcome("stopped"))
    assert job_outcome(over) is None
    assert held(over) == WaitReason("the job has ended")


def test_the_view_of_an_own_proposal_leads_to_no_other() -> None:
    """The group does not oscillate."""
    for seen in (
        view(there(0), there(1), of=None),
        view(*up(0, 1), there(2), of=generation(0, 1)),
        view(*up(0), of=generation(0, 1), suspicion=suspected(1.5)),
        view(*up(0), there(1), of=generation(0, 1), state="forming", since=NOW - 20),
    ):
        draft = planned(seen)
        then = msgspec.structs.replace(
            seen, generation=draft, number=draft.number, state="forming", since=NOW, suspicion=None
        )
        assert held(then).for_s < math.inf


def drafted(*members: MemberLease, **fields: Any) -> tuple[str, str]:
    """Return the gear of what follows generation 4 of instances 0, 1 and 2, and by number who writes a checkpoint."""
    draft = planned(view(*members, of=generation(0, 1, 2), **fields))
    return draft.gear, draft.writer.partition("-")[0]


def test_the_first_that_stays_writes_a_checkpoint_unless_the_gear_is_live() -> None:
    """It is the first rank of those that load it; those that leave are not waited for."""
    going = up(0, leaving=True, live=False, since=NOW - 0.1)
    assert drafted(*going, *up(1, 2, live=False)) == ("warm", "1")
    assert drafted(*going, *up(1, 2, live=False, standby=False)) == ("cold", "1")
    assert drafted(*up(0, leaving=True, since=NOW - 0.1), *up(1, 2)) == ("live", "")
    assert drafted(*up(0, 1, 2, live=False), there(3, since=NOW - 0.3)) == ("warm", "0")


def test_the_member_at_the_highest_step_writes_a_checkpoint_after_a_loss() -> None:
    """Survivors differ by one step at most, and no step is repeated."""
    assert drafted(*up(0, live=False, comm_failed=4, step=7), *up(1, live=False, comm_failed=4, step=8)) == (
        "warm",
        "1",
    )
    assert drafted(*up(0, live=False, comm_failed=4, step=8), *up(1, live=False, comm_failed=4, step=8)) == (
        "warm",
        "0",
    )


def test_survivors_report_their_step_before_one_writes() -> None:
    """For a while after the loss: in long steps a worker is slow to notice it."""
    lost = there(2, up=4, lost=4, ready=False, since=NOW - 0.4)
    unsaid = (*up(0, live=False, comm_failed=4, step=7), *up(1, live=False, step=8))
    wait = held(view(*unsaid, lost, of=generation(0, 1, 2)))
    assert wait == WaitReason("instance 1 has yet to report a step", 0.6)
    later = there(2, up=4, lost=4, ready=False, since=NOW - 1.0)
    assert drafted(*unsaid, later) == ("warm", "1")
    assert drafted(*up(0, comm_failed=4, step=7), *up(1, step=8), lost) == ("live", "")
    assert drafted(*up(0, live=False, step=7), lost) == ("warm", "0")


@pytest.mark.parametrize("live", [True, False])
def test_newcomers_wait_for_the_checkpoint_when_all_others_leave(*, live: bool) -> None:
    """No member that stays has the state."""
    going = up(0, 1, leaving=True, live=live, since=NOW - 5)
    seen = view(*going, there(2), of=generation(0, 1))
    assert held(seen) == WaitReason("instances 0 and 1 have yet to write a checkpoint, and leave")
    seen = view(going[1], there(2), of=generation(0, 1), left=frozenset({"0-a"}))
    assert held(seen) == WaitReason("instance 1 has yet to write a checkpoint, and leave")
    seen = view(there(2), of=generation(0, 1), left=frozenset({"0-a", "1-a"}))
    assert following(seen)[0] == "2"


def test_newcomers_wait_until_others_have_their_standbys() -> None:
    """After a crash the survivors have used theirs: a join would be cold. There is a time limit."""
    without = up(0, live=False, standby=False)
    assert held(view(*without, there(1, since=NOW - 0.3), of=generation(0), since=NOW - 2)).for_s == 14.7
    assert held(view(*without, there(1), of=generation(0), since=NOW - 2)).for_s == 13.0
    assert drafted_join(*without, there(1), since=NOW - 15) == "cold"
    assert drafted_join(*up(0, live=False), there(1, since=NOW - 0.3)) == "warm"
    assert drafted_join(*up(0, standby=False), there(1, since=NOW - 0.3)) == "live"
    assert drafted_join(*up(0, live=False, standby=False, gear="cold"), there(1, since=NOW - 0.3)) == "cold"


def drafted_join(*members: MemberLease, **fields: Any) -> str:
    draft = planned(view(*members, of=generation(0), **fields))
    return draft.gear


def test_a_member_that_came_too_late_to_train_does_not_delay_the_end() -> None:
    """Whether it is still there or gone."""
    forming = {"state": "forming", "finished": frozenset({"0-a", "1-a"})}
    came = there(2, elastic=True)
    assert job_outcome(view(came, of=generation(0, 1, 2), **forming)) == JobOutcome("done")
    assert job_outcome(view(came, of=generation(0, 1, 3), **forming)) == JobOutcome("done")
    replaced = there(2, stepped=2, lost=2, elastic=True)  # in a step before
    assert job_outcome(view(replaced, of=generation(0, 1, 2), **forming)) == JobOutcome("done")
    plain = there(2)
    assert job_outcome(view(plain, of=generation(0, 1, 2), **forming)) is None


async def test_each_generation_has_a_secret_token() -> None:
    """Not even workers of an older generation know it."""
    drafts: list[Generation] = []

    async def propose(draft: Generation) -> None:
        drafts.append(draft)

    membership = cast("RendezvousStore", SimpleNamespace(propose=propose))
    for _ in range(2):
        assert await advance_rendezvous(membership, view(there(0), of=None), BOUNDS, "0-a", None) == 0.0
    first, second = (draft.token for draft in drafts)
    assert len(first) == len(second) == 32
    assert first != second
