"""Agents that agree through a real Redis: who is first, who is out of date, who is gone."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog
from support.redis_clock import later, take_time_from_a_key

from edl_runtime.elastic.agent.failures import MAX_FAILURES
from edl_runtime.elastic.errors import InstanceSupersededError, JobTakenError, NoCheckpointError
from edl_runtime.elastic.rendezvous import redis_store
from edl_runtime.elastic.rendezvous.generation import Generation, GroupView, JobOutcome, TrainerMember
from edl_runtime.elastic.rendezvous.group_status import LastCheckpoint, LastFailure, group_status, has_live_agents
from edl_runtime.elastic.rendezvous.news import GroupNews
from edl_runtime.elastic.rendezvous.planner import WaitReason, plan_generation
from edl_runtime.elastic.rendezvous.redis_store import (
    Event,
    RendezvousStore,
    follow_events,
    next_heartbeat,
    read_events,
)
from edl_runtime.elastic.rendezvous.requests import await_checkpoint, request_checkpoint, request_stop
from edl_runtime.specs import Bounds
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from edl_runtime.store.redis_server import RedisServer

JOB = "digits"
BOUNDS = Bounds(1, 16)


class Agent:
    """An agent that does as it is told."""

    def __init__(self, client: Redis, namespace: str, index: int, boot: str = "a", **options: Any) -> None:
        self.client = client
        self.membership = RendezvousStore(client, namespace, JOB, **{"quiet_s": 0.01, **options})
        self.record = TrainerMember(id=f"{index}-{boot}", index=index, ready=True, live=True)
        self.view = GroupView(now=0.0)

    async def heartbeat(self, **changes: Any) -> GroupView:
        self.record = msgspec.structs.replace(self.record, **changes)
        self.view = await self.membership.heartbeat(self.record)
        return self.view

    async def draft(self) -> Generation:
        """Beat until there is something to propose."""
        for _ in range(1000):
            draft = plan_generation(await self.heartbeat(), BOUNDS, self.record.id)
            if isinstance(draft, Generation):
                return draft
            await later(self.client, 0.03)
        raise AssertionError(self.view)

    def again(self) -> Generation:
        """Return a proposal of the same members once more."""
        assert self.view.generation
        return msgspec.structs.replace(self.view.generation, after=self.view.generation.number)

    async def publish(self) -> Generation:
        """Propose what is next, alone."""
        published = await self.membership.propose(await self.draft())
        assert published
        return published


def ids(view: GroupView) -> list[str]:
    return [each.member.id for each in view.members]


async def group(client: Redis, namespace: str, count: int, **options: Any) -> list[Agent]:
    """Agents whose trainers are up in generation 1."""
    await later(client, 0.0)
    agents = [Agent(client, namespace, index, **options) for index in range(count)]
    for agent in agents:
        await agent.heartbeat()
    await agents[0].publish()
    for agent in [*agents, *agents]:
        await agent.heartbeat(up=1)
    assert {agent.view.state for agent in agents} == {"active"}
    return agents


async def kinds(client: Redis, namespace: str) -> list[str]:
    return [event.kind for event in await read_events(client, namespace, JOB)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes but where a test lets it."""
    take_time_from_a_key(monkeypatch)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    async with connect(redis_url) as client:
        await later(client, 0.0)
        yield client


async def test_one_of_many_proposers_wins(client: Redis, namespace: str) -> None:
    """All agents decide at the same time and alike; there is one generation, and all see it."""
    agents = [Agent(client, namespace, index) for index in range(8)]
    for agent in agents:
        await agent.heartbeat()
    await agents[0].draft()
    drafts = [await agent.draft() for agent in agents]
    proposals = [agent.membership.propose(draft) for agent, draft in zip(agents, drafts, strict=True)]
    published = [each for each in await asyncio.gather(*proposals) if each]
    assert [each.number for each in published] == [1]
    assert {(await agent.heartbeat()).generation for agent in agents} == set(published)
    assert (await kinds(client, namespace)).count("forming") == 1


async def test_only_members_with_a_lease_propose_and_are_proposed(client: Redis, namespace: str) -> None:
    """A generation with somebody in it who has gone would never form."""
    first, second = await group(client, namespace, 2)
    draft = first.again()
    for broken in ({"ready": False}, {"leaving": True, "ready": True}):
        await second.heartbeat(**broken)
        assert await first.membership.propose(draft) is None
    await second.heartbeat(leaving=False)
    await first.membership.leave()
    assert await first.membership.propose(draft) is None
    assert await second.membership.propose(draft) is None
    await first.heartbeat()
    published = await second.membership.propose(draft)
    assert published
    assert published.number == 2


async def test_who_does_not_beat_is_gone_after_its_lease(client: Redis, namespace: str) -> None:
    """By Redis's clock, and told as an event."""
    first, _second = await group(client, namespace, 2, ttl_s=0.6)
    began = first.view.now
    assert ids(await first.heartbeat()) == ["0-a", "1-a"]
    assert (await first.draft()).reason == "instance 1 is gone"
    assert ids(first.view) == ["0-a"]
    assert first.view.now - began >= 0.5
    assert (await kinds(client, namespace))[-1] == "gone"


async def test_nobody_runs_out_while_nobody_beats(client: Redis, namespace: str) -> None:
    """All were stopped, or Redis was away; the first to be back does not find the others dead."""
    first, second = await group(client, namespace, 2, ttl_s=0.6)
    before = first.view.now
    await later(client, 1.5)
    assert ids(await first.heartbeat()) == ["0-a", "1-a"]
    assert first.view.now - before == pytest.approx(0.2), "the clock goes on by a third of a lease at most"
    await later(client, 0.1)
    assert ids(await second.heartbeat()) == ["0-a", "1-a"]
    await later(client, -3600.0)
    assert (await first.heartbeat()).now == second.view.now, "nor does it go back when Redis's own is put back"
    assert "gone" not in await kinds(client, namespace)


