"""Runs of jobs: a name that one owner's job had may be another's later, and what is kept by it stays."""

from __future__ import annotations

import msgspec

from edl_airflow.client import EdlClient, job_status
from edl_airflow.identity import is_own_name
from edl_runtime.backends.interface import token_owner
from edl_runtime.errors import BackendError


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a job. `owner`: empty for nobody's; `created_at`: in Unix seconds, 0 once the job is removed."""

    job: str
    owner: str
    created_at: float

    @property
    def has_own_name(self) -> bool:
        """Whether only its own task's jobs have its name: a retry continues what the try before has left."""
        return is_own_name(self.owner, self.job)

    @property
    def since(self) -> float:
        """From when on what is kept by its name is its owner's; `created_at` has to be known."""
        return 0.0 if self.has_own_name else self.created_at


class AnotherRunError(BackendError):
    """Raised when a name has just become that of another run."""


def another_run(job: str) -> AnotherRunError:
    """Return the error."""
    return AnotherRunError(f"{job} has just been started again or removed; ask again")


async def run_of(client: EdlClient, job: str) -> JobRun:
    """Return the last run of a job. Raises UnknownJobError; AnotherRunError while another one begins."""
    owner = await client.backend.owner(job)
    status = await job_status(client.backend, job)
    if status and token_owner(status.token) != owner:
        raise another_run(job)
    return JobRun(job=job, owner=owner, created_at=status.created_at if status else 0.0)
