"""The pod template of a job. Pure.

Five templates are laid over each other, the strongest first: what the runtime needs, the fields of the job's `Pod`, its
`template`, the fields of the connection's Pod, and its `template`; our defaults lie below them all. See `overlay`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import reduce
from typing import Any

from edl_runtime import __version__
from edl_runtime.backends.kubernetes import names
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.specs import SECRET_VARIABLES, JobSpec

Manifest = dict[str, Any]

START = f"""\
import sys
try:
    from edl_runtime.backends.kubernetes.pod_init import main
except ModuleNotFoundError as error:
    import edl_runtime
    sys.exit(f"edl: edl-airflow {{edl_runtime.__version__}} can't run a job of {__version__} ({{error}})")
sys.exit(main(sys.argv[1:]))
"""
"""What the Python of the image runs. An image of another version may lack what this one starts pods by."""

USER = 10001
"""User and group of instances, unless a template names others."""


def pod_template(spec: JobSpec, defaults: Pod) -> Manifest:
    """Return the template of the job's pods. `defaults`: the connection's Pod. Raises SpecError."""
    pod = spec.pod or Pod()
    _check_no_secrets(pod.template, "pod.template")
    _check_no_secrets(defaults.template, "the connection's pod.template")
    runtime = _runtime_template(spec, pod)
    layers = (runtime, _template_of_fields(pod), pod.template, _template_of_fields(defaults), defaults.template)
    stated: Manifest = reduce(overlay, layers)
    if not instance_container(stated).get("image"):
        raise SpecError("pod.image", "", "an image with edl_runtime in it, here or in the connection's field 'Pod'")
    template: Manifest = overlay(stated, _default_template(spec, stated))
    mounted = _mounted_volumes(template["spec"])
    # a pod waits for all its volumes, so those whose mounts were replaced must not stay
    template["spec"]["volumes"] = [v for v in mappings_at(template["spec"], "volumes") if str(v.get("name")) in mounted]
    return template


def _check_no_secrets(template: Mapping[str, Any], field: str) -> None:
    for variable in mappings_at(instance_container(template), "env"):
        if variable.get("name") in SECRET_VARIABLES and "value" in variable:
            place = f"{field}.spec.containers[{names.CONTAINER!r}].env"
            raise SpecError(place, variable["name"], "none that may hold a secret, unless it comes from a Secret")


def _runtime_template(spec: JobSpec, pod: Pod) -> Manifest:
    """Return what the runtime needs of a pod to do its work."""
    container: Manifest = {
        "name": names.CONTAINER,
        "command": ["python", "-P", "-c", START],
        "args": [_escape(word) for word in spec.command],
        "workingDir": spec.cwd or names.HOME,
        "env": _environment(spec, pod),
        "envFrom": [{"secretRef": {"name": names.secret_name(spec.name)}}],
        "volumeMounts": [{"name": "edl-0", "mountPath": names.HOME}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "metadata": {"labels": names.labels(spec.name, spec.kind)},
        "spec": {
            "restartPolicy": "Always" if spec.kind == "pool" else "Never",
            "terminationGracePeriodSeconds": max(1, math.ceil(spec.grace_s)),
            "containers": [container],
            "volumes": [{"name": "edl-0", "emptyDir": {}}],
        },
    }


def _template_of_fields(pod: Pod) -> Manifest:
    """Return a template of all fields of a Pod but its own template."""
    amounts = pod.amounts()
    # an instance may use CPU that is idle, so that alone has no limit
    limits = {name: amount for name, amount in amounts.items() if name != "cpu"}
    volumes, mounts = [], []
    for volume in pod.volumes:
        # named after its path: a connection's volume at the same path is replaced as a whole
        name = f"volume-{zlib.crc32(volume.path.rstrip('/').encode()):08x}"
        source = {"persistentVolumeClaim": {"claimName": volume.claim}} if volume.claim else volume.source
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": volume.path, **({"readOnly": True} if volume.read_only else {})})
    container = {
        "name": names.CONTAINER,
        "image": pod.image,
        "resources": _without_empty({"requests": amounts, "limits": limits}),
        "env": [
            {"name": variable, "valueFrom": {"secretKeyRef": dict(zip(("name", "key"), of.split("/", 1), strict=True))}}
            for variable, of in pod.secret_env.items()
        ],
        "envFrom": [{"secretRef": {"name": name}} for name in pod.env_from_secrets],
        "volumeMounts": mounts,
    }
    spec = {
        "serviceAccountName": pod.service_account,
        "priorityClassName": pod.priority_class,
        "nodeSelector": pod.node_selector,
        "tolerations": list(pod.tolerations),
        "affinity": pod.affinity,
        "imagePullSecrets": [{"name": name} for name in pod.pull_secrets],
        "containers": [_without_empty(container)],
        "volumes": volumes,
    }
    metadata = {"labels": pod.labels, "annotations": pod.annotations}
    return {"metadata": _without_empty(metadata), "spec": _without_empty(spec)}


def _without_empty(parts: Mapping[str, Any]) -> Manifest:
    return {name: part for name, part in parts.items() if part}


def _environment(spec: JobSpec, pod: Pod) -> list[Manifest]:
    plain = {
        **spec.env,
        "EDL_JOB": spec.name,
        "EDL_GRACE_S": str(spec.grace_s),
        "EDL_RESULT_FILE": f"{names.HOME}/result.json",
        "HOME": names.HOME,
        "PYTHONUNBUFFERED": "1",
        **({"EDL_PORT": str(names.PORT)} if spec.serves_http else {}),
    }
    from_pod = {"EDL_HOST": "status.podIP"}
    if spec.kind == "trainer":
        from_pod["EDL_INSTANCE"] = f"metadata.annotations['{names.INDEX}']"
        from_pod["EDL_RUN"] = f"metadata.labels['{names.RUN}']"
    for variable in pod.secret_env.keys() & {*plain, *from_pod}:
        raise SpecError("pod.secret_env", variable, "variables that are set neither by 'env' nor by the backend")
    return [
        *({"name": name, "value": _escape(value)} for name, value in plain.items() if name not in from_pod),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in from_pod.items()),
    ]


def _escape(text: str) -> str:
    """Escape what Kubernetes would replace in commands and variables: $(NAME)."""
    return text.replace("$", "$$")


def _default_template(spec: JobSpec, stated: Manifest) -> Manifest:
    """Return our defaults for a job whose other layers are `stated`."""
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    instance = {
        "name": names.CONTAINER,
        "volumeMounts": [{"name": "edl-1", "mountPath": "/tmp"}, {"name": "edl-2", "mountPath": "/dev/shm"}],  # noqa: S108
        **(_probes(tls=_speaks_tls(stated)) if spec.serves_http else {}),
    }
    restrict = {
        part: [{"name": one["name"], "securityContext": restricted} for one in mappings_at(stated["spec"], part)]
        for part in _CONTAINERS & stated["spec"].keys()
    }
    defaults = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [instance],
        "volumes": [{"name": "edl-1", "emptyDir": {}}, {"name": "edl-2", "emptyDir": {"medium": "Memory"}}],
        **_placement(spec, stated["spec"]),
    }
    template: Manifest = overlay({"spec": defaults}, {"spec": restrict})
    return template


def _speaks_tls(template: Manifest) -> bool:
    """Whether the instance has a certificate among its variables."""
    env = mappings_at(instance_container(template), "env")
    certificate = next((variable for variable in env if variable.get("name") == "EDL_TLS_CERT"), {})
    return bool(certificate.get("value") or certificate.get("valueFrom"))


def _probes(*, tls: bool) -> Manifest:
    scheme = {"scheme": "HTTPS"} if tls else {}

    def probe(path: str, **more: int) -> Manifest:
        return {"httpGet": {"path": path, "port": names.PORT, **scheme}, "timeoutSeconds": 5, **more}

    return {
        "ports": [{"containerPort": names.PORT}],
        "startupProbe": probe("/v2/health/live", periodSeconds=2, failureThreshold=300),
        "livenessProbe": probe("/v2/health/live", periodSeconds=10, failureThreshold=6),
        "readinessProbe": probe("/v2/health/ready", periodSeconds=2, failureThreshold=3),
    }


def _placement(spec: JobSpec, stated: Mapping[str, Any]) -> Manifest:
    """Return where pods are placed by default: trainers near each other, teachers apart."""
    if "affinity" in stated or "topologySpreadConstraints" in stated:
        return {}
    same = {"matchLabels": {names.JOB: spec.name}}
    if spec.kind == "pool":
        spread = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": same,
        }
        return {"topologySpreadConstraints": [spread]}
    preferred = [
        {"weight": weight, "podAffinityTerm": {"topologyKey": where, "labelSelector": same}}
        for weight, where in ((100, "kubernetes.io/hostname"), (50, "topology.kubernetes.io/zone"))
    ]
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}


def mapping_at(thing: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping at a path, empty if it is missing, null or no mapping."""
    for part in path:
        found = thing.get(part)
        thing = found if isinstance(found, Mapping) else {}
    return thing


