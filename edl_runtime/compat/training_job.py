"""Converts EDL's `TrainingJob` manifests into jobs of elastic trainers. Pure.

Two forms are supported: that of EDL's examples and tutorial (`paddlepaddle.org/v1`, with `passes` below `trainer`), and
that of its later resource definition (`paddlepaddle.org/v1` and `v1alpha1`, with `passes` beside `trainer`, volumes,
environment, tolerations and node selectors). The script's environment has:

- PADDLE_JOB_NAME: the job's name; PADDLE_INIT_NUM_PASSES: `passes`, 1 by default; PADDLE_INIT_USE_GPU: "1" or "0";
- `trainer.envs`, which override these.

TRAINERS, PSERVERS, PADDLE_INIT_NUM_GRADIENT_SERVERS and the like are not set: these numbers change while the job runs
(`run.world_size` and `run.rank`), or do not exist. Nor are ENTRY, TOPOLOGY and TRAINER_PACKAGE.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from edl_runtime.compat.manifest_yaml import below, read_manifests
from edl_runtime.errors import SpecError
from edl_runtime.pods import GPU, Pod, Volume, check_length
from edl_runtime.specs import MOST_COMMAND, MOST_INSTANCES, Bounds, TrainerSpec, check_name

API_VERSIONS = ("paddlepaddle.org/v1", "paddlepaddle.org/v1alpha1")
KIND = "TrainingJob"


class _Known(NamedTuple):
    """The fields of a mapping: those that are used, and the ignored ones with the reason or a replacement."""

    used: tuple[str, ...]
    ignored: Mapping[str, str]


_BY_THE_CONTROLLER = "the controller set it"
_NO_FRAMEWORK = "the script imports its framework, and min-instance and max-instance set the number of trainers"

TOP = _Known(("apiVersion", "kind", "metadata", "spec"), {"status": _BY_THE_CONTROLLER})
METADATA = _Known(
    ("name", "namespace", "labels", "annotations"),
    {
        **dict.fromkeys(
            ("clusterName", "creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"),
            "the API server set it",
        ),
        "finalizers": _BY_THE_CONTROLLER,
    },
)
SPEC = _Known(
    (
        *("image", "fault_tolerant", "passes", "volumes", "VolumeMounts", "volumeMounts", "schedulerName"),
        *("imagePullSecrets", "trainer"),
    ),
    {
        "annotations": "pods get metadata.annotations and metadata.labels",
        "frame_work": _NO_FRAMEWORK,
        **dict.fromkeys(("hostNetwork", "host_network"), "trainers connect to the addresses of their pods"),
        "is_nccl": "trainers use NCCL wherever they have GPUs",
        "local_job": _NO_FRAMEWORK,
        "master": "a ledger in Redis assigns samples to trainers",
        "matrix": "the image contains edl_runtime",
        **dict.fromkeys(("mountPath", "mountpath", "nfsmount"), "volumes and VolumeMounts set the mounts"),
        "podGroupName": "Kueue starts all pods of a job together: set its queue by the label kueue.x-k8s.io/queue-name "
        "in metadata.labels, or by `edl submit --queue`",
        **dict.fromkeys(
            ("port", "ports_num", "ports_num_for_sparse", "trainer_port", "trainer_ports_num"),
            "there are no parameter servers, and trainers find each other's ports through Redis",
        ),
        "pserver": "every trainer holds the whole model, and trainers average their gradients",
        "trainer_package": "the script is in the image, or on a volume",
    },
)
TRAINER = _Known(
    (
        *("entrypoint", "workspace", "passes", "min-instance", "max-instance", "instances", "resources"),
        *("envs", "tolerations", "node_selector", "imagePullSecrets"),
    ),
    {
        "etcd-endpoint": "trainers use the Redis of the connection, or of EDL_REDIS_URL",
        "grace_period_seconds": "a trainer that leaves has 30 s to finish its step and write a checkpoint",
        "pre_stop_cmd": "a trainer that leaves finishes its step and writes a checkpoint if needed",
        **dict.fromkeys(("index_succeed", "replicaSpec"), _BY_THE_CONTROLLER),
        **dict.fromkeys(("liveness_probe", "readiness_probe"), "trainers detect by themselves that one hangs or fails"),
    },
)
RESOURCES = _Known(("limits", "requests"), {})

OLD_GPU = "alpha.kubernetes.io/nvidia-gpu"
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"

_MOST_PASSES = 2**31 - 1
_SHELLS = ("sh", "bash")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_OPERATOR = re.compile(r"[();<>|&]+")
_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)

VOLUMES = ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
"""Kinds of volumes that a manifest may have: those of Kubernetes' Pod Security Standard `restricted`."""

