"""The user's specifications: frozen structs that all layers share.

They are plain data (JSON by msgspec), and validated when they are built: SpecError names the field, the given value and
what is allowed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Self, get_args

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod

NAME_LIMIT = 52
"""Longest name of a job or pool, so that an instance's name is still a DNS label (63) on every backend."""

HUNG_AFTER_S = 20.0
"""Default limit for one run of a teacher's model; a teacher that takes longer counts as hung."""

MAX_BATCH = 64
"""Default limit for the rows of several requests in one run of a teacher's model."""

MOST_INSTANCES = 10_000
"""The most instances of a job or pool."""

MOST_COMMAND = 100_000
"""The most characters of a command, all its words together: Linux takes no word of 131,072 bytes."""

MOST_PRIORITY = 1_000_000
"""The highest priority of a job; the lowest is its negative."""

CHECKPOINT_EVERY_S = 300.0
"""Default interval between checkpoints."""

SECRET_VARIABLES = frozenset(
    {
        "EDL_DISCOVERY_TOKEN",
        "EDL_GATEWAY_TOKEN",
        "EDL_JOB_SERVER_TOKEN",
        "EDL_MONITOR_TOKEN",
        "EDL_REDIS_URL",
        "EDL_TEACHER_TOKEN",
    }
)
"""Variables that may hold a password or token: never part of a spec, log, argument or file."""

_NAME = re.compile(rf"[a-z0-9]([-a-z0-9]{{0,{NAME_LIMIT - 2}}}[a-z0-9])?")
_NAMED = "abfss?|adl|az|ftp|hdfs|sftp|smb|ssh|wasbs?|webhdfs"
"""URL protocols with a user or container name before the host."""

_LOGIN = re.compile(rf"://[^/@]*:(?!\d{{1,5}}/)[^@]*@|(?<![\w+.-])(?!(?:{_NAMED})://)[\w+.-]+://[^/@]+@", re.IGNORECASE)
"""A URL with a password (which may contain "/", unlike a port) or a token."""


def check_name(field: str, name: object) -> str:
    """Return `name` if it is a valid job or pool name on every backend, else raise SpecError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = f"1 to {NAME_LIMIT} of a-z, 0-9 and '-', starting and ending with a letter or digit"
        raise SpecError(field, name, allowed)
    return name


def name_from(text: str) -> str:
    """Return `text` as a valid name, in small letters, with hyphens for all but letters and digits; "" without any."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:NAME_LIMIT].rstrip("-")


def check_priority(priority: object) -> int:
    """Return `priority` if it is valid, else raise SpecError."""
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MOST_PRIORITY:
        raise SpecError("priority", priority, f"a whole number, -{MOST_PRIORITY:,} to {MOST_PRIORITY:,}")
    return priority


def check_weight(weight: object) -> float:
    """Return `weight` as a float if it is valid, else raise SpecError."""
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
        raise SpecError("weight", weight, "a number above 0")
    return float(weight)


