"""Every error the runtime raises on purpose.

Errors carry their data as attributes and build their text from them, so callers never parse messages. The text
says what was given, what is allowed and what to do next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from datetime import datetime

EX_CONFIG = 78
"""Exit status (BSD's `sysexits.h`) of a process that can never work as configured: restarting it is pointless.

It speaks for that process alone. Of an instance of elastic trainers: it gives up, and the others may go on.
"""

EX_DATAERR = 65
"""Exit status of an instance whose whole job was given what can't be trained: starting the job again is pointless."""

MOST_SHOWN = 500
"""Characters of a value that a message shows."""


class EdlError(Exception):
    """The root of this project's errors."""


class SpecError(EdlError, ValueError):
    """Raised when a spec, flag or parameter has a value that is not allowed."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        super().__init__(field, given, allowed)
        self.field = field
        self.given = given
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{_clipped(self.field)}: got {_clipped(_shown(self.given))}, allowed is {self.allowed}"

    def of(self, kind: str, field: str) -> SpecError:
        """Return this error of a `kind` of struct, as "bounds", as one of the field that holds it, as "teachers"."""
        return SpecError(re.sub(rf"^{kind}\b", field, self.field), self.given, self.allowed)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a whole number of thousands of digits, or what a class of another's raises
        return f"a value of type {type(value).__name__} that can't be shown ({type(error).__name__})"


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}… ({len(text):,} characters)"


class BackendError(EdlError):
    """Raised when a backend can't do what it was asked."""


class UnknownJobError(BackendError, LookupError):
    """Raised when no job or pool of that name exists."""

    def __init__(self, name: str, known: Sequence[str] = ()) -> None:
        super().__init__(name, known)
        self.name = name
        self.known = tuple(known)

    def __str__(self) -> str:
        known = f"; there are: {', '.join(self.known)}" if self.known else "; there are none"
        return f"no job or pool named {self.name!r}{known}"


class JobEndedError(BackendError):
    """Raised when a job that has ended, or ends just now, can't be resized."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__(name, how)
        self.name = name
        self.how = how

    def __str__(self) -> str:
        return f"{self.name!r} {self.how} and can't be resized; submit it again"


class JobLockedError(BackendError):
    """Raised when a job can't be started or stopped, for another process that does so does not come to its end.

    - `holder`: that process, in words.
    - `suspended`: whether it is, as by Ctrl-Z.
    - `waited_s`: how long it was waited for.
    """

    def __init__(self, name: str, holder: str, *, suspended: bool, waited_s: float) -> None:
        super().__init__(name, holder, suspended, waited_s)
        self.name = name
        self.holder = holder
        self.suspended = suspended
        self.waited_s = waited_s

    def __str__(self) -> str:
        if self.suspended:
            state, advice = "is suspended", "let it go on (`fg`, or `kill -CONT` with its id), or end it (`kill -KILL`)"
        else:
            state, advice = f"has not ended for {self.waited_s:.0f} s", "if it hangs, end it (`kill` with its id)"
        return f"{self.holder} starts or stops job {self.name!r} and {state}; {advice}, and try again"


class SubmitError(BackendError):
    """Raised when a job could not be started."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"job {self.name!r} could not be started: {self.reason}"


class OwnedElsewhereError(BackendError):
    """Raised when a job or pool of that name runs and belongs to somebody else."""

    def __init__(self, name: str, kind: str, owner: str) -> None:
        super().__init__(name, kind, owner)
        self.name = name
        self.kind = kind
        self.owner = owner

    def __str__(self) -> str:
        what = "pool" if self.kind == "pool" else "job"
        return (
            f"{what} {self.name!r} belongs to {self.owner!r} and is running; "
            f"give each its own name, or stop that one with `edl stop {self.name}`"
        )


class JobRunsError(BackendError):
    """Raised when a job is to be run by hand while one of its name runs.

    `folder`: in which its instances were started, empty for one of each's own.
    """

    def __init__(self, name: str, since: datetime, folder: str) -> None:
        super().__init__(name, since, folder)
        self.name = name
        self.since = since
        self.folder = folder

    def __str__(self) -> str:
        where = f" in {self.folder}" if self.folder else ""
        return (
            f"a job {self.name!r} runs{where} since {self.since:%Y-%m-%d %H:%M:%S}; "
            f"`edl logs -f {self.name}` shows what it writes, `edl stop {self.name}` ends it, and --name gives this "
            "one another name"
        )


class ClusterError(BackendError):
    """Raised when a Kubernetes API server refuses a request. `message` is its own, and names what is wrong."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(status, reason, message)
        self.status = status
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        hint = {
            401: "; the credentials of the cluster are wrong or have expired",
            403: "; the role in deploy/ has all verbs that are needed" if "cannot" in self.message else "",
        }.get(self.status, "")
        return f"the cluster refuses it: {self.message or self.reason}{hint}"


class ConflictError(ClusterError):
    """Raised when an object in a cluster is another one than the request took it for, or is there already."""


class GoneError(ClusterError):
    """Raised when a watch or a list of a cluster would go on in a past that the server has forgotten: list anew."""


class ClusterUnavailableError(BackendError, ConnectionError):
    """Raised when a Kubernetes API server does not answer, for a while."""

    def __init__(self, address: str, cause: str) -> None:
        super().__init__(address, cause)
        self.address = address
        self.cause = cause

    def __str__(self) -> str:
        return f"the Kubernetes API at {self.address} does not answer ({self.cause}); check the kubeconfig's server"


class BrokenStreamError(ClusterUnavailableError):
    """Raised when the connection to a cluster broke while something was read bit by bit: go on from where that was."""


class RescalingError(EdlError):
    """Raised when a rescaling, or the one that it waits for, does not come to its end."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(what, limit_s)
        self.what = what
        self.limit_s = limit_s

    def __str__(self) -> str:
        return f"{self.what} has not ended within {self.limit_s:g} s; the next one does what is left to do"


class RegistryError(EdlError):
    """Raised when the registry refuses or can't be used."""


class RegistryUnavailableError(RegistryError, ConnectionError):
    """Raised when Redis does not answer, or not to us."""

    def __init__(self, address: str, cause: str) -> None:
        super().__init__(address, cause)
        self.address = address
        self.cause = cause

    def __str__(self) -> str:
        return (
            f"Redis at {self.address} can't be used ({self.cause}); "
            "check that it runs and that host, port, user and password are right"
        )


class RegistrySilentError(RegistryUnavailableError):
    """Raised when Redis does not answer in time; it may be away, or slow for a moment."""


class MalformedRecordError(RegistryError):
    """Raised when Redis holds something that this version can't read, and can't do without. `key`: where.

    No ValueError, for nobody has given it: by the next try it may have been mended, or have run out.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(key, problem)
        self.key = key
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"what Redis holds at {self.key!r} can't be read ({self.problem}): another version of edl-airflow has "
            "written it, or it is damaged; stop the job or pool that it belongs to, or delete the key if none runs"
        )


class DiscoveryUnavailableError(RegistryError, ConnectionError):
    """Raised when a discovery endpoint does not answer, or has no registry to ask."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(url, cause)
        self.url = url
        self.cause = cause

    def __str__(self) -> str:
        return (
            f"the discovery endpoint {self.url} can't be used ({self.cause}); "
            "check that `edl discovery` runs there and that EDL_DISCOVERY_URL is right"
        )


class DiscoverySilentError(DiscoveryUnavailableError):
    """Raised when a discovery endpoint does not answer in time; it may be away, or slow for a moment."""


class DiscoveryRefusedError(RegistryError):
    """Raised when a discovery endpoint refuses a request: a wrong token, or something that is no such endpoint."""

    def __init__(self, url: str, status: int, cause: str) -> None:
        super().__init__(url, status, cause)
        self.url = url
        self.status = status
        self.cause = cause

    def __str__(self) -> str:
        return (
            f"the discovery endpoint {self.url} answered {self.status}: {self.cause}; "
            "check EDL_DISCOVERY_URL and EDL_DISCOVERY_TOKEN"
        )


class PoolLimitError(RegistryError):
    """Raised when an endpoint follows as many pools as it can, and a student asks for another."""

    def __init__(self, pool: str, limit: int) -> None:
        super().__init__(pool, limit)
        self.pool = pool
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"this endpoint already has students of {self.limit} pools, the most that it follows at once, and pool "
            f"{self.pool!r} is not among them; run another `edl discovery`, or stop students of other pools"
        )


