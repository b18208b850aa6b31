"""The JobSpec of a `TrainingJob`, and what the settings give to all its instances. Pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from edl_runtime.compat.training_job import TrainingJob
from edl_runtime.elastic.agent.entrypoint import elastic_job
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, Checkpoint, JobSpec

_ADDRESS = r"([\w.-]+|\[[\da-fA-F:.]+\]):\d{1,5}"
_ADDRESSES = re.compile(rf"{_ADDRESS}(,{_ADDRESS})*")


def job_spec(
    job: TrainingJob,
    settings: RuntimeSettings,
    *,
    start: int | None = None,
    cwd: str | None = None,
    checkpoints: str = "",
    queue: str = "",
    priority: int = 0,
    weight: float = 1.0,
) -> JobSpec:
    """Return the job of elastic trainers.

    - `start`: instances at the start, by default the manifest's `instances`, or the fewest.
    - `cwd`: by default the manifest's workspace. Entrypoint words that are paths below that are below `cwd` then.
    - `checkpoints`: where checkpoints are kept, in a folder of the job's name; empty for nowhere.
    - `queue`: its Kueue queue, by default the manifest's.

    Raises SpecError.
    """
    own = RuntimeSettings(namespace=settings.namespace, job=job.name)
    cwd = job.trainer.cwd if cwd is None else cwd
    keeping = Checkpoint(url=f"{checkpoints}/{job.name}").to_env() if checkpoints else {}
    script = JobSpec(
        name=job.name,
        kind="trainer",
        command=tuple(_moved(word, job.trainer.cwd.rstrip("/"), cwd) for word in job.trainer.command),
        bounds=Bounds(1, 1),
        instances=1,
        env={**own.to_env(), **keeping, **job.trainer.env},
        cwd=cwd,
        pod=Pod(queue=queue).over(job.trainer.pod or Pod()) if queue else job.trainer.pod,
        priority=priority,
        weight=weight,
    )
    return elastic_job(script, job.bounds, start=job.instances if start is None else start)


def _moved(word: str, before: str, now: str) -> str:
    """Return a path below the absolute folder `before` as it is below `now`; any other word as it is."""
    is_below = before.startswith("/") and f"{word}/".startswith(f"{before}/")
    return now.rstrip("/") + word.removeprefix(before) if is_below else word


def checkpoints_of_pods(url: str) -> str:
    """Return where pods keep checkpoints, empty for nowhere. Raises SpecError for a relative path."""
    if url and "://" not in url and not url.startswith("/"):
        raise SpecError("--checkpoint", url, "a URL, or an absolute path on a volume that all pods have")
    return url.rstrip("/")


def redis_of_pods(settings: RuntimeSettings) -> str:
    """Return the address of Redis, or of its sentinels, as pods reach it, with its password. Raises SpecError."""
    if not settings.redis_for_pods:
        return settings.redis_url
    if not _ADDRESSES.fullmatch(settings.redis_for_pods):
        raise SpecError("EDL_REDIS_FOR_PODS", settings.redis_for_pods, "host:port, as in edl-redis.ml.svc:6379")
    parts = urlsplit(settings.redis_url)
    login, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login}{at}{settings.redis_for_pods}"))
