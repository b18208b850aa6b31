"""Trainer processes, from the side of the agent that starts, hears and ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

import msgspec

from edl_runtime.elastic.channel import Unpacker, pack
from edl_runtime.elastic.link import AGENT_FD
from edl_runtime.elastic.messages import FromTrainer, Start, ToTrainer
from edl_runtime.elastic.script import Script
from edl_runtime.log import get_logger

log = get_logger(__name__)

DRAIN_S = 1.0
"""How long it may take until all is heard that a process said before it ended."""


class Ended(msgspec.Struct, frozen=True):
    """The process is gone, with all that it started in its session; `exit_code` is negative for a signal."""

    exit_code: int


Heard = FromTrainer | Ended


class Trainer:
    """A process that loads what a script imports, waits to be told to start, and then is that script.

    It leads a session of its own, writes where its agent does, and never outlives its agent.
    """

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, script: Script, environ: Mapping[str, str], *, nice: bool) -> Self:
        """Begin a process; with `nice` it loads behind everybody else's work. Then `attend` it. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *_command(script, theirs.fileno(), nice=nice),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**quietened(environ, script), AGENT_FD: str(theirs.fileno())},
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

    async def attend(self, heard: Callable[[Self, Heard], None]) -> None:
        """Call `heard` with all that it says, in order, and `Ended` last. Cancelled, end it and return."""
        listening = asyncio.create_task(self._listen(heard))
        try:
            exit_code = await self._process.wait()
            self._kill_session()
            await asyncio.wait([listening], timeout=DRAIN_S)
            heard(self, Ended(exit_code))
        finally:
            self.kill()
            listening.cancel()
            self._writer.close()
            await self._process.wait()

    def start(self, environ: Mapping[str, str]) -> None:
        """Let it be its script, with these variables on top of what it began with."""
        self.say(Start(environ=dict(environ)))

    def say(self, message: ToTrainer) -> None:
        """Tell it something; nothing happens when it is gone."""
        if not self._writer.is_closing():
            self._writer.write(pack(message))

    def kill(self) -> None:
        """End it and all it started, whatever it is doing; `Ended` is still to come."""
        if self._process.returncode is None:
            self._kill_session()

    def terminate(self) -> None:
        """Ask the process to end, in the way that any program knows."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    async def _listen(self, heard: Callable[[Self, Heard], None]) -> None:
        unpacker: Unpacker[FromTrainer] = Unpacker(FromTrainer)
        try:
            while data := await self._reader.read(1 << 16):
                for message in unpacker.feed(data):
                    heard(self, message)
        except ConnectionError:
            pass
        except msgspec.DecodeError as error:
            log.warning("trainer.unintelligible", pid=self.pid, error=str(error))
            self.kill()

    def _kill_session(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nothing of it is left (macOS says it so)
            os.killpg(self.pid, signal.SIGKILL)


def quietened(environ: Mapping[str, str], script: Script) -> dict[str, str]:
    """Return `environ` with what keeps Paddle's chatter out of the log; whoever has set anything of it is left alone.

    That is what its C++ parts say of connections, and its advice to install ccache.
    """
    quiet: dict[str, str] = {}
    if not any(name.startswith("GLOG_") for name in environ):
        quiet["GLOG_minloglevel"] = "1"
    if "PYTHONWARNINGS" not in environ and not any(option.startswith("-W") for option in script.options):
        quiet["PYTHONWARNINGS"] = "ignore:No ccache found"
    return {**environ, **quiet}


def _command(script: Script, descriptor: int, *, nice: bool) -> list[str]:
    interpreter = script.command[0] if script.file else sys.executable
    standby = [interpreter, *script.options, "-m", "edl_runtime.elastic.standby"]
    flags = ["--agent", f"{descriptor},{os.getpid()}"]
    flags += ["--nice"] if nice else []
    flags += ["--elastic"] if script.elastic else []
    if not script.file:
        return [*standby, *flags, "--", *script.command]
    loaded = ["--load", ",".join(script.imports)] if script.imports else []
    return [*standby, *flags, *loaded, "--script", "--", script.file, *script.arguments]
