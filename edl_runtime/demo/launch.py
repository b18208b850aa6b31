"""`python -m edl_runtime.demo.launch script`: runs a pod's trainers, each as an instance of one elastic training.

The face of the original's `paddle_edl.collective.launch`, over `edl agent`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from edl_runtime.backends.local.instances import InstanceProcess, ProcessTable
from edl_runtime.backends.local.job_folders import tail
from edl_runtime.concurrency import event_of_termination
from edl_runtime.demo.command import log_level_option, make_log_dir, run_command
from edl_runtime.demo.pod_sets import PodSet, job_name
from edl_runtime.demo.rest import JobServerClient
from edl_runtime.elastic.agent.entrypoint import agent_command, parse_entrypoint
from edl_runtime.elastic.comm.agent_protocol import GEARS, Gear
from edl_runtime.errors import SpecError
from edl_runtime.exit_status import describe_exit
from edl_runtime.log import get_logger, log_to_stderr
from edl_runtime.settings import PaddleJob, RuntimeSettings, paddle_job, visible_gpu
from edl_runtime.specs import Bounds

IGNORED = ("selected_gpus", "cluster_node_ips", "node_ip", "started_port")
"""Flags of the original that the JobServer's answer decides, as there. Its `use_paddlecloud` has no value."""
REFUSED = ("hdfs_name", "hdfs_ugi", "hdfs_path")

log = get_logger(__name__)


def _original_flags(command: click.Command) -> click.Command:
    flags = [click.Option([f"--{name}"], default="", hidden=True) for name in (*IGNORED, *REFUSED)]
    command.params[:0] = [*flags, click.Option(["--use_paddlecloud"], is_flag=True, hidden=True)]
    return command


@_original_flags
@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@log_level_option
@click.option("--log_dir", type=click.Path(path_type=Path), default=Path("log"), show_default=True, help="For logs.")
@click.option("--gear", type=click.Choice(GEARS), default="live", show_default=True, help="As in `edl agent`.")
@click.option("--print_config", type=bool, default=True, show_default=True, help="Print what is run.")
@click.argument("training_script")
@click.argument("training_script_args", nargs=-1, type=click.UNPROCESSED)
def launch(
    *,
    log_level: int,
    log_dir: Path,
    gear: Gear,
    print_config: bool,
    training_script: str,
    training_script_args: tuple[str, ...],
    **original: object,
) -> None:
    """Run `python -u TRAINING_SCRIPT` with its arguments as each trainer of this pod, PADDLE_POD_ID.

    Logs are LOG_DIR/workerlog.N. Checkpoints are kept in EDL_CHECKPOINT, or PADDLE_EDL_FLEET_CHECKPOINT_PATH.

    Exits with 0 when the training is done, when this pod is none of the job's, and when it was stopped by SIGTERM.
    """
    if training_script.startswith("-"):
        raise click.NoSuchOption(training_script.partition("=")[0])
    for name in REFUSED:
        if original[name]:
            raise SpecError(f"--{name}", original[name], "to leave it out: EDL_CHECKPOINT is the URL of checkpoints")
    log_to_stderr(log_level)
    job, settings = paddle_job(os.environ), RuntimeSettings.from_env(os.environ)
    if not settings.redis_url:
        raise SpecError("EDL_REDIS_URL", "", "the Redis of the job's trainers; a JobClient sets it")
    command = ("python", "-u", training_script, *training_script_args)
    parse_entrypoint(command)  # raises SpecError for what each agent would refuse
    make_log_dir(log_dir)
    sys.exit(asyncio.run(_run(job, settings, command, log_dir.absolute(), gear, print_config=print_config)))


async def _run(
    job: PaddleJob, settings: RuntimeSettings, command: tuple[str, ...], logs: Path, gear: Gear, *, print_config: bool
) -> int:
    leave = event_of_termination()
    async with JobServerClient(job.server, job.id, settings.job_server_token) as server:
        pods = await server.wait_for_pods(leave)
    if pods is None:
        return 0
    if (rank := pods.rank(job.pod)) is None:
        log.info("pod.unknown", pod=job.pod, job=job.id)
        return 0
    environments = trainer_environments(pods, rank, job, settings, os.environ)
    words = agent_command(command, Bounds(1, pods.trainers_limit), gear=gear)
    if print_config:
        click.echo(f"trainers of {job.pod}: {len(environments)}, each {' '.join(command)}")
    with ProcessTable(lock=None) as processes:
        started = [
            processes.start([sys.executable, *words[1:]], env=environ, cwd=Path(), log=_log(logs, number))
            for number, environ in enumerate(environments)
        ]
        statuses = await asyncio.gather(*(_trainer(process, leave, settings.grace_s) for process in started))
    return _exit_status(statuses, logs)


def _log(logs: Path, number: int) -> Path:
    return logs / f"workerlog.{number}"


async def _trainer(process: InstanceProcess, leave: asyncio.Event, grace_s: float) -> int:
    """Return its exit code; a failure stops the others of the pod."""
    exit_code = await process.run(leave, grace_s)
    if exit_code == -signal.SIGTERM and leave.is_set():
        return 0
    if exit_code:
        leave.set()
    return exit_code


def _exit_status(statuses: list[int], logs: Path) -> int:
    for number, exit_code in enumerate(statuses):
        if exit_code:
            lines = "".join(f"\n  {line}" for line in tail(_log(logs, number)))
            click.echo(f"edl: trainer {number} {describe_exit(exit_code)}; the end of its log:{lines}", err=True)
    failed = next(filter(None, statuses), 0)
    return 128 - failed if failed < 0 else failed


def trainer_environments(
    pods: PodSet, rank: int, job: PaddleJob, settings: RuntimeSettings, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the environment of each trainer's agent in the pod of that rank."""
    pod = pods.pods[rank]
    each = len(pod.trainer_ports)
    name = job_name(job.id)
    shared = msgspec.structs.replace(
        settings,
        job=name,
        run=settings.run or name,
        host=job.host or pod.addr,
        checkpoint=settings.checkpoint or job.checkpoint,
    ).to_env()
    return [
        {
            **environ,
            **shared,
            "EDL_INSTANCE": str(rank * each + number),
            "CUDA_VISIBLE_DEVICES": visible_gpu(environ, number),
        }
        for number in range(each)
    ]


if __name__ == "__main__":
    run_command(launch)
