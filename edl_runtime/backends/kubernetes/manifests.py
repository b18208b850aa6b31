"""A job's spec → the objects that run it. Pure.

A pool is a Deployment, a trainer job an elastic Indexed Job. Either owns all else of it, so deleting it deletes all.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from edl_runtime.backends.kubernetes import names
from edl_runtime.backends.kubernetes.defaults import giving_way
from edl_runtime.backends.kubernetes.merge import lay_over, merge, with_defaults
from edl_runtime.backends.kubernetes.templates import at, instance_of, things
from edl_runtime.errors import EX_CONFIG, SpecError
from edl_runtime.pods import Pod
from edl_runtime.specs import SECRET_VARIABLES, Bounds, JobSpec

Manifest = dict[str, Any]

MOST_LIVES = 5
"""How often an instance of a trainer job is started, in all, before it is given up: its pod's own failures count,
a pod that was evicted or preempted does not."""

MOST_DISRUPTIONS = 20
"""How often the cluster may end an instance of a trainer job, unless its spec says otherwise."""

KEPT_S = 7 * 24 * 3600
"""How long a trainer job that has ended is kept, with its pods and their logs, unless it is deleted before."""

USER = 10001
"""User and group of instances, unless a template says otherwise."""

TERMINATED = 128 + signal.SIGTERM
"""Exit status of an instance that was told to go: a Job judges also those that leave by a resize."""

_SIGNALS = [128 + number for number in range(1, 65)]
"""Exit statuses that stand for a signal."""


def owner_of_all(spec: JobSpec, *, token: str, created_at: float, defaults: Pod) -> Manifest:
    """Return the Deployment or Job, which has no instances yet. `defaults`: of what its spec leaves open.

    Raises SpecError for a pod template that fights the spec, and for a spec without an image.
    """
    if spec.cwd and not spec.cwd.startswith("/"):
        raise SpecError("cwd", spec.cwd, "an absolute path, as in '/data': pods have no folder in common")
    own = spec.pod or Pod()
    set_here = {variable["name"] for variable in _environment(spec, own)}
    pod = own.over(giving_way(defaults, own.template, set_here))
    labels = {**pod.labels, **_labels(spec)}
    metadata = {
        "name": spec.name,
        "labels": labels,
        "annotations": {
            **({names.ELASTIC_IN_QUEUE: "true"} if _is_resized_in_queue(spec, pod) else {}),
            **pod.annotations,
            names.TOKEN: token,
            names.DIGEST: spec.digest,
            names.BOUNDS: str(spec.bounds),
            names.PRIORITY: str(spec.priority),
            names.WEIGHT: repr(spec.weight),
            names.WANTED: str(spec.instances),
            names.ELASTIC: str(spec.elastic).lower(),
            names.CREATED_AT: repr(created_at),
            names.CWD: spec.cwd,
            **({names.MOST_DISRUPTIONS: str(_most_disruptions(pod))} if spec.kind == "trainer" else {}),
        },
    }
    template = pod_template(spec, pod, beneath=defaults.template)
    if spec.kind == "pool":
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 0,
                "revisionHistoryLimit": 0,
                "selector": {"matchLabels": {names.JOB: spec.name}},
                "template": template,
            },
        }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "parallelism": spec.instances,
            "completions": spec.instances,
            "backoffLimitPerIndex": MOST_LIVES - 1,
            "maxFailedIndexes": most_given_up(spec.instances, spec.bounds, elastic=spec.elastic),
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules(elastic=spec.elastic)},
            "ttlSecondsAfterFinished": KEPT_S,
            "template": template,
        },
    }


def _is_resized_in_queue(spec: JobSpec, pod: Pod) -> bool:
    return spec.kind == "trainer" and spec.bounds.min < spec.bounds.max and names.QUEUE in pod.labels


def most_given_up(completions: int, bounds: Bounds, *, elastic: bool) -> int:
    """Return how many indexes of a Job may be given up before it ends all others: none, but of elastic trainers.

    Of these, one that says itself that it can't work leaves the others to go on. One that signals have ended too often
    fails its job, and so says the status; the Job counts both alike, so its other pods run until it is deleted, which
    whoever waits for it does at once. To end them sooner would take somebody of ours in the cluster.
    """
    return max(0, completions - bounds.min) if elastic else 0


def _most_disruptions(pod: Pod) -> int:
    return MOST_DISRUPTIONS if pod.disruptions is msgspec.UNSET else pod.disruptions


def secret(spec: JobSpec, secrets: Mapping[str, str]) -> Manifest:
    """Return the Secret with the variables that are written nowhere else."""
    metadata = {"name": names.secret_name(spec.name), "labels": _labels(spec)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(secrets)}


def disruption_budget(spec: JobSpec) -> Manifest:
    """Return what keeps all but one of a pool's instances where they are while nodes are drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": spec.name, "labels": _labels(spec)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {names.JOB: spec.name}}},
    }


