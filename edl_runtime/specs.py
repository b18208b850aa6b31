"""What a user asks for: frozen structs that every layer shares.

Everything here is plain data (JSON in, JSON out, by msgspec) and valid once made: a struct that can't work raises
`SpecError` where it is built, naming the field, what was given and what is allowed.
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
"""A teacher that takes longer over one run of its model counts as hung, unless told otherwise."""

MAX_BATCH = 64
"""Most rows of a run of a teacher's model that answers several requests, unless told otherwise."""

MOST_PRIORITY = 1_000_000
"""The highest priority of a job; the lowest is its negative."""

CHECKPOINT_EVERY_S = 300.0
"""How often a training writes a checkpoint, unless told otherwise."""

SECRET_VARIABLES = frozenset({"EDL_DISCOVERY_TOKEN", "EDL_MONITOR_TOKEN", "EDL_REDIS_URL", "EDL_TEACHER_TOKEN"})
"""Variables that may hold a password or token: they never stand in a spec, a log, an argument or a file."""

_NAME = re.compile(rf"[a-z0-9]([-a-z0-9]{{0,{NAME_LIMIT - 2}}}[a-z0-9])?")
_NAMED = "abfss?|adl|az|ftp|hdfs|sftp|smb|ssh|wasbs?|webhdfs"
"""Protocols of URLs in which the name of a user or container may stand before the host."""

_LOGIN = re.compile(rf"://[^/@]*:(?!\d{{1,5}}/)[^@]*@|(?<![\w+.-])(?!(?:{_NAMED})://)[\w+.-]+://[^/@]+@", re.IGNORECASE)
"""A password in a URL, which may have a "/" in it as no port has, or a token alone."""


def check_name(field: str, name: object) -> str:
    """Return `name` if it can name a job or pool on every backend, else raise SpecError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = f"1 to {NAME_LIMIT} of a-z, 0-9 and '-', starting and ending with a letter or digit"
        raise SpecError(field, name, allowed)
    return name


def check_priority(priority: object) -> int:
    """Return `priority` if it is one, else raise SpecError."""
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MOST_PRIORITY:
        raise SpecError("priority", priority, f"a whole number, -{MOST_PRIORITY:,} to {MOST_PRIORITY:,}")
    return priority


def check_weight(weight: object) -> float:
    """Return `weight` if it is one, else raise SpecError."""
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < math.inf:
        raise SpecError("weight", weight, "a number above 0")
    return float(weight)


class Spec(msgspec.Struct, frozen=True):
    """What the user-facing structs share: they are read from plain data, and travel as such from task to task."""

    @classmethod
    def read(cls, field: str, given: object, *, strict: bool = True) -> Self:
        """Return the struct that a dict of its fields makes; `field` is what errors call it.

        Where it is not `strict`, text stands for numbers, too. Raises SpecError.
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
        """Raise SpecError, in the words of the field, for a wrong one among those in `given`.

        `is_open` says of a value that it is not known yet, as it holds a template: such text may become text or a
        number, but no list or dict. What is wrong in a struct within, and what is missing, is not looked for.
        """
        values: dict[str, Any] = {}
        for one in msgspec.structs.fields(cls):
            value = given.get(one.name, msgspec.UNSET)
            if value is msgspec.UNSET:
                continue
            try:
                values[one.name] = msgspec.convert(value, one.type, strict=strict)
            except msgspec.ValidationError:
                holds_others = _takes(one.type, {}) or _takes(one.type, [])
                if holds_others if isinstance(value, str) and is_open(value) else not is_open(value):
                    values[one.name] = value
                if isinstance(value, dict) and any(is_struct(kind) for kind in get_args(one.type)):
                    values.pop(one.name, None)
        with suppress(TypeError):  # one is missing
            cls(**values)

    def serialize(self) -> dict[str, Any]:
        """Return it as plain data, which is how Airflow keeps it in XCom."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    @classmethod
    def deserialize(cls, data: object, version: int) -> Self:  # noqa: ARG003 (Airflow's signature)
        """Return what `serialize` has taken apart. Raises SpecError."""
        return cls.read(cls.__name__, data)


def check_fields(field: str, struct: type[msgspec.Struct], given: object) -> dict[str, Any]:
    """Return `given` if it is a dict whose keys are fields of `struct`, in structs within it as well.

    Raises SpecError if not.
    """
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
    """Whether a type, as of a field, is a struct."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _takes(kind: Any, value: object) -> bool:
    """Whether a field of that type can be that value."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


class Bounds(Spec, frozen=True):
    """How many instances a pool or job may have: at least `min`, at most `max`.

    Raises SpecError unless both are whole numbers with 1 <= min <= max.
    """

    min: int
    max: int

    def __post_init__(self) -> None:
        for field, value in (("bounds.min", self.min), ("bounds.max", self.max)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise SpecError(field, value, "a whole number")
            if value < 1:
                raise SpecError(field, value, "1 or more")
        if self.min > self.max:
            raise SpecError("bounds", f"{self.min}:{self.max}", "min at most max")

    @classmethod
    def parse(cls, text: str, field: str = "bounds") -> Self:
        """Read "min:max", or "n" for exactly n; `field` is what errors call it. Raises SpecError."""
        low, colon, high = text.partition(":")
        try:
            return cls(int(low), int(high if colon else low))
        except SpecError as error:
            raise error.of("bounds", field) from None
        except ValueError:
            raise SpecError(field, text, "'min:max' or one number, as in '1:3'") from None

    def __contains__(self, instances: int) -> bool:
        return self.min <= instances <= self.max

    def __str__(self) -> str:
        return f"{self.min}:{self.max}"


class TeacherSpec(Spec, frozen=True, kw_only=True):
    """The teachers of a pool.

    - `model`: a folder with a Paddle inference model, an `.onnx` file, or `package.module:function` (a Python
      callable that takes and returns a dict of arrays by name).
    - `outputs`: the outputs that teachers answer with, empty for all of the model's. "logits=fetch_name_0" gives the
      model's output `fetch_name_0` the name `logits`.
    - `gpu_ids`: GPUs of one teacher; empty for CPU.
    - `mem_optim`: let Paddle reuse memory between layers.
    - `max_batch`: most rows that requests are joined to which came while the model was busy. 1 joins none: for a model
      of which a row's answer depends on the others in its batch; else students join theirs, too, where teachers answer
      within milliseconds.
    - `hung_after_s`: a teacher that takes longer over one run counts as hung and is started anew. For slower
      models raise the students' EDL_TEACHER_TIMEOUT_S, too (30 s by default).
    - `env`: further environment variables, by name. No secrets: specs are kept and shown.
    - `pod`: what each teacher needs as a pod; processes don't look at it.
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


