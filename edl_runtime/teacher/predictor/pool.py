"""Starts, feeds and supervises the predictor processes, one per device."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

import msgspec

from edl_runtime.concurrency import first_completed
from edl_runtime.exit_status import describe_exit
from edl_runtime.log import get_logger
from edl_runtime.protocol.errors import TeacherError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.settings import split_secrets
from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.metrics import DeviceLoad, TeacherMetrics
from edl_runtime.teacher.models.model import ModelOptions
from edl_runtime.teacher.predictor.execute import EncodedAnswer, encode_refusal
from edl_runtime.teacher.predictor.process import DROP, FORGET, PING, RAN, RECORD, LoadFailure, PredictorTask, unpack
from edl_runtime.teacher.shm.arena import IDLE, READING, Arena
from edl_runtime.teacher.shm.regions import RegionSender, region_channel

Done = Callable[[EncodedAnswer], None]


class Runner(Protocol):
    """Answers requests that lie in the arena."""

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        """Answer the request of `size` bytes in `slot`; call `done` once, now or later, on the event loop."""

    def drop(self, slot: int) -> None:
        """Skip the request in `slot` if it has not begun: its client has disconnected. `done` is called as well."""


PING_LIMIT_S = 5.0
"""An idle predictor that does not answer a ping for so long counts as hung."""

END_WITHIN_S = 2.0
"""A predictor that has closed its channel is killed if it runs for longer than this."""

CHECKS_PER_LIMIT = 5
"""Health checks per limit."""

log = get_logger(__name__)


class PredictorPool:
    """The predictors of one model as one Runner: each request goes to the one with the fewest requests."""

    def __init__(
        self, members: Sequence[_PredictorProcess], signature: ModelSignature, metrics: TeacherMetrics, load: DeviceLoad
    ) -> None:
        self.signature = signature
        self.load = load
        self._members = members
        metrics.gauges["edl_teacher_queue_depth"] = (
            "Requests that wait for the model or run.",
            lambda: sum(map(len, members)),
        )

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        min(self._members, key=len).submit(slot, size, json_size, done)

    def drop(self, slot: int) -> None:
        for member in self._members:
            member.drop(slot)

    async def failed(self, hung_after_s: float) -> TeacherError:
        """Wait until a predictor has ended by itself, or has hung and was killed; return the error to report."""
        return await first_completed(*(member.failed(hung_after_s) for member in self._members))


@asynccontextmanager
async def run_predictors(
    options: Sequence[ModelOptions], arena: Arena, metrics: TeacherMetrics
) -> AsyncIterator[PredictorPool]:
    """Start a predictor for each of `options`, wait until all are ready, and end them with the block.

    Raises ModelError when the model can't be loaded, TeacherError when a predictor was killed while it loaded.
    """
    async with AsyncExitStack() as stack:
        members = []
        load = DeviceLoad(len(options))
        for number, one in enumerate(options):
            member = _PredictorProcess(one, arena, number, metrics, load)
            stack.push_async_callback(member.stop)
            await member.start()
            members.append(member)
        signatures = [await member.ready() for member in members]
        yield PredictorPool(members, signatures[0], metrics, load)


class _PredictorProcess(asyncio.Protocol):
    """One predictor process. Its length is the number of its unanswered requests."""

    def __init__(
        self, options: ModelOptions, arena: Arena, number: int, metrics: TeacherMetrics, load: DeviceLoad
    ) -> None:
        self._metrics = metrics
        self._load = load
        self._options = options
        self._arena = arena
        self._number = number
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._region_sender: RegionSender | None = None
        self._lifeline = -1
        self._pending: dict[int, Done] = {}
        self._pinged = False  # a ping is unanswered
        self._messages_seen = 0  # signs of life
        self._partial = b""
        loop = asyncio.get_running_loop()
        self._announced: asyncio.Future[ModelSignature | LoadFailure] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()

    def __len__(self) -> int:
        return len(self._pending)

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        region_socket, theirs_for_regions = region_channel()
        self._region_sender = RegionSender(region_socket, self._forget)
        lifeline, self._lifeline = os.pipe()
        task = PredictorTask(
            model=self._options,
            number=self._number,
            arena=self._arena.descriptor,
            area_size=self._arena.area_size,
            slots=self._arena.slots,
            channel=theirs.fileno(),
            region_socket=theirs_for_regions.fileno(),
            lifeline=lifeline,
        )
        plain, _ = split_secrets(os.environ)
        module = "edl_runtime.teacher.predictor.process"  # -P: files of the working directory must not shadow it
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", module, msgspec.json.encode(task).decode()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # a model may print; the teacher's own stdout may be JSON
                pass_fds=(task.arena, task.channel, task.region_socket, task.lifeline),
                env={"GLOG_minloglevel": "2", **plain},
            )
        finally:
            os.close(lifeline)
            theirs.close()
            theirs_for_regions.close()
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)

    async def ready(self) -> ModelSignature:
        either: list[asyncio.Future[Any]] = [self._announced, self._lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._announced.done():
            announced = self._announced.result()
            if isinstance(announced, LoadFailure):
                raise ModelError(announced.model, announced.reason)
            return announced
        code = await self._exit_code()
        if code == -signal.SIGKILL:  # probably out of memory, so that a restart may help
            raise TeacherError(f"the predictor was killed while it loaded {self._options.model!r}; is memory short?")
        raise ModelError(self._options.model, f"while loading it, the predictor {describe_exit(code)}; see its output")

    async def failed(self, hung_after_s: float) -> TeacherError:
        """Wait until the process has ended by itself, or was silent for too long and is killed; return the error.

        Silence is counted in checks, not by a clock: a teacher that was suspended itself must not blame its predictor.
        An idle predictor is pinged at each check. Decoding a request is never a hang: its size is limited.
        """
        ping_limit_s = min(PING_LIMIT_S, hung_after_s)
        check_s = ping_limit_s / CHECKS_PER_LIMIT
        silent_s = 0.0
        while silent_s < (ping_limit_s if self._pinged else hung_after_s):
            self._ping_if_idle()
            seen = self._messages_seen
            await asyncio.wait([self._lost], timeout=check_s)
            if self._lost.done():
                return TeacherError(f"the predictor {describe_exit(await self._exit_code())}; see its output")
            reads = any(self._arena.stages[slot] == READING for slot in self._pending)
            silent_s = silent_s + check_s if self._messages_seen == seen and not reads else 0.0
        self._kill()
        what = "not even a ping" if self._pinged else f"with {len(self)} requests pending"
        return TeacherError(f"the predictor hangs: no answer for {silent_s:.0f} s, {what}; restart the teacher")

    def _ping_if_idle(self) -> None:
        if self._transport and not self._pending and not self._pinged:
            self._pinged = True
            self._transport.write(RECORD.pack(PING, 0, 0, 0))

    async def _exit_code(self) -> int:
        """Wait for the end of the process; kill it after END_WITHIN_S: a thread of the model may keep it alive."""
        if self._process is None:
            return 0
        try:
            async with asyncio.timeout(END_WITHIN_S):
                return await self._process.wait()
        except TimeoutError:
            log.warning("predictor.killed", cause="it closed its channel but did not exit", waited_s=END_WITHIN_S)
            self._kill()
            return await self._process.wait()

    async def stop(self) -> None:
        """Kill the process: it has no state to save."""
        if self._transport:
            self._transport.abort()
        if self._region_sender:
            self._region_sender.close()
        self._kill()
        await self._exit_code()
        if self._lifeline >= 0:
            os.close(self._lifeline)

    def _kill(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.kill()

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        if self._transport is None or self._lost.done():
            done(self._gone(slot))
            return
        self._pending[slot] = done
        self._load.begin(self._number)
        region = self._arena.regions.get(slot)
        shared = 0 if region is None or self._region_sender is None else self._region_sender.send_region(region)
        self._transport.write(RECORD.pack(slot, size, -1 if json_size is None else json_size, shared))

    def drop(self, slot: int) -> None:
        if self._transport and slot in self._pending:
            self._transport.write(RECORD.pack(DROP, slot, 0, 0))

    def _forget(self, region: int) -> None:
        if self._transport and not self._lost.done():
            self._transport.write(RECORD.pack(FORGET, region, 0, 0))

    def data_received(self, data: bytes) -> None:
        records, self._partial = unpack(self._partial + data)
        for slot, status, json_size, size in records:
            self._messages_seen += 1
            if slot == PING:
                self._pinged = False
            elif slot == RAN:
                self._metrics.count_run(status, json_size / 1e9)
            elif self._announced.done():
                self._metrics.count_answer(status)
                self._load.end(self._number)
                self._pending.pop(slot)(EncodedAnswer(status, None if json_size < 0 else json_size, size))
            else:
                kind: type[ModelSignature | LoadFailure] = ModelSignature if status == 200 else LoadFailure
                self._announced.set_result(msgspec.json.decode(self._arena.answer(slot)[:size], type=kind))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._lost.set_result(None)
        pending, self._pending = self._pending, {}
        for slot, done in pending.items():
            self._load.end(self._number)
            done(self._gone(slot))

    def _gone(self, slot: int) -> EncodedAnswer:
        """Return the refusal of a request whose predictor has ended; `predictor_died` if that was at work on it."""
        self._metrics.count_answer(503)
        at_work, self._arena.stages[slot] = self._arena.stages[slot] != IDLE, IDLE
        reason = "the teacher's predictor has ended; use another teacher"
        if at_work:
            reason = "the teacher's predictor died or hung while it worked on this request, which may be the cause"
        return encode_refusal(self._arena.answer(slot), 503, reason)._replace(predictor_died=at_work)