class Spec(msgspec.Struct, frozen=True):
    """Base of the user-facing structs: read from plain data, and passed as such from task to task."""

    @classmethod
    def read(cls, field: str, given: object, *, strict: bool = True) -> Self:
        """Build the struct from a dict of its fields. `field` is its name in errors.

        Unless `strict`, text is accepted for numbers. Raises SpecError.
        """
        fields = check_fields(field, cls, given)
        try:
            return msgspec.convert(fields, cls, strict=strict)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, SpecError):
                raise error.__cause__ from None
            mistake = SpecError(field, str(error), f"what the fields of {cls.__name__} take")
        cls.check_each(fields, strict=strict)
        raise mistake

    @classmethod
    def check_each(
        cls, given: Mapping[str, Any], *, strict: bool, is_open: Callable[[object], bool] = lambda _: False
    ) -> None:
        """Raise SpecError for the first wrong field in `given`. Does not check nested structs and missing fields.

        `is_open` says whether a text holds a template: it may become text or a number, but no list or dict.
        """
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            value = given.get(field.name, msgspec.UNSET)
            if value is msgspec.UNSET:
                continue
            try:
                values[field.name] = msgspec.convert(value, field.type, strict=strict)
            except msgspec.ValidationError:
                is_container = _accepts(field.type, {}) or _accepts(field.type, [])
                if is_container if isinstance(value, str) and is_open(value) else not is_open(value):
                    values[field.name] = value
                if isinstance(value, dict) and any(is_struct(kind) for kind in get_args(field.type)):
                    values.pop(field.name, None)
        with suppress(TypeError):  # a required field is missing
            cls(**values)

    def serialize(self) -> dict[str, Any]:
        """Return plain data, for Airflow's XCom."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    @classmethod
    def deserialize(cls, data: object, version: int) -> Self:  # noqa: ARG003 (Airflow's signature)
        """Build the struct from the result of `serialize`. Raises SpecError."""
        return cls.read(cls.__name__, data)


def check_fields(field: str, struct: type[msgspec.Struct], given: object) -> dict[str, Any]:
    """Return `given` if it is a dict of fields of `struct` and its nested structs, else raise SpecError."""
    if not isinstance(given, dict):
        raise SpecError(field, given, f"a {struct.__name__}, or a dict of its fields")
    known = {one.name: one.type for one in msgspec.structs.fields(struct)}
    for name, value in given.items():
        if name not in known:
            raise SpecError(field, name, f"the fields of {struct.__name__}: {', '.join(known)}")
        for kind in get_args(known[name]):
            if isinstance(value, dict) and is_struct(kind):
                check_fields(f"{field}.{name}", kind, value)
    return given


def is_struct(kind: object) -> bool:
    """Whether a type is a struct."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _accepts(kind: Any, value: object) -> bool:
    """Whether a field of that type accepts the value."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


class Bounds(Spec, frozen=True):
    """How many instances a pool or job may have: at least `min`, at most `max`.

    Raises SpecError unless both are whole numbers with 1 <= min <= max <= 10,000.
    """

    min: int
    max: int

    def __post_init__(self) -> None:
        for field, value in (("bounds.min", self.min), ("bounds.max", self.max)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise SpecError(field, value, "a whole number")
            if not 1 <= value <= MOST_INSTANCES:
                raise SpecError(field, value, f"1 to {MOST_INSTANCES:,}")
        if self.min > self.max:
            raise SpecError("bounds", f"{self.min}:{self.max}", "min at most max")

    @classmethod
    def parse(cls, text: str, field: str = "bounds") -> Self:
        """Parse "min:max", or "n" for exactly n; `field` is the name in errors. Raises SpecError."""
        low, colon, high = text.partition(":")
        try:
            return cls(int(low), int(high if colon else low))
        except SpecError as error:
            raise error.of("bounds", field) from None
        except ValueError:
            raise SpecError(field, text, "'min:max' or one number, as in '1:3'") from None

    def check_size(self, instances: object) -> None:
        """Raise SpecError unless `instances` is 0, which suspends a job, or within the bounds."""
        if not isinstance(instances, int) or isinstance(instances, bool):
            raise SpecError("instances", instances, "a whole number")
        if instances != 0 and instances not in self:
            raise SpecError("instances", instances, f"0, or {self.min} to {self.max}")

    def __contains__(self, instances: int) -> bool:
        return self.min <= instances <= self.max

    def __str__(self) -> str:
        return f"{self.min}:{self.max}"


class TeacherSpec(Spec, frozen=True, kw_only=True):
    """The teachers of a pool.

    - `model`: a folder with a Paddle inference model, an `.onnx` file, or `package.module:function` (a Python
      callable that takes and returns a dict of arrays by name).
    - `outputs`: the outputs in answers, empty for all of the model's. "logits=fetch_name_0" renames the model's output
      `fetch_name_0` to `logits`.
    - `gpu_ids`: GPUs of one teacher; empty for CPU.
    - `mem_optim`: let Paddle reuse memory between layers.
    - `max_batch`: most rows when waiting requests are batched. 1 disables batching, also in students: for a model whose
      answer to a row depends on the others in its batch.
    - `hung_after_s`: a teacher that takes longer for one run counts as hung and is restarted. For slower models also
      raise the students' EDL_TEACHER_TIMEOUT_S (30 s by default).
    - `env`: further environment variables. No secrets: specs are stored and shown.
    - `pod`: the pod of each teacher on Kubernetes; other backends ignore it.
    """

    model: str
    outputs: Sequence[str] = ()
    gpu_ids: Sequence[int] = ()
    mem_optim: bool = False
    max_batch: int = MAX_BATCH
    hung_after_s: float = HUNG_AFTER_S
    env: dict[str, str] = {}
    pod: Pod | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise SpecError("teacher.model", self.model, "a model folder, an .onnx file or 'module:function'")
        _keep_as_tuple(self, "outputs", "teacher.outputs", str, "a list of output names, as in ['logits']")
        _check_outputs("teacher.outputs", self.outputs)
        _keep_as_tuple(self, "gpu_ids", "teacher.gpu_ids", int, "a list of GPU numbers, as in [0, 1]")
        if not isinstance(self.max_batch, int) or self.max_batch < 1:
            raise SpecError("teacher.max_batch", self.max_batch, "1 or more rows")
        if not isinstance(self.hung_after_s, int | float) or not 0 < self.hung_after_s < math.inf:
            raise SpecError("teacher.hung_after_s", self.hung_after_s, "seconds above 0")
        _check_env("teacher.env", self.env)
        _check_pod("teacher.pod", self.pod)


NotFinite = Literal["warn", "fail"]
"""What a training does whose loss or gradients become NaN or infinite."""


def check_not_finite(field: str, given: object) -> NotFinite:
    """Return it. Raises SpecError for another value than "warn" and "fail"."""
    if given not in ("warn", "fail"):
        raise SpecError(field, given, "'warn' or 'fail'")
    return given


class TrainerSpec(Spec, frozen=True, kw_only=True):
    """A training script and how to start it.

    - `command`: program and arguments. "python" is the interpreter that the backend runs with.
    - `env`: further environment variables. No secrets: specs are stored and shown.
    - `cwd`: the working directory; empty for a new one, which is removed together with the logs.
    - `pod`: the pod of each instance on Kubernetes; other backends ignore it.
    - `not_finite`: an elastic training whose loss or gradients become NaN or infinite goes on with a warning ("warn"),
      or fails ("fail"); see `Run.wrap`.
    """

    command: Sequence[str]
    env: dict[str, str] = {}
    cwd: str = ""
    pod: Pod | None = None
    not_finite: NotFinite = "warn"

    def __post_init__(self) -> None:
        check_not_finite("not_finite", self.not_finite)
        allowed = "a non-empty list of words, as in ['python', 'student.py']"
        if not self.command:
            raise SpecError("command", self.command, allowed)
        _keep_as_tuple(self, "command", "command", str, allowed)
        if any("\0" in word for word in self.command):
            raise SpecError("command", "a word with a null byte", "words without")
        if sum(map(len, self.command)) > MOST_COMMAND:
            raise SpecError("command", self.command, f"{MOST_COMMAND:,} characters at most, all words together")
        _check_env("env", self.env)
        _check_folder("cwd", self.cwd)
        _check_pod("pod", self.pod)


class Checkpoint(Spec, frozen=True, kw_only=True):
    """The checkpoint folder of a training, how often it writes a checkpoint, and which are kept.

    - `url`: a path, or a URL that fsspec supports, as s3://bucket/job. The next run resumes from this folder. One job
      at a time may use it. No password: URLs are stored and shown; configure credentials as for the store's own
      library, as in AWS_SECRET_ACCESS_KEY.
    - `every_steps`, `every_s`: interval in steps or seconds, whichever comes first. By default 300 seconds.
    - `keep_last`: how many of the newest are kept. While one is written there is one more.
    - `keep_every`: the first at or after each multiple of so many steps is kept for ever; None for none.
    - `allow_not_finite`: the name of a checkpoint from which a run may continue though its weights have NaN or
      infinity: others like it are passed over. A newer one that is whole still comes first.
    """

    url: str
    every_steps: int | None = None
    every_s: float | None = None
    keep_last: int = 3
    keep_every: int | None = None
    allow_not_finite: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url or "\0" in self.url:
            raise SpecError("checkpoint.url", self.url, "a folder's path or a URL as s3://bucket/job")
        if _LOGIN.search(self.url):
            allowed = "a URL without a password or token, because it is shown; use the variables of the store's library"
            raise SpecError("checkpoint.url", re.sub("://.*@", "://***@", self.url), allowed)
        for field in ("every_steps", "keep_last", "keep_every"):
            number = getattr(self, field)
            if number is None and field != "keep_last":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise SpecError(f"checkpoint.{field}", number, "a whole number, 1 or more")
        if not isinstance(self.allow_not_finite, str) or "/" in self.allow_not_finite:
            allowed = "a checkpoint's name, as `edl checkpoints ls` shows it, without the folder"
            raise SpecError("checkpoint.allow_not_finite", self.allow_not_finite, allowed)
        every_s = self.every_s
        if every_s is None and self.every_steps is None:
            every_s = CHECKPOINT_EVERY_S
        if every_s is not None:
            if not isinstance(every_s, int | float) or not 0 < every_s < math.inf:
                raise SpecError("checkpoint.every_s", every_s, "a number of seconds above 0")
            msgspec.structs.force_setattr(self, "every_s", float(every_s))

    def to_env(self) -> dict[str, str]:
        """Return the variables for `RuntimeSettings.from_env(...).checkpoint_spec()`."""
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value not in (None, "")}
        url = fields.pop("url")
        return {"EDL_CHECKPOINT": url, **{f"EDL_CHECKPOINT_{name.upper()}": str(fields[name]) for name in fields}}


def _keep_as_tuple(spec: msgspec.Struct, name: str, field: str, kind: type, allowed: str) -> None:
    """Store the given list as a tuple, because a frozen spec must not change."""
    given = getattr(spec, name)
    if not isinstance(given, list | tuple) or not all(isinstance(entry, kind) for entry in given):
        raise SpecError(field, given, allowed)
    msgspec.structs.force_setattr(spec, name, tuple(given))


def _check_outputs(field: str, outputs: Sequence[str]) -> None:
    """Raise SpecError for an output without a name or a repeated name. Skips templates."""
    names = [output.partition("=") for output in outputs if "{" not in output]
    for name, sign, origin in names:
        if not name or (sign and not origin):
            raise SpecError(field, f"{name}{sign}{origin}", "an output's name, or 'name=output of the model'")
    given = [name for name, _, _ in names]
    if len(set(given)) < len(given):
        raise SpecError(field, list(outputs), "each output once")


def _check_env(field: str, env: object) -> None:
    """Raise SpecError, which never shows a value, unless `env` is a valid environment without secrets."""
    if not isinstance(env, dict):
        raise SpecError(field, type(env).__name__, "a dict of variables, as in {'LR': '0.1'}")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise SpecError(field, name, "names of variables: text without '=' and null bytes")
        if name in SECRET_VARIABLES:
            raise SpecError(
                field, name, "none that may hold a secret: specs are shown; secrets belong in the connection"
            )
        if not isinstance(value, str):
            raise SpecError(f"{field}[{name!r}]", type(value).__name__, "text, as in '0.1'")
        if "\0" in value:
            raise SpecError(f"{field}[{name!r}]", "a text with a null byte", "text without")


def _check_folder(field: str, folder: object) -> None:
    if not isinstance(folder, str) or "\0" in folder:
        raise SpecError(field, folder, "a folder's path as text, as in 'jobs/student'")


def _check_pod(field: str, pod: object) -> None:
    if pod is not None and not isinstance(pod, Pod):
        raise SpecError(field, pod, "a Pod, as in Pod(image='registry.example/train:1'), or None")


JobKind = Literal["pool", "trainer"]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend runs: `instances` processes or pods of one command.

    - `kind`: instances of a `pool` are restarted when they end, and leave one by one when it shrinks; one that exits
      with EX_CONFIG (78) is not restarted, and the pool fails when none is left. A `trainer` job succeeds when all
      instances exit with 0, and fails with the first that doesn't.
    - `elastic`: the instances are agents of trainers that can continue without one of them. One that is ended by a
      signal is restarted, a limited number of times in a row and per hour; one that exits with EX_CONFIG is not, and
      the job fails when fewer than `bounds.min` are left.
    - `bounds`: the limits of `instances` while the job runs.
    - `env`: plain environment variables. Secrets are passed to `Backend.submit` separately and never stored.
    - `grace_s`: seconds between SIGTERM and SIGKILL.
    - `pool_digest`: digest of the pool that was started for this job only, so that the same job with other teachers is
      a different one; else empty.
    - `serves_http`: each instance answers /v2/health/live and /v2/health/ready at EDL_HOST and EDL_PORT.
    - `pod`: the pod of each instance; None for the connection's image and defaults.
    - `priority`: jobs of a higher priority get their instances first.
    - `weight`: above 0; share of the instances beyond the minimums, relative to other jobs.
    """

    name: str
    kind: JobKind
    command: tuple[str, ...]
    bounds: Bounds
    instances: int
    elastic: bool = False
    env: dict[str, str] = {}
    cwd: str = ""
    grace_s: float = 10.0
    pool_digest: str = ""
    serves_http: bool = False
    pod: Pod | None = None
    priority: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_priority(self.priority)
        check_weight(self.weight)
        _check_env("env", self.env)
        _check_folder("cwd", self.cwd)
        if self.instances not in self.bounds:
            raise SpecError("instances", self.instances, f"{self.bounds.min} to {self.bounds.max}")
        for field in ("grace_s", "weight"):
            msgspec.structs.force_setattr(self, field, float(getattr(self, field)))  # 10 and 10.0 are the same spec

    @property
    def digest(self) -> str:
        """A digest of this spec's content."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]
