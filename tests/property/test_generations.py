"""What generations never do and always come to, for any order of joins, leaves, losses, stops and Redis's troubles."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.depth import examples
from support.elastic.group_simulation import LEASE_S, Agent, World, starving
from support.redis_clock import take_time_from_a_key

from edl_runtime.elastic.rendezvous.generation import Generation
from edl_runtime.elastic.rendezvous.planner import WaitReason, plan_generation
from edl_runtime.specs import Bounds
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

SETTINGS = settings(
    max_examples=examples(8, 200), stateful_step_count=25, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
"""Shrinking takes minutes; what is printed when it fails can be followed as it is."""
INSTANCES = st.integers(0, 3)


def again(agent: Agent) -> Generation | None:
    """Return a proposal of the same members once more."""
    current = agent.view.generation
    return msgspec.structs.replace(current, after=current.number) if current else None


class Groups(RuleBasedStateMachine):
    """Four instances, whatever happens to them."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client = self.runner.run(self.connected())
        self.world = World(self.client, Bounds(1, 4))

    async def connected(self) -> Any:
        client = connect(self.url)
        await client.flushdb()
        return client

    def do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(what)

    def agent(self, index: int) -> Agent | None:
        return next((agent for agent in reversed(self.world.alive) if agent.index == index), None)

    @initialize(low=st.integers(1, 3), more=st.integers(0, 2), first=st.integers(1, 4))
    def begin(self, low: int, more: int, first: int) -> None:
        self.world.bounds = Bounds(low, low + more)
        for index in range(first):
            self.do(self.world.start(index))
        self.do(self.world.run(3.0))

    @rule(index=INSTANCES)
    def start(self, index: int) -> None:
        """Start an instance, anew if it is there; of an earlier one that lost Redis or is stopped nobody knows."""
        there = self.agent(index)
        if there is None or not there.runs or not there.reachable:
            self.do(self.world.start(index))

    @rule(index=INSTANCES)
    def kill(self, index: int) -> None:
        if agent := self.agent(index):
            agent.alive = False

    @rule(index=INSTANCES)
    def kill_trainer(self, index: int) -> None:
        agent = self.agent(index)
        if agent and agent.runs:
            agent.new_trainer(1.0)

    @rule(index=INSTANCES)
    def stop_process(self, index: int) -> None:
        agent = self.agent(index)
        if agent and agent.runs:
            agent.stopped_at = self.world.now

    @rule()
    def continue_processes(self) -> None:
        for agent in self.world.alive:
            agent.stopped_at = None

    @rule()
    def decide_now(self) -> None:
        """Each agent makes up its mind, or would have the same members once more, and is then slow to propose it."""
        for agent in self.world.alive:
            plan = plan_generation(agent.view, self.world.bounds, agent.id)
            agent.late = again(agent) if isinstance(plan, WaitReason) else plan

    @rule(index=INSTANCES)
    def propose_late(self, index: int) -> None:
        agent = self.agent(index)
        if agent and agent.runs and agent.reachable:
            self.do(agent.propose(agent.late))

    @rule(index=INSTANCES)
    def leave(self, index: int) -> None:
        agent = self.agent(index)
        if agent and agent.runs and agent.leaving_since is None:
            agent.leaving_since = self.world.now

    @rule(index=INSTANCES)
    def lose_redis(self, index: int) -> None:
        if agent := self.agent(index):
            agent.reachable = False

    @rule()
    def find_redis(self) -> None:
        for agent in self.world.alive:
            agent.reachable = True

    @rule(away_s=st.sampled_from([1.0, 4.0, 20.0]), emptied=st.booleans())
    def redis_goes_away(self, away_s: float, emptied: bool) -> None:  # noqa: FBT001 - hypothesis's
        """While Redis is away, and by its coming back, nobody is removed who was not on the way out."""
        world = self.world
        world.feed()
        knows = any(agent.runs and agent.reachable and agent.view.number >= world.highest for agent in world.alive)
        cut = [agent for agent in world.alive if agent.reachable]
        whole = len(cut) == len(world.alive) and world.highest and world._is_well()
        before = {agent.id for agent in world.alive if agent.up and not agent.leaving_since and agent.runs}
        for agent in cut:
            agent.reachable = False
        self.do(world.run(away_s))
        if emptied and knows:
            self.do(world.forget())
        for agent in cut:
            agent.reachable = True
        self.do(world.run(LEASE_S + 1.0))
        if whole:
            assert before <= set(world.published[world.highest].members)

    @rule(by_s=st.sampled_from([-3600.0, -2.0, 2.0, 3600.0]))
    def clock_steps(self, by_s: float) -> None:
        self.world.ahead_s += by_s

    @rule(index=INSTANCES)
    def suspect_falsely(self, index: int) -> None:
        agent = self.agent(index)
        if agent and agent.runs and agent.reachable and agent.up:
            self.do(agent.membership.suspect(agent.up, "it seemed so"))

    @rule(form_s=st.sampled_from([0.3, 3.0, 6.0, 12.0]), come_on=st.frozensets(INSTANCES))
    def form_slowly(self, form_s: float, come_on: frozenset[int]) -> None:
        """Take so long to form, while some come on: they read the state, or it is given to them."""
        self.world.form_s, self.world.advancing = form_s, come_on

    @rule(starved=st.frozensets(INSTANCES), longest_s=st.sampled_from([1.0, 3.0, 8.0]))
    def starve(self, starved: frozenset[int], longest_s: float) -> None:
        """Come to nothing for so long at most after each turn."""
        late = starving(longest_s)
        self.world.starve = lambda index: late(index) if index in starved else 0.0

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 2.0, 5.0]))
    def run(self, seconds: float) -> None:
        self.do(self.world.run(seconds))

    @precondition(lambda self: self.world.published)
    @rule()
    def settle(self) -> None:
        self.do(self.world.settle())

    def teardown(self) -> None:
        try:
            self.do(self.world.settle())
        finally:
            self.do(self.client.aclose())
            self.runner.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generations_keep_their_promises(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens, numbers and leases hold; once it is quiet, all who can train do."""
    take_time_from_a_key(monkeypatch)
    Groups.url = own_redis.url
    run_state_machine_as_test(Groups, settings=SETTINGS)
