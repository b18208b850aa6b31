"""The agent of one instance: joins the job's rendezvous and keeps the instance's worker in the agreed generation.

Only agents talk to Redis about the group. While Redis is unavailable nothing changes: running workers keep training.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from edl_runtime.checkpoint.folder_lease import JobFolderLeases
from edl_runtime.concurrency import first_completed, wait_for_event
from edl_runtime.elastic.agent.entrypoint import Entrypoint, PortReservation
from edl_runtime.elastic.agent.failures import (
    NOT_WRITTEN,
    FailureStreak,
    FailureVerdict,
    PeerState,
    WorkerFailure,
    judge_failure,
)
from edl_runtime.elastic.agent.reconciler import DesiredState, KillWorker, WorkerState, is_ending, reconcile
from edl_runtime.elastic.agent.reporter import StatusReporter, StepMeter
from edl_runtime.elastic.agent.stragglers import StragglerWatch, peers_compute_s, slowdown
from edl_runtime.elastic.agent.watchdog import Watchdog
from edl_runtime.elastic.agent.workers import GroupUpdate, WorkerSupervisor, WorkerUpdate
from edl_runtime.elastic.comm.agent_protocol import (
    Gear,
    GenerationEntered,
    GenerationLost,
    Heartbeat,
    Note,
    StepDone,
)
from edl_runtime.elastic.rendezvous.generation import Generation, GroupView, JobOutcome, TrainerMember
from edl_runtime.elastic.rendezvous.group_status import group_status
from edl_runtime.elastic.rendezvous.news import GroupNews
from edl_runtime.elastic.rendezvous.planner import job_outcome, plan_generation
from edl_runtime.elastic.rendezvous.redis_store import (
    HEARTBEAT_EVERY_S,
    RETRY_EVERY_S,
    Event,
    RendezvousStore,
    next_heartbeat,
    read_events,
)
from edl_runtime.errors import EX_DATAERR, EdlError
from edl_runtime.log import get_logger
from edl_runtime.preemption import PreemptionNotice, watch_machine
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds
from edl_runtime.store.errors import MalformedRecordError, RegistryAccessError, RegistryUnavailableError

if TYPE_CHECKING:
    from redis.asyncio import Redis

FINISHED_WAIT_S = 60.0
"""How long an agent whose worker has finished waits for an unavailable Redis."""

OUTCOME_EVERY_S = 2.0
"""How often an agent that has left, and waits for its machine's end, looks whether the job has ended."""

AFTER_OTHERS_S = 1.0
"""How long an agent stays after another instance has failed the job, so that the exit of that one is seen first."""

DAY_S = 24 * 3600.0

MIN_TURN_S = 0.01
"""Shortest time between two turns of the loop, so that news that come all the time don't take a whole processor."""

log = get_logger(__name__)


class AgentExit(msgspec.Struct, frozen=True):
    """How an agent exits: with this status, or negative by this signal; and why, for people."""

    status: int
    reason: str = ""


