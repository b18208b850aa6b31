"""Errors of shards and of their ledger."""

from __future__ import annotations

from dataclasses import dataclass

from edl_runtime.errors import EdlError


@dataclass(eq=False, repr=False)
class DatasetChangedError(EdlError, ValueError):
    """Raised when the number of a dataset's samples has changed since the training began."""

    before: int
    now: int

    def __str__(self) -> str:
        return (
            f"the dataset has {self.now} samples, and had {self.before} when this training began; the order of its "
            "samples depends on that. Use the same data, or another checkpoint folder to start from scratch"
        )


class LedgerError(EdlError):
    """Raised when the ledger can't do a request."""


@dataclass(eq=False, repr=False)
class StaleGenerationError(LedgerError):
    """Raised when a worker of an old generation changes the ledger."""

    job: str
    generation: int
    current: int

    def __str__(self) -> str:
        return (
            f"generation {self.generation} of job {self.job!r} may not change its ledger, which belongs to generation "
            f"{self.current}; what this process trained since is not in the model. A trainer rejoins by itself"
        )


@dataclass(eq=False, repr=False)
class LedgerMissingError(LedgerError, LookupError):
    """Raised when Redis has lost a job's ledger, or may have lost a part of it."""

    job: str

    def __str__(self) -> str:
        return (
            f"Redis has no ledger of job {self.job!r}, or may have lost a part of it, as by a restart, a failover or "
            "an eviction; trainers restore model and ledger from a checkpoint by themselves. If this happens again, "
            "keep Redis running, without evictions (maxmemory-policy noeviction)"
        )


@dataclass(eq=False, repr=False)
class ForkedLedgerError(LedgerError):
    """Raised when a forked child uses its parent's ledger: the thread that talks to Redis is not in the child."""

    job: str
    worker: str

    def __str__(self) -> str:
        return (
            f"the ledger of job {self.job!r} was made as {self.worker!r} by the parent of this process; use it there "
            "and pass on the shards, or make a ledger in this process, with another worker's name"
        )


@dataclass(eq=False, repr=False)
class LeaseLostError(LedgerError):
    """Raised when a worker acknowledges a shard that it does not hold."""

    job: str
    worker: str
    ticket: int

    def __str__(self) -> str:
        return (
            f"{self.worker!r} does not hold ticket {self.ticket} of job {self.job!r}; it was considered dead, or the "
            "job was restored from a checkpoint. What it trained since is not in the model; a trainer rejoins by "
            "itself. If this happens again, check that nothing else uses this job's ledger in the same EDL_NAMESPACE"
        )


@dataclass(eq=False, repr=False)
class ShardsChangedError(LedgerError, ValueError):
    """Raised when the shards, or their shuffling, have changed since the training began."""

    before: int
    now: int

    def __str__(self) -> str:
        return (
            f"these {self.now} shards are not the {self.before} that this training began with, in the same order and "
            "shuffled by the same seed. Use the same, or another checkpoint folder to start from scratch; for shards "
            "that are added over time, use a stream"
        )


@dataclass(eq=False, repr=False)
class TasksMissingError(LedgerError, LookupError):
    """Raised when Redis has no tasks of a job, or has lost some of what it had."""

    job: str
    namespace: str

    def __str__(self) -> str:
        return (
            f"Redis has no tasks of job {self.job!r} in namespace {self.namespace!r}. `cloud_reader` or `set_dataset` "
            "makes them. If it had them, Redis was emptied, or has evicted or lost a part; keep it on disk (appendonly "
            "yes, appendfsync always), without evictions (maxmemory-policy noeviction), and start the readers again"
        )


@dataclass(eq=False, repr=False)
class TasksDifferError(LedgerError, ValueError):
    """Raised when a job has tasks of another list of shards."""

    job: str
    there: str
    given: str

    def __str__(self) -> str:
        return (
            f"job {self.job!r} has {self.there}; given was {self.given}. All readers of a job need the same shards, as "
            "many in each task; for other shards use another job name"
        )