class UnknownPoolError(RegistryError, LookupError):
    """Raised when nobody is registered in a pool of that name."""

    def __init__(self, pool: str, namespace: str, known: Sequence[str] = ()) -> None:
        super().__init__(pool, namespace, known)
        self.pool = pool
        self.namespace = namespace
        self.known = tuple(known)

    def __str__(self) -> str:
        known = f"there are: {', '.join(self.known)}" if self.known else "there are none"
        return (
            f"no pool {self.pool!r} has members in namespace {self.namespace!r} now; {known}. "
            "`edl jobs` tells whether its teachers run, and EDL_NAMESPACE names another namespace"
        )


class PoolMismatchError(RegistryError):
    """Raised when a teacher's metadata differs from that of the pool it wants to join."""

    def __init__(self, pool: str, differences: Sequence[str]) -> None:
        super().__init__(pool, differences)
        self.pool = pool
        self.differences = tuple(differences)

    def __str__(self) -> str:
        return (
            f"this teacher differs from pool {self.pool!r}: {'; '.join(self.differences)}. "
            "Serve the pool's model, or start a pool of another name"
        )


class SupersededError(RegistryError):
    """Raised when somebody else has registered with a member's id."""

    def __init__(self, pool: str, member: str) -> None:
        super().__init__(pool, member)
        self.pool = pool
        self.member = member

    def __str__(self) -> str:
        return f"somebody else has registered as {self.member!r} in pool {self.pool!r}; give each member its own id"


