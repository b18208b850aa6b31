"""`python -m edl_runtime.demo.job_server`: serves a job's pods, and changes them on a schedule."""

from __future__ import annotations

import asyncio
import math
import os
import signal

import click

from edl_runtime.concurrency import event_of_termination, wait_for_event
from edl_runtime.demo.command import log_level_option, run_command
from edl_runtime.demo.pod_sets import DEFAULT_JOB, Nodes, PodSet, first_pods, job_name, next_pods
from edl_runtime.demo.rest import PodReport, RuntimeReport, build_app
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.log import get_logger, log_to_stderr
from edl_runtime.protocol.address import check_exposure
from edl_runtime.settings import RuntimeSettings

CONNECTION_LIMIT = 1000
"""Each client, and each pod as it starts, uses one."""

log = get_logger(__name__)


class ScheduledJob:
    """A job whose pods change each `every_s`: `delete` leave, then `add` come, and so on."""

    def __init__(self, nodes: Nodes, job_id: str, *, every_s: float, delete: int, add: int) -> None:
        self._nodes = nodes
        self._pods = first_pods(nodes, job_id)
        self._ended: set[str] = set()
        self._every_s = every_s
        self._delete = delete
        self._add = add

    def pods(self) -> PodSet:
        """Return the pods of now."""
        return self._pods.with_ended(self._ended)

    def report_pod(self, report: PodReport) -> None:
        """Note whether a pod runs."""
        if report.running == (report.pod_id in self._ended):
            (self._ended.discard if report.running else self._ended.add)(report.pod_id)
            level = log.info if report.running else log.warning
            level("pod.running" if report.running else "pod.ended", pod=report.pod_id)

    def report_runtime(self, report: RuntimeReport) -> None:
        """Log how long the job is expected to run."""
        log.info("job.estimated", job=report.job_id, run_time_s=report.estimated_run_time)

    def change(self) -> None:
        """Begin the next stage."""
        self._pods = next_pods(self._nodes, self._pods, delete=self._delete, add=self._add)
        pods = [pod.pod_id for pod in self._pods.pods]
        self._ended.intersection_update(pods)
        log.info("pods.changed", stage=self._pods.job_stage_flag, pods=pods)

    async def run(self, stop: asyncio.Event) -> None:
        """Begin a stage each `every_s`, until `stop` is set."""
        while not stop.is_set():
            if not await wait_for_event(stop, self._every_s):
                self.change()


@click.command
@click.option("--node_ips", default="127.0.0.1", show_default=True, help="Addresses of the nodes, as in A,B.")
@click.option("--pod_num_of_node", type=int, default=1, show_default=True, help="Pods of each node.")
@click.option(
    "--gpu_num_of_node",
    type=int,
    default=8,
    show_default=True,
    help="GPUs of each node, a multiple of its pods. A pod has a trainer for each; with 0 it has one, on CPUs.",
)
@click.option(
    "--time_interval_to_change",
    type=click.FloatRange(0, min_open=True),
    default=900.0,
    show_default=True,
    help="Seconds between two changes of the pods.",
)
@click.option("--del_pods_one_step", type=click.IntRange(0), default=1, show_default=True, help="Pods that leave.")
@click.option("--add_pods_one_step", type=click.IntRange(0), default=1, show_default=True, help="Pods that come.")
@click.option("--server_port", type=click.IntRange(0, 65535), default=8180, show_default=True, help="0: a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind; off loopback only with a token.")
@click.option("--job_id", default=DEFAULT_JOB, show_default=True, help="Id of the job, PADDLE_JOB_ID of its clients.")
@log_level_option
def job_server(
    *,
    node_ips: str,
    pod_num_of_node: int,
    gpu_num_of_node: int,
    time_interval_to_change: float,
    del_pods_one_step: int,
    add_pods_one_step: int,
    server_port: int,
    host: str,
    job_id: str,
    log_level: int,
) -> None:
    """Serve the pods of a job until SIGTERM or Ctrl-C, and change them on a schedule; SIGUSR1 changes them now.

    EDL_JOB_SERVER_TOKEN is the token of clients; EDL_TLS_CERT and EDL_TLS_KEY enable HTTPS.
    """
    log_to_stderr(log_level)
    job_name(job_id)  # raises SpecError for an id that no training can have
    if not math.isfinite(time_interval_to_change):
        raise SpecError("time_interval_to_change", time_interval_to_change, "a number of seconds")
    nodes = Nodes(
        tuple(word for part in node_ips.split(",") if (word := part.strip())), pod_num_of_node, gpu_num_of_node
    )
    job = ScheduledJob(nodes, job_id, every_s=time_interval_to_change, delete=del_pods_one_step, add=add_pods_one_step)
    settings = RuntimeSettings.from_env(os.environ)
    check_exposure(host, settings.job_server_token, "EDL_JOB_SERVER_TOKEN")
    asyncio.run(_serve(job, host, server_port, settings))


async def _serve(job: ScheduledJob, host: str, port: int, settings: RuntimeSettings) -> None:
    try:
        from edl_runtime.protocol.asgi_server import open_listener, serving
    except ModuleNotFoundError as error:
        raise SpecError("job_server", f"no module {error.name}", "the extra edl-airflow[discovery]") from None
    from edl_runtime.protocol.tls import server_tls_context

    stop = event_of_termination()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, job.change)
    app = build_app(job.pods, on_pod=job.report_pod, on_runtime=job.report_runtime, token=settings.job_server_token)
    tls = server_tls_context(settings)
    try:
        listener = open_listener(host, port)
    except OSError as error:
        raise EdlError(f"can't listen on {host} port {port}: {error.strerror or error}") from None
    async with serving(app, listener, connections=CONNECTION_LIMIT, tls=tls) as url:
        click.echo(f"JobServer ready on {url}")
        await job.run(stop)


if __name__ == "__main__":
    run_command(job_server)
