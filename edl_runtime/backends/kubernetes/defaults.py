"""What a connection's fields say of all pods gives way to what a job's template says of its own. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from edl_runtime.backends.kubernetes.templates import at, instance_of, things
from edl_runtime.pods import GPU, Pod


def giving_way(defaults: Pod, template: Mapping[str, Any], variables: Collection[str]) -> Pod:
    """Return the defaults without what a job's template says, and without secrets by the names of its variables.

    A resource that the template requests or limits is the template's alone. The defaults' own template is left out: it
    lies beneath all else, see `edl_runtime.backends.kubernetes.merge.lay_over`.
    """
    spec = at(template, "spec")
    instance = instance_of(template)
    resources = at(instance, "resources")
    amounts = {*at(resources, "requests"), *at(resources, "limits")}
    taken = {*variables, *(str(one.get("name")) for one in things(instance, "env"))}
    mounted = {str(one.get("mountPath")).rstrip("/") for one in things(instance, "volumeMounts")}
    accounts = spec.keys() & {"serviceAccount", "serviceAccountName"}
    return msgspec.structs.replace(
        defaults,
        image="" if instance.get("image") else defaults.image,
        resources={
            name: much for name, much in defaults.resources.items() if {"gpu": GPU}.get(name, name) not in amounts
        },
        node_selector=_without(defaults.node_selector, at(spec, "nodeSelector")),
        affinity=_without(defaults.affinity, at(spec, "affinity")),
        priority_class="" if "priorityClassName" in spec else defaults.priority_class,
        service_account="" if accounts else defaults.service_account,
        volumes=[volume for volume in defaults.volumes if volume.path.rstrip("/") not in mounted],
        secret_env=_without(defaults.secret_env, taken),
        labels=_without(defaults.labels, at(template, "metadata", "labels")),
        annotations=_without(defaults.annotations, at(template, "metadata", "annotations")),
        template={},
    )


def _without(given: Mapping[str, Any], said: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in said}
