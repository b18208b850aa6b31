"""A simulation of a job's agents and trainers, with the real scripts in a real Redis whose clock the test sets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from support.redis_clock import START_S, set_clock

from edl_runtime.elastic.errors import InstanceSupersededError
from edl_runtime.elastic.rendezvous.generation import Generation, GroupView, Timeouts, TrainerMember
from edl_runtime.elastic.rendezvous.planner import WaitReason, job_outcome, plan_generation
from edl_runtime.elastic.rendezvous.redis_store import RendezvousStore
from edl_runtime.specs import Bounds

if TYPE_CHECKING:
    from redis.asyncio import Redis

TICK_S = 0.25
LEASE_S = 3.0
TIMES = Timeouts(join_limit_s=4.0, retry_s=2.0, setback_s=0.5)
LOAD_S = 2.0
"""Start time of the process of an unchanged script."""
HANGS_FOR_S = 1.5
"""How long a collective waits for a stopped member before its trainer reports it."""


def starving(longest_s: float) -> Callable[[int], float]:
    """Return random delays after an agent's turn: mostly a second or two, at most `longest_s`."""
    drawn = random.Random(1)
    return lambda _: drawn.triangular(TICK_S, longest_s, 1.0)


class Agent:
    """An instance's agent and its trainer. `reports_failures`: whether the trainer reports broken connections."""

    reports_failures = True

    def __init__(self, world: World, index: int, boot: int) -> None:
        self.id = f"{index}-{boot}"
        self.index = index
        self.membership = RendezvousStore(world.client, "n", "job", ttl_s=LEASE_S)
        self.view = GroupView(now=0.0)
        self.alive = True
        self.stopped_at: float | None = None
        self.reachable = True
        self.leaving_since: float | None = None
        self.loaded_at = world.now + 0.5
        self.joined = 0
        self.joined_at = 0.0
        self.up = 0
        self.lost = 0
        self.failures = 0
        self.suspected = 0
        self.late: Generation | None = None
        self.wakes_at = 0.0
        self._world = world

    @property
    def runs(self) -> bool:
        return self.alive and self.stopped_at is None

    @property
    def ready(self) -> bool:
        return self._world.now >= self.loaded_at

    def record(self) -> TrainerMember:
        return TrainerMember(
            id=self.id,
            index=self.index,
            ready=self.ready,
            leaving=self.leaving_since is not None,
            live=True,
            standby=True,
            up=self.up,
            lost=self.lost,
            failures=self.failures,
            stepped=self.up,
            advanced=self.joined > self.up and self.ready and self.index in self._world.advancing,
        )

    def new_trainer(self, load_s: float) -> None:
        """Its trainer ends and another is started."""
        if self.up < self.joined:
            self.failures += 1
        self.lost = max(self.lost, self.joined)
        self.joined = self.up = 0
        self.loaded_at = self._world.now + load_s

    async def turn(self) -> None:
        """One iteration of the agent's loop."""
        if not self.runs or self._world.now < self.wakes_at:
            return
        self.wakes_at = self._world.now + self._world.starve(self.index)
        self._train()
        if not self.reachable:
            return
        try:
            record = self.record()
            self.view = view = await self.membership.heartbeat(record)
        except InstanceSupersededError:
            self.alive = False
            return
        current = view.generation
        if record.advanced and current and self.id in current.members:
            self._world.advanced_at = view.now
        if current:
            self._follow(current)
        if self.leaving_since is not None and (
            not current or self.id not in current.members or self._world.now > self.leaving_since + 2.0
        ):
            self.alive = False
            await self.membership.leave()
            return
        if (
            self.reports_failures
            and self.joined
            and self.suspected < self.joined
            and self._world.is_broken(self.joined)
        ):
            self.suspected = self.joined
            await self.membership.suspect(self.joined, "the connection was reset")
        assert job_outcome(view) is None
        await self.propose(plan_generation(view, self._world.bounds, self.id, self._world.times))

    async def propose(self, draft: Generation | WaitReason | None) -> bool:
        """Publish a draft, if there is one, and check what was published."""
        published = await self.membership.propose(draft) if isinstance(draft, Generation) else None
        if published:
            await self._world.check(published)
        return published is not None

    def _train(self) -> None:
        if self.joined > self.up and self.ready and self._world.has_formed(self.joined):
            self.up = self.joined
            self.failures = 0

    def _follow(self, current: Generation) -> None:
        if self.id in current.members and current.number > max(self.joined, self.lost):
            if current.gear != "live":
                self.loaded_at = self._world.now + (0.25 if current.gear == "warm" else 2.0)
                self.up = 0
            self.joined, self.joined_at = current.number, self._world.now
        elif self.joined and current.number > self.joined:
            self.new_trainer(1.0)


class PlainAgent(Agent):
    """The agent of an unchanged script, whose process is restarted for each generation."""

    reports_failures = False

    def record(self) -> TrainerMember:
        ready = self.ready or self.view.rank(self.id) is not None
        return msgspec.structs.replace(super().record(), ready=ready, live=False, stepped=0, advanced=False)

    def _train(self) -> None:
        """It reports no steps."""

    def _follow(self, current: Generation) -> None:
        if current.number > self.joined and self.up:  # its process is ended, and the next is loaded
            self.up, self.loaded_at = 0, self._world.now + LOAD_S
        if current.number > self.joined and self.id in current.members and self.ready:
            self.joined = self.up = current.number


