"""A controller that tries often for its Lease. As a process, its environment is that of `edl controller`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

from kubernetes_asyncio.client import ApiClient
from support.cluster.cluster import Cluster, RedisService

from edl_runtime.cli.backends import kubernetes_place
from edl_runtime.cli.options import read_settings
from edl_runtime.compat.job_specs import redis_of_pods
from edl_runtime.controller.controller import JobDefaults
from edl_runtime.controller.leader import LeaseTimes
from edl_runtime.controller.run import ControllerOptions, run_controller
from edl_runtime.settings import RuntimeSettings

TIMES = LeaseTimes(lease_s=20, give_up_s=15.0, retry_s=0.5)
"""Long enough for a leader that stands still for some seconds."""

Connect = Callable[[], AbstractAsyncContextManager[ApiClient]]


def options(settings: RuntimeSettings, namespace: str, **more: Any) -> ControllerOptions:
    defaults = JobDefaults(settings=settings, redis_url=redis_of_pods(settings))
    given = {"passes": None, **more}
    return ControllerOptions(namespace=namespace, defaults=defaults, lease_times=TIMES, **given)


def options_at(cluster: Cluster, redis: RedisService, **more: Any) -> ControllerOptions:
    """Return the options of a controller of the cluster's namespace, without rescaling by default."""
    settings = RuntimeSettings(
        manifest_volumes="hostPath",
        redis_url=redis.url,
        redis_for_pods=redis.address_in_cluster,
        namespace=cluster.namespace,
    )
    return options(settings, cluster.namespace, **more)


class Death:
    """Clients of the API server that stop for good once it has made so many changes, as those of a killed process."""

    def __init__(self, connect: Connect, changes: int) -> None:
        self.came = asyncio.Event()
        self._connect = connect
        self._left = changes

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ApiClient]:
        async with self._connect() as client:
            yield cast(ApiClient, _Mortal(client, self))

    async def after(self, path: str, method: str, query: list[tuple[str, str]]) -> None:
        if method != "GET" and ("dryRun", "All") not in query and "/leases" not in path:
            self._left -= 1
            if self._left == 0:
                self.came.set()
                await self.wait()

    async def wait(self) -> None:
        """Do nothing for ever."""
        await asyncio.Event().wait()


class _Mortal:
    def __init__(self, client: ApiClient, death: Death) -> None:
        self.configuration = client.configuration
        self._client = client
        self._death = death

    async def call_api(self, path: str, method: str, **more: Any) -> Any:
        if self._death.came.is_set():
            await self._death.wait()
        response = await self._client.call_api(path, method, **more)
        try:
            await self._death.after(path, method, more["query_params"])
        except BaseException:
            response.close()  # nobody reads it
            raise
        return response


class Labelled:
    """Clients that see, of the TrainingJobs of all namespaces, those with a label: others are other tests'."""

    def __init__(self, connect: Connect, label: str) -> None:
        self._connect = connect
        self._label = label

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ApiClient]:
        async with self._connect() as client:
            call = client.call_api

            async def call_api(path: str, method: str, **more: Any) -> Any:
                if path == "/apis/paddlepaddle.org/v1/trainingjobs":
                    more["query_params"] = [*more["query_params"], ("labelSelector", self._label)]
                return await call(path, method, **more)

            client.call_api = call_api  # type: ignore[method-assign]
            yield client


async def run_until_killed(cluster: Cluster, redis: RedisService, changes: int) -> None:
    """Run a controller until it has made so many changes. The Lease of the dead one is deleted: nobody waits for it."""
    death = Death(cluster.connect, changes)
    working = asyncio.create_task(run_controller(death.open, options_at(cluster, redis)))
    dying = asyncio.create_task(death.came.wait())
    await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
    assert death.came.is_set(), working
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    path = f"/apis/coordination.k8s.io/v1/namespaces/{cluster.namespace}/leases/edl-controller"
    await cluster.request("DELETE", path)


@asynccontextmanager
async def running(cluster: Cluster, redis: RedisService, **more: Any) -> AsyncIterator[None]:
    """Run a controller for the block."""
    working = asyncio.create_task(run_controller(cluster.connect, options_at(cluster, redis, **more)))
    try:
        yield
        assert not working.done(), working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


if __name__ == "__main__":
    settings = read_settings(redis="the Redis of the trainers")
    connect, namespace = kubernetes_place(settings)
    asyncio.run(run_controller(connect, options(settings, namespace)))
