"""Errors of pools and their members."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from edl_runtime.store.errors import RegistryError

MOST_NAMES = 5
"""How many pools a message names."""


def other_pools(pool: str, namespace: str, known: Sequence[str]) -> str:
    """Return in words which other pools a namespace has: those of a similar name, or else the first ones."""
    others = [name for name in known if name != pool]
    if not others:
        return f"namespace {namespace!r} has no other pool"
    shown = difflib.get_close_matches(pool, others, MOST_NAMES) or others[:MOST_NAMES]
    more = f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
    return f"namespace {namespace!r} has {', '.join(shown)}{more}"


@dataclass(eq=False, repr=False)
class UnknownPoolError(RegistryError, LookupError):
    """Raised when a pool has no members."""

    pool: str
    namespace: str
    known: Sequence[str] = ()

    def __str__(self) -> str:
        known = f"there are: {', '.join(self.known)}" if self.known else "there are none"
        return (
            f"no pool {self.pool!r} has members in namespace {self.namespace!r} now; {known}. "
            "`edl jobs` shows whether its teachers run, and EDL_NAMESPACE names another namespace"
        )


@dataclass(eq=False, repr=False)
class UnknownTeacherError(RegistryError, LookupError):
    """Raised when a pool has no such teacher, or no such `drained` one."""

    pool: str
    teacher: str
    known: Sequence[str] = ()
    drained: bool = False

    def __str__(self) -> str:
        what = "drained teacher" if self.drained else "teacher"
        known = f"there are: {', '.join(self.known)}" if self.known else "there are none"
        return f"pool {self.pool!r} has no {what} {self.teacher!r}; {known}. `edl pools {self.pool}` shows its members"


@dataclass(eq=False, repr=False)
class DrainedError(RegistryError):
    """Raised when `edl drain` has taken a member out of its pool."""

    pool: str
    member: str

    def __str__(self) -> str:
        return (
            f"{self.member!r} was drained from pool {self.pool!r}; a new process may join, "
            f"and a server of `edl register` after `edl drain {self.pool} {self.member} --undo`"
        )


@dataclass(eq=False, repr=False)
class PoolMismatchError(RegistryError):
    """Raised when a teacher's metadata differs from that of the pool it wants to join."""

    pool: str
    differences: Sequence[str]

    def __str__(self) -> str:
        return (
            f"this teacher differs from pool {self.pool!r}: {'; '.join(self.differences)}. "
            "Serve the pool's model, or start a pool of another name"
        )


@dataclass(eq=False, repr=False)
class SupersededError(RegistryError):
    """Raised when another process has registered with a member's id."""

    pool: str
    member: str

    def __str__(self) -> str:
        return f"another process has registered as {self.member!r} in pool {self.pool!r}; give each member its own id"