@dataclass(eq=False, repr=False)
class TaskLostError(LedgerError):
    """Raised when a reader reports a task that it does not hold any more."""

    job: str
    number: int
    pass_number: int
    worker: str

    def __str__(self) -> str:
        return (
            f"{self.worker!r} no longer holds task {self.number} of pass {self.pass_number} of job {self.job!r}: it "
            "took longer than the task's timeout, or Redis lost the lease. Another reader reads it again from its "
            "start. If this happens often, raise the timeout or put fewer shards in a task"
        )


@dataclass(eq=False, repr=False)
class AllTasksFailedError(LedgerError):
    """Raised when a pass is over and each of its tasks has failed too often."""

    job: str
    pass_number: int

    def __str__(self) -> str:
        return (
            f"all tasks of pass {self.pass_number} of job {self.job!r} have failed; `edl tasks {self.job}` shows why, "
            f"and `edl tasks {self.job} --requeue failed` puts them back"
        )


@dataclass(eq=False, repr=False)
class PassLostError(LedgerError):
    """Raised when Redis is more than a pass behind what a reader has seen."""

    job: str
    pass_number: int
    current: int

    def __str__(self) -> str:
        return (
            f"pass {self.pass_number} of job {self.job!r} should begin, but Redis is in pass {self.current} again: it "
            "has lost what was finished since. A reader that is started again reads on from there; keep Redis on disk "
            "(appendonly yes, appendfsync always) to lose nothing"
        )


@dataclass(eq=False, repr=False)
class StreamError(LedgerError, ValueError):
    """Raised when shards can't be added to a stream: after its end, after a gap, or in place of others."""

    job: str
    reason: str

    def __str__(self) -> str:
        return f"these shards can't be added to the stream of job {self.job!r}: {self.reason}"


@dataclass(eq=False, repr=False)
class SampleError(EdlError, ValueError):
    """Raised when a reader yields a sample that shards can't hold. `field` is None if it concerns the whole sample."""

    sample: int
    field: int | None
    given: str
    allowed: str

    def __str__(self) -> str:
        place = f"sample {self.sample}" if self.field is None else f"sample {self.sample}, field {self.field}"
        return f"{place}: got {self.given}, allowed is {self.allowed}; samples and fields are counted from 0"


@dataclass(eq=False, repr=False)
class ReaderError(EdlError):
    """Raised when a reader fails. `sample` is the number of the one that it did not yield."""

    reader: str
    sample: int
    cause: str

    def __str__(self) -> str:
        return f"the reader {self.reader} failed at sample {self.sample}, counted from 0: {self.cause}"


@dataclass(eq=False, repr=False)
class ConversionRunningError(EdlError):
    """Raised when another conversion writes shards to the same place."""

    url: str

    def __str__(self) -> str:
        return f"another conversion writes shards to {self.url}; wait for its end, or stop it, and convert again"


@dataclass(eq=False, repr=False)
class DatasetStoreError(EdlError):
    """Raised when shards can't be written or read: no permission, no space, or the store does not answer."""

    url: str
    cause: str

    def __str__(self) -> str:
        return (
            f"shards at {self.url} can't be written or read ({self.cause}); check that this process may do it there, "
            "and that there is space"
        )


@dataclass(eq=False, repr=False)
class UnfinishedDatasetError(EdlError, LookupError):
    """Raised when there are no shards at `url`, or not all of them: a conversion is still running, or was killed."""

    url: str
    problem: str

    def __str__(self) -> str:
        return f"{self.url} has no whole set of shards: {self.problem}; run `edl convert` again with --overwrite"


@dataclass(eq=False, repr=False)
class DamagedShardError(EdlError, ValueError):
    """Raised when a shard is not what was written: torn, truncated, or with a wrong bit. None of it is used."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"shard {self.path} is damaged: {self.problem}; copy it again, or convert its reader again"