async def beat_in_turn(agents: list[Agent], gap_s: float) -> None:
    """Have each agent beat so long after its last beat, three times."""
    for agent in agents * 3:
        await later(agent.client, gap_s / len(agents))
        await agent.heartbeat()


@pytest.mark.parametrize(("gap_s", "lease_s"), [(0.25, 3.0), (0.5, 3.0), (1.0, 6.0), (2.0, 12.0), (8.0, 30.0)])
async def test_leases_last_longer_where_most_are_late(
    client: Redis, namespace: str, gap_s: float, lease_s: float
) -> None:
    """Six of the silences that are usual, ten leases at most; where they are short, one lease."""
    agents = await group(client, namespace, 8)
    await beat_in_turn(agents, gap_s)
    assert agents[-1].view.stretch * 3.0 == pytest.approx(lease_s)
    dead, others = agents[0], agents[1:]
    silent_s = gap_s * 7 / 8
    while dead.record.id in ids(others[-1].view):
        for agent in others:
            await later(client, gap_s / 7)
            silent_s += gap_s / 7
            await agent.heartbeat()
    assert lease_s - gap_s <= silent_s < lease_s + 2 * gap_s
    assert (await kinds(client, namespace)).count("late") == (lease_s > 3.0)


async def test_one_that_is_late_alone_has_no_longer_lease(client: Redis, namespace: str) -> None:
    """Nor has anybody else, so nobody who is dead is noticed later because of it."""
    first, second, third = await group(client, namespace, 3)
    for gap_s, is_there in ((2.0, True), (3.25, False)):
        await third.heartbeat()
        for _ in range(int(gap_s / 0.25)):
            await beat_in_turn([first, second], 0.25 / 3)
        assert first.view.stretch == 1.0
        assert ("2-a" in ids(second.view)) == is_there
    assert "late" not in await kinds(client, namespace)


