"""Retry policy by the kind of failure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from airflow.sdk import RetryDecision, RetryPolicy

from edl_airflow.failures import is_transient, is_user_error

if TYPE_CHECKING:
    from airflow.sdk import Context


@dataclass(frozen=True, kw_only=True)
class EdlRetryPolicy(RetryPolicy):
    """Fails at once for user errors, and backs off for transient ones: `retry_policy=EdlRetryPolicy()` on any task.

    The default of all our operators and sensors. On other tasks it recognises this library's errors, as `SpecError` or
    `RegistryUnavailableError`; other failures follow the task's `retries` and `retry_delay`. It never grants more tries
    than `retries`.

    :param first_delay: delay before the second try after a transient error, or the task's `retry_delay` if that is
        shorter; it doubles with each further try
    :param longest_delay: the longest delay
    """

    first_delay: timedelta = timedelta(seconds=30)
    longest_delay: timedelta = timedelta(minutes=10)

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,  # noqa: ARG002 (Airflow's signature)
        context: Context | None = None,
    ) -> RetryDecision:
        if is_user_error(exception):
            return RetryDecision.fail(reason=f"a retry can't help: {exception}")
        if not is_transient(exception):
            return RetryDecision.default()
        first = min(self.first_delay, context["task"].retry_delay) if context else self.first_delay
        delay = min(first * 2 ** min(max(try_number - 1, 0), 16), self.longest_delay)
        return RetryDecision.retry(delay=delay, reason=f"it may be over in {delay.total_seconds():.0f} s: {exception}")

    def serialize(self) -> dict[str, Any]:
        return {
            "first_delay": self.first_delay.total_seconds(),
            "longest_delay": self.longest_delay.total_seconds(),
        }

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> Self:
        return cls(**{field: timedelta(seconds=seconds) for field, seconds in data.items()})
