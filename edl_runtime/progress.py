"""How far a job is: written by the student, read by Airflow and the `edl` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from edl_runtime.store import keys
from edl_runtime.store.client import unavailable_if_lost

if TYPE_CHECKING:
    from redis.asyncio import Redis

KEPT_S = 3600
"""How long a report outlives its writer."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A job's last report. Rates are a second; `time_left_s` and `loss` are None while unknown.

    - `step`: batches trained; `total_steps`: of how many, None while unknown.
    - `teachers`: teachers in use; `answered`: requests answered by each teacher so far, address → count.
    - `note`: what is being done, in the script's own words ("seed 2 of 3, distilled").
    - `updated_at`: Unix seconds of the student's clock.
    """

    step: int
    updated_at: float
    total_steps: int | None = None
    epoch: int = 0
    loss: float | None = None
    samples_per_s: float = 0.0
    teachers: int = 0
    answered: dict[str, int] = {}
    time_left_s: float | None = None
    note: str = ""

    def line(self) -> str:
        """Return this report as one line for a log."""
        of_total = f"/{self.total_steps}" if self.total_steps else ""
        words = [f"step {self.step}{of_total}"]
        if self.loss is not None:
            words.append(f"loss {self.loss:.4f}")
        words += [f"{self.samples_per_s:,.0f} samples/s", f"{self.teachers} teacher{'' if self.teachers == 1 else 's'}"]
        if self.time_left_s is not None:
            minutes, seconds = divmod(round(self.time_left_s), 60)
            words.append(f"{minutes}:{seconds:02d} left")
        return " · ".join([*words, self.note] if self.note else words)


async def publish(client: Redis, namespace: str, job: str, progress: Progress) -> None:
    """Replace the job's last report; it is kept for an hour. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        await client.set(keys.progress(namespace, job), msgspec.json.encode(progress), ex=KEPT_S)


async def read(client: Redis, namespace: str, job: str) -> Progress | None:
    """Return the job's last report, None when there is none within the hour. Raises RegistryUnavailableError."""
    with unavailable_if_lost(client):
        content = await client.get(keys.progress(namespace, job))
    return None if content is None else msgspec.json.decode(content, type=Progress)