def mappings_at(thing: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    """Return the mappings in a list, none if it is missing or no list."""
    found = thing.get(part)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def instance_container(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the instance's container, empty if there is none."""
    containers = mappings_at(mapping_at(template, "spec"), "containers")
    return next((one for one in containers if one.get("name") == names.CONTAINER), {})


_CONTAINERS = frozenset({"containers", "initContainers"})
_MERGED = _CONTAINERS | {
    *("template", "metadata", "spec", "labels", "annotations", "nodeSelector", "affinity"),
    *("securityContext", "capabilities", "resources", "requests", "limits"),
}
"""Mappings, and lists of mappings, that are merged key by key. All others are one value."""

_REPLACED = frozenset({"command", "args", "add", "drop", "topologySpreadConstraints"})
"""Lists that are one value."""

_KEYS = {"volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort"}
"""Keys that identify entries of lists, where it is not their name."""


def overlay(given: Any, beneath: Any, part: str = "template") -> Any:
    """Return two pod templates in one. Where both set a value, `given` wins.

    Merged key by key: the pod, its containers, labels, annotations, node selectors, affinities of different kinds,
    security contexts, and resources by name. One value each: all else, as a variable, a mount, a volume or a probe.
    Entries of lists are identified by name, mounts by path, ports by number and protocol; lists of entries without
    names are joined.
    """
    if isinstance(given, Mapping) and isinstance(beneath, Mapping) and part in _MERGED:
        if part == "resources":
            beneath = _other_resources(given, beneath)
        both = {key: overlay(given[key], beneath[key], key) for key in given if key in beneath}
        return {**beneath, **given, **both}
    if isinstance(given, list) and isinstance(beneath, list) and part not in _REPLACED:
        return _overlay_list(given, beneath, part)
    return given


def _overlay_list(given: list[Any], beneath: list[Any], part: str) -> list[Any]:
    key = _KEYS.get(part, "name")
    if all(isinstance(entry, Mapping) and isinstance(entry.get(key), str | int) for entry in (*given, *beneath)):
        others = {_identity(entry, key): entry for entry in beneath}
        first = [overlay(one, others.pop(_identity(one, key), one), part) for one in given]
        rest = [*others.values()]
    else:
        first, rest = given, [entry for entry in beneath if entry not in given]
    # order matters: the last envFrom entry wins, and a job's init containers may need what the defaults' prepare
    return [*rest, *first] if part in ("envFrom", "initContainers") else [*first, *rest]


def _identity(entry: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    if key == "mountPath":
        return (str(entry[key]).rstrip("/"),)
    return (entry[key], str(entry.get("protocol", "TCP"))) if key == "containerPort" else (entry[key],)


def _other_resources(given: Mapping[str, Any], beneath: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `beneath` sets of resources that `given` does not name: a request must not exceed another's limit."""
    named = {name for amounts in given.values() if isinstance(amounts, Mapping) for name in amounts}
    others = {
        part: {name: amount for name, amount in amounts.items() if name not in named}
        if isinstance(amounts, Mapping)
        else amounts
        for part, amounts in beneath.items()
    }
    return {part: amounts for part, amounts in others.items() if amounts}


def _mounted_volumes(spec: Mapping[str, Any]) -> set[str]:
    """Return the names of the volumes that containers mount."""
    containers = [one for part in _CONTAINERS for one in mappings_at(spec, part)]
    uses = [use for one in containers for part in ("volumeMounts", "volumeDevices") for use in mappings_at(one, part)]
    return {str(use.get("name")) for use in uses}
