"""`edl submit`: the trainings that a manifest of the original EDL asks for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from edl_runtime.cli import backends
from edl_runtime.cli.backends import remove_ended_job, warn_of_eviction
from edl_runtime.cli.options import priority_option, read_settings, weight_option
from edl_runtime.compat.job_specs import checkpoints_of_pods, job_spec, redis_of_pods
from edl_runtime.compat.manifest_yaml import manifest_text
from edl_runtime.compat.training_job import read_training_job
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import JobSpec
from edl_runtime.store.redis_client import connect


@click.command
@click.option("-f", "--file", "path", required=True, type=click.Path(path_type=Path), help="The manifest.")
@click.option("--name", default="", help="Another name for its only job, so that several copies can run.")
@click.option("--start", type=int, help="Instances at the start; by default the manifest's instances, or min-instance.")
@click.option(
    "--workspace",
    default="",
    metavar="DIR",
    help="A local folder in place of the image's workspace, also in the entrypoint.",
)
@click.option(
    "--checkpoint", default="", metavar="URL", help="Where checkpoints are kept, in a folder of the job's name."
)
@click.option("--queue", default="", metavar="NAME", help="The Kueue queue of the jobs, on Kubernetes.")
@priority_option
@weight_option
@click.option("--json", "as_json", is_flag=True, help="Print each job's status as JSON, a line each.")
def submit(
    *,
    path: Path,
    name: str,
    start: int | None,
    workspace: str,
    checkpoint: str,
    queue: str,
    priority: int,
    weight: float,
    as_json: bool,
) -> None:
    """Start each TrainingJob of a manifest as an elastic training, and return.

    Fields with another meaning than in the original EDL, or none, are reported on stderr. Needs EDL_REDIS_URL; if pods
    reach that Redis at another address, set EDL_REDIS_FOR_PODS to it, as host:port.

    EDL_BACKEND=kubernetes starts pods in the cluster of the kubeconfig; EDL_KUBE_CONTEXT and EDL_KUBE_NAMESPACE select
    context and namespace. On this machine, a relative workspace is below the manifest's folder. EDL_CHECKPOINT is the
    default of --checkpoint. Scripts see the variables of the manifest, not those of this command.
    """
    settings = read_settings(redis="the Redis of the trainers")
    jobs = read_training_job(manifest_text(path), name=name, volumes=settings.manifest_volumes)
    is_here = settings.backend == "local"
    redis_url = settings.redis_url if is_here else redis_of_pods(settings)
    checkpoints = _checkpoints(checkpoint or settings.checkpoint, is_here=is_here)
    specs = [
        job_spec(
            job,
            settings,
            start=start,
            cwd=_folder(workspace or job.trainer.cwd, (Path() if workspace else path.parent) if is_here else None),
            checkpoints=checkpoints,
            queue=queue,
            priority=priority,
            weight=weight,
        )
        for job in jobs
    ]
    for note in (note for job in jobs for note in job.notes):
        click.echo(f"edl: {note}", err=True)
    asyncio.run(_start(specs, settings, redis_url, as_json=as_json))


def _folder(given: str, below: Path | None) -> str:
    """Return an absolute path; unchanged if it is empty or not on this machine."""
    return str((below / Path(given).expanduser()).absolute()) if given and below else given


def _checkpoints(url: str, *, is_here: bool) -> str:
    """Return where checkpoints are kept: a relative path is below the present folder of this machine."""
    return checkpoints_of_pods(_folder(url, Path()) if is_here and "://" not in url else url)


async def _start(specs: Sequence[JobSpec], settings: RuntimeSettings, redis_url: str, *, as_json: bool) -> None:
    """Start all jobs; none if a job of one of the names runs, or Redis can't be reached."""
    async with connect(settings.redis_url) as client:
        await warn_of_eviction(client)
    backend = backends.open_backend(settings)
    for spec in specs:
        await remove_ended_job(backend, spec.name)
    for spec in specs:
        token = f"edl-submit-{secrets.token_hex(8)}/0"  # unique, so that no other command takes over the job
        status = await backend.submit(spec, token=token, secrets={"EDL_REDIS_URL": redis_url})
        started = f"{spec.name} is started; `edl logs -f {spec.name}` follows its output"
        click.echo(msgspec.json.encode(status) if as_json else started)
