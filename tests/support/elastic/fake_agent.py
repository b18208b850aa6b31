"""A stand-in for agents: it starts trainers and tells them their generations, by itself and at the test's word."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from support.elastic import warm_trainers
from support.paths import TRAINING_SCRIPTS

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

    def receive(self) -> Iterator[WorkerMessage]:
        decoder: MessageDecoder[WorkerMessage] = MessageDecoder(WorkerMessage)
        while data := self._end.recv(1 << 16):
            yield from decoder.feed(data)


class Trainer:
    """A process that runs a script, and this end of its line. `warm`: forked from one that has imported Paddle."""

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
        told = {
            **os.environ,
            "GLOG_minloglevel": "2",
            "SCRIPT_OPTIONS": json.dumps(options),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        command = [str(script), str(out)]
        with theirs, (out / f"stderr-{time.monotonic_ns()}").open("wb") as errors:
            self.process = (
                warm_trainers.begin(command, told, theirs, errors)
                if warm
                else subprocess.Popen(
                    [sys.executable, "-W", "ignore", *command],
                    env={**told, "EDL_AGENT_FD": str(theirs.fileno())},
                    pass_fds=[theirs.fileno()],
                    stderr=errors,
                )
            )
        self._end = ours
        self.line = AgentEnd(ours)
        self.heard: list[tuple[float, WorkerMessage]] = []
        self._news: queue.Queue[WorkerMessage | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, name="edl-test-listener", daemon=True)
        self._listener.start()

    def await_message(self, kind: type[Message], such: Callable[[Message], bool] = lambda _: True) -> Message:
        """Return the next message of that kind, passing over others. Fails after 150 s, or when the trainer ends."""
        until = time.monotonic() + 150
        while (word := self._news.get(timeout=max(0.01, until - time.monotonic()))) is not None:
            if isinstance(word, kind) and such(word):
                return word
        raise AssertionError(f"the trainer ended with {self.process.wait()} before any {kind.__name__}")

    def said(self, kind: type[Message]) -> list[Message]:
        return [word for _, word in self.heard if isinstance(word, kind)]

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
            for word in self.line.receive():
                if not isinstance(word, Heartbeat):
                    self.heard.append((time.time(), word))
                self._news.put(word)
        self._news.put(None)


def join(trainers: list[Trainer], generation: int, instances: int = 3) -> None:
    """Tell these trainers that they are the members of a generation, in this order."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"127.0.0.1:{free.getsockname()[1]}"
    for rank, trainer in enumerate(trainers):
        word = JoinGeneration(
            generation=generation,
            rank=rank,
            world_size=len(trainers),
            store=store,
            instances=max(instances, len(trainers)),
        )
        trainer.line.send(word)


def leave(trainer: Trainer, *, checkpoint: bool = False) -> None:
    trainer.line.send(Leave(reason="a test", checkpoint=checkpoint))


def open_gate(out: Path, step: int) -> None:
    """Let trainers do a step that is one of their `gates`: however busy the machine is, they did not do it before."""
    (out / f"gate-{step}").touch()


@contextlib.contextmanager
def trainers(out: Path, count: int, **options: Any) -> Iterator[list[Trainer]]:
    """Yield so many trainers that are ready; what is left of them is ended afterwards. Append others to the list."""
    out.mkdir(exist_ok=True)
    started = [Trainer(out, **options) for _ in range(count)]
    try:
        for trainer in started:
            trainer.await_message(WorkerReady)
        yield started
    finally:
        for trainer in started:
            trainer.end()


def said_in(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the objects that processes have written to these files; a last line may be half written yet."""
    return [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]]


def stepped(out: Path) -> dict[int, list[int]]:
    """Return the samples of each step, sorted, as processes have written them down.

    A step that was done in two generations counts as in the later: the one before it was lost.
    """
    steps: dict[int, tuple[int, list[int]]] = {}
    for line in sorted(said_in(out.glob("stepped-*.jsonl")), key=lambda line: int(line["generation"])):
        generation, samples = steps.get(line["step"], (0, []))
        kept = samples if generation == line["generation"] else []
        steps[line["step"]] = line["generation"], [*kept, *line["samples"]]
    return {step: sorted(samples) for step, (_, samples) in sorted(steps.items())}


def generations_of(out: Path) -> dict[int, set[int]]:
    """Return the generations that each step was done in: of one that was done twice there are two."""
    found: dict[int, set[int]] = {}
    for line in said_in(out.glob("stepped-*.jsonl")):
        found.setdefault(line["step"], set()).add(line["generation"])
    return found


def batches_of(samples: int, global_batch: int, epochs: int, seed: int = 3) -> dict[int, list[int]]:
    """Return what `stepped` is when each sample counts once an epoch, in the order that the seed gives."""
    place = DatasetCursor(length=samples, global_batch=global_batch, epochs=epochs, seed=seed)
    steps: dict[int, list[int]] = {}
    while not place.done:
        indices = place.batch()
        steps[len(steps) + 1] = sorted(indices.tolist())
        place = place.advance(len(indices))
    return steps


def weights(out: Path) -> dict[str, np.ndarray]:
    with np.load(out / "weights.npz") as kept:
        return dict(kept)