async def test_a_job_whose_instances_were_late_is_free_after_a_longer_lease(
    client: Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another submission of it, whose instances wait so long, and begin with leases as short as any."""
    agents = await group(client, namespace, 3, run="monday")
    await beat_in_turn(agents, 5.0)
    assert agents[-1].view.stretch == 6
    waited_s = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal waited_s
        waited_s += seconds
        await later(client, seconds)

    monkeypatch.setattr(redis_store, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(redis_store, "time", SimpleNamespace(monotonic=lambda: waited_s))
    assert (await Agent(client, namespace, 0, "b", run="tuesday").heartbeat()).stretch == 1
    assert waited_s == pytest.approx(18.0)


async def test_the_later_agent_of_an_instance_counts(client: Redis, namespace: str) -> None:
    """The earlier one is out at once, and for good."""
    first, second = await group(client, namespace, 2)
    anew = Agent(client, namespace, 1, "b")
    view = await anew.heartbeat()
    assert ids(view) == ["0-a", "1-b"]
    with pytest.raises(InstanceSupersededError, match=r"instance 1 of job 'digits' was started again"):
        await second.heartbeat()
    assert (await first.draft()).members == ("0-a", "1-b")


async def test_suspicion_counts_once_and_only_for_its_generation(client: Redis, namespace: str) -> None:
    """Who has not beaten since is told apart from who has."""
    first, second = await group(client, namespace, 2)
    assert not await first.membership.suspect(7, "reset")
    assert await first.membership.suspect(1, "reset")
    assert not await second.membership.suspect(1, "reset as well")
    answers = []
    for passed_s in (0.0, 0.001):  # what was said in the same millisecond may have been said before
        await later(client, passed_s)
        view = await first.heartbeat()
        assert view.suspicion
        assert (view.suspicion.by, view.suspicion.reason) == ("0-a", "reset")
        answers.append({each.member.id: each.heartbeat_at >= view.suspicion.since for each in view.members})
    assert answers == [{"0-a": False, "1-a": False}, {"0-a": True, "1-a": False}]


async def test_news_wakes_an_agent_at_once(client: Redis, namespace: str) -> None:
    """Before its wait is over, also of what happened before its wait."""
    first, second = await group(client, namespace, 2)
    async with GroupNews(client, namespace, JOB) as news:
        await subscribe(news, client, namespace, for_all=False)
        waiting = asyncio.create_task(news.wait(for_all=False, timeout_s=60.0))
        await second.heartbeat(leaving=True)
        assert await waiting
        await first.heartbeat(leaving=True)
        assert await news.wait(for_all=False, timeout_s=60.0)
        assert not await news.wait(for_all=False, timeout_s=0.01)


async def test_only_some_news_wake_an_agent_that_leaves_the_rest_to_others(client: Redis, namespace: str) -> None:
    """It does not wait behind those that it has not to see, and sees all as soon as it is among those that decide."""
    first, _, third, fourth = await group(client, namespace, 4)
    view = await fourth.heartbeat()
    assert [view.acts_first(member) for member in ids(view)] == [True, True, True, False]
    async with GroupNews(client, namespace, JOB) as news:
        await subscribe(news, client, namespace, for_all=True)
        await first.heartbeat()
        await third.heartbeat(leaving=True)
        assert not await news.wait(for_all=True, timeout_s=0.01)
        await first.publish()
        assert await news.wait(for_all=True, timeout_s=60.0)
        await subscribe(news, client, namespace, for_all=False)
        await third.membership.leave()
        assert await news.wait(for_all=False, timeout_s=60.0)


def test_heartbeats_of_a_large_group_stay_apart_after_an_event() -> None:
    """All send one at 0.5 s, and their next ones at their own moments: more than a quarter of a second later."""
    dues = [next_heartbeat(0.5 + number / 128, 0.5, 64) for number in range(64)]
    assert max(dues) - min(dues) > 0.4
    assert all(0.75 <= due < 1.25 for due in dues)
    assert next_heartbeat(0.5, 0.5, 2) == 0.75
    assert next_heartbeat(0.5, 7.5 + 0.01, 64) == 8.0, "those of an outage are omitted"


async def test_a_user_without_channels_is_late_but_trains(client: Redis, redis_url: str, namespace: str) -> None:
    """Redis refuses its subscription and drops its news, and nothing else; the agent says so once."""
    await client.execute_command("ACL SETUSER", namespace, "on", "nopass", "allkeys", "+@all", "resetchannels")
    try:
        with structlog.testing.capture_logs() as said:
            async with connect(redis_url.replace("://", f"://{namespace}:any@")) as narrow:
                alone = Agent(narrow, namespace, 0)
                async with GroupNews(narrow, namespace, JOB) as news:
                    while not said:
                        assert not await news.wait(for_all=True, timeout_s=0.01)
                    assert ids(await alone.heartbeat()) == ["0-a"]
                    assert not await news.wait(for_all=True, timeout_s=0.01)
        assert [line["event"] for line in said] == ["news.forbidden"]
    finally:
        await client.execute_command("ACL DELUSER", namespace)


async def subscribe(news: GroupNews, client: Redis, namespace: str, *, for_all: bool) -> None:
    """Wait until Redis has the subscription."""
    channels = keys.group_channels(namespace, JOB)[: 1 if for_all else 2]
    while not all(count for _, count in await client.pubsub_numsub(*channels)):
        assert not await news.wait(for_all=for_all, timeout_s=0.01)


async def test_the_pause_is_the_longest_of_those_who_trained_before(client: Redis, namespace: str) -> None:
    """Told when all have finished a step; who has just joined has none, nor has a first generation."""
    for agent in await group(client, f"{namespace}-first", 2):
        await agent.heartbeat(stepped=1)
    resumed = (await read_events(client, f"{namespace}-first", JOB))[-1]
    assert (resumed.kind, resumed.pause_s) == ("resumed", None)
    first, second = await group(client, namespace, 2)
    await first.heartbeat(stepped=1, pause_s=0.4)
    assert (await kinds(client, namespace))[-1] == "active"
    await later(client, 0.5)
    await second.heartbeat(stepped=1, pause_s=0.75)
    await second.heartbeat()
    events = await read_events(client, namespace, JOB)
    (resumed,) = [event for event in events if event.kind == "resumed"]
    assert (resumed.generation, resumed.members, resumed.pause_s, resumed.total_s) == (1, (0, 1), 0.75, 0.5)
    assert "pause 0.75 s" in resumed.line()


async def test_the_absence_of_an_instance_that_returns_is_no_pause(client: Redis, namespace: str) -> None:
    """Others trained meanwhile: who trained with the last of them counts, however long the rest was away."""
    first, second = await group(client, namespace, 2)
    await second.heartbeat(leaving=True, stepped=1)
    await first.heartbeat(stepped=1)
    await first.publish()
    await first.heartbeat(up=2)
    await first.heartbeat(stepped=2, pause_s=0.4, paused_in=1)
    await second.heartbeat(leaving=False, up=0)
    await first.publish()
    for agent in (first, second, first):
        await agent.heartbeat(up=3)
    await second.heartbeat(stepped=3, pause_s=15.2, paused_in=1)
    await first.heartbeat(stepped=3, pause_s=0.25, paused_in=2)
    resumed = [event for event in await read_events(client, namespace, JOB) if event.kind == "resumed"]
    assert [(event.generation, event.pause_s) for event in resumed] == [(1, None), (2, 0.4), (3, 0.25)]
    status = await group_status(client, namespace, JOB)
    assert status is not None
    assert status.resize is not None
    assert (status.generation, status.forming, status.waits) == (3, False, "")
    assert (status.resize.before, status.resize.after, status.resize.pause_s) == (1, 2, 0.25)
    assert (status.resize.gear, status.resize.reason) == ("live", "instance 1 has joined")
    assert status.heard_at >= status.resize.at > 0


async def test_the_last_checkpoint_is_part_of_the_status(client: Redis, namespace: str) -> None:
    """With when it was reported; the next run of the job begins without one, and without a resize."""
    (agent,) = await group(client, namespace, 1, run="first")
    saved = Event(kind="saved", instance=0, generation=1, step=7, epoch=2, url="/c/7", total_s=0.1)
    await agent.membership.announce(saved)
    status = await group_status(client, namespace, JOB)
    assert status is not None
    assert status.checkpoint == LastCheckpoint(step=7, epoch=2, generation=1, url="/c/7", at=status.heard_at)
    assert status.resize is None
    await agent.membership.end(JobOutcome("done"))
    await agent.membership.leave()
    await Agent(client, namespace, 0, boot="b", run="second").heartbeat()
    after = await group_status(client, namespace, JOB)
    assert after is not None
    assert (after.checkpoint, after.resize) == (None, None)


async def test_what_is_told_late_has_the_time_when_it_happened(client: Redis, namespace: str) -> None:
    """As after an outage; told again because nobody answered, it is the same event."""
    (agent,) = await group(client, namespace, 1)
    saved = Event(kind="saved", instance=0, step=7, url="/c/7", delay_s=43.5)
    assert await agent.membership.announce(saved)
    assert not await agent.membership.announce(msgspec.structs.replace(saved, delay_s=44.0))
    status = await group_status(client, namespace, JOB)
    assert status is not None
    assert status.checkpoint is not None
    told = (await read_events(client, namespace, JOB))[-1]
    assert (told.kind, told.delay_s) == ("saved", 43.5)
    assert told.at == pytest.approx(int(told.id.partition("-")[0]) / 1000 - 43.5, rel=0, abs=0.01)
    assert status.checkpoint.at == pytest.approx(status.heard_at - 43.5, rel=0, abs=0.01)


async def test_stragglers_are_part_of_the_status(client: Redis, namespace: str) -> None:
    """As long as they say so themselves, and are in the generation."""
    agents = await group(client, namespace, 3)

    async def stragglers() -> dict[int, float]:
        status = await group_status(client, namespace, JOB)
        assert status is not None
        return status.stragglers

    assert await stragglers() == {}
    await agents[1].heartbeat(slow=1.8)
    await agents[2].heartbeat(slow=2.0)
    await agents[1].heartbeat(slow=1.9)
    assert await stragglers() == {1: 1.9, 2: 2.0}
    await agents[1].heartbeat(slow=0.0)
    assert await stragglers() == {2: 2.0}
    await agents[2].membership.leave()
    await agents[0].publish()
    for agent in agents[:2]:
        await agent.heartbeat(up=2)
    assert await stragglers() == {}
    assert await client.hget(keys.group_state(namespace, JOB), "slow") is None


async def test_a_script_that_tells_of_no_steps_does_not_resume(client: Redis, namespace: str) -> None:
    """Not when it ends either: one that does has done so until then."""
    first, second = await group(client, namespace, 2)
    for agent in (first, second, first):
        await agent.heartbeat(finished=True)
    assert "resumed" not in await kinds(client, namespace)


async def test_a_generation_that_forms_is_as_young_as_what_came_of_it_last(client: Redis, namespace: str) -> None:
    """By any of its members, and by nobody else; once it is up it has been so since then."""
    first, second, third = (Agent(client, namespace, index) for index in range(3))
    for agent in (first, second):
        await agent.heartbeat()
    published = await first.publish()
    assert set(published.members) == {"0-a", "1-a"}
    begun = (await first.heartbeat(advanced=True)).since
    await later(client, 0.02)
    assert (await second.heartbeat()).since == begun
    assert (await third.heartbeat(advanced=True)).since == begun
    advanced = (await second.heartbeat(advanced=True)).since
    assert advanced - begun == pytest.approx(0.02, abs=1e-6)  # times since 1970 are no more exact
    await later(client, 0.02)
    assert (await second.heartbeat(advanced=False)).since == advanced
    for agent in (first, second):
        await agent.heartbeat(up=1, advanced=False)
    up = await first.heartbeat()
    assert (up.state, up.since > advanced) == ("active", True)
    assert (await second.heartbeat(advanced=True)).since == up.since


async def test_a_job_ends_once(client: Redis, namespace: str) -> None:
    """The first to say how counts; there is no generation afterwards."""
    first, second = await group(client, namespace, 2)
    await first.membership.end(JobOutcome("done"))
    await second.membership.end(JobOutcome("failed", "out of memory"))
    assert (await second.heartbeat()).outcome == JobOutcome("done")
    assert await second.membership.propose(second.again()) is None
    assert not await request_stop(client, namespace, JOB, "too late")


async def test_a_stop_reaches_all(client: Redis, namespace: str) -> None:
    """The first reason counts; nobody can be asked where nobody is, which leaves no key."""
    assert not await request_stop(client, namespace, JOB, "deadline")
    assert not await client.exists(*keys.group_keys(namespace, JOB))
    first, second = await group(client, namespace, 2)
    assert await request_stop(client, namespace, JOB, "deadline")
    assert await request_stop(client, namespace, JOB, "edl stop")
    assert {(await agent.heartbeat()).stop for agent in (first, second)} == {"deadline"}


async def test_the_dead_are_not_asked_to_stop_for_long(client: Redis, namespace: str) -> None:
    """Nobody beats any more, so whoever asks is the one to find that their leases have run out."""
    await group(client, namespace, 2, ttl_s=1.0)
    asked = 0
    while await request_stop(client, namespace, JOB, "deadline"):
        asked += 1
        await later(client, 10.0)
    assert asked == 4  # each but the first has let a third of a lease pass
    assert (await kinds(client, namespace))[-3:] == ["stop", "gone", "gone"]


async def test_a_job_submitted_anew_knows_nothing_of_how_it_ended_before(client: Redis, namespace: str) -> None:
    """But for the number: none is used twice. Agents of before are out."""
    (old,) = await group(client, namespace, 1, run="monday")
    await request_stop(client, namespace, JOB, "deadline")
    await old.membership.end(JobOutcome("stopped"))
    new = Agent(client, namespace, 0, "b", run="tuesday")
    view = await new.heartbeat()
    assert (view.outcome, view.stop, view.generation, view.number, ids(view)) == (None, None, None, 1, ["0-b"])
    with pytest.raises(JobTakenError):
        await old.heartbeat()
    assert (await new.publish()).number == 2


async def test_a_job_that_trains_is_not_taken(client: Redis, namespace: str) -> None:
    """Not before its instances are gone: those that are dead are waited for."""
    await group(client, namespace, 1, run="monday", ttl_s=0.4)
    with pytest.raises(JobTakenError, match="another submission of job 'digits'"):
        await Agent(client, namespace, 0, "a", run="tuesday", ttl_s=0.1).heartbeat()
    await later(client, 0.5)
    view = await Agent(client, namespace, 0, "b", run="tuesday").heartbeat()
    assert (ids(view), view.number, view.generation) == (["0-b"], 1, None)


async def test_an_instance_of_a_run_that_has_ended_learns_so(client: Redis, namespace: str) -> None:
    """It was started once more, for nothing."""
    (old,) = await group(client, namespace, 1, run="monday")
    await old.membership.end(JobOutcome("done"))
    await old.membership.leave()
    assert (await Agent(client, namespace, 0, "b", run="monday").heartbeat()).outcome == JobOutcome("done")


async def test_a_job_started_by_hand_starts_anew_when_all_are_gone(client: Redis, namespace: str) -> None:
    """Whoever comes while others are there learns that it has ended."""
    first, second = await group(client, namespace, 2)
    await first.membership.end(JobOutcome("done"))
    await first.membership.leave()
    assert (await Agent(client, namespace, 0, "b").heartbeat()).outcome == JobOutcome("done")
    await second.heartbeat()
    await second.membership.leave()
    again = Agent(client, namespace, 1, "c")
    with suppress(InstanceSupersededError):
        await again.heartbeat()
    await client.delete(keys.group_keys(namespace, JOB)[0])  # its instance 0 runs out
    last = Agent(client, namespace, 3, "d")
    view = await last.heartbeat()
    assert (view.outcome, view.generation, view.number) == (None, None, 1)


async def test_what_a_job_waits_for_is_told_once(client: Redis, namespace: str) -> None:
    """However many agents find so, and however often."""
    first, second = await group(client, namespace, 2)
    for agent in (first, second, first):
        await agent.membership.announce(Event(kind="waiting", reason="1 of at least 2 instances is ready"))
    await first.membership.announce(Event(kind="note", reason="learning rate 0.1 -> 0.2", generation=1))
    assert (await kinds(client, namespace))[-2:] == ["waiting", "note"]


async def test_events_are_read_and_followed(client: Redis, namespace: str) -> None:
    """From the first on, or from where one had been; what can't be read is left out."""
    (agent,) = await group(client, namespace, 1)
    await client.xadd(keys.group_events(namespace, JOB), {"event": '{"kind": "of another version"}'})
    so_far = await read_events(client, namespace, JOB)
    assert [event.kind for event in so_far] == ["registered", "ready", "forming", "active"]
    assert abs(so_far[0].at - time.time()) < 60
    following = follow_events(client, namespace, JOB)
    assert [await anext(following) for _ in so_far] == so_far
    await agent.heartbeat(leaving=True)
    assert (await asyncio.wait_for(anext(following), 60.0)).kind == "leaving"
    await following.aclose()
    assert [event.kind for event in await read_events(client, namespace, JOB, after=so_far[-1].id)] == ["leaving"]


async def test_a_job_is_forgotten_in_time(client: Redis, namespace: str) -> None:
    """A day after its last beat."""
    await group(client, namespace, 1)
    for key in keys.group_keys(namespace, JOB)[:-2]:
        assert 86_000 < await client.ttl(key) <= 86_400
        assert f"{{{namespace}/{JOB}}}" in key


async def test_an_emptied_redis_gets_its_generation_back(own_redis: RedisServer) -> None:
    """Members have leases before they are back themselves, and numbers go on where they were."""
    async with connect(own_redis.url) as client:
        first, second, third = await group(client, "n", 3)
        before = first.view.generation
        own_redis.kill()
        for verb in (first.heartbeat(), first.membership.suspect(1, ""), third.heartbeat()):
            with pytest.raises(RegistryUnavailableError):
                await verb
        own_redis.start()
        await later(client, 0.0)
        view = await second.heartbeat()
        assert (view.generation, ids(view), set(view.granted)) == (before, ["1-a"], {"0-a", "2-a"})
        assert isinstance(plan_generation(msgspec.structs.replace(view, quiet_until=0.0), BOUNDS, "1-a"), WaitReason)
        for agent in (first, third):
            view = await agent.heartbeat()
        assert (view.generation, view.state, view.granted) == (before, "active", {})
        assert [each.member.fence for each in view.members] == sorted(each.member.fence for each in view.members)
        await third.heartbeat(leaving=True)
        published = await first.publish()
        assert (published.number, published.members) == (2, ("0-a", "1-a"))


async def restart(server: RedisServer, client: Redis) -> None:
    """Kill a Redis and start it with what it last saved."""
    server.kill()
    await client.connection_pool.disconnect()
    server.start()
    await later(client, 0.0)


async def test_an_older_redis_gets_back_what_was_seen_since_in_its_generation(own_redis: RedisServer) -> None:
    """Who was asked to stop, has finished or has left is known again, and the clock goes on from where it was."""
    async with connect(own_redis.url) as client:
        first, second, third, fourth = await group(client, "n", 4, quiet_s=1.0)
        await client.save()
        await third.membership.leave()
        await second.heartbeat(finished=True)
        await request_stop(client, "n", JOB, "deadline")
        await client.hincrby(keys.group_state("n", JOB), "clock", 500)
        before = await first.heartbeat()
        await restart(own_redis, client)
        view = await first.heartbeat()
        assert before.now <= view.now < before.now + 0.5
        assert (view.generation, view.number, view.stop) == (before.generation, 101, "deadline")
        assert (view.finished, view.left) == (frozenset({"1-a"}), frozenset({"2-a"}))
        assert (ids(view), set(view.granted)) == (["0-a"], {"1-a", "3-a"})
        plan = plan_generation(msgspec.structs.replace(view, quiet_until=0.0, stop=None), BOUNDS, "0-a")
        assert isinstance(plan, WaitReason)
        await second.heartbeat()
        view = await fourth.heartbeat()
        assert (sorted(ids(view)), view.granted, view.state) == (["0-a", "1-a", "3-a"], {}, "active")
        assert (await kinds(client, "n")).count("restored") == 1


async def test_a_number_that_an_older_redis_has_lost_is_not_given_again(own_redis: RedisServer) -> None:
    """Who has it returns after others have gone on without it, and does not take their generation for its own."""
    async with connect(own_redis.url) as client:
        first, second = await group(client, "n", 2, quiet_s=0.001)
        await client.save()
        lost = await first.membership.propose(msgspec.structs.replace(first.again(), members=("0-a",)))
        await first.heartbeat()
        await restart(own_redis, client)
        await second.heartbeat()
        await later(client, 0.1)
        await second.heartbeat()
        after = await second.membership.propose(msgspec.structs.replace(second.again(), members=("1-a",)))
        assert lost
        assert after
        assert (lost.number, after.number) == (2, 102)
        assert (await first.heartbeat()).generation == after


async def test_what_only_one_has_seen_counts_in_an_older_redis(own_redis: RedisServer) -> None:
    """Also if others were there before, and for longer than it takes until their clock has come as far."""
    async with connect(own_redis.url) as client:
        first, second = await group(client, "n", 2, quiet_s=1.0)
        await client.save()
        await first.membership.end(JobOutcome("done"))
        await first.heartbeat()
        known = first.view.now
        await restart(own_redis, client)
        while (view := await second.heartbeat()).now <= known:
            assert view.outcome is None
            await later(client, 0.02)
        assert (await first.heartbeat()).outcome == JobOutcome("done")


async def test_one_whose_view_is_old_does_not_let_others_run_out(own_redis: RedisServer) -> None:
    """The clock goes on to what the next one has seen, which may be far, and leases go with it."""
    async with connect(own_redis.url) as client:
        first, second = await group(client, "n", 2, quiet_s=1.0)
        await client.save()
        began = first.view.now
        await client.hincrby(keys.group_state("n", JOB), "clock", 60_000)
        assert ids(await first.heartbeat()) == ["0-a"]
        await restart(own_redis, client)
        assert (await second.heartbeat()).now < began + 30
        view = await first.heartbeat()
        assert view.now >= began + 60
        assert sorted(ids(view)) == ["0-a", "1-a"]
        assert view.quiet_until >= view.now + 0.9


async def test_the_highest_generation_comes_back_whoever_is_first(own_redis: RedisServer) -> None:
    """One that was cut off and knows an earlier one only is outside when others are back."""
    async with connect(own_redis.url) as client:
        first, second = await group(client, "n", 2)
        await second.heartbeat(leaving=True)
        latest = await first.publish()
        await first.heartbeat(up=2)
        await client.flushdb()
        await later(client, 0.0)
        assert (await second.heartbeat(leaving=False)).number == 1
        view = await first.heartbeat()
        assert (view.generation, view.number) == (latest, 2)
        view = await second.heartbeat()
        assert (view.generation, view.rank("1-a")) == (latest, None)


async def test_a_newcomer_does_not_begin_anew_in_an_emptied_redis(client: Redis, namespace: str) -> None:
    """For a second nothing is published there, however ready it is; then somebody is back who knows more."""
    (old,) = await group(client, namespace, 1)
    await client.delete(*keys.group_keys(namespace, JOB))
    newcomer = Agent(client, namespace, 1, quiet_s=1.0)
    await newcomer.heartbeat()
    while (view := await newcomer.heartbeat()).now < view.members[0].since + 0.5:
        assert isinstance(plan_generation(view, BOUNDS, "1-a"), WaitReason)
        await later(client, 0.05)
    draft = plan_generation(msgspec.structs.replace(view, quiet_until=0.0), BOUNDS, "1-a")
    assert isinstance(draft, Generation)
    assert await newcomer.membership.propose(draft) is None
    assert (await old.heartbeat()).number == 1
    assert (await newcomer.publish()).members == ("0-a", "1-a")


async def test_an_agent_that_did_not_hear_of_its_registration_registers_once(client: Redis, namespace: str) -> None:
    """Redis had done it when the connection broke."""
    agent = Agent(client, namespace, 0)
    fence = (await agent.heartbeat()).members[0].member.fence
    agent.membership._fence = 0
    assert (await agent.heartbeat()).members[0].member.fence == fence


async def test_fences_in_an_emptied_redis_are_above_those_that_it_forgot(client: Redis, namespace: str) -> None:
    """An agent that was started anew is never taken for the earlier one of its instance."""
    await later(client, 1.0)
    before = (await Agent(client, namespace, 0).heartbeat()).members[0].member.fence
    await client.delete(*keys.group_keys(namespace, JOB))
    await later(client, 1.0)
    anew = Agent(client, namespace, 0, "b")
    assert (await anew.heartbeat()).members[0].member.fence > before


async def faller(client: Redis, namespace: str, index: int = 2, boot: str = "a") -> RendezvousStore:
    """Return the membership of an agent that is registered."""
    redis_store = RendezvousStore(client, namespace, JOB)
    await redis_store.heartbeat(TrainerMember(id=f"{index}-{boot}", index=index))
    return redis_store


async def counts(membership: RendezvousStore, steps: list[int], *, generation: int = 0) -> list[int]:
    """Return the count of each of these falls, each at a step of the job."""
    return [await membership.count_failure(generation, step, progress=False) for step in steps]


async def test_falls_without_progress_add_up(client: Redis, namespace: str) -> None:
    """A later step than at any fall before begins a new count."""
    one = await faller(client, namespace)
    assert await counts(one, [100, 100, 100, 100]) == [1, 2, 3, 4]
    assert await counts(one, [101, 50, 101, 101]) == [1, 2, 3, 4]
    assert await one.count_failure(0, 50, progress=True) == 1


async def test_the_last_fall_is_part_of_the_status(client: Redis, namespace: str) -> None:
    """With the falls before it since the job's last step; a new run begins without one."""
    one, other = await faller(client, namespace), await faller(client, namespace, 3)
    await one.count_failure(1, 100, progress=False, reason="it fell")
    await other.count_failure(2, 100, progress=False, reason="so did it")
    status = await group_status(client, namespace, JOB)
    assert status is not None
    assert status.failure == LastFailure(step=100, instance=3, count=2, reason="so did it")
    await one.end(JobOutcome("failed", "too many falls"))
    for each in (one, other):
        await each.leave()
    await faller(client, namespace, boot="b")
    after = await group_status(client, namespace, JOB)
    assert after is not None
    assert after.failure is None


async def test_steps_of_others_are_progress(client: Redis, namespace: str) -> None:
    """Whoever falls tells where the job stands: one that never comes to a step does not fail a healthy job."""
    one, other = await faller(client, namespace), await faller(client, namespace, 3)
    assert await counts(one, [100, 101]) == [1, 1]
    assert await counts(other, [101, 102], generation=7) == [2, 1]


async def test_falls_of_several_in_one_generation_are_one(client: Redis, namespace: str) -> None:
    """When a rank of a plain script ends, the others do because of it; and all may be killed before they are in one."""
    agents = [await faller(client, namespace, index) for index in range(10)]
    for number, generation in enumerate((0, 7, 8, 9), 1):
        assert [await counts(each, [9], generation=generation) for each in agents] == [[number]] * 10
    assert number > MAX_FAILURES


async def test_one_that_never_gets_into_a_generation_falls_again_each_time(client: Redis, namespace: str) -> None:
    """Its instance has been told of none since the first fell."""
    assert await counts(await faller(client, namespace), [9] * 4, generation=7) == [1, 2, 3, 4]


@pytest.mark.parametrize("ended", [True, False])
async def test_a_new_run_of_the_same_name_begins_with_no_falls(client: Redis, namespace: str, *, ended: bool) -> None:
    """Jobs that are started by hand have no word for their run; how the one before ended is of no matter."""
    before = await faller(client, namespace)
    assert await counts(before, [100] * 4) == [1, 2, 3, 4]
    if ended:
        await before.end(JobOutcome("failed", "too many falls"))
    await before.leave()
    anew = await faller(client, namespace, boot="b")
    assert await counts(anew, [50, 50]) == [1, 2]


async def test_who_last_beat_before_the_clock_was_set_back_is_not_there(client: Redis, namespace: str) -> None:
    """Whoever is beats again in a moment."""
    await group(client, namespace, 1)
    (now_s, _), state = await client.time(), keys.group_state(namespace, JOB)
    for at_s, is_there in ((now_s, True), (now_s + 3600, False), (now_s - 3600, False)):
        await client.hset(state, "wall", str(at_s * 1000))
        assert await has_live_agents(client, namespace, JOB) == is_there


async def test_who_leaves_a_redis_that_was_emptied_leaves_nothing_there_for_ever(client: Redis, namespace: str) -> None:
    """All that a group has in Redis has an end."""
    (agent,) = await group(client, namespace, 1)
    await client.delete(*keys.group_keys(namespace, JOB))
    await agent.membership.leave()
    left = [key for key in keys.group_keys(namespace, JOB) if await client.exists(key)]
    assert [key for key in left if not 0 < await client.ttl(key) <= 86_400] == []


@pytest.mark.parametrize("field", ["generation", "outcome"])
@pytest.mark.parametrize("content", ["{", '{"number": "none"}', "\udcff", "[" * 3000])
async def test_a_group_that_can_not_be_read_is_said_to_be(
    client: Redis, namespace: str, field: str, content: str
) -> None:
    """By an error that names the key, to its agents and to whoever looks at it."""
    (agent,) = await group(client, namespace, 1)
    key = keys.group_state(namespace, JOB)
    await client.hset(key, field, content.encode(errors="surrogateescape"))
    with pytest.raises(MalformedRecordError, match=re.escape(f"at '{key}' can't be read")):
        await agent.heartbeat()
    if field == "outcome":
        with pytest.raises(MalformedRecordError, match=re.escape(f"at '{key}' can't be read")):
            await group_status(client, namespace, JOB)


@pytest.mark.parametrize(
    ("field", "content", "problem"),
    [
        ("quiet_until", "", "it has no 'quiet_until'"),
        ("since", "lately", "could not convert string to float"),
        ("number", "none", "attempt to compare"),
        ("wall", "noon", "attempt to perform arithmetic"),
    ],
)
async def test_a_state_that_lacks_a_number_is_named_to_its_agents(
    client: Redis, namespace: str, field: str, content: str, problem: str
) -> None:
    """Whether its script or the agent itself meets it first."""
    (agent,) = await group(client, namespace, 1)
    key = keys.group_state(namespace, JOB)
    await (client.hset(key, field, content) if content else client.hdel(key, field))
    with pytest.raises(MalformedRecordError, match=problem) as caught:
        await agent.heartbeat()
    assert caught.value.key in (key, f"{key.removesuffix('state')}*")


@pytest.mark.parametrize("field", ["members", "wall"])
async def test_a_state_that_lacks_a_field_is_named_to_who_looks(client: Redis, namespace: str, field: str) -> None:
    """Also one whose clock is no number."""
    await group(client, namespace, 1)
    key = keys.group_state(namespace, JOB)
    await client.hdel(key, field)
    with pytest.raises(MalformedRecordError, match=f"it has no '{field}'") as caught:
        await group_status(client, namespace, JOB)
    assert caught.value.key == key
    await client.hset(key, "wall", "noon")
    for look in (group_status, has_live_agents):
        with pytest.raises(MalformedRecordError, match=re.escape(key)):
            await look(client, namespace, JOB)


@pytest.mark.parametrize(
    ("what", "content"),
    [
        (1, '{"id": 7}'),
        (2, '{"id": 7}'),
        (2, '{"fence": 7}'),
        (2, '{"fence": 7, "at": "noon", "since": 0}'),
    ],
)
async def test_who_can_not_be_read_is_waited_for_and_comes_back(
    client: Redis, namespace: str, what: int, content: str
) -> None:
    """The others go on, the log says so once, and the next beat replaces what is damaged, or the lease runs out."""
    one, other = await group(client, namespace, 2, ttl_s=3.0)
    key, damaged = keys.group_keys(namespace, JOB)[what], other.record.id
    with structlog.testing.capture_logs() as said:
        for _ in range(3):
            await client.hset(key, damaged, content)
            await later(client, 0.2)
            view = await one.heartbeat()
            assert (ids(view), [*view.granted], view.state) == ([one.record.id], [damaged], "active")
            assert isinstance(plan_generation(view, BOUNDS, one.record.id), WaitReason)
    assert [(each["event"], each["key"], each["member"]) for each in said] == [("member.unreadable", key, damaged)]
    assert len(ids(await other.heartbeat())) == len(ids(await one.heartbeat())) == 2
    assert one.view.generation == other.view.generation
    await client.hset(key, damaged, "?")
    for _ in range(20):
        await later(client, 0.5)
        await one.heartbeat()
    assert not one.view.granted
    assert isinstance(plan_generation(one.view, BOUNDS, one.record.id), Generation)
    assert (await kinds(client, namespace))[-1] == "gone"


async def test_a_request_for_a_checkpoint_reaches_the_agents_and_is_answered(client: Redis, namespace: str) -> None:
    """With the next heartbeat's answer; the checkpoint that names its number ends it, and the waiting."""
    (agent,) = await group(client, namespace, 1)
    await agent.heartbeat(called=True)
    request = await request_checkpoint(client, namespace, JOB)
    view = await agent.heartbeat()
    assert (view.checkpoint_asked, view.checkpoint_asked_in, view.checkpoint_answered) == (request, 1, 0)
    waiting = asyncio.create_task(await_checkpoint(client, namespace, JOB, request))
    saved = Event(kind="saved", instance=0, generation=1, step=7, epoch=2, url="/c/7")
    await agent.membership.announce(saved)
    assert (await agent.heartbeat()).checkpoint_answered == 0, "one that was begun before"
    answer = msgspec.structs.replace(saved, step=8, request=request)
    await agent.membership.announce(answer)
    assert await waiting == answer
    assert (await agent.heartbeat()).checkpoint_answered == request
    assert await request_checkpoint(client, namespace, JOB) > request


async def test_a_job_that_can_write_no_checkpoint_refuses_a_request(client: Redis, namespace: str) -> None:
    """Each time with the reason: nobody waits in vain."""
    with pytest.raises(NoCheckpointError, match="knows no trainers of that name"):
        await request_checkpoint(client, namespace, JOB)
    (agent,) = await group(client, namespace, 1)
    with pytest.raises(NoCheckpointError, match=r"has not called elastic\.init"):
        await request_checkpoint(client, namespace, JOB)
    await agent.heartbeat(called=True, keeps=False)
    with pytest.raises(NoCheckpointError, match="keeps no checkpoints"):
        await request_checkpoint(client, namespace, JOB)
    await agent.heartbeat(keeps=True)
    request = await request_checkpoint(client, namespace, JOB)
    await agent.membership.announce(Event(kind="note", instance=0, reason="the disk is full", request=request))
    with pytest.raises(NoCheckpointError, match="the disk is full"):
        await await_checkpoint(client, namespace, JOB, request)
    request = await request_checkpoint(client, namespace, JOB)
    await agent.membership.end(JobOutcome("done"))
    with pytest.raises(NoCheckpointError, match=r"has ended before \(done\)"):
        await await_checkpoint(client, namespace, JOB, request)
    with pytest.raises(NoCheckpointError, match="it has ended"):
        await request_checkpoint(client, namespace, JOB)


async def test_a_lost_request_is_not_waited_for(client: Redis, namespace: str) -> None:
    """As in a Redis that was emptied: whoever asked is told to ask again."""
    (agent,) = await group(client, namespace, 1)
    await agent.heartbeat(called=True)
    request = await request_checkpoint(client, namespace, JOB)
    await client.hdel(keys.group_state(namespace, JOB), "checkpoint_asked")
    with pytest.raises(NoCheckpointError, match="ask again"):
        await await_checkpoint(client, namespace, JOB, request)
