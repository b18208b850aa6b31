"""The worker processes of one instance: started, supervised, messaged and ended by its agent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self, assert_never

import msgspec

from edl_runtime.elastic.agent.failures import WorkerFailure
from edl_runtime.elastic.agent.launch import Communication, Entrypoint, generation_environment
from edl_runtime.elastic.agent.reconciler import (
    Action,
    KillWorker,
    RetireWorker,
    RunScript,
    SendMessage,
    StartStandby,
    StartWorker,
    TerminateWorker,
    WorkerPhase,
    WorkerState,
)
from edl_runtime.elastic.comm.agent_protocol import (
    AgentMessage,
    CheckpointDelayed,
    CheckpointSaved,
    GenerationEntered,
    GenerationLost,
    Heartbeat,
    InitCalled,
    JoinGeneration,
    Leave,
    MessageDecoder,
    Note,
    ScriptFailed,
    StandbyLoaded,
    StartScript,
    StepDone,
    WorkerFinished,
    WorkerMessage,
    WorkerReady,
    encode_message,
)
from edl_runtime.log import get_logger
from edl_runtime.settings import AGENT_FD

log = get_logger(__name__)

DRAIN_S = 1.0
"""How long it may take until all is heard that a process said before it ended."""


class WorkerExited(msgspec.Struct, frozen=True):
    """The process is gone, with all that it started in its session; `exit_code` is negative for a signal."""

    exit_code: int


WorkerUpdate = WorkerMessage | WorkerExited


class WorkerProcess:
    """A process that loads what a script imports, waits to be told to start, and then is that script.

    It leads a session of its own, writes where its agent does, and never outlives its agent.
    """

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, script: Entrypoint, environ: Mapping[str, str], *, nice: bool) -> Self:
        """Begin a process; with `nice` it loads behind everybody else's work. Then `monitor` it. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *_standby_command(script, theirs.fileno(), nice=nice),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**quiet_environment(environ, script), AGENT_FD: str(theirs.fileno())},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    @property
    def state(self) -> str:
        """What the process is for the system, in psutil's words; "gone" when it is nothing any more."""
        import psutil

        try:
            return str(psutil.Process(self.pid).status())
        except psutil.NoSuchProcess:
            return "gone"

    @property
    def cpu_s(self) -> float:
        """How much processor time the process has used, 0 when it is gone."""
        import psutil

        try:
            used = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(used.user + used.system)

    async def monitor(self, on_update: Callable[[Self, WorkerUpdate], None]) -> None:
        """Call `on_update` with all that it says, in order, and `Ended` last. Cancelled, end it and return."""
        listening = asyncio.create_task(self._listen(on_update))
        try:
            exit_code = await self._process.wait()
            self._kill_session()
            await asyncio.wait([listening], timeout=DRAIN_S)
            on_update(self, WorkerExited(exit_code))
        finally:
            self.kill()
            listening.cancel()
            self._writer.close()
            await self._process.wait()

    def start(self, environ: Mapping[str, str]) -> None:
        """Let it be its script, with these variables on top of what it began with."""
        self.send(StartScript(environ=dict(environ)))

    def send(self, message: AgentMessage) -> None:
        """Tell it something; nothing happens when it is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    def kill(self) -> None:
        """End it and all it started, whatever it is doing; `Ended` is still to come."""
        if self._process.returncode is None:
            self._kill_session()

    def terminate(self) -> None:
        """Ask the process to end, in the way that any program knows."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    async def _listen(self, on_update: Callable[[Self, WorkerUpdate], None]) -> None:
        unpacker: MessageDecoder[WorkerMessage] = MessageDecoder(WorkerMessage)
        try:
            while data := await self._reader.read(1 << 16):
                for message in unpacker.feed(data):
                    on_update(self, message)
        except ConnectionError:
            pass
        except msgspec.DecodeError as error:
            log.warning("trainer.unintelligible", pid=self.pid, error=str(error))
            self.kill()

    def _kill_session(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nothing of it is left (macOS says it so)
            os.killpg(self.pid, signal.SIGKILL)


def quiet_environment(environ: Mapping[str, str], script: Entrypoint) -> dict[str, str]:
    """Return `environ` with what keeps Paddle's chatter out of the log; whoever has set anything of it is left alone.

    That is what its C++ parts say of connections, and its advice to install ccache.
    """
    quiet: dict[str, str] = {}
    if not any(name.startswith("GLOG_") for name in environ):
        quiet["GLOG_minloglevel"] = "1"
    if "PYTHONWARNINGS" not in environ and not any(option.startswith("-W") for option in script.options):
        quiet["PYTHONWARNINGS"] = "ignore:No ccache found"
    return {**environ, **quiet}


def _standby_command(script: Entrypoint, descriptor: int, *, nice: bool) -> list[str]:
    interpreter = script.command[0] if script.file else sys.executable
    standby = [interpreter, *script.options, "-m", "edl_runtime.elastic.agent.standby"]
    flags = ["--agent", f"{descriptor},{os.getpid()}"]
    flags += ["--nice"] if nice else []
    flags += ["--elastic"] if script.elastic else []
    if not script.file:
        return [*standby, *flags, "--", *script.command]
    loaded = ["--load", ",".join(script.imports)] if script.imports else []
    return [*standby, *flags, *loaded, "--script", "--", script.file, *script.arguments]


# An instance's trainer and its standby: begun, told, heard and ended as `gears` orders.

EXIT_WAIT_S = 10.0
"""How long a trainer may take to end that has said why it fails, or that has left and ends beside the next one."""

GroupUpdate = GenerationEntered | StepDone | GenerationLost | CheckpointSaved | CheckpointDelayed | Note
"""What a trainer says that concerns others."""


class WorkerSupervisor:
    """The processes of one instance. Monitored by `tasks`; `on_update` is called after each message of any of them.

    - `worker_state`: how far the trainer is.
    - `live`, `seen`, `waits_for`, `moves`: as the trainer said last. `keeps`: it keeps checkpoints, as far as is known.
    - `checkpoint`: where the script keeps them, as it said; "" for nowhere, or while it has not said so.
    - `finished`: the trainer has trained all there is and has ended.
    """

    def __init__(
        self,
        script: Entrypoint,
        member: str,
        environ: Mapping[str, str],
        communication: Communication,
        *,
        tasks: asyncio.TaskGroup,
        on_update: Callable[[WorkerUpdate], None],
    ) -> None:
        self.worker_state = WorkerState()
        self.live = False
        self.seen = 0
        self.waits_for = 0
        self.moves = 0
        self.finished = False
        self._failures: list[WorkerFailure] = []
        self._updates: list[GroupUpdate] = []
        self._was_heard = False
        self._script = script
        self._member = member
        self._environ = environ
        self._communication = communication
        self._tasks = tasks
        self._on_update_hook = on_update
        self._worker: WorkerProcess | None = None
        self._standby: WorkerProcess | None = None
        self._retired: list[WorkerProcess] = []
        self._begun_at = 0.0
        self._kill_action: KillWorker | None = None
        self._failure_report: ScriptFailed | None = None
        self._stepped = self._writes = self._called = False
        self.keeps = True
        self.checkpoint = ""

    @property
    def elastic(self) -> bool:
        """Whether the script joins generations by itself, as far as is known by now."""
        return self._script.elastic

    @property
    def called(self) -> bool:
        """Whether the trainer has called `elastic.init`."""
        return self._called

    @property
    def pid(self) -> int:
        """The trainer's process id, 0 without one."""
        return self._worker.pid if self._worker else 0

    def take_failures(self) -> list[WorkerFailure]:
        """Return the trainers that fell since this was last asked."""
        falls, self._failures = self._failures, []
        return falls

    def take_updates(self) -> list[GroupUpdate]:
        """Return what the trainer said since this was last asked, in order."""
        news, self._updates = self._updates, []
        return news

    def take_liveness(self) -> bool:
        """Return whether the trainer said anything since this was last asked."""
        spoke, self._was_heard = self._was_heard, False
        return spoke

    @property
    def stopped(self) -> bool:
        """Whether the system has stopped the trainer's process, as by SIGSTOP."""
        return self._worker is not None and self._worker.state == "stopped"

    @property
    def failing(self) -> bool:
        """Whether the trainer is to be judged as soon as its end is known: the others may notice it sooner."""
        if self._worker is None or self.worker_state.phase != "member":
            return False
        killed = self._kill_action is not None and not self._kill_action.planned
        failed = self._failure_report is not None  # which it says before its connections to others end
        return killed or (self.elastic and (failed or self._worker.state in ("zombie", "gone")))

    @property
    def cpu_s(self) -> float:
        """How much processor time the trainer's process has used, 0 without one."""
        return self._worker.cpu_s if self._worker else 0.0

    def mark_elastic(self) -> None:
        """Go on with the script as one that joins generations by itself, since a trainer of this job has said so.

        One that was started for a generation, as others are, is not in it, and joins a later one.
        """
        if self.elastic:
            return
        self._script = self._script.as_elastic()
        self._end_standby()  # it lacks what such a script imports
        self._change(up=0, peers=())
        if self.worker_state.phase == "member":
            self._phase("starting")
        log.info("script.elastic", generation=self.worker_state.assigned)

    def dismiss(self) -> None:
        """End all processes at once; nothing is heard of them any more."""
        for trainer in (self._worker, self._standby, *self._retired):
            if trainer:
                trainer.kill()
        self._worker = self._standby = None
        self._retired.clear()

    async def execute(self, action: Action) -> None:
        """Do it, and note in `worker_state` that it is done. Raises OSError when no process can be begun."""
        match action:
            case StartWorker():
                await self._begin(fresh=action.fresh)
            case StartStandby():
                self._standby = await self._new(nice=True)
                self._change(standby="loading")
            case RetireWorker():
                self._retire()
            case RunScript():
                self._run(action)
            case SendMessage():
                self._send(action)
            case TerminateWorker():
                self._phase("leaving")
                if self._worker:
                    self._worker.terminate()
            case KillWorker():
                self._kill(action)
            case _:
                assert_never(action)

    async def _begin(self, *, fresh: bool) -> None:
        if fresh:
            self._end_standby()
        loaded = self.worker_state.standby == "loaded"
        self._worker = self._standby or await self._new(nice=False)
        self._standby = None
        self.live, self.waits_for, self.moves, self._kill_action, self._failure_report = False, 0, 0, None, None
        self._stepped = self._writes = self._called = False
        self.keeps = True
        self._begun_at = time.monotonic()
        self._change(standby="absent", up=0, comm_failed=0, aborted=0, left=False, peers=())
        self._phase("loaded" if loaded else "loading")
        log.info("trainer.begun", pid=self._worker.pid, loaded=loaded)

    def _end_standby(self) -> None:
        if self._standby:
            self._standby.kill()
            self._standby = None
            self._change(standby="absent")

    def _retire(self) -> None:
        if self._worker:
            self._retired.append(self._worker)
            self._limit_exit_time()
        self._worker = None
        self._phase("absent")

    async def _new(self, *, nice: bool) -> WorkerProcess:
        trainer = await WorkerProcess.begin(self._script, self._environ, nice=nice)
        self._tasks.create_task(trainer.monitor(self._on_update))
        return trainer

    def _run(self, action: RunScript) -> None:
        assert self._worker is not None  # noqa: S101 -- only what is loaded is told to run
        if action.generation is None:
            self._worker.start({})
            self._phase("starting")
            return
        number = action.generation.number
        self._worker.start(generation_environment(action.generation, self._member, self._communication))
        self._change(assigned=number, up=number, peers=action.generation.members)
        self._phase("member")

    def _send(self, action: SendMessage) -> None:
        assert self._worker is not None  # noqa: S101 -- only what runs is told something
        match action.message:
            case JoinGeneration(generation=number):
                self._change(assigned=number, peers=action.generation.members if action.generation else ())
                self._phase("member")
            case Leave(checkpoint=writes):
                self._writes = writes
                self._phase("leaving")
            case message:
                self._change(aborted=getattr(message, "generation", 0))
        self._worker.send(action.message)

    def _kill(self, action: KillWorker) -> None:
        if self._worker and self._kill_action is None:
            self._kill_action = action
            self._worker.kill()

    def _on_update(self, trainer: WorkerProcess, update: WorkerUpdate) -> None:
        if trainer is self._worker:
            self._was_heard = True
            self._on_worker_update(update)
        elif trainer is self._standby:
            self._on_standby_update(update)
        elif isinstance(update, WorkerExited) and trainer in self._retired:
            self._retired.remove(trainer)
        self._on_update_hook(update)

    def _on_standby_update(self, update: WorkerUpdate) -> None:
        if isinstance(update, StandbyLoaded):
            self._change(standby="loaded")
            log.info("standby.loaded")
        elif isinstance(update, WorkerExited):
            self._standby = None
            self._change(standby="failed")
            log.warning("standby.ended", exit_code=update.exit_code)

    def _on_worker_update(self, update: WorkerUpdate) -> None:
        match update:
            case StandbyLoaded():
                self._phase("loaded")
            case InitCalled(checkpoint=checkpoint):
                self.keeps, self.checkpoint, self._called = bool(checkpoint), checkpoint, True
                self.mark_elastic()
            case WorkerReady():
                self.live, self.seen = update.live, update.seen
                if self.worker_state.phase == "starting":
                    self._phase("ready")
            case GenerationEntered() | GenerationLost() | StepDone() | CheckpointSaved() | CheckpointDelayed() | Note():
                self._on_group_update(update)
            case Heartbeat():
                self._on_heartbeat(update)
            case WorkerFinished():
                self._change(left=update.why == "left")
                self._phase("done" if update.why == "done" else "leaving")
            case ScriptFailed():
                self._failure_report = update
                self._limit_exit_time()
            case WorkerExited():
                self._end(update.exit_code)

    def _limit_exit_time(self) -> None:
        """Have a trainer that is about to end not take for ever."""
        if self._worker:
            asyncio.get_running_loop().call_later(EXIT_WAIT_S, self._worker.kill)

    def _on_heartbeat(self, update: Heartbeat) -> None:
        if self.worker_state.phase == "leaving" and update.moves > self.moves:
            self._phase("leaving")  # while it writes its checkpoint it is not late
        self.waits_for, self.moves = update.waits_for or 0, update.moves

    def _on_group_update(self, update: GroupUpdate) -> None:
        if isinstance(update, GenerationEntered):
            self.live = update.live
            self._change(up=update.generation, since=time.monotonic())
        elif isinstance(update, GenerationLost):
            self._change(comm_failed=max(self.worker_state.comm_failed, update.generation))
        elif isinstance(update, StepDone):
            self._stepped = True
        self._updates.append(update)

    def _end(self, exit_code: int) -> None:
        worker_state, self._worker = self.worker_state, None
        self.waits_for = 0
        all_trained = worker_state.phase == "done" or (worker_state.phase == "member" and not self.elastic)
        planned = worker_state.phase == "leaving" or (self._kill_action is not None and self._kill_action.planned)
        unwritten = (
            self._writes
            and self.keeps
            and worker_state.up > 0
            and worker_state.phase == "leaving"
            and not worker_state.left
        )
        if exit_code == 0 and all_trained:
            self.finished = True
        elif unwritten or not planned:
            self._failures.append(self._failure(exit_code, unwritten=unwritten))  # whoever judges it says so
        if planned or self.finished:
            killed = {"killed": self._kill_action.why} if self._kill_action else {}
            log.info("trainer.ended", exit_code=exit_code, generation=worker_state.assigned, **killed)
        self._phase("absent")

    def _failure(self, exit_code: int, *, unwritten: bool) -> WorkerFailure:
        return WorkerFailure(
            exit_code=exit_code,
            report=self._failure_report,
            killed=self._kill_action.why if self._kill_action else "",
            elastic=self.elastic,
            generation=self.worker_state.assigned,
            was_up=self.worker_state.up >= self.worker_state.assigned,
            stepped=self._stepped,
            lived_s=time.monotonic() - self._begun_at,
            called=self._called,
            unwritten=unwritten,
        )

    def _phase(self, phase: WorkerPhase) -> None:
        self._change(phase=phase, since=time.monotonic())

    def _change(self, **changes: object) -> None:
        self.worker_state = msgspec.structs.replace(self.worker_state, **changes)