class World:
    """All agents of a job, and checks of each generation that they publish."""

    def __init__(self, client: Redis, bounds: Bounds) -> None:
        self.client = client
        self.bounds = bounds
        self.now = float(START_S)
        self.ahead_s = 0.0
        self.form_s = 0.3
        self.advancing: frozenset[int] = frozenset()
        self.advanced_at = 0.0
        self.times = TIMES
        self.agents: list[Agent] = []
        self.feed()
        self.published: dict[int, Generation] = {}
        self.random = random.Random(1)
        self._boots = 0

    def feed(self) -> None:
        """Let no instance starve any more: `starve` returns the delay after each turn of an instance."""
        self.starve: Callable[[int], float] = lambda _: 0.0
        for agent in self.agents:
            agent.wakes_at = 0.0

    async def start(self, index: int, *, plain: bool = False) -> Agent:
        """Start an instance; an earlier agent of it is not ended."""
        await self.set_clock()
        self._boots += 1
        self.agents.append((PlainAgent if plain else Agent)(self, index, self._boots))
        return self.agents[-1]

    @property
    def alive(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.alive]

    @property
    def highest(self) -> int:
        return max(self.published, default=0)

    async def set_clock(self) -> None:
        """Set Redis's clock to the world's, as far ahead or behind as it is."""
        await set_clock(self.client, self.now + self.ahead_s)

    async def run(self, seconds: float) -> None:
        """Let time pass; the agents wake in any order."""
        for _ in range(max(1, round(seconds / TICK_S))):
            self.now += TICK_S
            await self.set_clock()
            for agent in self.random.sample(self.agents, len(self.agents)):
                await agent.turn()

    async def forget(self) -> None:
        """Empty Redis."""
        await self.client.flushdb()
        await self.set_clock()

    def trainers(self, number: int) -> list[Agent | None]:
        """Return the agents whose trainers have joined a generation, None for each other member."""
        by_id = {agent.id: agent for agent in self.alive}
        members = [by_id.get(member) for member in self.published[number].members]
        return [agent if agent and agent.joined == number else None for agent in members]

    def has_formed(self, number: int) -> bool:
        """Whether all members of a generation have connected."""
        found = self.trainers(number)
        return all(
            agent and agent.stopped_at is None and agent.ready and self.now >= agent.joined_at + self.form_s
            for agent in found
        ) or any(agent and agent.up == number for agent in found)

    def is_broken(self, number: int) -> bool:
        """Whether a trainer of a generation notices that another has ended or hangs."""
        found = self.trainers(number)
        if not any(agent and agent.up == number for agent in found):
            return False  # they may not have connected yet
        return any(
            agent is None or (agent.stopped_at is not None and self.now > agent.stopped_at + HANGS_FOR_S)
            for agent in found
        )

    async def check(self, new: Generation) -> None:
        """Check a new generation."""
        assert new.number > self.highest, "numbers strictly increase, and none is used twice"
        assert new.after == self.highest, "it follows the current one"
        assert len(set(new.members)) == len(new.members)
        assert len({member.partition("-")[0] for member in new.members}) == len(new.members), "an instance has one rank"
        assert self.bounds.min <= len(new.members) <= self.bounds.max
        known = await self.client.hmget("edl:{n/job}:group:state", "clock", "overtime")
        clock, overtime = map(float, known)
        for member in new.members:
            deadline = await self.client.zscore("edl:{n/job}:group:leases", member)
            assert deadline is not None, f"{member} has a lease"
            assert deadline + overtime > clock
        old = self.published.get(new.after)
        if old and "did not form" in new.reason:
            without_progress_s = clock / 1000 - max(self.advanced_at, old.proposed_at)
            assert without_progress_s >= self.times.limit_s(old) - 0.001, (
                "only a generation without progress is overdue"
            )
        if old:
            records = [
                msgspec.json.decode(record, type=TrainerMember)
                for record in await self.client.hvals("edl:{n/job}:group:records")
            ]
            stay = {record.id for record in records if record.lost < old.number and record.id in new.members}
            survivors = [member for member in old.members if member in stay]
            assert list(new.members[: len(survivors)]) == survivors, "survivors keep their order, newcomers follow"
        self.published[new.number] = new

    async def settle(self) -> None:
        """Let all instances recover, and check that the group settles."""
        self.form_s = 0.3
        self.feed()
        for agent in self.alive:
            agent.reachable, agent.stopped_at = True, None
        rest_s, before = 0.0, None
        for _ in range(600):
            await self.run(TICK_S)
            views = [agent.view for agent in self.alive]
            now = [(view.generation, view.state) for view in views]
            rest_s = rest_s + TICK_S if now == before else 0.0
            before = now
            if rest_s >= 20.0 or (rest_s >= 4.0 and self._is_well()):
                break
        assert rest_s >= 4.0, "nothing oscillates"
        assert self._is_well() or len(self.alive) < self.bounds.min

    def _is_well(self) -> bool:
        """Whether all instances train, up to the maximum."""
        current = self.published.get(self.highest)
        train = {agent.id for agent in self.alive if agent.up == self.highest}
        wanted = min(len(self.alive), self.bounds.max)
        return (
            current is not None
            and set(current.members) == train
            and len(train) == wanted
            and all(agent.view.generation == current and agent.view.state == "active" for agent in self.alive)
        )
