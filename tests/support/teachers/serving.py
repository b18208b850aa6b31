"""A teacher's HTTP server in the test's process, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

from support.teachers.process import PATIENCE_S
from support.teachers.runners import InlineRunner

from edl_runtime.protocol.listener import accepting, listen
from edl_runtime.teacher.http.server import HttpServer
from edl_runtime.teacher.models.callable import CallableModel
from edl_runtime.teacher.models.model import ModelOptions
from edl_runtime.teacher.predictor.pool import Done
from edl_runtime.teacher.shm.arena import Arena

T = TypeVar("T")
LIMIT = 1 << 20
"""Most bytes of a body."""


def echo_request(size: int, value: int = 9) -> bytes:
    """Return a request of the model `echo` with `size` bytes of this value."""
    tensor = b'{"name":"x","datatype":"UINT8","shape":[1,%d],"parameters":{"binary_data_size":%d}}' % (size, size)
    header = b'{"inputs":[%b],"parameters":{"binary_data_output":true}}' % tensor
    head = b"POST /v2/models/teacher/infer HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n" % (
        len(header) + size
    )
    return head + b"Inference-Header-Content-Length: %d\r\n\r\n" % len(header) + header + bytes([value]) * size


class HeldRunner(InlineRunner):
    """Holds requests until the test releases them."""

    def __init__(self, model: CallableModel, arena: Arena) -> None:
        super().__init__(model, arena)
        self.held: list[Callable[[], None]] = []

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        self.held.append(lambda: InlineRunner.submit(self, slot, size, json_size, done))


class DeferredRunner(InlineRunner):
    """Answers in the next iteration of the loop, as predictors do."""

    def submit(self, slot: int, size: int, json_size: int | None, done: Done) -> None:
        asyncio.get_running_loop().call_soon(InlineRunner.submit, self, slot, size, json_size, done)


class Served:
    """An HTTP server in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, front: HttpServer, port: int) -> None:
        self.loop = loop
        self.front = front
        self.port = port
        self.address = f"127.0.0.1:{port}"

    @property
    def held(self) -> list[Callable[[], None]]:
        """The requests of its HeldRunner; each is released by a call."""
        assert isinstance(self.front.runner, HeldRunner)
        return self.front.runner.held

    def get(self, path: str, **headers: str) -> Any:
        request = urllib.request.Request(f"http://{self.address}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any, **headers: str) -> Any:
        request = urllib.request.Request(f"http://{self.address}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def on_loop(self, call: Callable[[], T]) -> T:
        """Call `call` in the server's event loop; return its result."""

        async def make_call() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(make_call(), self.loop).result(PATIENCE_S)

    def check_stalled(self, times: int = 1) -> None:
        """Look for clients that have stalled."""
        for _ in range(times):
            self.on_loop(self.front.end_stalled)

    def unsent(self) -> int:
        """Return the number of unsent bytes of answers."""
        return self.on_loop(
            lambda: sum(one._transport.get_write_buffer_size() for one in self.front.connections),
        )

    def exchange(self, sent: bytes) -> bytes:
        """Send raw bytes and return all that comes back until the teacher closes."""
        with self.connect() as raw:
            raw.sendall(sent)
            answer = b""
            while part := raw.recv(65536):
                answer += part
            return answer


@contextmanager
def serving(
    name: str = "arithmetic",
    runner: type[InlineRunner] = InlineRunner,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> Iterator[Served]:
    options.setdefault("check_s", 3600.0)  # tests run the checks themselves
    model = CallableModel(ModelOptions(model=f"support.models:{name}"))
    port = options.pop("port", 0)
    arena = Arena.create(options.pop("limit", LIMIT), slots=options.pop("slots", 4))
    loop = asyncio.new_event_loop()

    ending = AsyncExitStack()

    async def begin() -> tuple[HttpServer, int, asyncio.Task[None]]:
        front = HttpServer(model.signature, runner(model, arena), arena, **options)
        listener = listen("127.0.0.1", port)
        await ending.enter_async_context(accepting(listener, front.connections, front.connect, tls))
        return front, listener.getsockname()[1], loop.create_task(front.watch())

    async def end() -> None:
        watch.cancel()
        await ending.aclose()
        await front.drain(0.1)
        await asyncio.sleep(0)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        front, bound, watch = asyncio.run_coroutine_threadsafe(begin(), loop).result()
        yield Served(loop, front, bound)
        asyncio.run_coroutine_threadsafe(end(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        arena.close()
