"""All environment variables of the runtime are read in this module.

Backends set these for the instances they start (`RuntimeSettings.to_env`), instances read them
(`RuntimeSettings.from_env`). A person may set them by hand to run a teacher or a student alone. Other programs'
variables are read by the functions below. Only `edl_runtime.backends.kubernetes.pod_init` reads EDL_RESULT_FILE by
itself: it may import nothing that takes time to load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.specs import SECRET_VARIABLES, Checkpoint, check_not_finite

BACKENDS = ("local", "kubernetes")

KEPT_LOGS = 20
"""Deleted jobs of a cluster's namespace whose logs are kept, by default."""

CLOUDS = ("aws", "gcp", "azure")
"""Those whose metadata servers `edl_runtime.preemption` can ask."""

_METADATA_SERVER = re.compile(r"http://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[\w./-]*)?")

_VOLUMES = re.compile(r"[A-Za-z0-9, ]*")

AGENT_FD = "EDL_AGENT_FD"
"""Set by an agent for its trainer: the descriptor of the socket between the two. Empty once it is in use."""

GPU_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where the driver lists its GPUs."""


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one instance, read from EDL_ variables.

    - `redis_url` (EDL_REDIS_URL): `redis://` or `rediss://` with user and password, or `redis+sentinel://` as in
      `redis+sentinel://:PASSWORD@host1:26379,host2:26379/MASTER/0`; empty for no registry.
    - `redis_for_pods` (EDL_REDIS_FOR_PODS): "host:port" at which pods reach the same Redis, for `edl submit`, with
      commas for several sentinels; empty if they reach it as this command does.
    - `discovery_url` (EDL_DISCOVERY_URL): `http://` or `https://` of the `edl discovery` server that assigns teachers
      to students; used when `redis_url` is empty.
    - `discovery_token` (EDL_DISCOVERY_TOKEN): its bearer token; required unless it listens on loopback.
    - `monitor_token` (EDL_MONITOR_TOKEN): the bearer token for the metrics of `edl monitor` and `edl controller`;
      required unless they listen on loopback.
    - `gateway_token` (EDL_GATEWAY_TOKEN): the token of an `edl gateway`, which clients send as a bearer token or as the
      password in its URL; required unless it listens on loopback.
    - `job_server_token` (EDL_JOB_SERVER_TOKEN): the bearer token of a JobServer; required unless it listens on
      loopback.
    - `namespace` (EDL_NAMESPACE): prefix of all keys, so that several teams share one Redis.
    - `job` (EDL_JOB): the job's name; empty when started by hand.
    - `run` (EDL_RUN): which run of the job this is; another run of the same name has another. Empty by hand.
    - `instance` (EDL_INSTANCE): this instance's number in its job, from 0.
    - `host` (EDL_HOST): the address at which the job's other instances, and a teacher's students, reach this one.
    - `port` (EDL_PORT): the port that a teacher serves at; 0 for a free one.
    - `grace_s` (EDL_GRACE_S): how long after SIGTERM this instance is killed.
    - `preemption_notice` (EDL_PREEMPTION_NOTICE): the cloud whose metadata server an instance asks whether its machine
      is about to be taken away, so that it leaves before: "aws", "gcp" or "azure"; "aws=http://HOST:PORT" for a server
      at another address. Empty to ask none.
    - `step_limit_s` (EDL_STEP_LIMIT_S): how long all other trainers wait at the end of a step for one that lives; and
      how long one may be silent and idle that nobody waits for.
    - `straggler_factor`, `straggler_after_s` (EDL_STRAGGLER_FACTOR, EDL_STRAGGLER_AFTER_S): a trainer is a straggler if
      it computes at least so many times as long in a step as its peers, by their median, and that for so long.
    - `straggler_restarts` (EDL_STRAGGLER_RESTARTS): how often a day one leaves, to be started again; 0 for never.
    - `pool` (EDL_POOL): the pool that a teacher joins or a student asks.
    - `teachers` (EDL_TEACHERS): addresses of fixed teachers, "host:port,host:port", also of other servers, as
      "oip+http://host:port/model"; wins over `pool`.
    - `teacher_wait_s` (EDL_TEACHER_WAIT_S): how long a student waits while there is no healthy teacher.
    - `teacher_timeout_s` (EDL_TEACHER_TIMEOUT_S): how long a teacher may take for one request; then another is asked.
    - `teacher_token` (EDL_TEACHER_TOKEN): the bearer token of teachers; required unless they listen on loopback.
    - `teacher_ca` (EDL_TEACHER_CA): a PEM file with the CA certificates for teachers. If it is set, a student uses TLS
      for all its teachers and rejects a teacher whose certificate none of these CAs signed.
    - `teacher_tls_name` (EDL_TEACHER_TLS_NAME): the name that teachers' certificates hold, as teachers come and go at
      addresses that nobody knows before; empty for the host at which each is reached.
    - `tls_cert`, `tls_key` (EDL_TLS_CERT, EDL_TLS_KEY): PEM files with the certificate, and those between it and the
      authority's, that a teacher, `edl discovery` or `edl gateway` shows, and with its private key, which may stand in
      the same file. It speaks nothing but TLS then. Both are read when it starts.
    - `lease_ttl_s` (EDL_LEASE_TTL_S): a registration expires if it is not renewed for this long.
    - `result_file` (EDL_RESULT_FILE): the file to which a student writes its result; see `edl_runtime.result`.
    - `checkpoint_stream` (EDL_CHECKPOINT_STREAM): the Redis stream of complete checkpoints, see
      `edl_runtime.checkpoint.checkpoint_events`; empty for a stream of the job's name.
    - `metrics_port` (EDL_METRICS_PORT): where a student's process shows Prometheus its metrics, at 127.0.0.1 only; 0
      for nowhere. If the port is in use, the process logs it and runs without metrics.
    - `checkpoint` (EDL_CHECKPOINT): where a training keeps its checkpoints, a path or URL; empty for nowhere.
    - `checkpoint_every_steps`, `checkpoint_every_s` (EDL_CHECKPOINT_EVERY_STEPS, EDL_CHECKPOINT_EVERY_S): how often it
      writes one; 0 for not by steps or time, and with neither it is every 300 s.
    - `checkpoint_keep_last`, `checkpoint_keep_every` (EDL_CHECKPOINT_KEEP_LAST, EDL_CHECKPOINT_KEEP_EVERY): how many of
      the newest are kept, and each how many steps one for good; 0 for none of these.
    - `checkpoint_allow_not_finite` (EDL_CHECKPOINT_ALLOW_NOT_FINITE): the name of a checkpoint with NaN or infinity
      from which a run may continue nevertheless.
    - `not_finite` (EDL_NOT_FINITE): "warn" or "fail", what an elastic training does whose loss or gradients become NaN
      or infinite.
    - `backend` (EDL_BACKEND): where the `edl` command finds jobs: "local" or "kubernetes".
    - `work_dir` (EDL_WORK_DIR): the local backend's folder, for the `edl` command.
    - `kube_context`, `kube_namespace` (EDL_KUBE_CONTEXT, EDL_KUBE_NAMESPACE): the context, of the kubeconfig that
      KUBECONFIG names, and the namespace of jobs, for the `edl` command; by default the current one, and its namespace.
    - `kube_kept_logs` (EDL_KUBE_KEPT_LOGS): of how many deleted jobs of the namespace the ends of the logs are kept, in
      ConfigMaps, by the `edl` command and the controller as they delete one; 0 for none.
    - `manifest_volumes` (EDL_MANIFEST_VOLUMES): kinds of volumes that `TrainingJob` manifests may have beside those of
      `edl_runtime.compat.training_job.VOLUMES`, with commas, as in "hostPath,nfs".

    Raises SpecError for times that can't be waited for, tokens that can't be sent and ports that don't exist.
    """

    redis_url: str = ""
    redis_for_pods: str = ""
    discovery_url: str = ""
    discovery_token: str = ""
    monitor_token: str = ""
    gateway_token: str = ""
    job_server_token: str = ""
    namespace: str = "default"
    job: str = ""
    run: str = ""
    instance: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    grace_s: float = 10.0
    preemption_notice: str = ""
    step_limit_s: float = 600.0
    straggler_factor: float = 1.5
    straggler_after_s: float = 300.0
    straggler_restarts: int = 0
    pool: str = ""
    teachers: str = ""
    teacher_wait_s: float = 60.0
    teacher_timeout_s: float = 30.0
    teacher_token: str = ""
    teacher_ca: str = ""
    teacher_tls_name: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    lease_ttl_s: float = 3.0
    result_file: str = ""
    checkpoint_stream: str = ""
    metrics_port: int = 0
    checkpoint: str = ""
    checkpoint_every_steps: int = 0
    checkpoint_every_s: float = 0.0
    checkpoint_keep_last: int = 3
    checkpoint_keep_every: int = 0
    checkpoint_allow_not_finite: str = ""
    not_finite: str = "warn"
    backend: str = "local"
    work_dir: str = "~/.edl"
    kube_context: str = ""
    kube_namespace: str = ""
    kube_kept_logs: int = KEPT_LOGS
    manifest_volumes: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.teacher_wait_s < math.inf:
            raise SpecError(named("teacher_wait_s"), self.teacher_wait_s, "a number of seconds, 0 or more")
        for field in ("teacher_timeout_s", "lease_ttl_s", "grace_s", "step_limit_s", "straggler_after_s"):
            seconds = getattr(self, field)
            if not 0 < seconds < math.inf:
                raise SpecError(named(field), seconds, "a number of seconds above 0")
        for field in ("metrics_port", "port"):
            if not 0 <= getattr(self, field) < 2**16:
                raise SpecError(named(field), getattr(self, field), "a port, 1 to 65535, or 0 for none in particular")
        if not _VOLUMES.fullmatch(self.manifest_volumes):
            allowed = "kinds of volumes with commas, as in 'hostPath,nfs'"
            raise SpecError(named("manifest_volumes"), self.manifest_volumes, allowed)
        self._check_checkpoint()
        check_not_finite(named("not_finite"), self.not_finite)
        self._check_instance()
        for field, needed in (("tls_key", "tls_cert"), ("teacher_tls_name", "teacher_ca")):
            if getattr(self, field) and not getattr(self, needed):
                raise SpecError(named(field), getattr(self, field), f"nothing without {_variable(needed)}")
        if self.backend not in BACKENDS:
            raise SpecError(named("backend"), self.backend, " or ".join(map(repr, BACKENDS)))
        check_token(named("teacher_token"), self.teacher_token)
        check_token(named("discovery_token"), self.discovery_token)
        check_token(named("monitor_token"), self.monitor_token)
        check_token(named("gateway_token"), self.gateway_token)
        check_token(named("job_server_token"), self.job_server_token)

    def _check_instance(self) -> None:
        for field in ("instance", "straggler_restarts", "kube_kept_logs"):
            if getattr(self, field) < 0:
                raise SpecError(named(field), getattr(self, field), "0 or more")
        if not 1 < self.straggler_factor < math.inf:
            raise SpecError(named("straggler_factor"), self.straggler_factor, "a number above 1")
        cloud, separator, address = self.preemption_notice.partition("=")
        is_address = bool(_METADATA_SERVER.fullmatch(address))
        if self.preemption_notice and (cloud not in CLOUDS or bool(separator) != is_address):
            allowed = f"{', '.join(map(repr, CLOUDS))}, or one with an address as in 'aws=http://127.0.0.1:1338'"
            raise SpecError(named("preemption_notice"), self.preemption_notice, allowed)

    def _check_checkpoint(self) -> None:
        for field in ("checkpoint_every_steps", "checkpoint_keep_every"):
            if getattr(self, field) < 0:
                raise SpecError(named(field), getattr(self, field), "a whole number of steps, or 0 for none")
        if not 0 <= self.checkpoint_every_s < math.inf:
            raise SpecError(named("checkpoint_every_s"), self.checkpoint_every_s, "a number of seconds, or 0 for none")
        if self.checkpoint_keep_last < 1:
            raise SpecError(named("checkpoint_keep_last"), self.checkpoint_keep_last, "1 or more")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read the EDL_ variables of `environ`. Raises SpecError that names the variable."""
        given = {}
        for field in msgspec.structs.fields(cls):
            variable = _variable(field.name)
            text = environ.get(variable)
            if text is None or (text == "" and field.type is not str):
                continue
            try:
                given[field.name] = msgspec.convert(text, field.type, strict=False)
            except msgspec.ValidationError:
                allowed = "a number of seconds" if field.name.endswith("_s") else "a number"
                allowed = "a whole number" if field.type is int else allowed
                raise SpecError(variable, text, allowed) from None
        return cls(**given)

    def to_env(self) -> dict[str, str]:
        """Return the variables that `from_env` reads back as these settings, without those at their defaults."""
        values = ((field, getattr(self, field.name)) for field in msgspec.structs.fields(type(self)))
        return {_variable(field.name): str(value) for field, value in values if value != field.default}

    def checkpoint_spec(self) -> Checkpoint | None:
        """Return where and how often a training keeps checkpoints; None if `checkpoint` is empty."""
        if not self.checkpoint:
            return None
        return Checkpoint(
            url=self.checkpoint,
            every_steps=self.checkpoint_every_steps or None,
            every_s=self.checkpoint_every_s or None,
            keep_last=self.checkpoint_keep_last,
            keep_every=self.checkpoint_keep_every or None,
            allow_not_finite=self.checkpoint_allow_not_finite,
        )


def kubeconfig_file(environ: Mapping[str, str]) -> str:
    """Return the file or files that KUBECONFIG names, as `kubectl` reads it; empty for the default."""
    return environ.get("KUBECONFIG", "")


def named_secret(environ: Mapping[str, str], variable: str) -> str:
    """Return a secret that is kept in the variable which a user has named for it; empty if that is not set."""
    return environ.get(variable, "") if variable else ""


class PaddleDistill(NamedTuple):
    """Teachers by the variables of the original EDL: `servers` assign at most `most` teachers of `pool`."""

    servers: str
    pool: str
    most: int


def paddle_distill(environ: Mapping[str, str]) -> PaddleDistill | None:
    """Return what PADDLE_DISTILL_BALANCE_SERVER, _SERVICE_NAME and _MAX_TEACHER say; None without the first.

    Raises SpecError.
    """
    servers = environ.get("PADDLE_DISTILL_BALANCE_SERVER", "")
    if not servers:
        return None
    pool, most = environ.get("PADDLE_DISTILL_SERVICE_NAME", ""), environ.get("PADDLE_DISTILL_MAX_TEACHER", "1")
    if not pool:
        raise SpecError("PADDLE_DISTILL_SERVICE_NAME", pool, "the name of the pool that the servers assign")
    if not most.isdecimal() or not int(most):
        raise SpecError("PADDLE_DISTILL_MAX_TEACHER", most, "a whole number of 1 or more")
    return PaddleDistill(servers, pool, int(most))


PADDLE_EDL = "PADDLE_EDL"
"""The only value of PADDLE_RUNING_ENV."""


class PaddleJob(NamedTuple):
    """A job by the variables of the original EDL's JobServer; `pod` is set in its pods, and `host` perhaps."""

    server: str
    id: str
    pod: str
    host: str
    checkpoint: str


