"""The pod template of a job, and how a user's template and ours become one. Pure.

- Mappings are merged key by key.
- Lists of things that have a name (containers, variables, volumes, ports, secrets) are merged thing by thing, volume
  mounts by their path, ports by number and protocol; the template's come after ours.
- A variable is a value or comes from somewhere, a volume has one source: saying the other is a contradiction, too.
- Of other lists the template's entries follow ours; commands and arguments are one value.
- What only one says, holds. What both say must be the same: a template that says otherwise than the spec, or than what
  a backend needs to do its work, is an error that names the place.
- Defaults are no statement: a template replaces ours.

What a connection says of all pods is no error either: it gives way to what a job says, be that in fields or in a
template. `overlay` does so for a connection's template, with things told apart as above. Of the pod, its containers,
labels and the like that is key by key, of resources each by its name. Of any other thing, as a variable, a mount or a
probe, both hold where they agree, and what the job says where they don't. Commands, arguments and affinities of one
sort are the job's alone, if it has any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from edl_runtime.backends.kubernetes import names
from edl_runtime.errors import SpecError
from edl_runtime.pods import GPU, Pod
from edl_runtime.specs import SECRET_VARIABLES, JobSpec

Manifest = dict[str, Any]

USER = 10001
"""User and group of instances, unless a template says otherwise."""


def pod_template(spec: JobSpec, pod: Pod, *, beneath: Mapping[str, Any]) -> Manifest:
    """Return the template of the job's pods: what the spec and the user's template say, and our defaults.

    `beneath`: a connection's template, which gives way to both. Raises SpecError.
    """
    stated = merge_templates(_template_of_spec(spec, pod, beneath), pod.template)
    _check_no_secrets(stated, "pod.template")
    template = overlay(stated, beneath)
    _check_no_secrets(template, "the connection's pod.template")
    containers = template["spec"]["containers"] = sorted(template["spec"]["containers"], key=_is_other)
    for part in ("containers", "initContainers"):
        if part in template["spec"]:
            template["spec"][part] = [with_defaults(one, _container_defaults()) for one in template["spec"][part]]
    if not containers[0].get("image"):
        raise SpecError("pod.image", "", "an image with edl_runtime in it, here or in the connection's field 'Pod'")
    defaults = {"spec": {**_pod_defaults(), **_placement(spec, template["spec"])}}
    return with_defaults(template, defaults)


def resolved_pod(spec: JobSpec, defaults: Pod) -> Pod:
    """Return the spec's pod with the `defaults` that neither it nor its template overrides."""
    own = spec.pod or Pod()
    set_here = {variable["name"] for variable in _environment(spec, own)}
    return own.over(without_overridden(defaults, own.template, set_here))


def _is_other(container: Mapping[str, Any]) -> bool:
    return bool(container["name"] != names.CONTAINER)


def _check_no_secrets(template: Manifest, of: str) -> None:
    for variable in mappings_at(instance_container(template), "env"):
        if variable.get("name") in SECRET_VARIABLES and "value" in variable:
            place = f"{of}.spec.containers[{names.CONTAINER!r}].env"
            raise SpecError(place, variable["name"], "none that may hold a secret, unless it comes from a Secret")


