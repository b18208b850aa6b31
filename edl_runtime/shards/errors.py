"""Errors of shards and of their ledger."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.errors import EdlError


@dataclass(eq=False, repr=False)
class DatasetChangedError(EdlError, ValueError):
    """Raised when a dataset has another number of samples than when its training began."""

    before: int
    now: int

    def __str__(self) -> str:
        return (
            f"the dataset has {self.now} samples, and had {self.before} when this training began; the order of its "
            "samples depends on that. Give it the same data, or another path for its checkpoints to start anew"
        )


class LedgerError(EdlError):
    """Raised when a ledger of shards can't do what it was asked."""


@dataclass(eq=False, repr=False)
class StaleGenerationError(LedgerError):
    """Raised when a worker of one generation wants to change a ledger that is another's."""

    job: str
    generation: int
    current: int

    def __str__(self) -> str:
        return (
            f"generation {self.generation} of job {self.job!r} may not change its ledger, which is that of generation "
            f"{self.current}; what this process trained since is not part of the model. A trainer joins anew by itself"
        )


@dataclass(eq=False, repr=False)
class LedgerMissingError(LedgerError, LookupError):
    """Raised when Redis has lost a job's ledger, or may have lost a part: by a restart, a failover or an eviction."""

    job: str

    def __str__(self) -> str:
        return (
            f"Redis has no ledger of job {self.job!r}, or may have lost a part of it, as by a restart, a failover or "
            "an eviction; trainers go back to a checkpoint by themselves, model and ledger. If this comes again, have "
            "Redis run on, and evict none of its data (maxmemory-policy noeviction)"
        )


@dataclass(eq=False, repr=False)
class ForkedLedgerError(LedgerError):
    """Raised when a process uses a ledger that its parent made: what talks to Redis is not in a forked child."""

    job: str
    worker: str

    def __str__(self) -> str:
        return (
            f"the ledger of job {self.job!r} was made as {self.worker!r} by the process that this one was forked from; "
            "use it there and hand the shards over, or make a ledger in this process, with another worker's name"
        )


@dataclass(eq=False, repr=False)
class LeaseLostError(LedgerError):
    """Raised when a worker has finished a shard that it does not hold."""

    job: str
    worker: str
    ticket: int

    def __str__(self) -> str:
        return (
            f"{self.worker!r} does not hold ticket {self.ticket} of job {self.job!r}; it was taken for dead, or the "
            "job went back to a checkpoint. What it trained since is not part of the model; a trainer joins anew by "
            "itself. If this comes again, see that nothing else uses the ledger of this job in the same EDL_NAMESPACE"
        )


@dataclass(eq=False, repr=False)
class ShardsChangedError(LedgerError, ValueError):
    """Raised when the shards, or how they are shuffled, are others than when a training began."""

    before: int
    now: int

    def __str__(self) -> str:
        return (
            f"these {self.now} shards are not the {self.before} that this training began with, in the same order and "
            "shuffled by the same seed. Give it the same, or another path for its checkpoints to start anew; shards "
            "that come in time are a stream"
        )


@dataclass(eq=False, repr=False)
class StreamError(LedgerError, ValueError):
    """Raised when shards can't be added to a stream: after its end, after a gap, or in place of others."""

    job: str
    reason: str

    def __str__(self) -> str:
        return f"these shards can't be added to the stream of job {self.job!r}: {self.reason}"
