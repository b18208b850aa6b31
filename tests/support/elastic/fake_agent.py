"""A fake agent: a test starts trainers with it and sends them generations."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from support.elastic import warm_trainers
from support.network.ports import free_ports
from support.paths import TRAINING_SCRIPTS
from support.teachers.process import wait_until

from edl_runtime.elastic.comm.agent_protocol import (
    AgentMessage,
    Heartbeat,
    JoinGeneration,
    Leave,
    MessageDecoder,
    WorkerMessage,
    WorkerReady,
    encode_message,
)
from edl_runtime.elastic.data.indexed import DatasetCursor

SCRIPT = TRAINING_SCRIPTS / "elastic_script.py"

Message = TypeVar("Message")


class AgentEnd:
    """The agent's end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: AgentMessage) -> None:
        self._end.sendall(encode_message(message))

    def unread(self) -> int:
        """Return how many bytes the trainer's listener has yet to read."""
        size = array.array("i", [0])
        fcntl.ioctl(self._end.fileno(), termios.TIOCOUTQ, size)
        return size[0]

    def receive(self) -> Iterator[WorkerMessage]:
        decoder: MessageDecoder[WorkerMessage] = MessageDecoder(WorkerMessage)
        while data := self._end.recv(1 << 16):
            yield from decoder.feed(data)


class Trainer:
    """A process that runs a script, and the agent's end of its socket. `warm`: forked from one with Paddle imported."""

    def __init__(
        self,
        out: Path,
        *,
        script: Path = SCRIPT,
        environ: Mapping[str, str] | None = None,
        warm: bool = True,
        **options: Any,
    ) -> None:
        ours, theirs = socket.socketpair()
        env = {
            **os.environ,
            "GLOG_minloglevel": "2",
            "SCRIPT_OPTIONS": json.dumps(options),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        command = [str(script), str(out)]
        with theirs, (out / f"stderr-{time.monotonic_ns()}").open("wb") as errors:
            self.process = (
                warm_trainers.begin(command, env, theirs, errors)
                if warm
                else subprocess.Popen(
                    [sys.executable, "-W", "ignore", *command],
                    env={**env, "EDL_AGENT_FD": str(theirs.fileno())},
                    pass_fds=[theirs.fileno()],
                    stderr=errors,
                )
            )
        self._end = ours
        self.line = AgentEnd(ours)
        self.messages: list[tuple[float, WorkerMessage]] = []
        self._queue: queue.Queue[WorkerMessage | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, name="edl-test-listener", daemon=True)
        self._listener.start()

    def await_message(self, kind: type[Message], matches: Callable[[Message], bool] = lambda _: True) -> Message:
        """Return the next message of that kind, skipping others. Fails after 150 s, or when the trainer ends."""
        until = time.monotonic() + 150
        while (message := self._queue.get(timeout=max(0.01, until - time.monotonic()))) is not None:
            if isinstance(message, kind) and matches(message):
                return message
        raise AssertionError(f"the trainer ended with {self.process.wait()} before any {kind.__name__}")

    def tell(self, message: AgentMessage) -> None:
        """Send a message that is to be known before the next step: wait until it is read, or the trainer has ended."""
        self.line.send(message)
        wait_until(lambda: not self.line.unread() or self.process.poll() is not None)

    def received(self, kind: type[Message]) -> list[Message]:
        return [message for _, message in self.messages if isinstance(message, kind)]

    def wait(self) -> int:
        return self.process.wait(150)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._listener.join(5)
        self._end.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            for message in self.line.receive():
                if not isinstance(message, Heartbeat):
                    self.messages.append((time.time(), message))
                self._queue.put(message)
        self._queue.put(None)


def join(trainers: list[Trainer], generation: int, instances: int = 3) -> None:
    """Send these trainers a generation of which they are the members, in this order."""
    store = f"127.0.0.1:{free_ports(1)[0]}"
    for rank, trainer in enumerate(trainers):
        message = JoinGeneration(
            generation=generation,
            rank=rank,
            world_size=len(trainers),
            store=store,
            instances=max(instances, len(trainers)),
        )
        trainer.tell(message)


def leave(trainer: Trainer, *, checkpoint: bool = False) -> None:
    trainer.tell(Leave(reason="a test", checkpoint=checkpoint))


def open_gate(out: Path, step: int | str) -> None:
    """Let trainers do a step that is one of their `gates`, for which they wait until then."""
    (out / f"gate-{step}").touch()


def close_gate(out: Path, step: int | str) -> None:
    """Let trainers wait again where a gate was open."""
    (out / f"gate-{step}").unlink()


@contextlib.contextmanager
def trainers(out: Path, count: int, **options: Any) -> Iterator[list[Trainer]]:
    """Yield `count` ready trainers; all in the list are killed afterwards, also those that a test appends."""
    out.mkdir(exist_ok=True)
    started = [Trainer(out, **options) for _ in range(count)]
    try:
        for trainer in started:
            trainer.await_message(WorkerReady)
        yield started
    finally:
        for trainer in started:
            trainer.end()


def read_json_lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the JSON lines of these files; an incomplete last line is skipped."""
    return [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]]


def stepped(out: Path) -> dict[int, list[int]]:
    """Return the sorted samples of each step, as trainers have logged them.

    A step that was done in two generations counts in the later one: the earlier was lost.
    """
    steps: dict[int, tuple[int, list[int]]] = {}
    for line in sorted(read_json_lines(out.glob("stepped-*.jsonl")), key=lambda line: int(line["generation"])):
        generation, samples = steps.get(line["step"], (0, []))
        kept = samples if generation == line["generation"] else []
        steps[line["step"]] = line["generation"], [*kept, *line["samples"]]
    return {step: sorted(samples) for step, (_, samples) in sorted(steps.items())}


def generations_of(out: Path) -> dict[int, set[int]]:
    """Return the generations in which each step was done."""
    found: dict[int, set[int]] = {}
    for line in read_json_lines(out.glob("stepped-*.jsonl")):
        found.setdefault(line["step"], set()).add(line["generation"])
    return found


def batches_of(samples: int, global_batch: int, epochs: int, seed: int = 3) -> dict[int, list[int]]:
    """Return what `stepped` returns if each sample counts once an epoch, in the order of the seed."""
    cursor = DatasetCursor(length=samples, global_batch=global_batch, epochs=epochs, seed=seed)
    steps: dict[int, list[int]] = {}
    while not cursor.done:
        indices = cursor.batch()
        steps[len(steps) + 1] = sorted(indices.tolist())
        cursor = cursor.advance(len(indices))
    return steps


def weights(out: Path) -> dict[str, np.ndarray]:
    with np.load(out / "weights.npz") as kept:
        return dict(kept)
