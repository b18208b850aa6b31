"""The agent of one instance: joins the job's rendezvous and keeps the instance's worker in the agreed generation.

Only the agent of an instance talks to Redis. While Redis is away nothing changes: running workers keep training.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.checkpoint.folder_lease import JobFolderLeases
from edl_runtime.elastic.agent.failures import FailureStreak, FailureVerdict, PeerState, WorkerFailure, judge_failure
from edl_runtime.elastic.agent.launch import Communication, Entrypoint, PortReservation, check_host
from edl_runtime.elastic.agent.reconciler import DesiredState, KillWorker, is_ending, reconcile
from edl_runtime.elastic.agent.reporter import StatusReporter, StepMeter
from edl_runtime.elastic.agent.watchdog import Watchdog
from edl_runtime.elastic.agent.workers import WorkerSupervisor, WorkerUpdate
from edl_runtime.elastic.comm.agent_protocol import Gear, GenerationEntered, GenerationLost, Heartbeat, Note, StepDone
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.elastic.rendezvous.events import Event
from edl_runtime.elastic.rendezvous.generation import GroupView, JobOutcome, TrainerMember
from edl_runtime.elastic.rendezvous.planner import job_outcome, plan_generation, wait_reason
from edl_runtime.elastic.rendezvous.redis_store import HEARTBEAT_EVERY_S, RETRY_EVERY_S, RendezvousStore
from edl_runtime.errors import EX_DATAERR, EdlError
from edl_runtime.log import get_logger
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds
from edl_runtime.store.errors import RegistryUnavailableError

if TYPE_CHECKING:
    from redis.asyncio import Redis

FINISHED_WAIT_S = 60.0
"""How long an agent whose trainer has trained all there is waits for a Redis that is away: all end at the same step."""

REDIS_AWAY_LOG_EVERY_S = 30.0
"""How often an agent says that Redis is away still."""

AFTER_OTHERS_S = 1.0
"""How long an agent stays whose job another instance has failed, so that the exit of that one is seen first."""

MIN_TURN_S = 0.01

log = get_logger(__name__)


class AgentExit(msgspec.Struct, frozen=True):
    """How an agent ends: with this exit status, or negative by this signal; and why, for people."""

    status: int
    reason: str = ""


class Agent:
    """One instance of the job in `settings`. `gear`: the fastest that generations may be entered in."""

    def __init__(
        self,
        script: Entrypoint,
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
        self._store = RendezvousStore(
            client, settings.namespace, settings.job, run=settings.run, ttl_s=settings.lease_ttl_s
        )
        self._reporter = StatusReporter(client, settings, self._store)
        self._wake = asyncio.Event()
        self._folder_leases = JobFolderLeases(client, settings, told=self._note, changed=self._wake.set)
        self._ports = PortReservation(settings.host)
        self._watchdog = Watchdog(self._me.id, settings.step_limit_s)
        self._steps = StepMeter()
        self._view = GroupView(now=0.0)
        self._redis_away_since: float | None = None
        self._redis_away_logged_at: float | None = None
        self._leaving_since: float | None = None
        self._signal = signal.SIGTERM
        self._failure_streak = FailureStreak()
        self._verdict: FailureVerdict | None = None
        self._over_since: float | None = None
        self._loss_reason = ""

    def leave(self, number: signal.Signals) -> None:
        """Go, at the end of a step and without hurry, as `number` asks; `run` then returns its negative."""
        if self._leaving_since is None:
            log.info("agent.leaving", signal=number.name)
            self._leaving_since, self._signal = time.monotonic(), number
            self._wake.set()

    async def run(self, environ: Mapping[str, str]) -> AgentExit:
        """Train until the job has ended or this instance has left; no process is left then. `environ`: of trainers.

        Raises InstanceSupersededError, JobTakenError; SpecError when EDL_HOST is no address of this machine, or none
        at which the others reach what its trainer talks by.
        """
        failure: EdlError | None = None
        with self._ports:
            async with asyncio.TaskGroup() as tasks:
                supervisor = WorkerSupervisor(
                    self._script, self._me.id, environ, self._communication, tasks=tasks, on_update=self._on_update
                )
                self._folder_leases.add(self._settings.checkpoint)
                if self._script.never_calls_init and self._bounds.max > 1:
                    self._refuse(InitNotCalledError())
                loops = (self._watch(), self._reporter.run(), self._folder_leases.run())
                helpers = [tasks.create_task(loop) for loop in loops]
                try:
                    agent_exit = await self._loop(supervisor)
                except EdlError as error:  # which a task group would wrap
                    failure = error
                supervisor.dismiss()
                for helper in helpers:
                    helper.cancel()
        if failure:
            raise failure
        return agent_exit

    async def _loop(self, supervisor: WorkerSupervisor) -> AgentExit:
        while True:
            self._wake.clear()
            rest_s = await self._run_once(supervisor)
            if agent_exit := self._exit(supervisor):
                await self._reporter.finish()
                with suppress(RegistryUnavailableError):
                    await self._store.leave()
                return agent_exit
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), rest_s)

    def _on_update(self, update: WorkerUpdate) -> None:
        if not isinstance(update, Heartbeat | StepDone):
            self._wake.set()

    async def _watch(self) -> None:
        """Wake the loop when there is news in Redis."""
        while True:
            try:
                if await self._store.changed():
                    self._wake.set()
                    await asyncio.sleep(MIN_TURN_S)  # until the loop has looked
            except RegistryUnavailableError:
                await asyncio.sleep(RETRY_EVERY_S)

    async def _run_once(self, supervisor: WorkerSupervisor) -> float:
        """Look and act; return for how long nothing is to be done unless there is news, in seconds."""
        self._process_updates(supervisor)
        if supervisor.elastic and not self._me.elastic and self._communication == "gloo" and self._bounds.max > 1:
            check_host(self._settings.host)
        for fall in supervisor.take_failures():
            await self._judge(fall)
        self._folder_leases.add(supervisor.checkpoint)
        for error in self._folder_leases.take_conflicts():
            self._refuse(error)
        try:
            self._me = member_record(self._me, supervisor, self._desired_state(supervisor), self._view, self._ports)
            self._change(ready=self._me.ready and self._folder_leases.are_held)
            self._view = await self._store.heartbeat(self._me)
            if self._redis_away_since is not None:
                log.info("agent.thawed", generation=self._view.number)
            self._redis_away_since = self._redis_away_logged_at = None
            rest_s = min(HEARTBEAT_EVERY_S, await self._advance(supervisor))
        except RegistryUnavailableError as error:
            self._note_redis_away(error)
            rest_s = RETRY_EVERY_S
        if any(each.member.elastic for each in self._view.members):
            supervisor.mark_elastic()
        if self._failed and self._view.outcome is None:
            self._view = msgspec.structs.replace(self._view, outcome=self._failed)
        self._ports.renew(self._view.number)
        await self._reconcile(supervisor)
        return max(MIN_TURN_S, rest_s)

    def _note_redis_away(self, error: RegistryUnavailableError) -> None:
        """Note that Redis is away, and say so now and again."""
        now = time.monotonic()
        self._redis_away_since = self._redis_away_since or now
        if self._redis_away_logged_at is None or now >= self._redis_away_logged_at + REDIS_AWAY_LOG_EVERY_S:
            self._redis_away_logged_at = now
            log.warning("agent.frozen", cause=str(error), for_s=round(now - self._redis_away_since))

    def _process_updates(self, supervisor: WorkerSupervisor) -> None:
        generation = self._view.generation
        for update in supervisor.take_updates():
            match update:
                case GenerationEntered():
                    self._change(failures=0, step=update.step)
                case StepDone():
                    self._steps.add(update)
                    steps = self._steps
                    self._change(
                        step=steps.step, stepped=steps.generation, pause_s=steps.pause_s, paused_in=steps.paused_in
                    )
                    if generation and self._view.rank(self._me.id) == 0:
                        instances = len(generation.members)
                        self._reporter.set_progress(steps.progress(instances=instances, generation=generation.number))
                case GenerationLost():
                    self._loss_reason = update.reason
                    step = self._me.step if update.step is None else update.step
                    self._change(comm_failed=update.generation, step=step)
                case _:
                    self._reporter.report(update)

    async def _judge(self, fall: WorkerFailure) -> None:
        """Decide what a trainer's fall is the end of, and tell all."""
        me = self._me
        log.warning("trainer.fell", reason=fall.reason, exit_code=fall.exit_code, generation=fall.generation)
        others = PeerState.of(self._view, me.id, self._bounds, me.step, stepped=bool(me.stepped))
        count = 0
        if not fall.unwritten:
            self._change(lost=max(me.lost, fall.generation), failures=me.failures + (not fall.was_up))
            self._failure_streak = self._failure_streak.after(fall, others.step)
        with suppress(RegistryUnavailableError):  # then nobody can tell how many there were
            if not fall.unwritten and not others.without:
                count = await self._store.count_failure(fall.generation, others.step, progress=fall.made_progress)
        self._verdict = judge_failure(fall, others, self._failure_streak, count)
        if self._verdict and fall.unwritten:
            newest = await self._reporter.newest_checkpoint()
            self._verdict = msgspec.structs.replace(self._verdict, reason=f"{self._verdict.reason}; {newest}")
        with suppress(RegistryUnavailableError):
            if self._failed:  # at once: others who see first that its trainer is gone may take the job for stopped
                await self._store.end(self._failed)
            else:
                what = f"its checkpoint is not written: {fall.reason}" if fall.unwritten else fall.reason
                told = self._verdict.reason if self._verdict else what
                await self._store.announce(Event(kind="failed", instance=me.index, reason=told))
        if self._verdict and self._leaving_since is None:
            self._leaving_since = time.monotonic()

    def _note(self, text: str) -> None:
        self._reporter.report(Note(text=text))

    def _refuse(self, error: EdlError) -> None:
        """Fail the job as one whose input is wrong, as where it is to write where another does.

        One that trains already goes on.
        """
        others = PeerState.of(self._view, self._me.id, self._bounds, self._me.step, stepped=bool(self._me.stepped))
        if others.train:
            self._note(f"{error}. This job goes on, for it trains already")
            return
        self._verdict = FailureVerdict(str(error), EX_DATAERR)
        self._leaving_since = self._leaving_since or time.monotonic()

    @property
    def _failed(self) -> JobOutcome | None:
        """How the job has ended, by what became of this instance's trainer."""
        if self._verdict is None or self._verdict.others_go_on:
            return None
        return JobOutcome("failed", f"instance {self._me.index}: {self._verdict.reason}")

    async def _advance(self, supervisor: WorkerSupervisor) -> float:
        """Do what any agent may do for all. Return after how many seconds there may be more to do."""
        current = self._view.generation
        if current and supervisor.worker_state.comm_failed == current.number and self._view.suspicion is None:
            await self._store.suspect(current.number, self._loss_reason)
        return await advance_rendezvous(self._store, self._view, self._bounds, self._me.id, self._failed)

    async def _reconcile(self, supervisor: WorkerSupervisor) -> None:
        """Have the trainer do what it is to do now."""
        now = time.monotonic()
        hangs = self._watchdog.check(
            self._view,
            was_heard=supervisor.take_liveness(),
            stopped=supervisor.stopped,
            cpu_s=supervisor.cpu_s,
            waits_for=supervisor.waits_for,
            moves=supervisor.moves,
            median_s=self._steps.median_s,
            now=now,
        )
        if hangs and supervisor.worker_state.phase == "member":
            await supervisor.execute(KillWorker(hangs, planned=False))
            self._wake.set()
        if supervisor.failing:  # nothing can be told to it, and how it ended is still to be known
            return
        before = None
        while supervisor.worker_state != before:  # an order may make room for the next
            before = supervisor.worker_state
            for action in reconcile(before, self._desired_state(supervisor), self._view, now):
                await supervisor.execute(action)

    def _desired_state(self, supervisor: WorkerSupervisor) -> DesiredState:
        return DesiredState(
            member=self._me.id,
            elastic=supervisor.elastic,
            gear=self._me.gear,
            instances=self._bounds.max,
            leaving_since=self._leaving_since,
            grace_s=self._settings.grace_s,
            exclusive=self._communication == "nccl",
            finished=supervisor.finished,
        )

    def _change(self, **changes: object) -> None:
        self._me = msgspec.structs.replace(self._me, **changes)

    def _exit(self, supervisor: WorkerSupervisor) -> AgentExit | None:
        if supervisor.worker_state.phase != "absent":
            return None
        outcome = self._view.outcome
        if self._verdict:
            return AgentExit(self._verdict.status, f"instance {self._me.index}: {self._verdict.reason}")
        if outcome and outcome.kind != "failed":
            return AgentExit(0, outcome.reason)
        if (
            supervisor.finished
            and self._redis_away_since is not None
            and time.monotonic() >= self._redis_away_since + FINISHED_WAIT_S
        ):
            return AgentExit(0)
        if outcome:
            self._over_since = self._over_since or time.monotonic()
            return AgentExit(1, outcome.reason) if time.monotonic() >= self._over_since + AFTER_OTHERS_S else None
        return AgentExit(-self._signal) if self._leaving_since is not None else None