class TeacherError(EdlError):
    """Raised when a teacher can't serve."""


class ModelError(TeacherError):
    """Raised when a model can't be loaded or does not have what was asked of it."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(model, reason)
        self.model = model
        self.reason = reason

    def __str__(self) -> str:
        return f"model {self.model!r}: {self.reason}"


class ProtocolError(EdlError):
    """Raised when bytes from the network are not what the protocol allows."""


class AnswerLimitError(ProtocolError):
    """Raised when a model's answer has more bytes than can be sent."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"the answer has {self.size} bytes or more, allowed are {self.limit}; "
            "ask for fewer rows or outputs, and for binary ones"
        )


class InferenceError(TeacherError):
    """Raised when a teacher answers a request with an error.

    `retryable` is true when another teacher may well answer it (the teacher drains, is overloaded or broke) and
    false when every teacher would refuse it (the request itself is wrong). `predictor_died` is true when the teacher's
    predictor died while it worked on the request, which may be the cause.
    """

    def __init__(
        self, address: str, status: int, reason: str, *, retryable: bool, predictor_died: bool = False
    ) -> None:
        super().__init__(address, status, reason)
        self.address = address
        self.status = status
        self.reason = reason
        self.retryable = retryable
        self.predictor_died = predictor_died

    def __str__(self) -> str:
        return f"teacher {self.address} answered {self.status}: {self.reason}"


class DistillError(EdlError):
    """Raised when a student can't be given its teachers' answers."""


class NoTeacherError(DistillError):
    """Raised when no healthy teacher was there within the wait limit."""

    def __init__(self, pool: str, waited_s: float, reason: str = "") -> None:
        super().__init__(pool, waited_s, reason)
        self.pool = pool
        self.waited_s = waited_s
        self.reason = reason

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        waited = f"no healthy teacher of {self.pool!r} after {self.waited_s:.0f} s{because}"
        return f"{waited}; check that teachers run: `edl pools` shows who is in a pool, with EDL_REDIS_URL as here"


