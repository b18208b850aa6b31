"""Errors of the gateway; each becomes an HTTP status in `edl_runtime.gateway.app`."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.errors import EdlError, one_line
from edl_runtime.protocol.errors import MOST_TOLD


class GatewayError(EdlError):
    """Raised when the gateway can't answer, or can't serve."""


class RequestRefusedError(GatewayError):
    """Raised for a request that no teacher of the pool can ever answer; its text says why, on one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason, MOST_TOLD))


@dataclass(eq=False, repr=False)
class TeacherFailedError(GatewayError):
    """Raised when a teacher does not answer, or answers wrongly; the `reason` is made one line.

    - `unreached`: it never had the request.
    - `answered`: it did answer, so that the request may be the cause.
    """

    address: str
    reason: str
    unreached: bool = False
    answered: bool = False

    def __post_init__(self) -> None:
        self.reason = one_line(self.reason, MOST_TOLD)
        super().__post_init__()

    def __str__(self) -> str:
        return f"teacher {self.address}: {self.reason}"


@dataclass(eq=False, repr=False)
class NoGoodTeacherError(GatewayError):
    """Raised when a pool has had no teacher for a request for `waited_s`; `quarantined`: its others, and why."""

    pool: str
    waited_s: float
    quarantined: tuple[str, ...]

    def __str__(self) -> str:
        others = "; ".join(self.quarantined)
        return (
            f"pool {self.pool!r} had no teacher for this request for {self.waited_s:.0f} s"
            f"{f' (in quarantine: {others})' if others else ''}; see `edl pools {self.pool}`, and start one"
        )


@dataclass(eq=False, repr=False)
class PartFailedError(GatewayError):
    """Raised when several teachers, one after the other, have failed to answer the same part of a request."""

    pool: str
    tries: int
    last: str

    def __str__(self) -> str:
        return f"{self.tries} teachers of pool {self.pool!r} failed at the same sequences; the last one: {self.last}"


@dataclass(eq=False, repr=False)
class NoRoomError(GatewayError):
    """Raised when a request needs more memory than other requests leave of the `most` for all; in MiB."""

    needed: int
    free: int
    most: int

    def __str__(self) -> str:
        return (
            f"this request takes up to {self.needed} MiB of memory, and others leave {self.free} of {self.most} MiB; "
            "try again later, send fewer sequences at once, or run another `edl gateway`"
        )


@dataclass(eq=False, repr=False)
class RequestTooLargeError(GatewayError):
    """Raised when a request, or its answer, takes more memory than one may; in MiB."""

    needed: int
    most: int

    def __str__(self) -> str:
        return (
            f"this request takes {self.needed} MiB of memory or more until it is answered, allowed are {self.most}; "
            "send fewer sequences at once"
        )


@dataclass(eq=False, repr=False)
class FollowedPoolsError(GatewayError):
    """Raised when a request names one more pool than a gateway follows."""

    pool: str
    followed: int
    has_teachers: bool

    def __str__(self) -> str:
        if not self.has_teachers:
            return f"pool {self.pool!r} has no teachers, and this gateway follows {self.followed} others; start one"
        return (
            f"this gateway follows {self.followed} pools, and pool {self.pool!r} would be one more; run another `edl "
            "gateway`, or try again when others have had no request for a while"
        )