# What an agent tells the others of its instance.


def member_record(
    before: TrainerMember, supervisor: WorkerSupervisor, desired: DesiredState, view: GroupView, ports: PortReservation
) -> TrainerMember:
    """Return the record that follows `before`, with what the supervisor, the post and the ports are now.

    An instance stays ready while one of its processes makes room for the next on the way into a generation that none of
    them was told of: who is not ready counts as lost. While its trainer falls it is not, nor until the next can join.
    If its script fails after all was trained, it stays one that has trained until the next trainer joins.
    """
    phase = supervisor.worker_state.phase
    included = view.generation is not None and view.rank(desired.member) is not None
    on_its_way = included and view.generation is not None and supervisor.worker_state.assigned < view.generation.number
    can_join = phase in ("ready", "member", "leaving", "done") or (phase == "loaded" and not supervisor.elastic)
    lost = max(before.lost, supervisor.worker_state.assigned) if supervisor.failing else before.lost
    in_none_yet = phase in ("loaded", "ready")
    is_to_call = supervisor.elastic and phase == "starting" and not supervisor.called
    return msgspec.structs.replace(
        before,
        store_port=ports.store,
        trainer_port=ports.trainer,
        ready=not supervisor.failing
        and (can_join or supervisor.finished or (on_its_way and not is_ending(desired, view))),
        leaving=desired.leaving_since is not None,
        elastic=supervisor.elastic,
        called=supervisor.called,
        uncalled_since=(before.uncalled_since or view.now) if is_to_call else 0.0,
        live=supervisor.live,
        standby=supervisor.worker_state.standby == "loaded" or in_none_yet,
        up=supervisor.worker_state.up,
        lost=lost,
        waits_for=supervisor.waits_for,
        moves=supervisor.moves,
        advanced=supervisor.moves > before.moves or _still_joining(supervisor, view),
        done=phase == "done" or supervisor.finished or (before.done and phase != "member"),
        keeps=supervisor.keeps,
        finished=supervisor.finished,
        seen=max(before.seen, supervisor.seen, view.number),
    )