class TrainerSpec(Spec, frozen=True, kw_only=True):
    """A training script and how to start it.

    - `command`: program and arguments. "python" stands for the interpreter that the backend runs with.
    - `env`: further environment variables, by name. No secrets: specs are kept and shown.
    - `cwd`: the folder to start in; empty for one of its own, which is kept and dropped together with its logs.
    - `pod`: what each instance needs as a pod; processes don't look at it.
    """

    command: Sequence[str]
    env: dict[str, str] = {}
    cwd: str = ""
    pod: Pod | None = None

    def __post_init__(self) -> None:
        allowed = "a non-empty list of words, as in ['python', 'student.py']"
        if not self.command:
            raise SpecError("command", self.command, allowed)
        _keep_as_tuple(self, "command", "command", str, allowed)
        _check_env("env", self.env)
        _check_folder("cwd", self.cwd)
        _check_pod("pod", self.pod)


class Checkpoint(Spec, frozen=True, kw_only=True):
    """Where a training keeps its checkpoints, how often it writes one, and which are kept.

    - `url`: a folder's path, or a URL that fsspec knows, as s3://bucket/job. It names the training and not the run: the
      next run goes on from what it finds there. One job at a time keeps checkpoints there. No password: URLs are kept
      and shown, and credentials come as the store's own library has them, as in AWS_SECRET_ACCESS_KEY.
    - `every_steps`, `every_s`: one is due when so many steps or seconds have passed since the last, whichever comes
      first. With neither, every 300 seconds.
    - `keep_last`: how many of the newest are kept. While one is written there is one more.
    - `keep_every`: the first at or after each multiple of so many steps is kept for good; None for none.
    """

    url: str
    every_steps: int | None = None
    every_s: float | None = None
    keep_last: int = 3
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url or "\0" in self.url:
            raise SpecError("checkpoint.url", self.url, "a folder's path or a URL as s3://bucket/job")
        if _LOGIN.search(self.url):
            allowed = "a URL without a password or token: it is shown; the store's library knows variables for these"
            raise SpecError("checkpoint.url", re.sub("://.*@", "://***@", self.url), allowed)
        for field in ("every_steps", "keep_last", "keep_every"):
            number = getattr(self, field)
            if number is None and field != "keep_last":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise SpecError(f"checkpoint.{field}", number, "a whole number, 1 or more")
        every_s = self.every_s
        if every_s is None and self.every_steps is None:
            every_s = CHECKPOINT_EVERY_S
        if every_s is not None:
            if not isinstance(every_s, int | float) or not 0 < every_s < math.inf:
                raise SpecError("checkpoint.every_s", every_s, "a number of seconds above 0")
            msgspec.structs.force_setattr(self, "every_s", float(every_s))

    def to_env(self) -> dict[str, str]:
        """Return the variables that `RuntimeSettings.from_env(...).checkpoint_spec()` reads back as this."""
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        url = fields.pop("url")
        return {"EDL_CHECKPOINT": url, **{f"EDL_CHECKPOINT_{name.upper()}": str(fields[name]) for name in fields}}