def _template_of_spec(spec: JobSpec, pod: Pod, beneath: Mapping[str, Any]) -> Manifest:
    """Return what the spec, and our own work, says of a pod. `beneath`: see `pod_template`."""
    amounts = pod.amounts()
    volumes, mounts = _volumes(
        pod, {str(one.get("name")) for one in mappings_at(mapping_at(beneath, "spec"), "volumes")}
    )
    variables = _environment(spec, pod)
    stated: Manifest = {
        "serviceAccountName": pod.service_account,
        "priorityClassName": pod.priority_class,
        "nodeSelector": pod.node_selector,
        "tolerations": list(pod.tolerations),
        "affinity": pod.affinity,
        "imagePullSecrets": [{"name": name} for name in pod.pull_secrets],
    }
    container: Manifest = {
        "name": names.CONTAINER,
        **({"image": pod.image} if pod.image else {}),
        "command": ["python", "-P", "-m", "edl_runtime.backends.kubernetes.pod_init"],
        "args": [_escape(word) for word in spec.command],
        "workingDir": spec.cwd or names.HOME,
        "env": variables,
        "envFrom": [
            *({"secretRef": {"name": name}} for name in pod.env_from_secrets),
            {"secretRef": {"name": names.secret_name(spec.name)}},
        ],
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"resources": _resources(amounts)} if amounts else {}),
        **(_probes(tls=_speaks_tls(variables, pod.template, beneath)) if spec.serves_http else {}),
    }
    return {
        "metadata": {"labels": {**pod.labels, **names.labels(spec.name, spec.kind)}, **_annotations(pod)},
        "spec": {
            **{key: value for key, value in stated.items() if value},
            "restartPolicy": "Always" if spec.kind == "pool" else "Never",
            "terminationGracePeriodSeconds": max(1, math.ceil(spec.grace_s)),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _annotations(pod: Pod) -> Manifest:
    return {"annotations": pod.annotations} if pod.annotations else {}


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
    told = {"EDL_HOST": "status.podIP"}
    if spec.kind == "trainer":
        told |= {"EDL_INSTANCE": f"metadata.annotations['{names.INDEX}']", "EDL_RUN": f"metadata.labels['{names.RUN}']"}
    plain = {name: value for name, value in plain.items() if name not in told}
    for variable in pod.secret_env.keys() & {*plain, *told}:
        raise SpecError("pod.secret_env", variable, "variables that are set neither by 'env' nor by the backend")
    secrets = (
        {"name": variable, "valueFrom": {"secretKeyRef": dict(zip(("name", "key"), where.split("/", 1), strict=True))}}
        for variable, where in pod.secret_env.items()
    )
    return [
        *({"name": name, "value": _escape(value)} for name, value in plain.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in told.items()),
        *secrets,
    ]


def _escape(text: str) -> str:
    """Return what Kubernetes, which replaces $(NAME) in it, makes `text` of."""
    return text.replace("$", "$$")


def _volumes(pod: Pod, taken_names: Collection[str]) -> tuple[list[Manifest], list[Manifest]]:
    """Return the pod's volumes and where the instance sees them: its folders for writing, and the spec's.

    `taken_names`: of other volumes, which are not to be hidden by those that have their names from us.
    """
    taken = {volume.path.rstrip("/") for volume in pod.volumes}
    own = {names.HOME: {}, "/tmp": {}, "/dev/shm": {"medium": "Memory"}}  # noqa: S108 - of the pod's own
    folders = [(f"edl-{number}", path) for number, path in enumerate(own) if path not in taken]
    volumes: list[Manifest] = [{"name": name, "emptyDir": own[path]} for name, path in folders]
    mounts: list[Manifest] = [{"name": name, "mountPath": path} for name, path in folders]
    free = (name for number in itertools.count() if (name := f"volume-{number}") not in taken_names)
    for name, volume in zip(free, pod.volumes, strict=False):
        claim = {"persistentVolumeClaim": {"claimName": volume.claim}}
        volumes.append({"name": name, **(claim if volume.claim else volume.source)})
        mounts.append({"name": name, "mountPath": volume.path, **({"readOnly": True} if volume.read_only else {})})
    return volumes, mounts


def _resources(amounts: Mapping[str, str]) -> Manifest:
    """Return them as requests, and as limits but for the CPU, of which an instance may use what is left."""
    limits = {name: amount for name, amount in amounts.items() if name != "cpu"}
    return {"requests": dict(amounts), **({"limits": limits} if limits else {})}


def _speaks_tls(variables: list[Manifest], *templates: Mapping[str, Any]) -> bool:
    """Whether the instance is given a certificate to show: by the first of these that says anything of it."""
    env = [
        *variables,
        *(variable for template in templates for variable in mappings_at(instance_container(template), "env")),
    ]
    told = [variable for variable in env if variable.get("name") == "EDL_TLS_CERT"]
    return bool(told) and bool(told[0].get("value") or told[0].get("valueFrom"))


def _probes(*, tls: bool) -> Manifest:
    scheme = {"scheme": "HTTPS"} if tls else {}

    def asks(path: str, **more: int) -> Manifest:
        return {"httpGet": {"path": path, "port": names.PORT, **scheme}, "timeoutSeconds": 5, **more}

    return {
        "ports": [{"containerPort": names.PORT}],
        "startupProbe": asks("/v2/health/live", periodSeconds=2, failureThreshold=300),
        "livenessProbe": asks("/v2/health/live", periodSeconds=10, failureThreshold=6),
        "readinessProbe": asks("/v2/health/ready", periodSeconds=2, failureThreshold=3),
    }


def _placement(spec: JobSpec, stated: Mapping[str, Any]) -> Manifest:
    """Return where pods are placed unless somebody says so: trainers near each other, teachers apart."""
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


def _pod_defaults() -> Manifest:
    return {
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
    }


def _container_defaults() -> Manifest:
    return {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    }


def mapping_at(thing: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping that is there, empty for anything else."""
    for part in path:
        found = thing.get(part)
        thing = found if isinstance(found, Mapping) else {}
    return thing


def mappings_at(thing: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    """Return the mappings of the list that is there, none for anything else."""
    found = thing.get(part)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def instance_container(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the instance's container, empty if there is none."""
    containers = mappings_at(mapping_at(template, "spec"), "containers")
    return next((one for one in containers if one.get("name") == names.CONTAINER), {})


# How a user's pod template and our own pod become one. Pure.

_ACCOUNTS = frozenset({"serviceAccount", "serviceAccountName"})
_KEYS = {"volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort"}
_OF_ONE_KIND = frozenset({"env", "volumes"})
_WHOLE = frozenset({"command", "args"})
_PLACEMENT = frozenset({"nodeAffinity", "podAffinity", "podAntiAffinity", "topologySpreadConstraints"})
_CONTAINERS = frozenset({"containers", "initContainers"})
_BY_KEY = _CONTAINERS | {
    *("template", "metadata", "spec", "labels", "annotations"),
    *("nodeSelector", "affinity", "securityContext"),
}


def merge_templates(ours: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return both in one. Raises SpecError where they say different things."""
    merged: dict[str, Any] = _merged(ours, template, "pod.template")
    return merged


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` and what `defaults` say beside it, in mappings as deep as they go."""
    filled = {key: value for key, value in defaults.items() if key not in given}
    for key, value in given.items():
        default = defaults.get(key)
        both = isinstance(value, Mapping) and isinstance(default, Mapping)
        filled[key] = with_defaults(value, default) if both and default is not None else value
    return filled


def overlay(given: Mapping[str, Any], beneath: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template and what another says beside it: where they say different things, what is given holds.

    A volume beneath that nothing sees any more is not there.
    """
    laid: dict[str, Any] = _overlaid(given, beneath, "template")
    hidden = _mounted_volumes(beneath) - _mounted_volumes(laid) - _volume_names(given)
    if not hidden & _volume_names(laid):
        return laid
    volumes = [volume for volume in mappings_at(laid["spec"], "volumes") if str(volume.get("name")) not in hidden]
    return {**laid, "spec": {**laid["spec"], "volumes": volumes}}


def _mounted_volumes(template: Mapping[str, Any]) -> set[str]:
    """Return the names of the volumes that containers see."""
    spec = mapping_at(template, "spec")
    containers = [container for part in sorted(_CONTAINERS) for container in mappings_at(spec, part)]
    return {
        str(seen.get("name"))
        for one in containers
        for part in ("volumeMounts", "volumeDevices")
        for seen in mappings_at(one, part)
    }


def _volume_names(template: Mapping[str, Any]) -> set[str]:
    return {str(volume.get("name")) for volume in mappings_at(mapping_at(template, "spec"), "volumes")}


def _overlaid(given: Any, beneath: Any, part: str) -> Any:
    if part in _WHOLE | _PLACEMENT:
        return given
    if isinstance(given, Mapping) and isinstance(beneath, Mapping):
        if part == "resources":
            return _overlaid_resources(given, beneath)
        if part in _BY_KEY:
            hidden = given.keys() | (_ACCOUNTS if given.keys() & _ACCOUNTS else set())
            open_ = {key: value for key, value in beneath.items() if key not in hidden}
            both = {key: _overlaid(value, beneath[key], key) for key, value in given.items() if key in beneath}
            return {**open_, **given, **both}
    if isinstance(given, list) and isinstance(beneath, list):
        return _overlaid_list(given, beneath, part)
    try:
        return _merged_thing(beneath, given, part, part)
    except SpecError:
        return given


def _overlaid_resources(given: Mapping[str, Any], beneath: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, of each resource what is given or else what is beneath: a request of one has no limit of another."""
    said = {name for amounts in given.values() if isinstance(amounts, Mapping) for name in amounts}
    left = {
        part: {name: much for name, much in amounts.items() if name not in said}
        if isinstance(amounts, Mapping)
        else amounts
        for part, amounts in beneath.items()
    }
    return with_defaults(given, {part: amounts for part, amounts in left.items() if amounts})


def _overlaid_list(given: list[Any], beneath: list[Any], part: str) -> list[Any]:
    key = _key_of(part, [*beneath, *given])
    if key is None:
        return [*beneath, *(entry for entry in given if entry not in beneath)]
    others = {_identity(entry, key): entry for entry in beneath}
    laid = [
        _overlaid(entry, others.pop(name), part) if (name := _identity(entry, key)) in others else entry
        for entry in given
    ]
    return [*others.values(), *laid]


def _merged(ours: Any, theirs: Any, path: str) -> Any:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {
            key: _merged(ours[key], theirs[key], f"{path}.{key}")
            if key in ours and key in theirs
            else (ours if key in ours else theirs)[key]
            for key in [*ours, *(key for key in theirs if key not in ours)]
        }
    if isinstance(ours, list) and isinstance(theirs, list) and path.rpartition(".")[2] not in _WHOLE:
        return _merged_list(ours, theirs, path)
    if ours != theirs:
        raise SpecError(path, theirs, f"{ours!r}, or nothing: that is set already")
    return ours


def _merged_thing(ours: Any, theirs: Any, path: str, part: str) -> Any:
    if part in _OF_ONE_KIND and isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        _check_kind(ours, theirs, path)
    return _merged(ours, theirs, path)


def _merged_list(ours: list[Any], theirs: list[Any], path: str) -> list[Any]:
    part = path.rpartition(".")[2]
    key = _key_of(part, [*ours, *theirs])
    if key is None:
        return [*ours, *(entry for entry in theirs if entry not in ours)]
    named = {_identity(entry, key): entry for entry in ours}
    for entry in theirs:
        name = _identity(entry, key)
        known = name in named
        named[name] = _merged_thing(named[name], entry, f"{path}[{entry[key]!r}]", part) if known else entry
    return list(named.values())


def _key_of(part: str, entries: list[Any]) -> str | None:
    """Return what the things of a list are told apart by, None if that isn't said of all of them."""
    key = _KEYS.get(part, "name")
    told = all(isinstance(entry, Mapping) and isinstance(entry.get(key), str | int) for entry in entries)
    return key if told else None


def _identity(entry: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    if key == "mountPath":
        return (str(entry[key]).rstrip("/"),)
    return (entry[key], entry.get("protocol", "TCP")) if key == "containerPort" else (entry[key],)


def _check_kind(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> None:
    kinds = [sorted(entry.keys() - {"name"}) for entry in (ours, theirs)]
    if all(kinds) and kinds[0] != kinds[1]:
        raise SpecError(path, " and ".join(kinds[1]), f"{' and '.join(kinds[0])}, or nothing: that is set already")


# What a connection's fields say of all pods gives way to what a job's template says of its own. Pure.


def without_overridden(defaults: Pod, template: Mapping[str, Any], variables: Collection[str]) -> Pod:
    """Return the defaults without what a job's template says, and without secrets by the names of its variables.

    A resource that the template requests or limits is the template's alone. The defaults' own template is left out: it
    lies beneath all else, see `edl_runtime.backends.kubernetes.pod_template.overlay`.
    """
    spec = mapping_at(template, "spec")
    instance = instance_container(template)
    resources = mapping_at(instance, "resources")
    amounts = {*mapping_at(resources, "requests"), *mapping_at(resources, "limits")}
    taken = {*variables, *(str(one.get("name")) for one in mappings_at(instance, "env"))}
    mounted = {str(one.get("mountPath")).rstrip("/") for one in mappings_at(instance, "volumeMounts")}
    accounts = spec.keys() & {"serviceAccount", "serviceAccountName"}
    return msgspec.structs.replace(
        defaults,
        image="" if instance.get("image") else defaults.image,
        resources={
            name: much for name, much in defaults.resources.items() if {"gpu": GPU}.get(name, name) not in amounts
        },
        node_selector=_without_keys(defaults.node_selector, mapping_at(spec, "nodeSelector")),
        affinity=_without_keys(defaults.affinity, mapping_at(spec, "affinity")),
        priority_class="" if "priorityClassName" in spec else defaults.priority_class,
        service_account="" if accounts else defaults.service_account,
        volumes=[volume for volume in defaults.volumes if volume.path.rstrip("/") not in mounted],
        secret_env=_without_keys(defaults.secret_env, taken),
        labels=_without_keys(defaults.labels, mapping_at(template, "metadata", "labels")),
        annotations=_without_keys(defaults.annotations, mapping_at(template, "metadata", "annotations")),
        template={},
    )


def _without_keys(given: Mapping[str, Any], said: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in said}
