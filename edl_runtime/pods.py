"""What an instance needs to run as a pod on Kubernetes. Backends that start processes don't look at it.

Plain data, as in `edl_runtime.specs`, and valid once made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Literal

import msgspec

from edl_runtime.errors import SpecError
from edl_runtime.parsing import bounded_yaml_loader

GPU = "nvidia.com/gpu"
"""The extended resource that "gpu" means."""

HOME = "/edl"
"""The folder of its own that an instance starts in; it is as long-lived as the pod."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""The label by which Kueue knows the queue of a Job or Deployment."""

MAX_QUANTITY = 1e14
"""The largest quantity that counts: a hundred terabytes of memory in bytes."""

MOST_ENTRIES = 1_000
"""The most entries of a list or mapping: who reads thousands of them keeps others waiting."""

MOST_ANNOTATIONS = 256 * 1024
"""Most bytes of a pod's annotations together, their names included, as Kubernetes allows."""

_UNITS = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0,
    "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_LONGEST_QUANTITY = 40
_QUANTITY = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SUFFIXES = frozenset({"", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"})
_LABEL_PART = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DNS_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_KEY = re.compile(rf"({_DNS_PART}(\.{_DNS_PART})*/)?{_LABEL_PART}")
_LABEL_VALUE = re.compile(rf"({_LABEL_PART})?")
_OBJECT_NAME = re.compile(rf"{_DNS_PART}(\.{_DNS_PART})*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = re.compile(r"edl-airflow/.*|app\.kubernetes\.io/managed-by|batch\.kubernetes\.io/.*", re.DOTALL)
"""Labels and annotations by which jobs and their pods are known."""

_KINDS = {"Pod": "", "PodTemplateSpec": "", "PodTemplate": "template"}
"""Objects that have a template's parts, and where."""


def amount(quantity: str | float) -> float:
    """Return a quantity as Kubernetes writes it in units: cores, bytes or pieces. Raises ValueError."""
    text = str(quantity)
    digits = text.rstrip("numkKMGTPEi")
    return min(float(digits) * _UNITS[text[len(digits) :]], 2.0**63)  # no larger one counts in Kubernetes


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume in the pod's file system.

    - `path`: where it is seen, an absolute path. At "/tmp" and "/dev/shm" it takes the place of ours.
    - `claim`: the PersistentVolumeClaim that it is; or
    - `source`: any other source as in a pod's `volumes`, as {"configMap": {"name": "lexicon"}}.
    - `read_only`: nothing can be written to it.
    """

    path: str
    claim: str = ""
    source: dict[str, Any] = {}
    read_only: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path.strip("/") or not self.path.startswith("/"):
            raise SpecError("pod.volumes[].path", self.path, "an absolute path, as in '/data'")
        if ":" in self.path or "\0" in self.path or ".." in self.path.split("/"):
            raise SpecError("pod.volumes[].path", self.path, "a path without ':', '..' and null bytes")
        if self.path.rstrip("/") == HOME:
            raise SpecError(
                "pod.volumes[].path", self.path, f"another folder than {HOME}, which each instance has alone"
            )
        if bool(self.claim) == bool(self.source):
            given = "both" if self.claim else "neither"
            raise SpecError(f"pod.volumes[{self.path!r}]", given, "either a claim or a source")
        _check_object_name(f"pod.volumes[{self.path!r}].claim", self.claim, empty=True)
        field = f"pod.volumes[{self.path!r}].source"
        source = _checked_dict(field, _plain(self.source, field))
        if len(source) > 1 or not all(isinstance(about, dict) for about in source.values()):
            raise SpecError(field, source, "one volume source by its name, as in {'configMap': {'name': 'lexicon'}}")
        if not isinstance(self.read_only, bool):
            raise SpecError(f"pod.volumes[{self.path!r}].read_only", self.read_only, "True or False")
        msgspec.structs.force_setattr(self, "source", source)


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """What each instance's pod is given.

    - `image`: with `edl_runtime` in it; empty for the connection's.
    - `resources`: how much of each the instance gets, by name: "cpu" in cores, "memory" in bytes or as "8Gi", "gpu"
      (`nvidia.com/gpu`), and any extended resource, as "rdma/hca". It may use more of the CPU while nobody else needs
      it, and no more of all others.
    - `node_selector`: labels of the nodes that it may run on. `tolerations`, `affinity`: as in a pod's spec; without
      an affinity, trainers are placed near each other and teachers apart, where there is room.
    - `priority_class`: empty for the cluster's default.
    - `queue`: the Kueue queue that admits the job or pool, a LocalQueue of its namespace; empty for the connection's,
      or none. The label `kueue.x-k8s.io/queue-name` in `labels` means the same.
    - `volumes`: see `Volume`.
    - `secret_env`: environment variables by name, each with the secret that holds it, as "aws/secret-key".
    - `env_from_secrets`: secrets of which every key is an environment variable.
    - `service_account`: empty for the namespace's default. Its token is not mounted.
    - `pull_secrets`: for the image.
    - `labels`, `annotations`: of the pods and of what owns them, as Kueue's `kueue.x-k8s.io/priority-class`. Those by
      which jobs are known (`edl-airflow/...`, `batch.kubernetes.io/...`, `app.kubernetes.io/managed-by`) are not to be
      had.
    - `disruptions`: how often the cluster may end an instance of trainers, by an eviction, a preemption or with its
      node, and it is replaced; at the next time its job fails. Unset for the connection's, or 20. An instance of a pool
      is always replaced.
    - `template`: anything else that a PodTemplateSpec may say: as a dict, as YAML, or as the official client's
      V1PodTemplateSpec. Its container "instance" is this one; `edl_runtime.backends.kubernetes.pod_template` says how
      the two become one.

    Raises SpecError that names the field.
    """

    image: str = ""
    resources: dict[str, str | int | float] = {}
    node_selector: dict[str, str] = {}
    tolerations: Sequence[dict[str, Any]] = ()
    affinity: dict[str, Any] = {}
    priority_class: str = ""
    queue: str = ""
    volumes: Sequence[Volume] = ()
    secret_env: dict[str, str] = {}
    env_from_secrets: Sequence[str] = ()
    service_account: str = ""
    pull_secrets: Sequence[str] = ()
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    disruptions: int | msgspec.UnsetType = msgspec.UNSET
    template: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or any(letter.isspace() for letter in self.image):
            raise SpecError("pod.image", self.image, "an image's name, as in 'registry.example/train:1'")
        self._check_mappings()
        for field, kind in (
            ("tolerations", dict),
            ("volumes", Volume),
            ("env_from_secrets", str),
            ("pull_secrets", str),
        ):
            _keep_as_tuple(self, field, kind)
        paths = [volume.path.rstrip("/") for volume in self.volumes]
        for path in paths:
            if paths.count(path) > 1:
                raise SpecError("pod.volumes", path, "each path once")
        for field in ("priority_class", "service_account"):
            _check_object_name(f"pod.{field}", getattr(self, field), empty=True)
        self._check_queue()
        for field in ("env_from_secrets", "pull_secrets"):
            for name in getattr(self, field):
                _check_object_name(f"pod.{field}", name)
        _check_times("pod.disruptions", self.disruptions)
        msgspec.structs.force_setattr(self, "template", _as_dict(self.template))

    def _check_mappings(self) -> None:
        for field in ("resources", "node_selector", "labels", "annotations", "secret_env"):
            copied = dict(_checked_dict(f"pod.{field}", getattr(self, field)))
            msgspec.structs.force_setattr(self, field, copied)
        affinity = _checked_dict("pod.affinity", _plain(self.affinity, "pod.affinity"))
        msgspec.structs.force_setattr(self, "affinity", affinity)
        self._check_resources()
        for field in ("node_selector", "labels"):
            for key, value in getattr(self, field).items():
                _check_label(f"pod.{field}", key, value)
                _check_owner(f"pod.{field}", key)
        for key, text in self.annotations.items():
            _check_label("pod.annotations", key, "")
            _check_owner("pod.annotations", key)
            if not isinstance(text, str):
                raise SpecError(f"pod.annotations[{key!r}]", text, "text")
        size = sum(len(f"{key}{text}".encode(errors="replace")) for key, text in self.annotations.items())
        if size > MOST_ANNOTATIONS:
            raise SpecError("pod.annotations", f"{size:,} bytes", f"{MOST_ANNOTATIONS:,} bytes, as in Kubernetes")
        for variable, where in self.secret_env.items():
            _check_secret(variable, where)

    def _check_queue(self) -> None:
        """Keep the queue in its field, also if the label names it."""
        if QUEUE_LABEL in self.labels:
            if self.queue:
                raise SpecError("pod.labels", QUEUE_LABEL, "'queue' or this label, which are the same, and not both")
            msgspec.structs.force_setattr(self, "queue", self.labels.pop(QUEUE_LABEL))
        _check_object_name("pod.queue", self.queue, empty=True)
        _check_label("pod.queue", QUEUE_LABEL, self.queue)

    def _check_resources(self) -> None:
        for name, quantity in self.resources.items():
            _check_resource(name, quantity)
        if {"gpu", GPU} <= self.resources.keys():
            raise SpecError("pod.resources", GPU, f"'gpu' or {GPU!r}, which are the same, and not both")
        if GPU in self.resources:
            self.resources["gpu"] = self.resources.pop(GPU)

    def over(self, defaults: Pod) -> Pod:
        """Return this with what `defaults` say beside it.

        Of a mapping that is each key, of a list the entries before, of volumes those at other paths. A template is one
        thing here: a backend knows how one is laid over another.
        """
        both = {name: _both(getattr(defaults, name), getattr(self, name)) for name in self.__struct_fields__}
        taken = {volume.path.rstrip("/") for volume in self.volumes}
        others = [volume for volume in defaults.volumes if volume.path.rstrip("/") not in taken]
        return Pod(**{**both, "volumes": (*others, *self.volumes), "template": self.template or defaults.template})

    def amounts(self) -> dict[str, str]:
        """Return `resources` by the names and in the notation that Kubernetes has for them."""
        return {GPU if name == "gpu" else name: str(quantity) for name, quantity in self.resources.items()}

    def reserves(self) -> dict[str, float]:
        """Return `resources` in units: cores, bytes or pieces."""
        return {name: amount(quantity) for name, quantity in self.resources.items()}


def _both(default: Any, given: Any) -> Any:
    if isinstance(given, Mapping):
        return {**default, **given}
    if isinstance(given, tuple):
        return (*default, *(entry for entry in given if entry not in default))
    return default if given in ("", msgspec.UNSET) else given


def _check_resource(name: object, quantity: object) -> None:
    field = f"pod.resources[{name!r}]"
    if name not in ("cpu", "memory", "gpu", "ephemeral-storage") and not (
        isinstance(name, str) and "/" in name and _LABEL_KEY.fullmatch(name)
    ):
        raise SpecError(
            field, name, "'cpu', 'memory', 'gpu', 'ephemeral-storage' or an extended resource as 'rdma/hca'"
        )
    at_most = SpecError(field, quantity, f"a quantity of at most {MAX_QUANTITY:g} cores, bytes or pieces")
    if isinstance(quantity, int) and quantity > MAX_QUANTITY:  # its text may have no end
        raise at_most
    text = str(quantity)
    number = _QUANTITY.match(text)
    if isinstance(quantity, bool) or not number:
        raise SpecError(field, quantity, "a quantity, as in 2, '500m' or '8Gi'")
    if text[number.end() :] not in ({""} if number[3] else _SUFFIXES):
        raise SpecError(field, quantity, "a quantity, as in 2, '500m' or '8Gi'")
    if len(text) > _LONGEST_QUANTITY or amount(text) > MAX_QUANTITY:
        raise at_most
    if (name == "gpu" or "/" in name) and not text.isdecimal():
        raise SpecError(field, quantity, "a whole number")


def _check_times(field: str, times: object) -> None:
    if times is not msgspec.UNSET and (not isinstance(times, int) or isinstance(times, bool) or times < 0):
        raise SpecError(field, times, "a whole number, 0 or more")


def _check_label(field: str, key: object, value: object) -> None:
    if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key):
        raise SpecError(field, key, "names as in 'team' or 'example.com/team'")
    if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
        allowed = "at most 63 letters, digits and - _ . that start and end with a letter or digit"
        raise SpecError(f"{field}[{key!r}]", value, allowed)


def _check_owner(field: str, key: str) -> None:
    if field != "pod.node_selector" and _OURS.fullmatch(key):
        raise SpecError(field, key, "names that are not ours: jobs are known by that one")


def _check_object_name(field: str, name: object, *, empty: bool = False) -> None:
    if name == "" and empty:
        return
    if not isinstance(name, str) or len(name) > 253 or not _OBJECT_NAME.fullmatch(name):
        raise SpecError(field, name, "the name of an object: a-z, 0-9, '-' and '.'")


def _check_secret(variable: object, where: object) -> None:
    if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
        raise SpecError("pod.secret_env", variable, "names of environment variables")
    name, slash, key = where.partition("/") if isinstance(where, str) else ("", "", "")
    if not (slash and key and _OBJECT_NAME.fullmatch(name)):
        raise SpecError(f"pod.secret_env[{variable!r}]", where, "a secret and its key, as in 'aws/secret-key'")


def _checked_dict(field: str, given: Any) -> dict[Any, Any]:
    if not isinstance(given, dict):
        raise SpecError(field, given, "a dict")
    check_length(field, given)
    return given


def check_length(field: str, given: Sized) -> None:
    """Raise SpecError for a list or mapping of more than MOST_ENTRIES."""
    if len(given) > MOST_ENTRIES:
        raise SpecError(field, f"{len(given):,} entries", f"{MOST_ENTRIES:,} at most")


def _keep_as_tuple(pod: Pod, name: str, kind: type) -> None:
    given = getattr(pod, name)
    if not isinstance(given, list | tuple):
        raise SpecError(f"pod.{name}", given, "a list")
    check_length(f"pod.{name}", given)
    entries = [
        entry if kind is Volume else _plain(entry, f"pod.{name}[{number}]") for number, entry in enumerate(given)
    ]
    for number, entry in enumerate(entries):
        if not isinstance(entry, kind):
            raise SpecError(f"pod.{name}[{number}]", entry, f"a {kind.__name__}")
    msgspec.structs.force_setattr(pod, name, tuple(entries))


def _as_dict(template: object) -> dict[str, Any]:
    """Return a template as plain data, whichever way it was given."""
    if isinstance(template, str):
        import yaml

        try:
            template = yaml.load(template, bounded_yaml_loader())  # noqa: S506 - a safe loader
        except (yaml.YAMLError, ValueError) as error:  # the second: a date that is none
            raise SpecError("pod.template", str(error), "YAML of a PodTemplateSpec") from None
    allowed = "a PodTemplateSpec: 'metadata' and 'spec'"
    try:
        plain = _plain(template, "pod.template")
    except RecursionError:
        raise SpecError("pod.template", "data that is its own part", allowed) from None
    kind = plain.get("kind", "Pod") if isinstance(plain, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise SpecError("pod.template", plain, allowed)
    plain = {key: part for key, part in plain.items() if key not in ("apiVersion", "kind")}
    plain = plain.get(_KINDS[kind], {}) if _KINDS[kind] else plain
    if not isinstance(plain, dict) or not plain.keys() <= {"metadata", "spec"}:
        raise SpecError("pod.template", plain, allowed)
    for part, about in plain.items():
        _checked_dict(f"pod.template.{part}", about)
    for part in ("labels", "annotations"):
        _checked_dict(f"pod.template.metadata.{part}", plain.get("metadata", {}).get(part, {}))
    for part in ("containers", "initContainers"):
        _check_containers(f"pod.template.spec.{part}", plain.get("spec", {}).get(part, []))
    return {part: about for part, about in plain.items() if about}


def _check_containers(field: str, containers: object) -> None:
    if not isinstance(containers, list):
        raise SpecError(field, containers, "a list")
    for container in containers:
        if not isinstance(container, dict) or not isinstance(container.get("name"), str):
            raise SpecError(field, container, "containers, each with its name; ours is 'instance'")


def _plain(value: Any, field: str) -> Any:
    """Return data, or a model of the official client as the data that it stands for, without what is null."""
    if attributes := getattr(value, "attribute_map", None):
        value = {key: getattr(value, name) for name, key in attributes.items()}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(field, key, "names that are text; YAML wants quotes around such a one")
        return {key: _plain(each, f"{field}.{key}") for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{field}[{number}]") for number, each in enumerate(value)]
    if value is not None and not isinstance(value, str | bool | int | float):
        raise SpecError(field, value, "data as in JSON; YAML wants quotes around what would be a date")
    if isinstance(value, int | float) and not -(1 << 63) <= value < 1 << 63:
        raise SpecError(field, value, "a number of at most 64 bits")
    return value


# What a pod takes of its node. Pure.


Manifest = Mapping[str, Any]

PODS = "pods"
"""The resource of which every pod takes one, as nodes and quotas limit them."""


def reserved_resources(pod: Manifest) -> dict[str, float]:
    """Return what a pod, or one of such a template, takes of its node, by the names of `Scaling.resources`."""
    spec = pod.get("spec") or {}
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    asked = {name for container in containers for name in _amounts(container)} | (spec.get("overhead") or {}).keys()
    found = {resource_name(name): requested_amount(pod, name) for name in sorted(asked)}
    return {**{name: min(much, MAX_QUANTITY) for name, much in found.items() if much}, PODS: 1.0}


def resource_name(name: str) -> str:
    """Return what a resource of Kubernetes is called in a `Pod`."""
    return "gpu" if name == GPU else name


def kubernetes_name(resource: str) -> str:
    """Return what Kubernetes calls a resource of a `Pod`."""
    return GPU if resource == "gpu" else resource


def is_counted(resource: str) -> bool:
    """Whether a resource comes in pieces: pods, GPUs and other extended resources."""
    return resource == PODS or "/" in kubernetes_name(resource)


Unit = Literal["cores", "bytes", "pieces"]
"""Units of resources: devices and pods are counted."""


def unit_of(resource: str) -> Unit:
    """Return a resource's unit."""
    if resource in ("memory", "ephemeral-storage") or resource.startswith("hugepages-"):
        return "bytes"
    return "cores" if resource == "cpu" else "pieces"


def format_amount(amount: float, resource: str) -> str:
    """Return an amount of a resource for people, as in 14.2 or 65,536; bytes in GiB, as in 1.5 GiB."""
    is_bytes = unit_of(resource) == "bytes"
    number = f"{amount / 2**30 if is_bytes else amount:,.2f}".rstrip("0").rstrip(".")
    return f"{number} GiB" if is_bytes else number


def requested_amount(pod: Manifest, name: str) -> float:
    """Return what a pod reserves: what its containers ask for together, or what it takes to get there if that is more.

    Sidecars (init containers that keep running) add to all containers that start after them; other init containers
    run alone.
    """
    spec = pod["spec"]
    sidecars = most = 0.0
    for container in spec.get("initContainers") or []:
        asked = _asked(container, name)
        most = max(most, sidecars + asked)
        sidecars += asked if container.get("restartPolicy") == "Always" else 0.0
    together = sidecars + sum(_asked(container, name) for container in spec.get("containers") or [])
    return max(most, together) + amount((spec.get("overhead") or {}).get(name, 0))


def _asked(container: Manifest, name: str) -> float:
    return amount(_amounts(container).get(name, 0))


def _amounts(container: Manifest) -> dict[str, Any]:
    """Return what a container asks for. Where it says only a limit, pods ask for that."""
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