class DeadlyRequestError(DistillError):
    """Raised in place of a batch under which one teacher's predictor after another died: it would end all of them.

    - `batch`: which, in words: "batch 7" of the epoch, counted from 0.
    - `teachers`: their addresses.
    """

    def __init__(self, batch: str, teachers: Sequence[str], reason: str) -> None:
        super().__init__(batch, teachers, reason)
        self.batch = batch
        self.teachers = teachers
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.batch} of the epoch is not asked again: the predictors of teachers {', '.join(self.teachers)} died "
            f"or hung while they worked on it ({self.reason}). Look for what is odd about these samples, and into the "
            "teachers' logs; a model that is merely slow needs a larger `edl teacher --hung_after`"
        )


class NotRecordedError(DistillError, LookupError):
    """Raised when a student asks for answers that were not written to disk: `missing` of `rows` rows."""

    def __init__(self, folder: str, missing: int, rows: int) -> None:
        super().__init__(folder, missing, rows)
        self.folder = folder
        self.missing = missing
        self.rows = rows

    def __str__(self) -> str:
        if not self.rows:
            return f"no answers were written to {self.folder}; let a teacher answer the same script first"
        return (
            f"the answers in {self.folder} are to other inputs: {self.missing} of a request's {self.rows} rows are not "
            "among them. Answers on disk need a source that gives the same inputs each time: without augmentation, or "
            "with a fixed seed for all that is random"
        )


class UnreadableAnswersError(DistillError, ValueError):
    """Raised for answers on disk that another version has written, or that are damaged."""

    def __init__(self, folder: str, problem: str) -> None:
        super().__init__(folder, problem)
        self.folder = folder
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"the answers in {self.folder} can't be read ({self.problem}); go on with the version of edl-airflow that "
            "wrote them, or let a teacher answer the script into another folder"
        )


class SampleError(DistillError, ValueError):
    """Raised when the source yields something that the teachers can't be asked about."""

    def __init__(self, field: str, position: str, given: str, allowed: str) -> None:
        super().__init__(field, position, given, allowed)
        self.field = field
        self.position = position
        self.given = given
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field!r} of {self.position}: got {self.given}, the teachers take {self.allowed}"


class SampleIdError(SampleError):
    """Raised when a sample has no id that its answers could be kept by, or comes with the id of another."""

    def __init__(self, field: str, position: str, given: str) -> None:
        super().__init__(field, position, given, "an integer, text or bytes for each sample, of its own")

    def __str__(self) -> str:
        return (
            f"{self.field!r} of {self.position}: got {self.given}, a cache of answers needs {self.allowed}: the same "
            "in every epoch for the same inputs, and another for others. Augmented data can't have one; and when the "
            "data has changed, remove the cache's folder"
        )


def _best_of(lines: Sequence[str]) -> str:
    """Return the line that says most: what a traceback ends with, else the last."""
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return next((line for line in after if line.strip() and not line.startswith(" ")), "")


class JobFailedError(EdlError):
    """Raised when a job or pool ended in failure. `last_lines` are the last lines of its log."""

    def __init__(self, name: str, reason: str, last_lines: Sequence[str] = ()) -> None:
        super().__init__(name, reason, last_lines)
        self.name = name
        self.reason = reason
        self.last_lines = tuple(last_lines)

    def __str__(self) -> str:
        best = _best_of(self.last_lines)
        head = f"{self.name!r} failed: {self.reason}" + (f": {best}" if best and best not in self.reason else "")
        if not self.last_lines:
            return head
        return "\n".join([head, "its last lines:", *(f"  {line}" for line in self.last_lines)])


class DatasetChangedError(EdlError, ValueError):
    """Raised when a dataset has another number of samples than when its training began."""

    def __init__(self, before: int, now: int) -> None:
        super().__init__(before, now)
        self.before = before
        self.now = now

    def __str__(self) -> str:
        return (
            f"the dataset has {self.now} samples, and had {self.before} when this training began; the order of its "
            "samples depends on that. Give it the same data, or another path for its checkpoints to start anew"
        )


