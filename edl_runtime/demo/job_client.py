"""`python -m edl_runtime.demo.job_client`: runs those pods of a JobServer's job that are on this node."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import click
import msgspec

from edl_runtime.backends.local.instances import ProcessTable
from edl_runtime.checkpoint.storage import storage_at
from edl_runtime.concurrency import event_of_termination, unless_stopped, wait_for_event
from edl_runtime.demo.command import log_level_option, make_log_dir, run_command
from edl_runtime.demo.errors import JobServerRefusedError, JobServerUnavailableError
from edl_runtime.demo.node import local_pods
from edl_runtime.demo.pod_processes import LocalPod, PodScript
from edl_runtime.demo.pod_sets import Pod, PodSet
from edl_runtime.demo.rest import POLL_EVERY_S, SERVER_WAIT_S, JobServerClient
from edl_runtime.elastic.agent.entrypoint import ELASTIC_GRACE_S
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.locks import take
from edl_runtime.log import get_logger, log_to_stderr
from edl_runtime.settings import PaddleJob, RuntimeSettings, paddle_job, paddle_pod_environment
from edl_runtime.store.redis_server import own_redis

log = get_logger(__name__)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@log_level_option
@click.option(
    "--log_dir",
    type=click.Path(path_type=Path),
    default=Path("pod_log"),
    show_default=True,
    help="Folder of pods' logs.",
)
@click.option(
    "--package_sh",
    default="",
    help="Bash script that prepares a pod's folder, EDL_POD_PATH; it is called with -pod_id ID.",
)
@click.option("--pod_path", type=click.Path(path_type=Path), help="Scripts run in PATH/POD_ID; by default here.")
@click.option(
    "--grace_s",
    type=click.FloatRange(0, min_open=True),
    default=ELASTIC_GRACE_S,
    show_default=True,
    help="Seconds from SIGTERM to SIGKILL of a pod that has to leave.",
)
@click.argument("training_script")
@click.argument("training_script_args", nargs=-1, type=click.UNPROCESSED)
def job_client(
    *,
    log_level: int,
    log_dir: Path,
    package_sh: str,
    pod_path: Path | None,
    grace_s: float,
    training_script: str,
    training_script_args: tuple[str, ...],
) -> None:
    """Run TRAINING_SCRIPT, a bash script with its arguments, in each pod of this node.

    PADDLE_JOBSERVER is the JobServer's URL, and PADDLE_JOB_ID the job; EDL_JOB_SERVER_TOKEN its token. Trainers meet in
    the Redis EDL_REDIS_URL; without it, and with pods on this node alone, one is started for as long as this runs.

    Exits with 0 when all pods have, or when it was stopped by SIGTERM or Ctrl-C: then pods leave gracefully. A pod that
    fails is started again, and fails the client after five short lives in a row.
    """
    if training_script.startswith("-"):
        raise click.NoSuchOption(training_script.partition("=")[0])
    log_to_stderr(log_level)
    job = paddle_job(os.environ)
    settings = RuntimeSettings.from_env(os.environ)
    kept = settings.checkpoint or job.checkpoint
    settings = msgspec.structs.replace(
        settings,
        grace_s=grace_s,
        checkpoint=storage_at(kept).url if kept else "",  # absolute: pods have folders of their own
    )
    make_log_dir(log_dir)
    _lock(log_dir)
    script = PodScript(
        training_script, training_script_args, package=package_sh, folder=pod_path, logs=log_dir, grace_s=grace_s
    )
    asyncio.run(_run(job, settings, script))


def _lock(log_dir: Path) -> None:
    """Keep this node's other JobClients from running the same pods, until this process ends. Raises SpecError."""
    try:
        held = take(log_dir / f".{socket.gethostname()}.lock")
    except OSError as error:
        raise SpecError("--log_dir", str(log_dir), f"a folder that can be written ({error.strerror})") from None
    if held is None:
        raise SpecError("--log_dir", str(log_dir), "a folder that no other JobClient of this node uses")


