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

from edl_runtime.elastic.agent.entrypoint import STANDBY, Entrypoint, generation_environment
from edl_runtime.elastic.agent.failures import WorkerFailure
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
from edl_runtime.elastic.agent.watchdog import ProcessSample
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
    SaveCheckpoint,
    ScriptFailed,
    StandbyLoaded,
    StartScript,
    StepDone,
    WorkerFinished,
    WorkerMessage,
    WorkerReady,
    encode_message,
)
from edl_runtime.exit_status import oom_kills
from edl_runtime.log import get_logger
from edl_runtime.settings import AGENT_FD

log = get_logger(__name__)

DRAIN_S = 1.0
"""How long to read the last messages of a process that has ended."""


class WorkerExited(msgspec.Struct, frozen=True):
    """The process is gone, with everything in its session; `exit_code` is negative for a signal."""

    exit_code: int


WorkerUpdate = WorkerMessage | WorkerExited


class WorkerProcess:
    """A process that preloads what a script imports, waits for StartScript, and then runs the script.

    It leads a session of its own, writes to its agent's output, and never outlives its agent.
    """

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, script: Entrypoint, environ: Mapping[str, str], *, nice: bool = False) -> Self:
        """Begin a process; with `nice` it loads at a lower priority. `monitor` has to follow. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *_standby_command(script, theirs.fileno(), nice=nice),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**quiet_environment(environ, script), AGENT_FD: str(theirs.fileno())},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                writer.close()
                raise
        return cls(process, reader, writer)

    def sample(self) -> ProcessSample:
        """Ask the system what the process does."""
        import psutil

        try:
            process = psutil.Process(self.pid)
            with process.oneshot():
                used, switches = process.cpu_times(), 0
                with suppress(NotImplementedError):  # a sandbox's /proc may not have them
                    switches = sum(process.num_ctx_switches())
                return ProcessSample(str(process.status()), float(used.user + used.system), switches)
        except psutil.NoSuchProcess:
            return ProcessSample()

    async def monitor(self, on_update: Callable[[Self, WorkerUpdate], None]) -> None:
        """Call `on_update` with each message, in order, and WorkerExited last.

        When cancelled, kill the process and return.
        """
        listening = asyncio.create_task(self._listen(on_update))
        try:
            exit_code = await self._process.wait()
            self._kill_session()  # what it has started may hold the socket open
            await asyncio.wait([listening], timeout=DRAIN_S)
            on_update(self, WorkerExited(exit_code))
        finally:
            self.close()
            listening.cancel()
            await self._process.wait()

    def send(self, message: AgentMessage) -> None:
        """Send it a message; does nothing when it is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    def kill(self) -> None:
        """Kill it and everything in its session; WorkerExited is still to come."""
        if self._process.returncode is None:
            self._kill_session()

    def close(self) -> None:
        """Kill it, too, and hear no more of it."""
        self.kill()
        self._writer.close()

    def terminate(self) -> None:
        """Send SIGTERM."""
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
            log.warning("message.rejected", pid=self.pid, error=str(error))
            self.kill()

    def _kill_session(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nothing of it is left (PermissionError on macOS)
            os.killpg(self.pid, signal.SIGKILL)


def quiet_environment(environ: Mapping[str, str], script: Entrypoint) -> dict[str, str]:
    """Return `environ` with settings that silence Paddle's C++ log and ccache warning, unless the user has set any."""
    quiet: dict[str, str] = {}
    if not any(name.startswith("GLOG_") for name in environ):
        quiet["GLOG_minloglevel"] = "1"
    if "PYTHONWARNINGS" not in environ and not any(option.startswith("-W") for option in script.options):
        quiet["PYTHONWARNINGS"] = "ignore:No ccache found"
    return {**environ, **quiet}


def _standby_command(script: Entrypoint, descriptor: int, *, nice: bool) -> list[str]:
    interpreter = script.command[0] if script.file else sys.executable
    standby = [interpreter, *script.options, "-m", STANDBY]
    flags = ["--agent", f"{descriptor},{os.getpid()}"]
    flags += ["--nice"] if nice else []
    flags += ["--elastic"] if script.elastic else []
    if not script.file:
        return [*standby, *flags, "--", *script.command]
    loaded = ["--load", ",".join(script.imports)] if script.imports else []
    return [*standby, *flags, *loaded, "--script", "--", script.file, *script.arguments]


EXIT_WAIT_S = 10.0
"""How long a worker may take to exit that has reported its failure, or that was retired."""

GroupUpdate = GenerationEntered | StepDone | GenerationLost | CheckpointSaved | CheckpointDelayed | Note
"""Updates that concern other instances."""


class WorkerSupervisor:
    """The worker and the standby of one instance. `on_update` is called after each message of any of its processes.

    `gpu`: whether a script has a GPU, as far as is known before one of them has imported Paddle.
    """

    def __init__(
        self,
        script: Entrypoint,
        member: str,
        environ: Mapping[str, str],
        *,
        gpu: bool,
        tasks: asyncio.TaskGroup,
        on_update: Callable[[WorkerUpdate], None],
    ) -> None:
        self.state = WorkerState(elastic=script.elastic, gpu=gpu)
        self._updates: list[GroupUpdate | WorkerFailure] = []
        self._was_heard = False
        self._script = script
        self._member = member
        self._environ = environ
        self._tasks = tasks
        self._on_update_hook = on_update
        self._worker: WorkerProcess | None = None
        self._standby: WorkerProcess | None = None
        self._retired: list[WorkerProcess] = []
        self._begun_at = 0.0
        self._oom_kills = 0
        self._kill_action: KillWorker | None = None
        self._failure_report: ScriptFailed | None = None
        self._stepped = self._writes = False

    def take_updates(self) -> list[GroupUpdate | WorkerFailure]:
        """Return the worker's updates and failures since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    @property
    def has_failure(self) -> bool:
        """Whether a failure is among what `take_updates` returns next: nothing is done about the worker before."""
        return any(isinstance(update, WorkerFailure) for update in self._updates)

    def take_liveness(self) -> bool:
        """Return whether the worker has sent anything since the last call."""
        heard, self._was_heard = self._was_heard, False
        return heard

    def sample(self) -> ProcessSample:
        """Ask the system what the worker's process does."""
        return self._worker.sample() if self._worker else ProcessSample()

    @property
    def failing(self) -> bool:
        """Whether the worker has failed and its exit status is not known yet; other instances may notice it sooner."""
        if self._worker is None or self.state.phase != "member":
            return False
        failed = self._failure_report is not None  # sent before its connections to others end
        return self._hung or (self.state.elastic and (failed or self.sample().status in ("zombie", "gone")))

    @property
    def _hung(self) -> bool:
        return self._kill_action is not None and not self._kill_action.planned

    def mark_elastic(self) -> None:
        """Treat the script as elastic from now on, since a worker of this job has called `elastic.init`.

        A worker that was started for a generation as a plain script is not in it, and joins a later one.
        """
        if self.state.elastic:
            return
        self._script = self._script.as_elastic()
        self._end_standby()  # it has not preloaded what an elastic script imports
        self._change(elastic=True, up=0, peers=())
        if self.state.phase == "member":
            self._phase("starting")
        log.info("script.marked_elastic", generation=self.state.assigned)

    def dismiss(self) -> None:
        """Kill all processes, and ignore what they still send."""
        for process in (self._worker, self._standby, *self._retired):
            if process:
                process.kill()
        self._worker = self._standby = None
        self._retired.clear()

    async def execute(self, action: Action) -> None:
        """Do it, and update `state`. Raises OSError when no process can be begun."""
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
                if self._worker and self._kill_action is None:
                    self._kill_action = action
                    self._worker.kill()
            case _:
                assert_never(action)

    async def _begin(self, *, fresh: bool) -> None:
        if fresh:
            self._end_standby()
        before = self.state
        self._worker = self._standby or await self._new(nice=False)
        self._standby = None
        self._kill_action = self._failure_report = None
        self._stepped = self._writes = False
        self._begun_at = time.monotonic()
        self._oom_kills = oom_kills()
        self.state = WorkerState(
            phase="loaded" if before.standby == "loaded" else "loading",
            since=self._begun_at,
            assigned=before.assigned,
            elastic=before.elastic,
            gpu=before.gpu,
            checkpoint=before.checkpoint,
            seen=before.seen,  # a generation's number is never used again, whichever worker has seen it
            finished=before.finished,
        )
        log.info("worker.started", pid=self._worker.pid, loaded=before.standby == "loaded")

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
        process = await WorkerProcess.begin(self._script, self._environ, nice=nice)
        monitoring = self._tasks.create_task(process.monitor(self._on_update))
        monitoring.add_done_callback(lambda _: process.close())  # it may be cancelled before it begins
        return process

    def _run(self, action: RunScript) -> None:
        assert self._worker is not None  # noqa: S101 -- it is loaded
        if action.generation is None:
            self._worker.send(StartScript(environ={}))
            self._phase("starting")
            return
        number = action.generation.number
        environ = generation_environment(action.generation, self._member, gpu=self.state.gpu)
        self._worker.send(StartScript(environ=environ))
        self._change(assigned=number, up=number, peers=action.generation.members)
        self._phase("member")

    def _send(self, action: SendMessage) -> None:
        assert self._worker is not None  # noqa: S101 -- it runs
        match action.message:
            case JoinGeneration(generation=number):
                self._change(assigned=number, peers=action.generation.members if action.generation else ())
                self._phase("member")
            case Leave(checkpoint=writes):
                self._writes = writes
                self._phase("leaving")
            case SaveCheckpoint(request=request):
                self._change(saving=request)
            case message:
                self._change(aborted=getattr(message, "generation", 0))
        self._worker.send(action.message)

    def _on_update(self, process: WorkerProcess, update: WorkerUpdate) -> None:
        if process is self._worker:
            self._was_heard = True
            self._on_worker_update(update)
        elif process is self._standby:
            self._on_standby_update(update)
        elif isinstance(update, WorkerExited) and process in self._retired:
            self._retired.remove(process)
        self._on_update_hook(update)

    def _on_standby_update(self, update: WorkerUpdate) -> None:
        if isinstance(update, StandbyLoaded):
            self._note_gpu(update)
            self._change(standby="loaded")
            log.info("standby.loaded")
        elif isinstance(update, WorkerExited):
            self._standby = None
            self._change(standby="failed")
            log.warning("standby.exited", exit_code=update.exit_code)

    def _note_gpu(self, loaded: StandbyLoaded) -> None:
        if loaded.gpu is not None:
            self._change(gpu=loaded.gpu)

    def _on_worker_update(self, update: WorkerUpdate) -> None:
        match update:
            case StandbyLoaded():
                self._note_gpu(update)
                self._phase("loaded")
            case InitCalled(checkpoint=checkpoint):
                self._change(keeps=bool(checkpoint), checkpoint=checkpoint, called=True)
                self.mark_elastic()
            case WorkerReady():
                self._change(live=update.live, seen=update.seen)
                if self.state.phase == "starting":
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
        """Kill a worker that is about to exit and takes too long."""
        if self._worker:
            asyncio.get_running_loop().call_later(EXIT_WAIT_S, self._worker.kill)

    def _on_heartbeat(self, update: Heartbeat) -> None:
        if self.state.phase == "leaving" and update.moves > self.state.moves:
            self._phase("leaving")  # its deadline starts again with each piece of the checkpoint
        self._change(waits_for=update.waits_for or 0, moves=update.moves)

    def _on_group_update(self, update: GroupUpdate) -> None:
        if isinstance(update, GenerationEntered):
            self._change(live=update.live, up=update.generation, since=time.monotonic())
        elif isinstance(update, GenerationLost):
            self._change(comm_failed=max(self.state.comm_failed, update.generation))
        elif isinstance(update, StepDone):
            self._stepped = True
        elif isinstance(update, CheckpointDelayed | CheckpointSaved):
            self._change(unsaved=update.reason if isinstance(update, CheckpointDelayed) else "")
        self._updates.append(update)

    def _end(self, exit_code: int) -> None:
        state, self._worker = self.state, None
        all_trained = state.phase == "done" or (state.phase == "member" and not self.state.elastic)
        report, kill = self._failure_report, self._kill_action
        no_group = report is not None and report.cause == "group"  # it failed before it was told to leave
        planned = (state.phase == "leaving" and not no_group) or (kill is not None and kill.planned)
        has_to_write = self._writes and state.keeps and state.up > 0
        unwritten = has_to_write and state.phase == "leaving" and not state.left and not no_group
        ended_well = exit_code == 0 and all_trained
        finished = state.finished or ended_well
        if not ended_well and (unwritten or not planned):
            self._updates.append(self._failure(exit_code, unwritten=unwritten))  # the agent logs it
        if planned or finished:
            killed = {"killed": kill.why} if kill else {}
            log.info("worker.exited", exit_code=exit_code, generation=state.assigned, **killed)
        self._change(finished=finished, waits_for=0)
        self._phase("absent")

    def _failure(self, exit_code: int, *, unwritten: bool) -> WorkerFailure:
        return WorkerFailure(
            exit_code=exit_code,
            report=self._failure_report,
            killed=self._kill_action.why if self._kill_action else "",
            elastic=self.state.elastic,
            generation=self.state.assigned,
            was_up=self.state.up >= self.state.assigned,
            stepped=self._stepped,
            lived_s=time.monotonic() - self._begun_at,
            called=self.state.called,
            unwritten=unwritten,
            hung=self._hung,
            oom_killed=oom_kills() > self._oom_kills,
        )

    def _phase(self, phase: WorkerPhase) -> None:
        self._change(phase=phase, since=time.monotonic())

    def _change(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
