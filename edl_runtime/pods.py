"""What an instance needs to run as a pod on Kubernetes. Backends that start processes don't look at it.

Plain data, as in `edl_runtime.specs`, and valid once made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edl_runtime.errors import SpecError

GPU = "nvidia.com/gpu"
"""The extended resource that "gpu" stands for."""

_QUANTITY = re.compile(r"\d+(\.\d*)?|\.\d+")
_SUFFIXES = frozenset({"", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"})
_LABEL_PART = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DNS_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_KEY = re.compile(rf"({_DNS_PART}(\.{_DNS_PART})*/)?{_LABEL_PART}")
_LABEL_VALUE = re.compile(rf"({_LABEL_PART})?")
_OBJECT_NAME = re.compile(rf"{_DNS_PART}(\.{_DNS_PART})*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A volume in the pod's file system.

    - `path`: where it is seen, an absolute path.
    - `claim`: the PersistentVolumeClaim that it is; or
    - `source`: any other source as in a pod's `volumes`, as {"configMap": {"name": "lexicon"}}.
    - `read_only`: nothing can be written to it.
    """

    path: str
    claim: str = ""
    source: dict[str, Any] = {}
    read_only: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path.startswith("/") or "\0" in self.path:
            raise SpecError("pod.volumes[].path", self.path, "an absolute path, as in '/data'")
        if bool(self.claim) == bool(self.source):
            given = "both" if self.claim else "neither"
            raise SpecError(f"pod.volumes[{self.path!r}]", given, "either a claim or a source")
        if self.claim and not _OBJECT_NAME.fullmatch(self.claim):
            raise SpecError(f"pod.volumes[{self.path!r}].claim", self.claim, "the name of a PersistentVolumeClaim")
        if not isinstance(self.source, dict) or len(self.source) > 1:
            allowed = "one volume source by its name, as in {'configMap': {'name': 'lexicon'}}"
            raise SpecError(f"pod.volumes[{self.path!r}].source", self.source, allowed)


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """What each instance's pod is given.

    - `image`: with `edl_runtime` in it; empty for the connection's.
    - `resources`: how much of each the instance gets, by name: "cpu" in cores, "memory" in bytes or as "8Gi", "gpu"
      (`nvidia.com/gpu`), and any extended resource, as "rdma/hca". It may use more of the CPU while nobody else needs
      it, and no more of all others.
    - `node_selector`: labels of the nodes that it may run on. `tolerations`, `affinity`: as in a pod's spec; without
      an affinity, trainers are placed near each other and teachers apart, where there is room.
    - `priority_class`: empty for the cluster's default.
    - `volumes`: see `Volume`.
    - `secret_env`: environment variables by name, each with the secret that holds it, as "aws/secret-key".
    - `env_from_secrets`: secrets of which every key is an environment variable.
    - `service_account`: empty for the namespace's default. Its token is not mounted.
    - `pull_secrets`: for the image.
    - `labels`, `annotations`: of the pods and of what owns them, as Kueue's `kueue.x-k8s.io/queue-name`.
    - `template`: anything else that a PodTemplateSpec may say: as a dict, as YAML, or as the official client's
      V1PodTemplateSpec. Its container "instance" is this one; `edl_runtime.backends.kubernetes.merge` says how the two
      become one.

    Raises SpecError that names the field.
    """

    image: str = ""
    resources: dict[str, str | int | float] = {}
    node_selector: dict[str, str] = {}
    tolerations: Sequence[dict[str, Any]] = ()
    affinity: dict[str, Any] = {}
    priority_class: str = ""
    volumes: Sequence[Volume] = ()
    secret_env: dict[str, str] = {}
    env_from_secrets: Sequence[str] = ()
    service_account: str = ""
    pull_secrets: Sequence[str] = ()
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    template: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or any(letter.isspace() for letter in self.image):
            raise SpecError("pod.image", self.image, "an image's name, as in 'registry.example/train:1'")
        self._check_mappings()
        for field in ("tolerations", "volumes", "env_from_secrets", "pull_secrets"):
            _keep_as_tuple(self, field)
        for field in ("priority_class", "service_account"):
            _check_object_name(f"pod.{field}", getattr(self, field), empty=True)
        for field in ("env_from_secrets", "pull_secrets"):
            for name in getattr(self, field):
                _check_object_name(f"pod.{field}", name)
        msgspec.structs.force_setattr(self, "template", _as_dict(self.template))

    def _check_mappings(self) -> None:
        for name, quantity in _checked_dict("pod.resources", self.resources).items():
            _check_resource(name, quantity)
        for field in ("node_selector", "labels"):
            for key, value in _checked_dict(f"pod.{field}", getattr(self, field)).items():
                _check_label(f"pod.{field}", key, value)
        for key, text in _checked_dict("pod.annotations", self.annotations).items():
            _check_label("pod.annotations", key, "")
            if not isinstance(text, str):
                raise SpecError(f"pod.annotations[{key!r}]", text, "text")
        for variable, where in _checked_dict("pod.secret_env", self.secret_env).items():
            _check_secret(variable, where)
        _checked_dict("pod.affinity", self.affinity)

    def over(self, defaults: Pod) -> Pod:
        """Return this with what `defaults` say beside it: of a mapping each key, of a list the entries before."""
        return Pod(**{name: _both(getattr(defaults, name), getattr(self, name)) for name in self.__struct_fields__})

    def amounts(self) -> dict[str, str]:
        """Return `resources` by the names and in the notation that Kubernetes has for them."""
        return {GPU if name == "gpu" else name: str(quantity) for name, quantity in self.resources.items()}