class Agent:
    """One instance of the job in `settings`.

    `gear`: the fastest in which generations may be entered. `gpu`: whether the machine has a GPU for it, perhaps; its
    processes report whether their Paddle sees one.
    """

    def __init__(
        self,
        script: Entrypoint,
        settings: RuntimeSettings,
        client: Redis,
        *,
        bounds: Bounds,
        gear: Gear,
        gpu: bool,
    ) -> None:
        self._script = script
        self._settings = settings
        self._client = client
        self._bounds = bounds
        self._gpu = gpu
        self._me = TrainerMember(
            id=f"{settings.instance}-{secrets.token_hex(4)}", index=settings.instance, host=settings.host, gear=gear
        )
        self._store = RendezvousStore(
            client, settings.namespace, settings.job, run=settings.run, ttl_s=settings.lease_ttl_s
        )
        self._reporter = StatusReporter(client, settings, self._store)
        self._wake = asyncio.Event()
        self._folder_leases = JobFolderLeases(client, settings, notify=self._note, changed=self._wake.set)
        self._ports = PortReservation(settings.host)
        self._watchdog = Watchdog(self._me.id, settings.step_limit_s)
        self._steps = StepMeter()
        self._stragglers = StragglerWatch(settings.straggler_factor, settings.straggler_after_s)
        self._view = GroupView(now=0.0)
        self._redis_away_since: float | None = None
        self._due = time.monotonic()  # its next heartbeat without news
        self._desired = DesiredState(
            member=self._me.id,
            gear=gear,
            instances=bounds.max,
            grace_s=settings.grace_s,
        )
        self._signal = signal.SIGTERM
        self._terminated = asyncio.Event()
        self._notice: PreemptionNotice | None = None
        self._failure_streak = FailureStreak()
        self._verdict: FailureVerdict | None = None
        self._over_since: float | None = None
        self._loss_reason = ""
        self._unwritten = ""

    def leave(self, number: signal.Signals) -> None:
        """Leave at the end of a step, as signal `number` asks; `run` then returns its negative."""
        self._terminated.set()
        if self._desired.leaving_since is None:
            log.info("shutdown.requested", signal=number.name)
            self._signal = number
        self._start_leaving(self._settings.grace_s)

    def _leave_machine(self, notice: PreemptionNotice) -> None:
        """Leave before the machine is taken away."""
        self._notice = notice
        self._note(f"{notice.reason} in {notice.left_s:.0f} s; this instance leaves before")
        self._start_leaving(notice.left_s)

    def _start_leaving(self, grace_s: float) -> None:
        """Leave within `grace_s`, or by an earlier deadline that holds already."""
        now, since = time.monotonic(), self._desired.leaving_since
        if since is not None:
            grace_s = min(self._desired.grace_s, now - since + grace_s)
        since = now if since is None else since
        self._desired = msgspec.structs.replace(self._desired, leaving_since=since, grace_s=grace_s)
        self._wake.set()

    async def run(self, environ: Mapping[str, str]) -> AgentExit:
        """Train until the job has ended or this instance has left, with all its processes.

        After a notice that the machine is taken away, wait for its end, or the job's.

        `environ`: of workers. Raises InstanceSupersededError, JobTakenError; SpecError when EDL_HOST is no address of
        this machine, or none at which the other instances reach its worker; MalformedRecordError when the group can't
        be read at the start.
        """
        failure: EdlError | None = None
        watch_machine(self._settings.preemption_notice, self._leave_machine)
        with self._ports:
            async with asyncio.TaskGroup() as tasks:
                supervisor = WorkerSupervisor(
                    self._script, self._me.id, environ, gpu=self._gpu, tasks=tasks, on_update=self._on_update
                )
                self._folder_leases.add(self._settings.checkpoint)
                loops = (self._watch(), self._reporter.run(), self._folder_leases.run())
                helpers = [tasks.create_task(loop) for loop in loops]
                try:
                    agent_exit = await self._loop(supervisor)
                except EdlError as error:  # a task group would wrap it in an ExceptionGroup
                    failure = error
                supervisor.dismiss()
                for helper in helpers:
                    helper.cancel()
        if failure:
            raise failure
        if self._notice and agent_exit.status < 0:
            return await first_completed(self._notice.outlast(self._terminated), self._await_outcome()) or agent_exit
        return agent_exit

    async def _await_outcome(self) -> AgentExit:
        """Wait until the job has ended, without being a member; return how to exit then."""
        while True:
            with suppress(RegistryUnavailableError):
                found = await group_status(self._client, self._settings.namespace, self._settings.job)
                if found and (outcome := found.outcome):
                    return AgentExit(1 if outcome.kind == "failed" else 0, outcome.reason)
            await asyncio.sleep(OUTCOME_EVERY_S)

    async def _loop(self, supervisor: WorkerSupervisor) -> AgentExit:
        while True:
            self._wake.clear()
            rest_s = await self._run_once(supervisor)
            if agent_exit := self._exit(supervisor):
                await self._reporter.finish()
                with suppress(RegistryUnavailableError):
                    await self._store.leave()
                return agent_exit
            await wait_for_event(self._wake, rest_s)

    def _on_update(self, update: WorkerUpdate) -> None:
        if isinstance(update, GenerationEntered):  # no other agent waits for it
            may_wait = not self._view.acts_first(self._me.id)
        else:
            may_wait = isinstance(update, Heartbeat | StepDone)
        if not may_wait:
            self._wake.set()

    async def _watch(self) -> None:
        """Wake the loop when the group has news."""
        while True:
            with suppress(RegistryUnavailableError):
                async with GroupNews(self._client, self._settings.namespace, self._settings.job) as news:
                    while self._redis_away_since is None:  # a connection that is cut does not tell
                        if await news.wait(for_all=not self._view.acts_first(self._me.id)):
                            self._wake.set()
                            await asyncio.sleep(MIN_TURN_S)
            await asyncio.sleep(RETRY_EVERY_S)

    async def _run_once(self, supervisor: WorkerSupervisor) -> float:
        """Read the group, decide and act; return after how many seconds to do it again without news."""
        for update in supervisor.take_updates():
            await self._process_update(update)
        self._folder_leases.add(supervisor.state.checkpoint)
        for error in self._folder_leases.take_conflicts():
            self._refuse(error)
        try:
            self._me = member_record(
                self._me, supervisor.state, self._desired, self._view, self._ports, failing=supervisor.failing
            )
            self._change(ready=self._me.ready and self._folder_leases.are_held)
            self._view = await self._store.heartbeat(self._me)
            await self._compare_pace()
            due_s = await self._advance(supervisor)
            if self._redis_away_since is not None:
                log.info("redis.reconnected", generation=self._view.number)
            self._redis_away_since = None
            now = time.monotonic()
            self._due = next_heartbeat(self._due, now, len(self._view.members))
            rest_s = self._due - now
            if self._view.acts_first(self._me.id):
                rest_s = min(rest_s, due_s)
        except RegistryUnavailableError as error:
            hopeless = isinstance(error, MalformedRecordError | RegistryAccessError)
            if hopeless and not self._view.now:  # nothing of this job runs here yet
                raise
            if self._redis_away_since is None:
                self._redis_away_since = time.monotonic()
                log.warning("redis.disconnected", cause=str(error))
            rest_s = RETRY_EVERY_S
        if any(each.member.elastic for each in self._view.members):
            supervisor.mark_elastic()
        if self._failed and self._view.outcome is None:  # Redis does not have it yet, and may be away
            self._view = msgspec.structs.replace(self._view, outcome=self._failed)
        self._ports.renew(self._view.number)  # the next generation gets ports that no earlier one has used
        await self._reconcile(supervisor)
        return max(MIN_TURN_S, rest_s)

    async def _process_update(self, update: GroupUpdate | WorkerFailure) -> None:
        generation, steps = self._view.generation, self._steps
        match update:
            case WorkerFailure():
                await self._judge(update)
            case GenerationEntered():
                self._change(failures=0, step=update.step)
            case StepDone():
                steps.add(update)
                self._change(
                    step=steps.step,
                    stepped=steps.generation,
                    pause_s=steps.pause_s,
                    paused_in=steps.paused_in,
                    compute_s=steps.compute_s,
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

    async def _judge(self, failure: WorkerFailure) -> None:
        """Decide whether a failed worker is restarted, and report it."""
        me = self._me
        log.warning("worker.failed", reason=failure.reason, exit_code=failure.exit_code, generation=failure.generation)
        others = PeerState.of(self._view, me.id, self._bounds, me.step, stepped=me.stepped)
        count = 0
        if not failure.unwritten:
            self._change(lost=max(me.lost, failure.generation), failures=me.failures + (not failure.was_up))
            self._failure_streak = self._failure_streak.after(failure, others.step)
        with suppress(RegistryUnavailableError):  # the count is not known then
            if not failure.unwritten and not others.without:
                why = failure.reason if failure.elastic else ""  # plain scripts report no later step
                count = await self._store.count_failure(
                    failure.generation, others.step, progress=failure.made_progress, reason=why
                )
        self._verdict = judge_failure(failure, others, self._failure_streak, count)
        if failure.unwritten and not others.stay:
            newest = await self._reporter.newest_checkpoint()
            if self._verdict:
                self._verdict = msgspec.structs.replace(self._verdict, reason=f"{self._verdict.reason}; {newest}")
            elif self._desired.leaving_since is not None:
                self._unwritten = f"instance {me.index}: {NOT_WRITTEN}: {failure.reason}; {newest}"
        with suppress(RegistryUnavailableError):
            if self._failed:  # at once: agents that first see that the worker is gone may take the job for stopped
                await self._store.end(self._failed)
            else:
                what = f"its checkpoint is not written: {failure.reason}" if failure.unwritten else failure.reason
                reason = self._verdict.reason if self._verdict else what
                await self._store.announce(Event(kind="failed", instance=me.index, reason=reason))
        if self._verdict:
            self._start_leaving(self._settings.grace_s)

    async def _compare_pace(self) -> None:
        """Report this instance once it is a straggler, and leave if it is to be started again elsewhere."""
        me, peers_s = self._me, peers_compute_s(self._view, self._me.id)
        if not (me.compute_s and peers_s):
            return
        slow = self._stragglers.observe(slowdown(me.compute_s, peers_s), time.monotonic())
        if slow and not me.slow:
            pace = f"it computes {me.compute_s:.3g} s in a step, they {statistics.median(peers_s):.3g} s"
            reason = f"{slow:.1f} times slower than its peers for {self._settings.straggler_after_s:g} s: {pace}"
            restarts = len(peers_s) >= self._bounds.min and await self._may_restart()
            more = "; it leaves, to be started again" if restarts else ""
            await self._store.announce(Event(kind="straggler", instance=me.index, reason=f"{reason}{more}"))
            if restarts:
                self._start_leaving(self._settings.grace_s)
        self._change(slow=slow)

    async def _may_restart(self) -> bool:
        """Whether a straggler is restarted once more today, as far as events are kept."""
        if not self._settings.straggler_restarts:
            return False
        happened = await read_events(self._client, self._settings.namespace, self._settings.job)
        own = [each for each in happened if each.kind == "straggler" and each.instance == self._me.index]
        today = [each for each in own if each.at >= time.time() - DAY_S]
        return len(today) < self._settings.straggler_restarts

    def _note(self, text: str) -> None:
        self._reporter.report(Note(text=text))

    def _refuse(self, error: EdlError) -> None:
        """Fail the job because its input is wrong, such as a checkpoint location that another job uses.

        A job that trains already continues.
        """
        others = PeerState.of(self._view, self._me.id, self._bounds, self._me.step, stepped=self._me.stepped)
        if others.train:
            self._note(f"{error}. This job continues, because it trains already")
            return
        self._verdict = FailureVerdict(str(error), EX_DATAERR)
        self._start_leaving(self._settings.grace_s)

    @property
    def _failed(self) -> JobOutcome | None:
        """The job's outcome, if this instance's worker has failed it."""
        if self._verdict is None or self._verdict.others_go_on:
            return None
        return JobOutcome("failed", f"instance {self._me.index}: {self._verdict.reason}")

    async def _advance(self, supervisor: WorkerSupervisor) -> float:
        """Do what any agent may do for the group. Return after how many seconds there may be more to do."""
        current = self._view.generation
        if current and supervisor.state.comm_failed == current.number and self._view.suspicion is None:
            await self._store.suspect(current.number, self._loss_reason)
        return await advance_rendezvous(self._store, self._view, self._bounds, self._me.id, self._failed)

    async def _reconcile(self, supervisor: WorkerSupervisor) -> None:
        """Bring the worker to its desired state."""
        now = time.monotonic()
        hung = self._watchdog.check(
            self._view,
            supervisor.state,
            supervisor.sample(),
            was_heard=supervisor.take_liveness(),
            median_s=self._steps.median_s,
            now=now,
        )
        if hung:
            await supervisor.execute(KillWorker(hung, planned=False))
            self._wake.set()
        if supervisor.failing:  # it takes no more messages, and its exit status is not known yet
            return
        before = None
        while supervisor.state != before and not supervisor.has_failure:  # an action may allow for the next
            before = supervisor.state
            for action in reconcile(before, self._desired, self._view, now):
                await supervisor.execute(action)

    def _change(self, **changes: object) -> None:
        self._me = msgspec.structs.replace(self._me, **changes)

    def _exit(self, supervisor: WorkerSupervisor) -> AgentExit | None:
        if supervisor.state.phase != "absent" or supervisor.has_failure:
            return None
        outcome = self._view.outcome
        if self._verdict:
            return AgentExit(self._verdict.status, f"instance {self._me.index}: {self._verdict.reason}")
        if outcome and outcome.kind != "failed":
            return AgentExit(0, outcome.reason)
        if (
            supervisor.state.finished
            and self._redis_away_since is not None
            and time.monotonic() >= self._redis_away_since + FINISHED_WAIT_S
        ):
            return AgentExit(0)
        if outcome:
            self._over_since = self._over_since or time.monotonic()
            return AgentExit(1, outcome.reason) if time.monotonic() >= self._over_since + AFTER_OTHERS_S else None
        return AgentExit(-self._signal, self._unwritten) if self._desired.leaving_since is not None else None


def member_record(
    before: TrainerMember,
    worker: WorkerState,
    desired: DesiredState,
    view: GroupView,
    ports: PortReservation,
    *,
    failing: bool,
) -> TrainerMember:
    """Return `before` with the present state of worker and ports.

    An instance stays ready while one of its processes is replaced by the next on the way into a generation that it has
    not been told of: an instance that is not ready counts as lost. It is not ready while its worker fails, nor until
    the next can join. If its script fails after everything was trained, it stays `done` until the next worker joins.
    """
    phase = worker.phase
    included = view.generation is not None and view.rank(desired.member) is not None
    on_its_way = included and view.generation is not None and worker.assigned < view.generation.number
    can_join = phase in ("ready", "member", "leaving", "done") or (phase == "loaded" and not worker.elastic)
    lost = max(before.lost, worker.assigned) if failing else before.lost
    in_none_yet = phase in ("loaded", "ready")
    is_to_call = worker.elastic and phase == "starting" and not worker.called
    return msgspec.structs.replace(
        before,
        store_port=ports.store,
        trainer_port=ports.trainer,
        ready=not failing and (can_join or worker.finished or (on_its_way and not is_ending(desired, view))),
        leaving=desired.leaving_since is not None,
        elastic=worker.elastic,
        called=worker.called,
        uncalled_since=(before.uncalled_since or view.now) if is_to_call else 0.0,
        live=worker.live,
        standby=worker.standby == "loaded" or in_none_yet,
        up=worker.up,
        lost=lost,
        waits_for=worker.waits_for,
        moves=worker.moves,
        advanced=worker.moves > before.moves or _still_joining(worker, view),
        done=phase == "done" or worker.finished or (before.done and phase != "member"),
        keeps=worker.keeps,
        unsaved=worker.unsaved,
        saving=worker.saving if worker.saving > view.checkpoint_answered else 0,
        finished=worker.finished,
        seen=max(before.seen, worker.seen, view.number),
    )


def _still_joining(worker: WorkerState, view: GroupView) -> bool:
    """Whether the worker is still busy before it comes to the current generation.

    Its own agent ends a step or a leave that takes too long.
    """
    number = view.generation.number if view.generation else 0
    return worker.phase == "leaving" or (worker.trains and worker.up < number and not worker.waits_for)


async def advance_rendezvous(
    store: RendezvousStore, view: GroupView, bounds: Bounds, me: str, failed: JobOutcome | None
) -> float:
    """End the job, or publish its next generation, or report what that waits for. Any agent may; the first one wins.

    `failed`: the outcome that only `me` knows. Returns after how many seconds there may be more to do. Raises
    RegistryUnavailableError.
    """
    if view.outcome:
        return HEARTBEAT_EVERY_S
    if outcome := failed or job_outcome(view):
        await store.end(outcome)
        return 0.0
    plan = plan_generation(view, bounds, me)
    if isinstance(plan, Generation):
        await store.propose(msgspec.structs.replace(plan, token=secrets.token_hex(16)))
        return 0.0
    if plan.why and (plan.announced or plan.for_s == math.inf):
        is_news = await store.announce(Event(kind="waiting", reason=plan.why))
        if is_news and plan.warns:
            log.warning("job.blocked", reason=plan.why)
    return plan.for_s