class CheckpointError(EdlError):
    """Raised when a checkpoint can't be written or read."""


class CheckpointStoreError(CheckpointError):
    """Raised when the place where checkpoints are kept can't be used: no permission, no room, nobody answers."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(url, cause)
        self.url = url
        self.cause = cause

    def __str__(self) -> str:
        return (
            f"checkpoints can't be kept at {self.url} ({self.cause}); check that this process may read and write there "
            "and that there is room, or name another place (EDL_CHECKPOINT)"
        )


class CheckpointHeldError(CheckpointError, ValueError):
    """Raised when a job is to keep checkpoints where another job that runs keeps its own.

    - `url`: that place. `job`: the other one, in `namespace`; `since` when it keeps them there.
    - `task`: "DAG/TASK" of Airflow that has started it, empty for no task.
    - `process`: who holds it, in words, where that is no job: `job` is empty then.
    """

    def __init__(self, url: str, *, job: str, namespace: str, task: str, since: datetime, process: str = "") -> None:
        super().__init__(url, job, namespace, task, since)
        self.url = url
        self.job = job
        self.namespace = namespace
        self.task = task
        self.since = since
        self.process = process

    def __str__(self) -> str:
        task = f"of the Airflow task {self.task!r}, " if self.task else ""
        who = f"job {self.job!r} ({task}in namespace {self.namespace!r})"
        stop = f"that job with `edl stop {self.job}`"
        if not self.job:
            who, stop = self.process, "that one"
        return (
            f"{who} keeps its checkpoints at {self.url} since "
            f"{self.since:%Y-%m-%d %H:%M:%S}, and two jobs would overwrite each other's there: name another place "
            f"(EDL_CHECKPOINT), stop {stop}, or start this one again when it has ended"
        )


class MissingExtraError(CheckpointStoreError):
    """Raised when checkpoints are to be kept where only an optional package can write."""

    def __init__(self, url: str, extra: str, cause: str) -> None:
        super().__init__(url, cause)
        self.args = (url, extra, cause)
        self.extra = extra

    def __str__(self) -> str:
        return f"checkpoints at {self.url} need {self.extra}: {self.cause}"


class UnreadableCheckpointError(CheckpointError):
    """Raised when what is in a checkpoint's folder can't be loaded. `state`: what it is; `problem`: why it is that.

    If it `is_draft` it has never been finished: it is being written, or its writer has died.
    """

    state: ClassVar[str]
    is_draft = False

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(url, problem)
        self.url = url
        self.problem = problem

    def __str__(self) -> str:
        return f"checkpoint {self.url} is {self.state}: {self.problem}"


class DamagedCheckpointError(UnreadableCheckpointError):
    """Raised when a checkpoint is not what was written: `problem` says which file, and how."""

    state = "damaged"


class UnfinishedCheckpointError(UnreadableCheckpointError):
    """Raised when a checkpoint has no manifest: it is a draft, or is being removed, or has lost its manifest."""

    state = "unfinished"

    def __init__(self, url: str, *, is_draft: bool) -> None:
        draft = "it has no manifest.json yet: it is being written, or its writer has died"
        other = "its manifest.json is gone: it is being removed, or somebody has taken the manifest away"
        super().__init__(url, draft if is_draft else other)
        self.is_draft = is_draft


class UnknownFormatError(UnreadableCheckpointError, ValueError):
    """Raised when another version has written a checkpoint, in a format (`found`) that is not the one `known` here."""

    state = "of an unknown format"

    def __init__(self, url: str, found: int, known: int) -> None:
        super().__init__(url, f"format {found}, this version reads format {known}")
        self.args = (url, found, known)
        self.found = found
        self.known = known

    def __str__(self) -> str:
        return (
            f"{super().__str__()}; go on with the version of edl-airflow that wrote it, or name another place "
            "(EDL_CHECKPOINT)"
        )


class NoWholeCheckpointError(CheckpointError, ValueError):
    """Raised when all finished checkpoints at a place are damaged: a training would begin anew as if there were none.

    One that has lost its manifest is damaged, too. `first`: what is wrong with the newest of them.
    """

    def __init__(self, url: str, damaged: int, first: UnreadableCheckpointError) -> None:
        super().__init__(url, damaged, first)
        self.url = url
        self.damaged = damaged
        self.first = first

    def __str__(self) -> str:
        return (
            f"no checkpoint at {self.url} is whole, {self.damaged} damaged: {self.first}. See "
            f"`edl checkpoints verify {self.url}`; to begin anew remove them, or name another place (EDL_CHECKPOINT); "
            "to go on bring back what is missing, as from a copy"
        )


class ElasticError(EdlError):
    """Raised when a training can't go on with the trainers that it has, or as its script wants it."""


