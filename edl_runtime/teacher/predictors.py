"""The front's end of the predictor processes: one for each device."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import structlog

from edl_runtime.errors import ModelError, TeacherError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.settings import split_secrets
from edl_runtime.teacher.answering import Answer, refuse
from edl_runtime.teacher.arena import Arena
from edl_runtime.teacher.models import ModelOptions
from edl_runtime.teacher.predictor import RECORD, Failure, Task
from edl_runtime.teacher.runner import Done

log = structlog.get_logger(__name__)


class Predictors:
    """Running predictors of one model, as one Runner: each request goes to the one with the fewest to do."""

    def __init__(self, members: Sequence[_Predictor], signature: ModelSignature) -> None:
        self.signature = signature
        self._members = members

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        min(self._members, key=len).submit(slot, size, json_size, done)

    async def lost(self) -> TeacherError:
        """Wait until one has ended by itself and return what to say of it."""
        await asyncio.wait([member.lost for member in self._members], return_when=asyncio.FIRST_COMPLETED)
        codes = [await member.exit_code() for member in self._members if member.lost.done()]
        return TeacherError(f"the predictor {_ended(codes[0])}; see its output above")


@asynccontextmanager
async def run_predictors(options: Sequence[ModelOptions], arena: Arena) -> AsyncIterator[Predictors]:
    """Start a predictor for each of `options`, wait until all are ready, and end them with the block.

    Raises ModelError when the model can't be loaded, TeacherError when a predictor was killed meanwhile.
    """
    async with AsyncExitStack() as stack:
        members = []
        for number, one in enumerate(options):
            member = _Predictor(one, arena, number)
            stack.push_async_callback(member.stop)
            await member.start()
            members.append(member)
        signatures = [await member.ready() for member in members]
        yield Predictors(members, signatures[0])


class _Predictor(asyncio.Protocol):
    """One predictor process. Its length is the number of requests that it has to answer."""

    def __init__(self, options: ModelOptions, arena: Arena, number: int) -> None:
        self._options = options
        self._arena = arena
        self._number = number
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._lifeline = -1
        self._pending: dict[int, Done] = {}
        self._partial = b""
        loop = asyncio.get_running_loop()
        self._announced: asyncio.Future[ModelSignature | Failure] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    def __len__(self) -> int:
        return len(self._pending)

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        task = Task(
            model=self._options,
            number=self._number,
            arena=self._arena.descriptor,
            area_size=self._arena.area_size,
            slots=self._arena.slots,
            channel=theirs.fileno(),
            lifeline=lifeline,
        )
        plain, _ = split_secrets(os.environ)
        command = [sys.executable, "-m", "edl_runtime.teacher.predictor", msgspec.json.encode(task).decode()]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # a model may print; our own output is for who started us
                pass_fds=(task.arena, task.channel, task.lifeline),
                env={"GLOG_minloglevel": "2", **plain},
            )
        finally:
            os.close(lifeline)
            theirs.close()
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)

    async def ready(self) -> ModelSignature:
        either: list[asyncio.Future[Any]] = [self._announced, self.lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._announced.done():
            announced = self._announced.result()
            if isinstance(announced, Failure):
                raise ModelError(announced.model, announced.reason)
            return announced
        code = await self.exit_code()
        if code == -signal.SIGKILL:  # what the system does when memory runs out: another time it may work
            raise TeacherError(f"the predictor was killed while it loaded {self._options.model!r}; is memory short?")
        raise ModelError(self._options.model, f"loading it, the predictor {_ended(code)}; see its output above")

    async def exit_code(self) -> int:
        return await self._process.wait() if self._process else 0

    async def stop(self) -> None:
        """End the process at once. It keeps nothing that has to be saved."""
        if self._transport:
            self._transport.abort()
        if self._process and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        if self._transport is None or self.lost.done():
            done(self._gone(slot))
            return
        self._pending[slot] = done
        self._transport.write(RECORD.pack(slot, size, -1 if json_size is None else json_size, 0))

    def data_received(self, data: bytes) -> None:
        data = self._partial + data
        whole = len(data) - len(data) % RECORD.size
        self._partial = data[whole:]
        for slot, status, json_size, size in RECORD.iter_unpack(data[:whole]):
            if self._announced.done():
                self._pending.pop(slot)(Answer(status, None if json_size < 0 else json_size, size))
            else:
                kind: type[ModelSignature | Failure] = ModelSignature if status == 200 else Failure
                self._announced.set_result(msgspec.json.decode(self._arena.answer(slot)[:size], type=kind))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.lost.set_result(None)
        pending, self._pending = self._pending, {}
        for slot, done in pending.items():
            done(self._gone(slot))

    def _gone(self, slot: int) -> Answer:
        return refuse(self._arena.answer(slot), 503, "the teacher's predictor has ended; ask another teacher")


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
