"""An instance's agent: brings its trainer into the generations that all agents of the job agree on.

It is the only one of its instance that talks to Redis. While Redis is away nothing changes: who trains trains on.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.elastic.crew import Crew
from edl_runtime.elastic.environment import Communication
from edl_runtime.elastic.events import Event
from edl_runtime.elastic.falls import Fall, Others, Row, Verdict, judge
from edl_runtime.elastic.gears import Kill, Post, orders
from edl_runtime.elastic.generation import GroupView, Outcome, TrainerMember
from edl_runtime.elastic.leading import lead
from edl_runtime.elastic.membership import BEAT_EVERY_S, RETRY_EVERY_S, Membership
from edl_runtime.elastic.messages import Beat, Gear, Lost, Note, Stepped, Up
from edl_runtime.elastic.places import Places
from edl_runtime.elastic.ports import Ports, check_host
from edl_runtime.elastic.record import record_of
from edl_runtime.elastic.reports import Reports
from edl_runtime.elastic.script import Script
from edl_runtime.elastic.steps import Steps
from edl_runtime.elastic.trainers import Heard
from edl_runtime.elastic.vigil import Vigil
from edl_runtime.errors import EX_DATAERR, EdlError, InitNotCalledError, RegistryUnavailableError
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds

if TYPE_CHECKING:
    from redis.asyncio import Redis

ALONE_S = 60.0
"""How long an agent whose trainer has trained all there is waits for a Redis that is away: all end at the same step."""

FROZEN_TOLD_EVERY_S = 30.0
"""How often an agent says that Redis is away still."""

AFTER_OTHERS_S = 1.0
"""How long an agent stays whose job another instance has failed, so that the exit of that one is seen first."""

SHORTEST_TURN_S = 0.01

log = get_logger(__name__)


class Ending(msgspec.Struct, frozen=True):
    """How an agent ends: with this exit status, or negative by this signal; and why, for people."""

    status: int
    reason: str = ""


class Agent:
    """One instance of the job in `settings`. `gear`: the fastest that generations may be entered in."""

    def __init__(
        self,
        script: Script,
        settings: RuntimeSettings,
        client: Redis,
        *,
        bounds: Bounds,
        gear: Gear,
        communication: Communication,
    ) -> None:
        self._script = script
        self._settings = settings
        self._client = client
        self._bounds = bounds
        self._communication = communication
        self._me = TrainerMember(
            id=f"{settings.instance}-{secrets.token_hex(4)}", index=settings.instance, host=settings.host, gear=gear
        )
        self._membership = Membership(
            client, settings.namespace, settings.job, run=settings.run, ttl_s=settings.lease_ttl_s
        )
        self._reports = Reports(client, settings, self._membership)
        self._wake = asyncio.Event()
        self._places = Places(client, settings, told=self._reports.tell, changed=self._wake.set)
        self._ports = Ports(settings.host)
        self._vigil = Vigil(self._me.id, settings.step_limit_s)
        self._steps = Steps()
        self._view = GroupView(now=0.0)
        self._frozen_since: float | None = None
        self._frozen_told: float | None = None
        self._leaving_since: float | None = None
        self._signal = signal.SIGTERM
        self._row = Row()
        self._verdict: Verdict | None = None
        self._over_since: float | None = None
        self._lost_because = ""

    def leave(self, number: signal.Signals) -> None:
        """Go, at the end of a step and without hurry, as `number` asks; `run` then returns its negative."""
        if self._leaving_since is None:
            log.info("agent.leaving", signal=number.name)
            self._leaving_since, self._signal = time.monotonic(), number
            self._wake.set()

    async def run(self, environ: Mapping[str, str]) -> Ending:
        """Train until the job has ended or this instance has left; no process is left then. `environ`: of trainers.

        Raises InstanceSupersededError, JobTakenError; SpecError when EDL_HOST is no address of this machine, or none
        at which the others reach what its trainer talks by.
        """
        failure: EdlError | None = None
        with self._ports:
            async with asyncio.TaskGroup() as tasks:
                crew = Crew(self._script, self._me.id, environ, self._communication, tasks=tasks, heard=self._heard)
                self._places.add(self._settings.checkpoint)
                if self._script.forgets and self._bounds.max > 1:
                    self._refuse(InitNotCalledError())
                loops = (self._watch(), self._reports.run(), self._places.run())
                helpers = [tasks.create_task(loop) for loop in loops]
                try:
                    ending = await self._work(crew)
                except EdlError as error:  # which a task group would wrap
                    failure = error
                crew.dismiss()
                for helper in helpers:
                    helper.cancel()
        if failure:
            raise failure
        return ending

    async def _work(self, crew: Crew) -> Ending:
        while True:
            self._wake.clear()
            rest_s = await self._turn(crew)
            if ending := self._ending(crew):
                await self._reports.finish()
                with suppress(RegistryUnavailableError):
                    await self._membership.leave()
                return ending
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), rest_s)

    def _heard(self, said: Heard) -> None:
        if not isinstance(said, Beat | Stepped):
            self._wake.set()

    async def _watch(self) -> None:
        """Wake the loop when there is news in Redis."""
        while True:
            try:
                if await self._membership.changed():
                    self._wake.set()
                    await asyncio.sleep(SHORTEST_TURN_S)  # until the loop has looked
            except RegistryUnavailableError:
                await asyncio.sleep(RETRY_EVERY_S)

    async def _turn(self, crew: Crew) -> float:
        """Look and act; return for how long nothing is to be done unless there is news, in seconds."""
        self._take_in(crew)
        if crew.elastic and not self._me.elastic and self._communication == "gloo" and self._bounds.max > 1:
            check_host(self._settings.host)
        for fall in crew.take_falls():
            await self._judge(fall)
        self._places.add(crew.checkpoint)
        for error in self._places.take_refusals():
            self._refuse(error)
        try:
            self._me = record_of(self._me, crew, self._post(crew), self._view, self._ports)
            self._change(ready=self._me.ready and self._places.are_held)
            self._view = await self._membership.beat(self._me)
            if self._frozen_since is not None:
                log.info("agent.thawed", generation=self._view.number)
            self._frozen_since = self._frozen_told = None
            rest_s = min(BEAT_EVERY_S, await self._lead(crew))
        except RegistryUnavailableError as error:
            self._freeze(error)
            rest_s = RETRY_EVERY_S
        if any(each.member.elastic for each in self._view.members):
            crew.take_for_elastic()
        if self._failed and self._view.outcome is None:
            self._view = msgspec.structs.replace(self._view, outcome=self._failed)
        self._ports.renew(self._view.number)
        await self._steer(crew)
        return max(SHORTEST_TURN_S, rest_s)

    def _freeze(self, error: RegistryUnavailableError) -> None:
        """Note that Redis is away, and say so now and again."""
        now = time.monotonic()
        self._frozen_since = self._frozen_since or now
        if self._frozen_told is None or now >= self._frozen_told + FROZEN_TOLD_EVERY_S:
            self._frozen_told = now
            log.warning("agent.frozen", cause=str(error), for_s=round(now - self._frozen_since))

    def _take_in(self, crew: Crew) -> None:
        generation = self._view.generation
        for said in crew.take_news():
            match said:
                case Up():
                    self._change(failures=0, step=said.step)
                case Stepped():
                    self._steps.add(said)
                    steps = self._steps
                    self._change(
                        step=steps.step, stepped=steps.generation, pause_s=steps.pause_s, paused_in=steps.paused_in
                    )
                    if generation and self._view.rank(self._me.id) == 0:
                        instances = len(generation.members)
                        self._reports.show(steps.progress(instances=instances, generation=generation.number))
                case Lost():
                    self._lost_because = said.reason
                    step = self._me.step if said.step is None else said.step
                    self._change(fallen=said.generation, step=step)
                case _:
                    self._reports.tell(said)

    async def _judge(self, fall: Fall) -> None:
        """Decide what a trainer's fall is the end of, and tell all."""
        me = self._me
        log.warning("trainer.fell", reason=fall.reason, exit_code=fall.exit_code, generation=fall.generation)
        others = Others.of(self._view, me.id, self._bounds, me.step, stepped=bool(me.stepped))
        count = 0
        if not fall.unwritten:
            self._change(lost=max(me.lost, fall.generation), failures=me.failures + (not fall.was_up))
            self._row = self._row.after(fall, others.step)
        with suppress(RegistryUnavailableError):  # then nobody can tell how many there were
            if not fall.unwritten and not others.without:
                count = await self._membership.count_fall(fall.generation, others.step, progress=fall.has_come_on)
        self._verdict = judge(fall, others, self._row, count)
        if self._verdict and fall.unwritten:
            newest = await self._reports.newest_checkpoint()
            self._verdict = msgspec.structs.replace(self._verdict, reason=f"{self._verdict.reason}; {newest}")
        with suppress(RegistryUnavailableError):
            if self._failed:  # at once: others who see first that its trainer is gone may take the job for stopped
                await self._membership.end(self._failed)
            else:
                what = f"its checkpoint is not written: {fall.reason}" if fall.unwritten else fall.reason
                told = self._verdict.reason if self._verdict else what
                await self._membership.announce(Event(kind="failed", instance=me.index, reason=told))
        if self._verdict and self._leaving_since is None:
            self._leaving_since = time.monotonic()

    def _refuse(self, error: EdlError) -> None:
        """Fail the job as one whose input is wrong, as where it is to write where another does.

        One that trains already goes on.
        """
        others = Others.of(self._view, self._me.id, self._bounds, self._me.step, stepped=bool(self._me.stepped))
        if others.train:
            self._reports.tell(Note(text=f"{error}. This job goes on, for it trains already"))
            return
        self._verdict = Verdict(str(error), EX_DATAERR)
        self._leaving_since = self._leaving_since or time.monotonic()

    @property
    def _failed(self) -> Outcome | None:
        """How the job has ended, by what became of this instance's trainer."""
        if self._verdict is None or self._verdict.others_go_on:
            return None
        return Outcome("failed", f"instance {self._me.index}: {self._verdict.reason}")

    async def _lead(self, crew: Crew) -> float:
        """Do what any agent may do for all. Return after how many seconds there may be more to do."""
        current = self._view.generation
        if current and crew.mine.fallen == current.number and self._view.suspicion is None:
            await self._membership.suspect(current.number, self._lost_because)
        return await lead(self._membership, self._view, self._bounds, self._me.id, self._failed)

    async def _steer(self, crew: Crew) -> None:
        """Have the trainer do what it is to do now."""
        now = time.monotonic()
        hangs = self._vigil.look(
            self._view,
            spoke=crew.take_spoke(),
            stopped=crew.stopped,
            cpu_s=crew.cpu_s,
            waits_for=crew.waits_for,
            moves=crew.moves,
            median_s=self._steps.median_s,
            now=now,
        )
        if hangs and crew.mine.phase == "member":
            await crew.carry_out(Kill(hangs, planned=False))
            self._wake.set()
        if crew.falling:  # nothing can be told to it, and how it ended is still to be known
            return
        before = None
        while crew.mine != before:  # an order may make room for the next
            before = crew.mine
            for order in orders(before, self._post(crew), self._view, now):
                await crew.carry_out(order)

    def _post(self, crew: Crew) -> Post:
        return Post(
            member=self._me.id,
            elastic=crew.elastic,
            gear=self._me.gear,
            instances=self._bounds.max,
            leaving_since=self._leaving_since,
            grace_s=self._settings.grace_s,
            exclusive=self._communication == "nccl",
            finished=crew.finished,
        )

    def _change(self, **changes: object) -> None:
        self._me = msgspec.structs.replace(self._me, **changes)

    def _ending(self, crew: Crew) -> Ending | None:
        if crew.mine.phase != "absent":
            return None
        outcome = self._view.outcome
        if self._verdict:
            return Ending(self._verdict.status, f"instance {self._me.index}: {self._verdict.reason}")
        if outcome and outcome.kind != "failed":
            return Ending(0, outcome.reason)
        if crew.finished and self._frozen_since is not None and time.monotonic() >= self._frozen_since + ALONE_S:
            return Ending(0)
        if outcome:
            self._over_since = self._over_since or time.monotonic()
            return Ending(1, outcome.reason) if time.monotonic() >= self._over_since + AFTER_OTHERS_S else None
        return Ending(-self._signal) if self._leaving_since is not None else None