def paddle_job(environ: Mapping[str, str]) -> PaddleJob:
    """Return what PADDLE_JOBSERVER, PADDLE_JOB_ID, PADDLE_POD_ID, POD_IP and PADDLE_EDL_FLEET_CHECKPOINT_PATH say.

    Raises SpecError without the first two, and for a PADDLE_RUNING_ENV of another platform.
    """
    for variable, allowed in (("PADDLE_JOBSERVER", "http://HOST:PORT"), ("PADDLE_JOB_ID", "the JobServer's --job_id")):
        if not environ.get(variable):
            raise SpecError(variable, "", allowed)
    if (platform := environ.get("PADDLE_RUNING_ENV", PADDLE_EDL)) != PADDLE_EDL:
        raise SpecError("PADDLE_RUNING_ENV", platform, PADDLE_EDL)
    names = ("PADDLE_POD_ID", "POD_IP", "PADDLE_EDL_FLEET_CHECKPOINT_PATH")
    return PaddleJob(environ["PADDLE_JOBSERVER"], environ["PADDLE_JOB_ID"], *(environ.get(name, "") for name in names))


def paddle_pod_environment(
    environ: Mapping[str, str], job: PaddleJob, pod_id: str, gpus: Sequence[int], folder: Path
) -> dict[str, str]:
    """Return the environment of a pod's script: `environ` without proxies, and what the original EDL sets there.

    EDL_POD_PATH is where the script runs, which the script that prepares the pod may have to make.
    """
    own = {
        "PADDLE_RUNING_ENV": PADDLE_EDL,
        "PADDLE_JOBSERVER": job.server,
        "PADDLE_JOB_ID": job.id,
        "PADDLE_POD_ID": pod_id,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "EDL_POD_PATH": str(folder),
    }
    return {name: value for name, value in environ.items() if name not in _PROXIES} | own