def pod_template(spec: JobSpec, pod: Pod, *, beneath: Mapping[str, Any]) -> Manifest:
    """Return the template of the job's pods: what the spec and the user's template say, and our defaults.

    `beneath`: a connection's template, which gives way to both. Raises SpecError.
    """
    stated = merge(_stated(spec, pod, beneath), pod.template)
    _check_no_secrets(stated, "pod.template")
    template = lay_over(stated, beneath)
    _check_no_secrets(template, "the connection's pod.template")
    containers = template["spec"]["containers"] = sorted(template["spec"]["containers"], key=_is_other)
    for part in ("containers", "initContainers"):
        if part in template["spec"]:
            template["spec"][part] = [with_defaults(one, _container_defaults()) for one in template["spec"][part]]
    if not containers[0].get("image"):
        raise SpecError("pod.image", "", "an image with edl_runtime in it, here or in the connection's field 'Pod'")
    defaults = {"spec": {**_pod_defaults(), **_placement(spec, template["spec"])}}
    return with_defaults(template, defaults)


def _is_other(container: Mapping[str, Any]) -> bool:
    return bool(container["name"] != names.CONTAINER)


def _check_no_secrets(template: Manifest, of: str) -> None:
    for variable in things(instance_of(template), "env"):
        if variable.get("name") in SECRET_VARIABLES and "value" in variable:
            place = f"{of}.spec.containers[{names.CONTAINER!r}].env"
            raise SpecError(place, variable["name"], "none that may hold a secret, unless it comes from a Secret")


def _stated(spec: JobSpec, pod: Pod, beneath: Mapping[str, Any]) -> Manifest:
    """Return what the spec, and our own work, says of a pod. `beneath`: see `pod_template`."""
    amounts = pod.amounts()
    volumes, mounts = _volumes(pod, {str(one.get("name")) for one in things(at(beneath, "spec"), "volumes")})
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
        "command": ["python", "-P", "-m", "edl_runtime.backends.kubernetes.init"],
        "args": [_literal(word) for word in spec.command],
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
        "metadata": {"labels": {**pod.labels, **_labels(spec)}, **_annotations(pod)},
        "spec": {
            **{key: value for key, value in stated.items() if value},
            "restartPolicy": "Always" if spec.kind == "pool" else "Never",
            "terminationGracePeriodSeconds": max(1, math.ceil(spec.grace_s)),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _labels(spec: JobSpec) -> dict[str, str]:
    return {names.MANAGED_BY: names.MANAGER, names.JOB: spec.name, names.KIND: spec.kind}


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
        *({"name": name, "value": _literal(value)} for name, value in plain.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in told.items()),
        *secrets,
    ]


def _literal(text: str) -> str:
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
    env = [*variables, *(variable for template in templates for variable in things(instance_of(template), "env"))]
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


def _failure_rules(*, elastic: bool) -> list[Manifest]:
    """Return what a failed pod of a trainer job means: see `JobSpec.elastic`."""
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    if not elastic:
        return [disrupted, _exits("FailJob", "NotIn", [0, TERMINATED])]
    return [disrupted, _exits("FailIndex", "In", [EX_CONFIG]), _exits("FailJob", "NotIn", [0, *_SIGNALS])]


def _exits(action: str, operator: str, values: list[int]) -> Manifest:
    codes = {"containerName": names.CONTAINER, "operator": operator, "values": values}
    return {"action": action, "onExitCodes": codes}


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