def _still_joining(supervisor: WorkerSupervisor, view: GroupView) -> bool:
    """Whether the trainer is at something that it does before it comes to the generation that counts.

    It is the agent's own to end a step or a leave that takes too long.
    """
    worker_state, number = supervisor.worker_state, view.generation.number if view.generation else 0
    return worker_state.phase == "leaving" or (
        worker_state.trains and worker_state.up < number and not supervisor.waits_for
    )


# What any agent of a job may do for all of them, and the first that does has done.


async def advance_rendezvous(
    store: RendezvousStore, view: GroupView, bounds: Bounds, me: str, failed: JobOutcome | None
) -> float:
    """End the job, or publish its next generation, or say what that waits for, as the view has it.

    `failed`: how it ends, by what `me` alone knows. Returns after how many seconds there may be more to do. Raises
    RegistryUnavailableError.
    """
    if view.outcome:
        return HEARTBEAT_EVERY_S
    if outcome := failed or job_outcome(view):
        await store.end(outcome)
        return 0.0
    if draft := plan_generation(view, bounds, me):
        await store.propose(msgspec.structs.replace(draft, token=secrets.token_hex(16)))
        return 0.0
    wait = wait_reason(view, bounds)
    if wait.why and (wait.announced or wait.for_s == math.inf):
        is_news = await store.announce(Event(kind="waiting", reason=wait.why))
        if is_news and wait.warns:
            log.warning("job.waits", reason=wait.why)
    return wait.for_s