async def _run(job: PaddleJob, settings: RuntimeSettings, script: PodScript) -> None:
    stop = event_of_termination()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(JobServerClient(job.server, job.id, settings.job_server_token))
        first = await server.wait_for_pods(stop)
        if first is None:
            return
        if not settings.redis_url:
            if len(local_pods(first)) < len(first.pods):
                allowed = "the Redis of all nodes, as redis://:PASSWORD@HOST:6379/0, where pods are on several"
                raise SpecError("EDL_REDIS_URL", "", allowed)
            settings = msgspec.structs.replace(settings, redis_url=await stack.enter_async_context(own_redis()))
        processes = stack.enter_context(ProcessTable(lock=None))
        await NodePods(server, job, settings, script, processes=processes, stop=stop).run(first)


class NodePods:
    """The pods of this node, kept as the JobServer has them."""

    def __init__(
        self,
        server: JobServerClient,
        job: PaddleJob,
        settings: RuntimeSettings,
        script: PodScript,
        *,
        processes: ProcessTable,
        stop: asyncio.Event,
    ) -> None:
        self._server = server
        self._job = job
        self._settings = settings
        self._script = script
        self._processes = processes
        self._stop = stop
        self._wake = asyncio.Event()
        self._pods: dict[str, LocalPod] = {}
        self._by_rank: dict[int, LocalPod] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, wanted: PodSet) -> None:
        """Run until all pods have succeeded or `stop` is set, then stop what is left.

        Raises PodFailedError, JobServerUnavailableError.
        """
        stopping = asyncio.create_task(self._wake_to_stop())
        lost_at = time.monotonic() + SERVER_WAIT_S
        try:
            while not self._stop.is_set():
                self._wake.clear()
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.remove(task)
                    task.result()  # raises PodFailedError
                try:
                    self._reconcile(wanted)
                    if self._pods and all(pod.succeeded for pod in self._pods.values()):
                        return
                    await unless_stopped(self._stop, self._report(wanted))
                    await wait_for_event(self._wake, POLL_EVERY_S)
                    wanted = await unless_stopped(self._stop, self._server.query_pods()) or wanted
                    lost_at = time.monotonic() + SERVER_WAIT_S
                except (JobServerUnavailableError, JobServerRefusedError) as error:
                    if time.monotonic() >= lost_at:
                        raise
                    log.warning("server.unavailable", cause=str(error), retry_in_s=POLL_EVERY_S)
                    await wait_for_event(self._stop, POLL_EVERY_S)
        finally:
            stopping.cancel()
            await self._end()

    async def _wake_to_stop(self) -> None:
        await self._stop.wait()
        self._wake.set()

    def _reconcile(self, wanted: PodSet) -> None:
        """Stop pods that are gone, and start those that have come."""
        here = local_pods(wanted)
        for pod_id in self._pods.keys() - here.keys():
            self._pods.pop(pod_id).leave()
        for pod_id, pod in here.items():
            if pod_id not in self._pods:
                self._start(pod, wanted.pods.index(pod))

    def _start(self, pod: Pod, rank: int) -> None:
        own = self._settings.to_env() | {"EDL_GRACE_S": str(self._settings.grace_s)}
        folder = self._script.folder(pod.pod_id)
        environ = paddle_pod_environment(os.environ, self._job, pod.pod_id, pod.gpus, folder) | own
        started = LocalPod(
            pod.pod_id,
            rank,
            self._script,
            environ,
            processes=self._processes,
            after=self._by_rank.get(rank),
            on_change=self._wake.set,
        )
        self._pods[pod.pod_id] = self._by_rank[rank] = started
        task = asyncio.create_task(started.run())
        task.add_done_callback(lambda _: self._wake.set())
        self._tasks.add(task)

    async def _report(self, known: PodSet) -> None:
        """Tell the JobServer of pods whose state it does not know. Raises as `JobServerClient`."""
        for pod in local_pods(known).values():
            running = self._pods[pod.pod_id].running
            if running != pod.running:
                with suppress(JobServerRefusedError):  # it has another set by now
                    await self._server.report_pod(pod.pod_id, running=running)

    async def _end(self) -> None:
        """Stop all pods, and report that none runs."""
        for pod in self._pods.values():
            pod.leave()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, EdlError):
                raise result
        with suppress(JobServerUnavailableError, JobServerRefusedError):
            for pod_id in self._pods:
                await self._server.report_pod(pod_id, running=False)


if __name__ == "__main__":
    run_command(job_client)
