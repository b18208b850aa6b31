"""Runs the controller: elects a leader, and gives each namespace a controller and rescaling passes."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from structlog.contextvars import bind_contextvars

from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.kubernetes.client import Outage, open_client
from edl_runtime.concurrency import first_completed
from edl_runtime.controller.controller import RETRY_S, JobDefaults, NamespaceController
from edl_runtime.controller.leader import Candidate, LeaseTimes, Substitute
from edl_runtime.controller.passes import Passes, PassOptions
from edl_runtime.controller.redis_access import RedisAccess
from edl_runtime.controller.resource import FINALIZER, Resource
from edl_runtime.controller.vitals import Vitals
from edl_runtime.controller.windows import WindowsConfigMap
from edl_runtime.errors import BackendError, EdlError, isolated
from edl_runtime.log import get_logger
from edl_runtime.monitor.reports import read_reports
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect as connect_redis
from edl_runtime.store.users import NamespaceUser, check_users

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

LEASE = "edl-controller"

CHECK_WITHIN_S = 5.0
"""How long a controller that shall stop asks whether its namespace is being deleted."""

log = get_logger(__name__)


class ControllerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller does.

    - `namespace`: its own, which has its Lease and the ConfigMap `windows_configmap` (empty for no traffic windows).
    - `all_namespaces`: whether it serves all of the cluster's, each with that of its name in Redis; else its own alone.
    - `passes`: when and how to rescale; None for never.
    """

    namespace: str
    defaults: JobDefaults
    all_namespaces: bool = False
    windows_configmap: str = ""
    passes: PassOptions | None = PassOptions()
    lease_times: LeaseTimes = LeaseTimes()


async def run_controller(
    connect: Callable[[], AbstractAsyncContextManager[ApiClient]],
    options: ControllerOptions,
    vitals: Vitals | None = None,
) -> None:
    """Work whenever this is the leader, until cancelled. `vitals`: what others may know of it.

    Traffic windows are read also by those that wait, so that each knows whether they are valid.
    """
    vitals = vitals or Vitals()
    if options.all_namespaces:
        await _check_users(options)
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
    async with open_client(connect, options.namespace, outage=Outage()) as api:
        candidate = Candidate(api, LEASE, identity, options.lease_times, vitals)
        windows = None
        if options.passes and options.windows_configmap:
            windows = WindowsConfigMap(api, options.windows_configmap, vitals)
        leading = candidate.lead(partial(_work, _Given(connect, options, windows, vitals)))
        await first_completed(leading, *([windows.follow()] if windows else []))


async def _check_users(options: ControllerOptions) -> None:
    """Raise SpecError unless namespaces can have Redis users of their own; wait for a Redis that is away."""
    redis_url = options.defaults.settings.redis_url
    user = NamespaceUser.of(options.namespace, redis_url)
    async with connect_redis(redis_url) as client:
        while True:
            try:
                return await check_users(client, user)
            except RegistryUnavailableError as error:
                log.warning("redis.unavailable", cause=str(error), retry_in_s=RETRY_S)
            await asyncio.sleep(RETRY_S)


async def wait_for_trainings_to_end(
    connect: Callable[[], AbstractAsyncContextManager[ApiClient]], namespace: str
) -> None:
    """If the namespace is being deleted, wait until no TrainingJob in it needs a controller; else return at once."""
    async with open_client(connect, namespace) as api:
        try:
            async with asyncio.timeout(CHECK_WITHIN_S):
                if not await api.is_terminating():
                    return
            log.info("namespace.terminating", namespace=namespace)
            async for found in api.watch("TrainingJob"):
                if not any(FINALIZER in Resource(one).finalizers for one in found.values()):
                    return
        except (BackendError, TimeoutError) as error:
            log.warning("namespace.not_read", namespace=namespace, cause=str(error) or "no answer in time")


class _Given(NamedTuple):
    """What all namespaces are served with."""

    connect: Callable[[], AbstractAsyncContextManager[ApiClient]]
    options: ControllerOptions
    windows: WindowsConfigMap | None
    vitals: Vitals


async def _work(given: _Given) -> None:
    async with asyncio.TaskGroup() as tasks:
        serve = partial(_serve_always, given)
        if not given.options.all_namespaces:
            await serve(given.options.namespace)
            return
        served: set[str] = set()
        async with open_client(given.connect, "", outage=Outage()) as everywhere:
            while True:
                try:
                    with isolated("the watch of TrainingJobs"):
                        async for change in everywhere.changes("TrainingJob"):
                            for namespace in {one["metadata"]["namespace"] for one in change.objects} - served:
                                served.add(namespace)
                                tasks.create_task(serve(namespace))
                except EdlError as error:
                    given.vitals.failures["trainingjobs.not_watched"] += 1
                    log.warning("trainingjobs.not_watched", cause=str(error))
                await asyncio.sleep(RETRY_S)


async def _serve_always(given: _Given, namespace: str) -> None:
    """Serve one namespace until cancelled, beginning anew whenever that fails: others don't fail by it."""
    while True:
        try:
            with isolated(f"namespace {namespace!r}"):
                await _serve(given, namespace)
        except EdlError as error:
            given.vitals.failures["namespace.failed"] += 1
            log.warning("namespace.failed", namespace=namespace, cause=str(error), retry_in_s=RETRY_S)
        await asyncio.sleep(RETRY_S)


async def _serve(given: _Given, namespace: str) -> None:
    """Reconcile and rescale one namespace until cancelled, unless that has a controller of its own.

    Both would make its jobs anew in turns.
    """
    work = partial(_reconcile, given, namespace)
    if given.options.all_namespaces:
        bind_contextvars(namespace=namespace)  # in all log lines of this task and of those that it starts
    if namespace == given.options.namespace:
        await work()
    else:
        async with open_client(given.connect, namespace, outage=Outage()) as api:
            await Substitute(api, LEASE).stand_in(work)


async def _reconcile(given: _Given, namespace: str) -> None:
    options, defaults = given.options, given.options.defaults
    if options.all_namespaces:
        settings = msgspec.structs.replace(defaults.settings, namespace=namespace)
        defaults = msgspec.structs.replace(defaults, settings=settings)
    backend = KubernetesBackend(given.connect, namespace=namespace, kept_logs=defaults.settings.kube_kept_logs)
    async with (
        open_client(given.connect, namespace, outage=Outage()) as api,
        backend.following() as followed,
        connect_redis(defaults.settings.redis_url) as client,
        asyncio.TaskGroup() as tasks,
    ):
        access = None
        if options.all_namespaces:
            user = NamespaceUser.of(namespace, defaults.settings.redis_url)
            access = RedisAccess(client, user, defaults.redis_url, followed)
            tasks.create_task(access.run())
        controller = NamespaceController(
            api,
            followed,
            defaults,
            vitals=given.vitals,
            read_reports=partial(read_reports, client, defaults.settings.namespace),
            access=access,
        )
        tasks.create_task(controller.run())
        if options.passes:
            passes = Passes(
                backend=followed,
                client=client,
                namespace=defaults.settings.namespace,
                options=options.passes,
                windows=given.windows,
                vitals=given.vitals,
            )
            tasks.create_task(passes.run())