_PROXIES = ("http_proxy", "https_proxy")


def visible_gpu(environ: Mapping[str, str], number: int, driver: Path = GPU_DRIVER) -> str:
    """Return the CUDA_VISIBLE_DEVICES of a trainer that has the `number`th GPU of `environ`; "" without that one.

    A machine without a driver has none, whatever `environ` says.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    on_machine = count_gpus({}, driver)
    visible = list(map(str, range(on_machine))) if given is None else given.split(",")
    return visible[number].strip() if on_machine and number < len(visible) else ""


def count_gpus(environ: Mapping[str, str], driver: Path = GPU_DRIVER) -> int:
    """Return how many GPUs programs see: those of CUDA_VISIBLE_DEVICES, or all that the driver lists.

    As CUDA reads it, that list ends before its first invalid entry: "" and "-1" are none.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(driver.iterdir())) if driver.is_dir() else 0
    count = 0
    for device in visible.split(","):
        if not device.strip() or device.strip().startswith("-"):
            break
        count += 1
    return count


def split_secrets(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the plain and the secret variables of `env`."""
    plain = {name: value for name, value in env.items() if name not in SECRET_VARIABLES}
    return plain, {name: value for name, value in env.items() if name in SECRET_VARIABLES}


def check_token(field: str, token: str) -> str:
    """Return `token` if it can stand in a header, else raise SpecError, which doesn't show it."""
    if not all("!" <= letter <= "~" for letter in token):
        given = f"{len(token)} characters that are not shown"
        raise SpecError(field, given, "printable ASCII without blanks and line ends")
    return token


def named(field: str) -> str:
    """Return how messages name a setting: as it is set in Python and in the environment."""
    return f"settings.{field} ({_variable(field)})"


def _variable(field: str) -> str:
    return f"EDL_{field.upper()}"