PROJECTED = ("clusterTrustBundle", "configMap", "downwardAPI", "secret")
"""Sources that a projected volume may have: `serviceAccountToken` is none, as a token is a service account's rights."""

INSTANCE = "instance"
"""The instance's container in a pod template; see `Pod.template`."""

_PLAIN_MOUNT = frozenset({"name", "mountPath", "readOnly"})
_MOUNT = _PLAIN_MOUNT | {"subPath", "subPathExpr", "mountPropagation", "recursiveReadOnly"}

_At = tuple[str, Any]
"""A field's path, and its value."""


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a manifest describes.

    - `namespace`: the manifest's, empty for none. Pods are created in the connection's.
    - `trainer`: the script and its pods. Its `cwd` is the workspace, unchanged.
    - `bounds`: of the number of trainers. `instances`: how many are wanted, 0 for a suspended job; None for the fewest
      at first, and later what `edl resize` and rescaling set.
    - `notes`: sentences about fields that are ignored or have another meaning.
    """

    name: str
    namespace: str
    trainer: TrainerSpec
    bounds: Bounds
    instances: int | None = None
    notes: tuple[str, ...]


def read_training_job(text: str, *, name: str = "", volumes: str = "") -> list[TrainingJob]:
    """Return the jobs of a YAML text, in its order. `name` renames its only job.

    `volumes` are kinds of volumes that are allowed beside `VOLUMES`, see `RuntimeSettings.manifest_volumes`.

    Raises SpecError with the field's path, as in "spec.trainer.min-instance", also for unknown fields and for two jobs
    of one name.
    """
    jobs = [_job(where, manifest, name, volumes) for where, manifest in read_manifests(text)]
    names = [job.name for job in jobs]
    if name and len(jobs) > 1:
        raise SpecError("name", name, f"no name for {len(jobs)} TrainingJobs")
    for number, known in enumerate(names):
        if known in names[:number]:
            raise SpecError("metadata.name", known, "a unique name for each TrainingJob")
    return jobs


def to_training_job(manifest: dict[str, Any], volumes: str = "") -> TrainingJob:
    """Return the job of a manifest in plain data, as JSON has it. See `read_training_job`, which raises the same."""
    return _job("", manifest, "", volumes)


class _Parts(NamedTuple):
    """A manifest's mappings, with their used fields only. `at` names the manifest in error messages.

    - `more_volumes`: kinds of volumes and of projected sources that are allowed beside `VOLUMES` and `PROJECTED`.
    """

    at: str
    more_volumes: tuple[str, ...]
    metadata: dict[str, Any]
    spec: dict[str, Any]
    trainer: dict[str, Any]

    def path(self, field: str) -> str:
        """Return the name of a field in error messages."""
        return below(self.at, field)


def _job(where: str, manifest: dict[str, Any], new_name: str, more_volumes: str) -> TrainingJob:
    notes: list[str] = []
    parts = _parts(where, manifest, more_volumes, notes)
    with _errors_name(parts.path("metadata.name")):
        name = check_name("name", parts.metadata.get("name"))
    if new_name:
        name = check_name("name", new_name)
    namespace = _text(parts.path("metadata.namespace"), parts.metadata.get("namespace", ""))
    if namespace:
        at = parts.path("metadata.namespace")
        notes.append(f"{at} is ignored: pods are in the namespace of the connection or kubeconfig")
    bounds = _bounds(parts)
    notes += _fault_tolerance(parts, bounds)
    resources = _resources(parts.path("spec.trainer.resources"), parts.trainer.get("resources", {}), notes)
    env = _environment(parts, name, has_gpu="gpu" in resources)
    trainer = TrainerSpec(
        command=_command(parts.path("spec.trainer.entrypoint"), parts.trainer.get("entrypoint"), env),
        env=env,
        cwd=_text(parts.path("spec.trainer.workspace"), parts.trainer.get("workspace", "")),
        pod=_pod(parts, resources, notes),
    )
    return TrainingJob(
        name=name,
        namespace=namespace,
        trainer=trainer,
        bounds=bounds,
        instances=_instances(parts, bounds),
        notes=tuple(notes),
    )


def _parts(where: str, manifest: dict[str, Any], more_volumes: str, notes: list[str]) -> _Parts:
    top = _fields(where, manifest, TOP, notes)
    for field, allowed in (("apiVersion", API_VERSIONS), ("kind", (KIND,))):
        if top.get(field) not in allowed:
            raise SpecError(below(where, field), top.get(field), " or ".join(map(repr, allowed)))
    metadata = _part(where, top, "metadata", METADATA, notes)
    spec = _part(where, top, "spec", SPEC, notes)
    trainer = _part(below(where, "spec"), spec, "trainer", TRAINER, notes)
    kinds = tuple(kind.strip() for kind in more_volumes.split(",") if kind.strip())
    return _Parts(where, kinds, metadata, spec, trainer)


def _bounds(parts: _Parts) -> Bounds:
    at = parts.path("spec.trainer")
    fewest = _whole(f"{at}.min-instance", parts.trainer.get("min-instance"), least=1, most=MOST_INSTANCES)
    most = _whole(f"{at}.max-instance", parts.trainer.get("max-instance", 0), most=MOST_INSTANCES) or fewest
    if most < fewest:
        raise SpecError(f"{at}.max-instance", most, f"at least min-instance, which is {fewest}")
    return Bounds(fewest, most)


def _instances(parts: _Parts, bounds: Bounds) -> int | None:
    at = parts.path("spec.trainer.instances")
    wanted = parts.trainer.get("instances")
    if wanted is None:
        return None
    if _whole(at, wanted, most=MOST_INSTANCES) and wanted not in bounds:
        raise SpecError(at, wanted, f"{bounds.min} to {bounds.max} (min-instance to max-instance), or 0 to suspend")
    return int(wanted)


def _fault_tolerance(parts: _Parts, bounds: Bounds) -> Iterator[str]:
    """Yield a note on it: EDL required it for jobs whose number of trainers changes."""
    at, tolerant = parts.path("spec.fault_tolerant"), parts.spec.get("fault_tolerant", False)
    if not isinstance(tolerant, bool):
        raise SpecError(at, tolerant, "true or false")
    if tolerant:
        yield f"{at} is not needed: in every job the other trainers continue when one fails"
    elif "fault_tolerant" in parts.spec or bounds.min < bounds.max:
        yield f"{at} need not be true: in every job the other trainers continue when one fails"


def _environment(parts: _Parts, name: str, *, has_gpu: bool) -> dict[str, str]:
    at = parts.path("spec.trainer.envs")
    env = {
        "PADDLE_JOB_NAME": name,
        "PADDLE_INIT_NUM_PASSES": str(_passes(parts)),
        "PADDLE_INIT_USE_GPU": "1" if has_gpu else "0",
        **_mapping(at, parts.trainer.get("envs", {})),
    }
    with _errors_name(at):
        return TrainerSpec(command=["python"], env=env).env


def _passes(parts: _Parts) -> int:
    beside, within = (
        _whole(parts.path(f"{part}.passes"), fields.get("passes", 0), most=_MOST_PASSES)
        for part, fields in (("spec", parts.spec), ("spec.trainer", parts.trainer))
    )
    if beside and within and beside != within:
        allowed = f"the same as spec.passes, which is {beside}, or nothing"
        raise SpecError(parts.path("spec.trainer.passes"), within, allowed)
    return within or beside or 1


def _command(at: str, entrypoint: object, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the entrypoint's words, with variables replaced. No shell runs it unless it names one."""
    allowed = f"a command, as in 'python train.py', of at most {MOST_COMMAND:,} characters and no null byte"
    if isinstance(entrypoint, str) and (len(entrypoint) > MOST_COMMAND or "\0" in entrypoint):
        raise SpecError(at, entrypoint, allowed)
    try:
        lexer = shlex.shlex(_text(at, entrypoint), posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        words = tuple(lexer)
    except SpecError:
        raise SpecError(at, entrypoint, allowed) from None
    except ValueError as error:
        raise SpecError(at, entrypoint, f"{allowed} ({error})") from None
    if not words or not words[0]:
        raise SpecError(at, entrypoint, allowed)
    if words[0].rpartition("/")[2] in _SHELLS:
        return words
    if _ASSIGNMENT.fullmatch(words[0]):
        raise SpecError(at, words[0], "a command; set variables in trainer.envs")
    if own := next(filter(_OPERATOR.fullmatch, words), None):
        raise SpecError(at, own, "one command without shell operators, or a shell: sh -c '...'")

    def value_of(found: re.Match[str]) -> str:
        variable = found[1] or found[2]
        if variable not in env:
            known = ", ".join(f"${name}" for name in env)
            raise SpecError(at, found[0], f"{known}; for others use a shell: sh -c 'exec ...'")
        return env[variable]

    return tuple(_VARIABLE.sub(value_of, word) for word in words)


def _resources(at: str, given: object, notes: list[str]) -> dict[str, str | int | float]:
    """Return the resources of an instance: the requested CPU, and the limits of all else."""
    known = _fields(at, given, RESOURCES, notes)
    limits, requests = (_amounts(f"{at}.{part}", known.get(part, {})) for part in ("limits", "requests"))
    if "cpu" in limits:
        notes.append(f"{at}.limits.cpu is no limit: an instance may use more CPU while others don't need it")
    notes += [
        f"{at}.requests.{name} is ignored: an instance gets all of its limit"
        for name, limit in limits.items()
        if name != "cpu" and str(requests.get(name, limit)) != str(limit)
    ]
    amounts = {**requests, **limits, **({"cpu": requests["cpu"]} if "cpu" in requests else {})}
    return {name: amount for name, amount in amounts.items() if name != "gpu" or int(amount)}


def _amounts(at: str, given: object) -> dict[str, str | int | float]:
    amounts: dict[str, str | int | float] = {}
    for name, amount in _mapping(at, given).items():
        known = "gpu" if name in (GPU, OLD_GPU) else name
        try:
            Pod(resources={known: amount})
        except SpecError as error:
            raise SpecError(f"{at}.{name}", error.given, error.allowed) from None
        if str(amounts.setdefault(known, amount)) != str(amount):
            raise SpecError(f"{at}.{name}", amount, f"{amounts[known]}, as under the other name of GPUs, or nothing")
    return amounts


def _pod(parts: _Parts, resources: dict[str, str | int | float], notes: list[str]) -> Pod:
    spec, trainer = parts.spec, parts.trainer
    volumes, template = _volumes(parts, notes)
    scheduler = _text(parts.path("spec.schedulerName"), spec.get("schedulerName", ""))
    annotations = _mapping(parts.path("metadata.annotations"), parts.metadata.get("annotations", {}))
    annotations = {name: text for name, text in annotations.items() if name != LAST_APPLIED}
    given = {
        "image": ("spec.image", spec.get("image", "")),
        "labels": ("metadata.labels", parts.metadata.get("labels", {})),
        "annotations": ("metadata.annotations", annotations),
        "node_selector": ("spec.trainer.node_selector", trainer.get("node_selector", {})),
        "tolerations": ("spec.trainer.tolerations", trainer.get("tolerations", [])),
    }
    for field, (at, value) in given.items():
        with _errors_name(parts.path(at)):
            Pod(**{field: value})
    for number, toleration in enumerate(trainer.get("tolerations", [])):
        _mapping(parts.path(f"spec.trainer.tolerations[{number}]"), toleration)
    return Pod(
        **{field: value for field, (_, value) in given.items()},
        resources=resources,
        volumes=volumes,
        pull_secrets=list(dict.fromkeys(_pull_secrets(parts))),
        template={"spec": {**template, **({"schedulerName": scheduler} if scheduler else {})}},
    )


def _volumes(parts: _Parts, notes: list[str]) -> tuple[list[Volume], dict[str, Any]]:
    """Return them, and a pod template's spec. EDL wrote `VolumeMounts`, and accepted `volumeMounts`, too."""
    spec = parts.spec
    if "VolumeMounts" in spec and "volumeMounts" in spec:
        raise SpecError(parts.path("spec.volumeMounts"), spec["volumeMounts"], "nothing beside VolumeMounts")
    mounts = "volumeMounts" if "volumeMounts" in spec else "VolumeMounts"
    at_volumes, at_mounts = parts.path("spec.volumes"), parts.path(f"spec.{mounts}")
    sources = _by_name(at_volumes, spec.get("volumes", []))
    for number, source in enumerate(sources.values()):
        _check_source(f"{at_volumes}[{number}]", source, parts.more_volumes)
    return _read_volumes((at_volumes, sources), (at_mounts, spec.get(mounts, [])), notes)


def _pull_secrets(parts: _Parts) -> Iterator[str]:
    for part, fields in (("spec", parts.spec), ("spec.trainer", parts.trainer)):
        at, given = parts.path(f"{part}.imagePullSecrets"), fields.get("imagePullSecrets", [])
        if isinstance(given, dict):  # as in some of EDL's own
            given = [given]
        if not isinstance(given, list):
            raise SpecError(at, given, "a list of secrets by name, as in [{name: registry}]")
        check_length(at, given)
        for number, entry in enumerate(given):
            name = _mapping(f"{at}[{number}]", entry).get("name")
            with _errors_name(f"{at}[{number}].name"):
                Pod(pull_secrets=[name])  # type: ignore[list-item]  # Pod checks it
            yield str(name)


def _part(where: str, fields: Mapping[str, Any], name: str, known: _Known, notes: list[str]) -> dict[str, Any]:
    """Return the used fields of the mapping in the field `name`."""
    if name not in fields:
        raise SpecError(below(where, name), None, f"a mapping: {name!r} is required")
    return _fields(below(where, name), fields[name], known, notes)


def _fields(path: str, given: object, known: _Known, notes: list[str]) -> dict[str, Any]:
    """Return the used fields, and add notes on ignored ones that have a value. Raises SpecError for unknown ones."""
    fields = {name: value for name, value in _mapping(path, given).items() if value is not None}
    for name, value in fields.items():
        if name not in known.used and name not in known.ignored:
            allowed = f"one of the fields {', '.join(sorted([*known.used, *known.ignored]))}"
            raise SpecError(below(path, name), value, allowed)
        if name in known.ignored and value not in (0, "", [], {}):
            notes.append(f"{below(path, name)} is ignored: {known.ignored[name]}")
    return {name: value for name, value in fields.items() if name in known.used}


def _mapping(path: str, given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise SpecError(path, given, "a mapping of names to values")
    check_length(path, given)
    return given


def _text(path: str, given: object) -> str:
    if not isinstance(given, str):
        raise SpecError(path, given, "text")
    return given


def _whole(path: str, given: object, *, least: int = 0, most: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        raise SpecError(path, given, f"a whole number, {least} to {most:,}")
    return given


@contextmanager
def _errors_name(path: str) -> Iterator[None]:
    """Name the manifest's field, and the entry in it, in SpecErrors of a spec."""
    try:
        yield
    except SpecError as error:
        _, bracket, entry = error.field.partition("[")
        raise SpecError(path + bracket + entry, error.given, error.allowed) from None


# Volumes and mounts, as `Volume`s and a pod template.


def _read_volumes(volumes: _At, mounts: _At, notes: list[str]) -> tuple[list[Volume], dict[str, Any]]:
    """Return the volumes that a `Volume` can express (mounted once, and whole), and a pod template's spec for others.

    Volumes without a mount are left out, with a note.
    """
    sources = volumes[1]
    mounted = _mounts(*mounts, sources)
    times = Counter(mount["name"] for _, mount in mounted)
    notes += [f"{volumes[0]} has {name!r}, which has no mount and is left out" for name in sources - times.keys()]
    simple: list[Volume] = []
    others: dict[str, str] = {}
    template_mounts: list[dict[str, Any]] = []
    for path, mount in mounted:
        name = mount["name"]
        if times[name] == 1 and mount.keys() <= _PLAIN_MOUNT:
            simple.append(_volume(path, mount, sources[name]))
        else:
            others.setdefault(name, f"manifest-{len(others)}")
            template_mounts.append({**mount, "name": others[name]})
    if not others:
        return simple, {}
    return simple, {
        "volumes": [{"name": known, **sources[name]} for name, known in others.items()],
        "containers": [{"name": INSTANCE, "volumeMounts": template_mounts}],
    }


def _by_name(path: str, given: object) -> dict[str, dict[str, Any]]:
    """Return the sources by volume name."""
    sources: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(_list(path, given)):
        at = f"{path}[{number}]"
        source = dict(_entry(at, entry, "a volume, as in {name: data, persistentVolumeClaim: {claimName: digits}}"))
        name = _name(at, source.pop("name", None))
        if name in sources:
            raise SpecError(f"{at}.name", name, "a unique name for each volume")
        if len(source) > 1 or not all(isinstance(value, dict) for value in source.values()):
            raise SpecError(at, source, "one source, as in persistentVolumeClaim: {claimName: digits}")
        sources[name] = source or {"emptyDir": {}}
    return sources


def _check_source(path: str, source: dict[str, Any], more: tuple[str, ...]) -> None:
    """Raise SpecError for a volume of another kind than are allowed, and for such a part of a projected one."""
    (kind,) = source
    _check_kind(path, source, kind, (*VOLUMES, *more))
    if kind != "projected":
        return
    at = f"{path}.projected.sources"
    for number, entry in enumerate(_list(at, source[kind].get("sources") or [])):
        for part in _entry(f"{at}[{number}]", entry, "a source, as in {configMap: {name: lexicon}}"):
            _check_kind(f"{at}[{number}]", entry, part, (*PROJECTED, *more))


def _check_kind(path: str, source: dict[str, Any], kind: str, kinds: tuple[str, ...]) -> None:
    if kind not in kinds:
        more = "EDL_MANIFEST_VOLUMES of the controller, of `edl submit` or of Airflow allows more"
        allowed = f"one of {', '.join(sorted(set(kinds)))}; {more}"
        raise SpecError(f"{path}.{kind}", source[kind], allowed)


def _mounts(path: str, given: object, sources: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return each mount's path in the manifest, and the mount."""
    mounts: list[tuple[str, dict[str, Any]]] = []
    seen: set[str] = set()
    for number, entry in enumerate(_list(path, given)):
        at = f"{path}[{number}]"
        mount = _entry(at, entry, "a mount, as in {name: data, mountPath: /data}")
        if unknown := next((name for name in mount if name not in _MOUNT), None):
            raise SpecError(f"{at}.{unknown}", mount[unknown], f"one of the fields {', '.join(sorted(_MOUNT))}")
        if _name(at, mount.get("name")) not in sources:
            raise SpecError(f"{at}.name", mount["name"], f"a volume's: {', '.join(sources) or 'there are none'}")
        where, read_only = mount.get("mountPath"), mount.get("readOnly", False)
        if not isinstance(where, str) or not where.startswith("/") or where in seen:
            raise SpecError(f"{at}.mountPath", where, "an absolute path, unique for each mount")
        if not isinstance(read_only, bool):
            raise SpecError(f"{at}.readOnly", read_only, "true or false")
        seen.add(where)
        mounts.append((at, mount))
    return mounts


def _volume(path: str, mount: dict[str, Any], source: dict[str, Any]) -> Volume:
    where, read_only = mount["mountPath"], mount.get("readOnly", False)
    claim = source.get("persistentVolumeClaim", {})
    try:
        if claim and claim.keys() <= {"claimName", "readOnly"}:
            read_only = read_only or claim.get("readOnly") is True
            return Volume(path=where, claim=claim.get("claimName", ""), read_only=read_only)
        return Volume(path=where, source=source, read_only=read_only)
    except SpecError as error:
        raise SpecError(f"{path}.name", error.given, error.allowed) from None
    except TypeError:
        raise SpecError(f"{path}.name", claim, "a claim by its name: {claimName: digits}") from None


def _list(path: str, given: object) -> list[Any]:
    if not isinstance(given, list):
        raise SpecError(path, given, "a list")
    check_length(path, given)
    return given


def _entry(path: str, entry: object, allowed: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise SpecError(path, entry, allowed)
    return {name: value for name, value in entry.items() if value is not None}


def _name(path: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise SpecError(f"{path}.name", name, "a name")
    return name