def _keep_as_tuple(spec: msgspec.Struct, name: str, field: str, kind: type, allowed: str) -> None:
    """Keep what the user gave, a list most often, as a tuple: a frozen spec holds nothing that changes."""
    given = getattr(spec, name)
    if not isinstance(given, list | tuple) or not all(isinstance(entry, kind) for entry in given):
        raise SpecError(field, given, allowed)
    msgspec.structs.force_setattr(spec, name, tuple(given))


def _check_outputs(field: str, outputs: Sequence[str]) -> None:
    """Raise SpecError for an output without a name, or two of one name; what has a template in it is not known yet."""
    names = [output.partition("=") for output in outputs if "{" not in output]
    for name, sign, origin in names:
        if not name or (sign and not origin):
            raise SpecError(field, f"{name}{sign}{origin}", "an output's name, or 'name=output of the model'")
    given = [name for name, _, _ in names]
    if len(set(given)) < len(given):
        raise SpecError(field, list(outputs), "each output once")


def _check_env(field: str, env: object) -> None:
    """Raise SpecError, which never shows a value, unless `env` can be a process's environment and has no secrets."""
    if not isinstance(env, dict):
        raise SpecError(field, type(env).__name__, "a dict of variables, as in {'LR': '0.1'}")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise SpecError(field, name, "names of variables: text without '=' and null bytes")
        if name in SECRET_VARIABLES:
            raise SpecError(field, name, "none that may hold a secret: the connection has that, and specs are shown")
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

_NEWER = {"priority": 0, "weight": 1.0}
"""Fields of a `JobSpec` that came later, with what says nothing."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend runs: `instances` processes or pods of one command.

    - `kind`: a `pool`'s instances are started again when they end and leave the pool one by one when it shrinks; one
      that exits with EX_CONFIG (78) is given up, and the pool fails when it has none to go on with. A `trainer`
      job succeeds when all its instances exit with 0 and fails with the first that ends otherwise.
    - `elastic`: its instances are agents of trainers that go on without one of them, so one that a signal ends is
      started again, a few times in a row or in an hour at most; one that exits with EX_CONFIG is given up, and the
      job fails when fewer than the bounds' least are left.
    - `bounds`: between which numbers `instances` may be changed while it runs.
    - `env`: plain environment variables. Secrets go to `Backend.submit` beside the spec and are never kept.
    - `grace_s`: seconds between SIGTERM and SIGKILL when an instance has to go.
    - `pool_digest`: digest of the pool that was started for this job alone, so that the same job with other teachers
      is another one; empty when the pool is nobody's in particular.
    - `serves_http`: each instance answers /v2/health/live and /v2/health/ready at EDL_HOST and EDL_PORT.
    - `pod`: what each instance needs as a pod; None for the connection's image and nothing else.
    - `priority`: where not all jobs fit, those of a higher one get their instances first.
    - `weight`: above 0; of the instances beyond the minimums, a job of weight 2 gets about twice as many as one of 1.
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
        """Names this spec's content: two specs are the same exactly if their digests are.

        A spec that says nothing in newer fields has the digest that it had before there were any.
        """
        content = msgspec.to_builtins(self, order="deterministic")
        for field, default in _NEWER.items():
            if content[field] == default:
                del content[field]
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]
