"""What a connection says of all pods, beside a job that says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.kubernetes import manifests
from edl_runtime.backends.kubernetes.defaults import giving_way
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


def made(pod: Pod, **given: Any) -> dict[str, Any]:
    spec = JobSpec(name="job", kind="trainer", command=("true",), bounds=Bounds(1, 1), instances=1, pod=pod, **given)
    return manifests.owner_of_all(spec, token="t", created_at=1.0, defaults=CONNECTION)


def test_a_template_says_otherwise_than_the_connection() -> None:
    """It is the job's own word, so it holds; what it leaves open is the connection's."""
    owner = made(Pod(template=TEMPLATE), env={"WORD": "job"})
    template = owner["spec"]["template"]
    spec, (container,) = template["spec"], template["spec"]["containers"]
    assert template["metadata"]["labels"].items() >= {"team": "job", "kept": "yes"}.items()
    assert template["metadata"]["annotations"] == {"team": "job", "kept": "yes"}
    assert spec["nodeSelector"] == {"disk": "ssd", "zone": "b"}
    assert spec["affinity"] == {"nodeAffinity": {"job": "yes"}, "podAffinity": {}}
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("high", "job")
    assert container["image"] == "job:1"
    assert container["resources"] == {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi", "nvidia.com/gpu": "2"}}
    claims = [one["persistentVolumeClaim"]["claimName"] for one in spec["volumes"] if "persistentVolumeClaim" in one]
    assert sorted(claims) == ["job", "models"]
    variables = {one["name"]: one.get("value") or one["valueFrom"] for one in container["env"]}
    assert (variables["KEY"], variables["WORD"]) == ("job", "job")
    assert variables["OTHER"] == {"secretKeyRef": {"name": "connection", "key": "other"}}


def test_a_job_without_a_template_has_what_the_connection_says() -> None:
    """All of it."""
    assert giving_way(CONNECTION, {}, ()) == CONNECTION


@pytest.mark.parametrize("part", ["nodeSelector", "affinity", "containers", "volumes"])
def test_what_is_not_as_it_should_be_is_left_to_the_cluster(part: str) -> None:
    """It judges templates, and names what is wrong."""
    assert giving_way(CONNECTION, {"spec": {part: "odd"}}, ()) == CONNECTION
