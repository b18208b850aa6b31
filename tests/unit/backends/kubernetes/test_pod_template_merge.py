"""How two pod templates become one."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.kubernetes.pod_template import overlay


def containers(*each: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"containers": list(each)}}


def instance(**parts: Any) -> dict[str, Any]:
    return containers({"name": "instance", **parts})


@pytest.mark.parametrize(
    ("given", "beneath", "both"),
    [
        pytest.param(
            containers({"name": "audit", "command": ["new"], "args": ["-q"]}),
            containers({"name": "audit", "command": ["old", "x"], "args": ["-v"], "image": "audit:1"}),
            containers({"name": "audit", "command": ["new"], "args": ["-q"], "image": "audit:1"}),
            id="a command is one value",
        ),
        pytest.param(
            instance(image="a"),
            containers({"name": "audit"}),
            containers({"name": "instance", "image": "a"}, {"name": "audit"}),
            id="other containers",
        ),
        pytest.param(
            {"spec": {"dnsPolicy": "Default", "nodeSelector": {"zone": "b"}}},
            {"spec": {"dnsPolicy": "None", "nodeSelector": {"zone": "a", "disk": "ssd"}, "hostNetwork": True}},
            {"spec": {"dnsPolicy": "Default", "nodeSelector": {"zone": "b", "disk": "ssd"}, "hostNetwork": True}},
            id="each key",
        ),
        pytest.param(
            instance(env=[{"name": "A", "valueFrom": {"fieldRef": {}}}, {"name": "C", "value": "given"}]),
            instance(env=[{"name": "A", "value": "beneath"}, {"name": "B", "value": "beneath"}]),
            instance(
                env=[
                    {"name": "A", "valueFrom": {"fieldRef": {}}},
                    {"name": "C", "value": "given"},
                    {"name": "B", "value": "beneath"},
                ]
            ),
            id="a variable is one value",
        ),
        pytest.param(
            instance(volumeMounts=[{"name": "new", "mountPath": "/data/"}]),
            instance(volumeMounts=[{"name": "old", "mountPath": "/data", "readOnly": True}]),
            instance(volumeMounts=[{"name": "new", "mountPath": "/data/"}]),
            id="another volume at a path",
        ),
        pytest.param(
            instance(ports=[{"containerPort": 8000}], volumeDevices=[{"name": "a", "devicePath": "/dev/a"}]),
            instance(
                ports=[{"containerPort": 8000, "name": "http"}, {"containerPort": 8000, "protocol": "UDP"}],
                volumeDevices=[{"name": "b", "devicePath": "/dev/a"}],
            ),
            instance(
                ports=[{"containerPort": 8000}, {"containerPort": 8000, "protocol": "UDP"}],
                volumeDevices=[{"name": "a", "devicePath": "/dev/a"}],
            ),
            id="ports by number and protocol, devices by path",
        ),
        pytest.param(
            {"spec": {"volumes": [{"name": "data", "emptyDir": {}}]}},
            {"spec": {"volumes": [{"name": "data", "hostPath": {"path": "/"}}]}},
            {"spec": {"volumes": [{"name": "data", "emptyDir": {}}]}},
            id="another source of a volume",
        ),
        pytest.param(
            instance(resources={"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi"}}),
            instance(resources={"requests": {"cpu": "2"}, "limits": {"memory": "1Gi", "cpu": "4"}}),
            instance(resources={"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"cpu": "4", "memory": "2Gi"}}),
            id="resources by their name",
        ),
        pytest.param(
            instance(resources={"requests": {"cpu": "2"}}),
            instance(resources={"limits": {"cpu": "1"}}),
            instance(resources={"requests": {"cpu": "2"}}),
            id="no request above the limit of another",
        ),
        pytest.param(
            instance(livenessProbe={"httpGet": {"path": "/"}, "periodSeconds": 1}),
            instance(livenessProbe={"exec": {"command": ["a"]}, "periodSeconds": 2}),
            instance(livenessProbe={"httpGet": {"path": "/"}, "periodSeconds": 1}),
            id="a probe is one value",
        ),
        pytest.param(
            {"spec": {"affinity": {"nodeAffinity": {"x": [1]}}}},
            {"spec": {"affinity": {"nodeAffinity": {"x": [2]}, "podAffinity": {"y": [3]}}}},
            {"spec": {"affinity": {"nodeAffinity": {"x": [1]}, "podAffinity": {"y": [3]}}}},
            id="affinities of each kind",
        ),
        pytest.param(
            {"spec": {"tolerations": [{"key": "a"}, {"key": "b"}]}},
            {"spec": {"tolerations": [{"key": "b"}, {"key": "c"}]}},
            {"spec": {"tolerations": [{"key": "a"}, {"key": "b"}, {"key": "c"}]}},
            id="of other lists each entry once",
        ),
        pytest.param(
            instance(envFrom=[{"secretRef": {"name": "a"}}]),
            instance(envFrom=[{"configMapRef": {"name": "a"}}]),
            instance(envFrom=[{"configMapRef": {"name": "a"}}, {"secretRef": {"name": "a"}}]),
            id="the last source of variables wins",
        ),
        pytest.param(
            {"spec": {"volumes": [], "nodeSelector": {}}},
            {"spec": {"volumes": "odd", "nodeSelector": "odd"}},
            {"spec": {"volumes": [], "nodeSelector": {}}},
            id="malformed parts",
        ),
    ],
)
def test_the_upper_template_wins(given: dict[str, Any], beneath: dict[str, Any], both: dict[str, Any]) -> None:
    """And keeps all else of the lower one."""
    assert overlay(given, beneath) == both
    assert overlay(both, beneath) == both