def _both(default: Any, given: Any) -> Any:
    if isinstance(given, Mapping):
        return {**default, **given}
    if isinstance(given, tuple):
        return (*default, *(entry for entry in given if entry not in default))
    return given or default


def _check_resource(name: object, quantity: object) -> None:
    field = f"pod.resources[{name!r}]"
    if not isinstance(name, str) or not (name in ("cpu", "memory", "gpu", "ephemeral-storage") or "/" in name):
        raise SpecError(
            field, name, "'cpu', 'memory', 'gpu', 'ephemeral-storage' or an extended resource as 'rdma/hca'"
        )
    text = str(quantity)
    number = _QUANTITY.match(text)
    if isinstance(quantity, bool) or not number or text[number.end() :] not in _SUFFIXES:
        raise SpecError(field, quantity, "a quantity, as in 2, '500m' or '8Gi'")
    if (name == "gpu" or "/" in name) and not text.isdecimal():
        raise SpecError(field, quantity, "a whole number")


def _check_label(field: str, key: object, value: object) -> None:
    if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key):
        raise SpecError(field, key, "names as in 'team' or 'example.com/team'")
    if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
        allowed = "at most 63 letters, digits and - _ . that start and end with a letter or digit"
        raise SpecError(f"{field}[{key!r}]", value, allowed)


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
    return given


def _keep_as_tuple(pod: Pod, name: str) -> None:
    given = getattr(pod, name)
    if not isinstance(given, list | tuple):
        raise SpecError(f"pod.{name}", given, "a list")
    msgspec.structs.force_setattr(pod, name, tuple(given))


def _as_dict(template: object) -> dict[str, Any]:
    """Return a template as plain data, whichever way it was given."""
    if isinstance(template, str):
        import yaml

        try:
            template = yaml.safe_load(template)
        except yaml.YAMLError as error:
            raise SpecError("pod.template", str(error), "YAML of a PodTemplateSpec") from None
    plain = _plain(template)
    if not isinstance(plain, dict) or not plain.keys() <= {"apiVersion", "kind", "metadata", "spec", "template"}:
        raise SpecError("pod.template", plain, "a PodTemplateSpec: 'metadata' and 'spec'")
    return {part: plain[part] for part in ("metadata", "spec") if plain.get(part)}


def _plain(value: Any) -> Any:
    """Return a model of the official client as the data that it stands for; what is data already, as it is."""
    if attributes := getattr(value, "attribute_map", None):
        fields = {key: _plain(getattr(value, name)) for name, key in attributes.items()}
        return {key: field for key, field in fields.items() if field is not None}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
