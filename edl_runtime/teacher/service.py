"""Teacher lifecycle: load the model, serve it, register in the pool, drain."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from edl_runtime.concurrency import event_of_termination, first_completed, unless_stopped
from edl_runtime.errors import EdlError, SpecError, missing_library
from edl_runtime.log import get_logger
from edl_runtime.pool_reports import TeacherReport
from edl_runtime.preemption import PreemptionNotice, watch_machine
from edl_runtime.protocol.address import check_exposure, is_loopback
from edl_runtime.protocol.errors import TeacherError
from edl_runtime.protocol.listener import accepting, connection_limit, listen
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tls import server_tls_context
from edl_runtime.registry.lease import hold_lease
from edl_runtime.registry.members import Member
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import HUNG_AFTER_S, check_weight
from edl_runtime.store.keys import Service
from edl_runtime.store.redis_client import connect
from edl_runtime.teacher.http.server import BODY_LIMIT, MOST_CONNECTIONS, HttpServer
from edl_runtime.teacher.metrics import TeacherMetrics
from edl_runtime.teacher.models.loading import check_model_files
from edl_runtime.teacher.models.model import ModelOptions
from edl_runtime.teacher.predictor.pool import run_predictors
from edl_runtime.teacher.shm.arena import Arena

DRAIN_S = 8.0
"""Longest time to deregister and answer requests in flight: a little less than a backend's default grace period."""

RESERVED_DESCRIPTORS = 256
"""File descriptors for all but connections and their clients' shared memory."""

PADDLE_DESCRIPTORS = 256
"""Those for clients of Paddle Serving and for the gRPC server behind them."""

_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9]+)?")

log = get_logger(__name__)


class TeacherOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Model, address and pool of a teacher.

    - `gpu_ids`: one predictor process on each; empty for one on the CPU.
    - `port`: 0 for a free one.
    - `grpc_port`: a port for the Open Inference Protocol over gRPC as well; 0 for a free one, None for none.
    - `paddle_port`: likewise for clients of Paddle Serving, which speak no TLS.
    - `advertise`: the host that students connect to; empty for the one it listens on, or for this machine's address
      if it listens on all.
    - `pool`: empty for a fixed teacher, which needs no Redis.
    - `weight`: its share of the pool's work, relative to the others.
    - `hung_after_s`: a predictor whose run takes longer counts as hung.
    """

    model: ModelOptions
    gpu_ids: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int | None = None
    paddle_port: int | None = None
    advertise: str = ""
    pool: str = ""
    weight: float = 1.0
    hung_after_s: float = HUNG_AFTER_S

    def __post_init__(self) -> None:
        """Raise SpecError for invalid values."""
        if not (math.isfinite(self.hung_after_s) and self.hung_after_s > 0):
            raise SpecError("hung_after", self.hung_after_s, "seconds above 0")
        check_weight(self.weight)
        if self.advertise and not _HOST.fullmatch(self.advertise):
            raise SpecError("advertise", self.advertise, "a host name or an IP address, without a port")


async def serve(
    options: TeacherOptions, settings: RuntimeSettings, on_ready: Callable[[str, ModelSignature], None]
) -> None:
    """Serve until SIGTERM or SIGINT: then leave the pool, answer requests in flight and return.

    After a notice that the machine is taken away, do the same, and wait for its end.

    `on_ready` is called with the address when the teacher answers requests, right before it registers.

    Raises SpecError, ModelError and PoolMismatchError for what a restart can't fix; RegistryUnavailableError without
    Redis at the start; DrainedError once it is drained; TeacherError when it can't listen, or when a predictor has
    ended by itself or has hung.
    """
    stop = asyncio.Event()
    terminated = event_of_termination(stop)
    notices: list[PreemptionNotice] = []

    def leave_machine(notice: PreemptionNotice) -> None:
        notices.append(notice)
        stop.set()

    watch_machine(settings.preemption_notice, leave_machine)
    await _serve_until(stop, options, settings, on_ready)
    for notice in notices:
        await notice.outlast(terminated)


async def _serve_until(
    stop: asyncio.Event,
    options: TeacherOptions,
    settings: RuntimeSettings,
    on_ready: Callable[[str, ModelSignature], None],
) -> None:
    check_exposure(options.host, settings.teacher_token, "EDL_TEACHER_TOKEN")
    if options.pool and not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", f"the Redis of pool {options.pool!r}, as in redis://127.0.0.1:6379/0")
    if settings.tls_cert and options.paddle_port is not None:
        allowed = "none where EDL_TLS_CERT is set: clients of Paddle Serving speak no TLS, so anybody could read along"
        raise SpecError("paddle_port", options.paddle_port, allowed)
    tls = server_tls_context(settings)
    await asyncio.to_thread(check_model_files, options.model)  # at once: a predictor first imports its framework
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        # First, because importing the client takes a while, and a teacher that is ready should register at once.
        client = await stack.enter_async_context(connect(settings.redis_url)) if options.pool else None
        arena, metrics = Arena.create(BODY_LIMIT), TeacherMetrics()
        stack.callback(arena.close)
        gpus = options.gpu_ids or (options.model.gpu_id,)
        per_device = [msgspec.structs.replace(options.model, gpu_id=gpu_id) for gpu_id in gpus]
        predictors = await unless_stopped(stop, stack.enter_async_context(run_predictors(per_device, arena, metrics)))
        if predictors is None:
            return
        beside = RESERVED_DESCRIPTORS + (0 if options.paddle_port is None else PADDLE_DESCRIPTORS)
        most = connection_limit(MOST_CONNECTIONS, each=2, beside=beside)
        server = HttpServer(
            predictors.signature, predictors, arena, metrics, token=settings.teacher_token, most_connections=most
        )
        address = await stack.enter_async_context(_listening(server, options, tls))
        if options.grpc_port is not None:
            await stack.enter_async_context(_serving_grpc(server, predictors.signature, options, settings))
        if options.paddle_port is not None:
            await stack.enter_async_context(_serving_paddle(server, predictors.signature, options, settings))
        on_ready(address, predictors.signature)
        reason: EdlError | None = None
        async with AsyncExitStack() as membership:
            member = Member(id=address, address=address, weight=options.weight, signature=predictors.signature)
            service = Service(settings.namespace, options.pool)
            refusals: list[Coroutine[Any, Any, EdlError]] = []
            if client is not None:

                def report() -> TeacherReport:
                    return msgspec.structs.replace(predictors.load.report(), answered=metrics.totals().answered)

                lease = hold_lease(client, service, member, ttl_s=settings.lease_ttl_s, make_report=report)
                if held := await unless_stopped(stop, membership.enter_async_context(lease)):
                    refusals.append(held.wait_rejected())
            reason = await unless_stopped(stop, first_completed(predictors.failed(options.hung_after_s), *refusals))
            server.draining = reason is not None  # so that health reports it before the teacher has deregistered
            leave_by = loop.time() + DRAIN_S
        drained = await server.drain(leave_by - loop.time())
        log.info("teacher.stopped", address=address, drained=drained)
        if reason is not None:
            raise reason


@asynccontextmanager
async def _listening(server: HttpServer, options: TeacherOptions, tls: ssl.SSLContext | None) -> AsyncIterator[str]:
    """Accept connections; yields the address that students connect to."""
    try:
        listener = listen(options.host, options.port)
    except OSError as error:
        raise TeacherError(f"can't listen on {options.host} port {options.port}: {error.strerror or error}") from None
    _enable_keepalive(listener)
    watch = asyncio.create_task(server.watch())
    try:
        async with accepting(listener, server.connections, server.connect, tls):
            bound, port, *_ = listener.getsockname()
            host = options.advertise or _reachable_host(bound)
            yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        watch.cancel()


@asynccontextmanager
async def _serving_grpc(
    server: HttpServer, signature: ModelSignature, options: TeacherOptions, settings: RuntimeSettings
) -> AsyncIterator[None]:
    try:
        from edl_runtime.teacher.grpc_server import GrpcService, server_credentials, serving_grpc
    except ImportError as error:
        raise missing_library("grpc_port", error) from None
    from edl_runtime.teacher.local_requests import LocalRequests

    service = GrpcService(signature, LocalRequests(server), server.metrics, token=settings.teacher_token)
    host = f"[{options.host}]" if ":" in options.host else options.host
    async with serving_grpc(service, f"{host}:{options.grpc_port}", server_credentials(settings)) as port:
        log.info("teacher.serves_grpc", address=f"{host}:{port}")
        yield


@asynccontextmanager
async def _serving_paddle(
    server: HttpServer, signature: ModelSignature, options: TeacherOptions, settings: RuntimeSettings
) -> AsyncIterator[None]:
    try:
        from edl_runtime.teacher.paddle_server import GeneralModelService, serving_paddle
    except ImportError as error:
        raise missing_library("paddle_port", error) from None
    from edl_runtime.teacher.local_requests import LocalRequests

    inputs = [spec.name for spec in signature.inputs]
    service = GeneralModelService(LocalRequests(server), inputs, settings.teacher_token)
    async with serving_paddle(service, options.host, options.paddle_port or 0) as port:
        log.info("teacher.serves_paddle_clients", host=options.host, port=port)
        yield


def _enable_keepalive(listener: socket.socket) -> None:
    """Close connections to unreachable machines after a few minutes: they count against the limit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
    if hasattr(socket, "TCP_KEEPIDLE"):
        for option, number in (("KEEPIDLE", 60), ("KEEPINTVL", 20), ("KEEPCNT", 6)):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), number)


def _reachable_host(bound: str) -> str:
    """Return the host for students of a server that listens on `bound`. Raises SpecError when it is unknown."""
    if not ipaddress.ip_address(bound).is_unspecified:
        return bound
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:
        raise SpecError("advertise", "", "the host that students connect to; this machine has no address") from None
    if is_loopback(host):
        log.warning("teacher.local_only", host=host, advice="set --advertise for students on other machines")
    return host