class GroupLostError(ElasticError, ConnectionError):
    """Raised when a generation's trainers can't talk to each other any more. The next generation mends it."""

    def __init__(self, generation: int, reason: str) -> None:
        super().__init__(generation, reason)
        self.generation = generation
        self.reason = reason

    def __str__(self) -> str:
        return f"generation {self.generation} can't go on: {self.reason}"


class StepError(ElasticError, ValueError):
    """Raised when a script trains in another way than by one `run.step` a batch. `instead`: what to do."""

    def __init__(
        self, what: str, instead: str = "call run.step(loss=loss) once for each batch, after loss.backward()"
    ) -> None:
        super().__init__(what, instead)
        self.what = what
        self.instead = instead

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"


class InitNotCalledError(ElasticError, ValueError):
    """Raised when a script that imports `edl_runtime.elastic` trains without having called `elastic.init`."""

    def __str__(self) -> str:
        return (
            "the script imports edl_runtime.elastic and never calls elastic.init: each instance would train everything "
            "alone. Call elastic.init and run.wrap before the first step; or, if the script is to stay as it is, take "
            "the import out"
        )


class EarlyEndError(ElasticError, ValueError):
    """Raised when some ranks have left the loop over the data and others have not."""

    def __init__(self, step: int, ranks: Sequence[int], world_size: int) -> None:
        super().__init__(step, ranks, world_size)
        self.step = step
        self.ranks = tuple(ranks)
        self.world_size = world_size

    def __str__(self) -> str:
        which = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return (
            f"{which} of {self.world_size} left the loop over the data after step {self.step}, the others did not; "
            "decide when to end by what all ranks know, as run.step_number or run.mean_loss"
        )


class OtherModelError(ElasticError, ValueError):
    """Raised when a checkpoint, or the state of another trainer, does not fit what this script wraps and registers."""

    def __init__(self, origin: str, differences: Sequence[str]) -> None:
        super().__init__(origin, differences)
        self.origin = origin
        self.differences = tuple(differences)

    def __str__(self) -> str:
        shown = [f"  {difference}" for difference in self.differences[:20]]
        if len(self.differences) > len(shown):
            shown.append(f"  and {len(self.differences) - len(shown)} more")
        head = f"{self.origin} is of another model, optimizer or registered state than this script's:"
        return "\n".join([head, *shown, "Build and register the same, or name another place for its checkpoints"])


class LedgerError(EdlError):
    """Raised when a ledger of shards can't do what it was asked."""


class StaleGenerationError(LedgerError):
    """Raised when a worker of one generation wants to change a ledger that is another's."""

    def __init__(self, job: str, generation: int, current: int) -> None:
        super().__init__(job, generation, current)
        self.job = job
        self.generation = generation
        self.current = current

    def __str__(self) -> str:
        return (
            f"generation {self.generation} of job {self.job!r} may not change its ledger, which is that of generation "
            f"{self.current}; what this process trained since is not part of the model. A trainer joins anew by itself"
        )


class LedgerMissingError(LedgerError, LookupError):
    """Raised when Redis has lost a job's ledger, or may have lost a part: by a restart, a failover or an eviction."""

    def __init__(self, job: str) -> None:
        super().__init__(job)
        self.job = job

    def __str__(self) -> str:
        return (
            f"Redis has no ledger of job {self.job!r}, or may have lost a part of it, as by a restart, a failover or "
            "an eviction; trainers go back to a checkpoint by themselves, model and ledger. If this comes again, have "
            "Redis run on, and evict none of its data (maxmemory-policy noeviction)"
        )


