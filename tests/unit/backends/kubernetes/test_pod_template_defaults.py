"""What a connection says of all pods, beside a job that says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.kubernetes import manifests
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod, Volume
from edl_runtime.specs import Bounds, JobSpec

CONNECTION = Pod(
    image="connection:1",
    resources={"memory": "4Gi", "cpu": "1", "gpu": 1},
    node_selector={"disk": "ssd", "zone": "a"},
    affinity={"nodeAffinity": {"connection": "yes"}, "podAffinity": {}},
    priority_class="low",
    service_account="connection",
    volumes=[Volume(path="/data/", claim="connection"), Volume(path="/models", claim="models")],
    secret_env={"KEY": "connection/key", "WORD": "connection/word", "OTHER": "connection/other"},
    labels={"team": "connection", "kept": "yes"},
    annotations={"team": "connection", "kept": "yes"},
)

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "job"}, "annotations": {"team": "job"}},
    "spec": {
        "nodeSelector": {"zone": "b"},
        "affinity": {"nodeAffinity": {"job": "yes"}},
        "priorityClassName": "high",
        "serviceAccountName": "job",
        "volumes": [{"name": "mine", "persistentVolumeClaim": {"claimName": "job"}}],
        "containers": [
            {
                "name": "instance",
                "image": "job:1",
                "resources": {"limits": {"memory": "2Gi", "nvidia.com/gpu": "2"}},
                "volumeMounts": [{"name": "mine", "mountPath": "/data"}],
                "env": [{"name": "KEY", "value": "job"}],
            }
        ],
    },
}


def made(pod: Pod, defaults: Pod = CONNECTION, **given: Any) -> dict[str, Any]:
    spec = JobSpec(name="job", kind="trainer", command=("true",), bounds=Bounds(1, 1), instances=1, pod=pod, **given)
    return manifests.job_manifest(spec, token="t", created_at=1.0, defaults=defaults)


@pytest.mark.parametrize("part", ["nodeSelector", "affinity", "volumes"])
def test_malformed_parts_of_a_template_replace_nothing_of_the_connection(part: str) -> None:
    """The cluster refuses what is malformed, where it has not been left out."""
    spec = made(Pod(template={"spec": {part: "odd"}}))["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "connection"


IN_FIELDS: dict[str, Any] = {
    "image": "job:1",
    "resources": {"memory": "2Gi", "gpu": 2},
    "node_selector": {"zone": "b"},
    "affinity": {"nodeAffinity": {"job": "yes"}},
    "priority_class": "high",
    "service_account": "job",
    "volumes": [Volume(path="/data", claim="job")],
    "secret_env": {"KEY": "job/key"},
    "labels": {"team": "job"},
    "annotations": {"team": "job"},
}
OF_CONNECTION: dict[str, Any] = {
    "metadata": {"labels": {"team": "connection", "kept": "yes"}, "annotations": {"team": "connection", "kept": "yes"}},
    "spec": {
        "nodeSelector": {"zone": "a", "disk": "ssd"},
        "affinity": {"nodeAffinity": {"connection": "yes"}, "podAffinity": {}},
        "priorityClassName": "low",
        "serviceAccountName": "connection",
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 99,
        "hostIPC": True,
        "volumes": [{"name": "volume-0", "persistentVolumeClaim": {"claimName": "connection"}}],
        "containers": [
            {"name": "audit", "image": "audit:1"},
            {
                "name": "instance",
                "image": "connection:1",
                "tty": True,
                "args": ["connection"],
                "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi", "nvidia.com/gpu": "1"}},
                "volumeMounts": [
                    {"name": "volume-0", "mountPath": "/data", "readOnly": True},
                    {"name": "volume-0", "mountPath": "/models"},
                ],
                "env": [
                    {"name": "KEY", "value": "connection"},
                    {"name": "WORD", "value": "connection"},
                    {"name": "OTHER", "value": "connection"},
                    {"name": "EDL_JOB", "value": "connection"},
                ],
            },
        ],
    },
}


@pytest.mark.parametrize(
    ("pod", "connection"),
    [
        (Pod(**IN_FIELDS), Pod(template=OF_CONNECTION)),
        (Pod(template=TEMPLATE), Pod(template=OF_CONNECTION)),
        (Pod(template=TEMPLATE), CONNECTION),
    ],
    ids=["fields over a template", "a template over one", "a template over fields"],
)
def test_a_job_says_otherwise_than_the_connection(pod: Pod, connection: Pod) -> None:
    """Wherever either says so: what the job leaves open is the connection's."""
    template = made(pod, connection, env={"WORD": "job"})["spec"]["template"]
    spec, container = template["spec"], template["spec"]["containers"][0]
    assert template["metadata"]["labels"].items() >= {"team": "job", "kept": "yes"}.items()
    assert template["metadata"]["annotations"] == {"team": "job", "kept": "yes"}
    assert spec["nodeSelector"] == {"disk": "ssd", "zone": "b"}
    assert spec["affinity"] == {"nodeAffinity": {"job": "yes"}, "podAffinity": {}}
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("high", "job")
    assert container["image"] == "job:1"
    assert container["resources"]["limits"] == {"memory": "2Gi", "nvidia.com/gpu": "2"}
    assert container["resources"]["requests"]["cpu"] == "1"
    sources = {one["name"]: one.get("persistentVolumeClaim", {}).get("claimName") for one in spec["volumes"]}
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert sources[mounts["/data"]["name"]] == "job"
    assert sources[mounts["/models"]["name"]] in ("connection", "models")
    assert {one["name"] for one in mounts.values()} == set(sources)  # a volume whose mount was replaced is gone
    assert "readOnly" not in mounts["/data"]
    variables = {one["name"]: one.get("value") or one["valueFrom"] for one in container["env"]}
    assert variables["KEY"] in ("job", {"secretKeyRef": {"name": "job", "key": "key"}})
    assert variables["OTHER"] in ("connection", {"secretKeyRef": {"name": "connection", "key": "other"}})
    assert (variables["WORD"], variables["EDL_JOB"]) == ("job", "job")


def test_the_template_of_a_connection_gives_way_to_our_own_work() -> None:
    """All else that it says holds."""
    spec = made(Pod(), Pod(template=OF_CONNECTION))["spec"]["template"]["spec"]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"], spec["hostIPC"]) == ("Never", 10, True)
    container, audit = spec["containers"]
    assert (container["image"], container["tty"], container["args"]) == ("connection:1", True, ["true"])
    assert (audit["name"], audit["image"]) == ("audit", "audit:1")


def test_the_template_of_a_connection_gives_way_to_its_fields() -> None:
    """Key by key."""
    connection = Pod(image="field:1", secret_env={"KEY": "a/b", "HOME": "a/b"}, template=OF_CONNECTION)
    container = made(Pod(), connection)["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "field:1"
    variables = {one["name"]: one.get("value") or one["valueFrom"] for one in container["env"]}
    assert (variables["KEY"], variables["HOME"]) == ({"secretKeyRef": {"name": "a", "key": "b"}}, "/edl")


def test_a_secret_in_the_connection_is_not_blamed_on_the_job() -> None:
    """The error names who wrote it, and does not show it."""
    env = [{"name": "EDL_REDIS_URL", "value": "redis://:open-sesame@redis"}]
    connection = Pod(image="x:1", template={"spec": {"containers": [{"name": "instance", "env": env}]}})
    with pytest.raises(SpecError) as caught:
        made(Pod(), connection)
    assert caught.value.field == "the connection's pod.template.spec.containers['instance'].env"
    assert "open-sesame" not in str(caught.value)