class ForkedLedgerError(LedgerError):
    """Raised when a process uses a ledger that its parent made: what talks to Redis is not in a forked child."""

    def __init__(self, job: str, worker: str) -> None:
        super().__init__(job, worker)
        self.job = job
        self.worker = worker

    def __str__(self) -> str:
        return (
            f"the ledger of job {self.job!r} was made as {self.worker!r} by the process that this one was forked from; "
            "use it there and hand the shards over, or make a ledger in this process, with another worker's name"
        )


class LeaseLostError(LedgerError):
    """Raised when a worker has finished a shard that it does not hold."""

    def __init__(self, job: str, worker: str, ticket: int) -> None:
        super().__init__(job, worker, ticket)
        self.job = job
        self.worker = worker
        self.ticket = ticket

    def __str__(self) -> str:
        return (
            f"{self.worker!r} does not hold ticket {self.ticket} of job {self.job!r}; it was taken for dead, or the "
            "job went back to a checkpoint. What it trained since is not part of the model; a trainer joins anew by "
            "itself. If this comes again, see that nothing else uses the ledger of this job in the same EDL_NAMESPACE"
        )


class ShardsChangedError(LedgerError, ValueError):
    """Raised when the shards, or how they are shuffled, are others than when a training began."""

    def __init__(self, before: int, now: int) -> None:
        super().__init__(before, now)
        self.before = before
        self.now = now

    def __str__(self) -> str:
        return (
            f"these {self.now} shards are not the {self.before} that this training began with, in the same order and "
            "shuffled by the same seed. Give it the same, or another path for its checkpoints to start anew; shards "
            "that come in time are a stream"
        )


class StreamError(LedgerError, ValueError):
    """Raised when shards can't be added to a stream: after its end, after a gap, or in place of others."""

    def __init__(self, job: str, reason: str) -> None:
        super().__init__(job, reason)
        self.job = job
        self.reason = reason

    def __str__(self) -> str:
        return f"these shards can't be added to the stream of job {self.job!r}: {self.reason}"


class InstanceSupersededError(ElasticError):
    """Raised when an instance was started anew, and an agent of before would go on."""

    def __init__(self, job: str, instance: int) -> None:
        super().__init__(job, instance)
        self.job = job
        self.instance = instance

    def __str__(self) -> str:
        return (
            f"instance {self.instance} of job {self.job!r} was started anew, so this one ends; give each instance that "
            "is to train its own EDL_INSTANCE"
        )


class JobTakenError(ElasticError):
    """Raised when a job of that name was submitted anew, or another one of it still trains."""

    def __init__(self, job: str) -> None:
        super().__init__(job)
        self.job = job

    def __str__(self) -> str:
        return (
            f"instances of another submission of job {self.job!r} are alive; stop that one first, or give this one "
            "another name"
        )


class SourceError(EdlError):
    """Raised when a traffic source does not say what the web needs."""


class SourceUnavailableError(SourceError, ConnectionError):
    """Raised when a traffic source does not answer, or is in trouble: later it may be well again."""

    def __init__(self, source: str, cause: str) -> None:
        super().__init__(source, cause)
        self.source = source
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.source} can't be asked what the web needs ({self.cause})"


class NoSamplesError(SourceError, LookupError):
    """Raised when a traffic source was asked of a time, and has nothing of it. `hint`: what may be the reason."""

    def __init__(self, source: str, since: datetime, until: datetime, hint: str) -> None:
        super().__init__(source, since, until, hint)
        self.source = source
        self.since = since
        self.until = until
        self.hint = hint

    def __str__(self) -> str:
        span = f"{self.since:%Y-%m-%d %H:%M} to {self.until:%Y-%m-%d %H:%M} UTC"
        return f"{self.source} has nothing from {span}; {self.hint}"
