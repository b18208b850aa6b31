"""How a pod template and our own pod become one."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.kubernetes.pod_template import merge_templates, overlay, with_defaults
from edl_runtime.errors import SpecError


def containers(*each: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"containers": list(each)}}


def instance(**parts: Any) -> dict[str, Any]:
    return containers({"name": "instance", **parts})


def seen_at_data(name: str, *volumes: dict[str, Any]) -> dict[str, Any]:
    """Return a pod with these volumes, of which one is mounted."""
    return {"spec": {**instance(volumeMounts=[{"name": name, "mountPath": "/data"}])["spec"], "volumes": [*volumes]}}


@pytest.mark.parametrize(
    ("ours", "template", "both"),
    [
        pytest.param(
            instance(image="a"),
            containers({"name": "audit"}, {"name": "instance", "tty": True}),
            containers({"name": "instance", "image": "a", "tty": True}, {"name": "audit"}),
            id="containers by their name, ours first",
        ),
        pytest.param(
            instance(env=[{"name": "A", "value": "1"}]),
            instance(env=[{"name": "B", "valueFrom": {}}, {"name": "A", "value": "1"}, {"name": "A"}]),
            instance(env=[{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {}}]),
            id="variables by their name",
        ),
        pytest.param(
            instance(volumeMounts=[{"name": "x", "mountPath": "/a"}]),
            instance(volumeMounts=[{"name": "x", "mountPath": "/b"}, {"mountPath": "/a", "subPath": "s"}]),
            instance(volumeMounts=[{"name": "x", "mountPath": "/a", "subPath": "s"}, {"name": "x", "mountPath": "/b"}]),
            id="mounts by their path, as one volume may be seen at two",
        ),
        pytest.param(
            instance(ports=[{"containerPort": 8000}]),
            instance(ports=[{"containerPort": 8000, "name": "http"}, {"containerPort": 8000, "protocol": "UDP"}]),
            instance(ports=[{"containerPort": 8000, "name": "http"}, {"containerPort": 8000, "protocol": "UDP"}]),
            id="ports by number and protocol",
        ),
        pytest.param(
            {"volumes": [{"name": "edl-2", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "edl-2", "emptyDir": {"sizeLimit": "8Gi"}}]},
            {"volumes": [{"name": "edl-2", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]},
            id="more about the same source of a volume",
        ),
        pytest.param(
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
            {"tolerations": [{"key": "a"}, {"key": "b"}]},
            id="of other lists each entry once",
        ),
        pytest.param(
            instance(envFrom=[{"secretRef": {"name": "a"}}]),
            instance(envFrom=[{"configMapRef": {"name": "a"}}]),
            instance(envFrom=[{"secretRef": {"name": "a"}}, {"configMapRef": {"name": "a"}}]),
            id="sources of variables have no name of their own",
        ),
        pytest.param({"env": [{"name": "A"}]}, {"env": ["B"]}, {"env": [{"name": "A"}, "B"]}, id="half of them named"),
        pytest.param({"x": [{"name": "A"}]}, {"x": [{"name": []}]}, {"x": [{"name": "A"}, {"name": []}]}, id="no name"),
    ],
)
def test_both_say_their_part(ours: dict[str, Any], template: dict[str, Any], both: dict[str, Any]) -> None:
    """The rules that the module states, one by one."""
    assert merge_templates(ours, template) == both


@pytest.mark.parametrize(
    ("ours", "template", "place"),
    [
        ({"spec": {"a": {"b": 1}}}, {"spec": {"a": {"b": 2}}}, "spec.a.b"),
        ({"spec": {"a": {"b": 1}}}, {"spec": {"a": "b"}}, "spec.a"),
        ({"spec": {"a": [1]}}, {"spec": {"a": {}}}, "spec.a"),
        (
            instance(env=[{"name": "A", "value": "1"}]),
            instance(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
            "spec.containers['instance'].env['A']",
        ),
        (
            instance(volumeMounts=[{"name": "data", "mountPath": "/data/"}]),
            instance(volumeMounts=[{"name": "mine", "mountPath": "/data"}]),
            "spec.containers['instance'].volumeMounts['/data'].name",
        ),
        (
            instance(ports=[{"containerPort": 8000, "name": "a"}]),
            instance(ports=[{"containerPort": 8000, "protocol": "TCP", "name": "b"}]),
            "spec.containers['instance'].ports[8000].name",
        ),
        (
            containers(),
            containers({"name": "a", "image": "x"}, {"name": "a", "image": "y"}),
            "spec.containers['a'].image",
        ),
    ],
)
def test_saying_otherwise_is_an_error_that_names_the_place(
    ours: dict[str, Any], template: dict[str, Any], place: str
) -> None:
    """And what is said there already."""
    with pytest.raises(SpecError, match="or nothing: that is set already") as caught:
        merge_templates(ours, template)
    assert caught.value.field == f"pod.template.{place}"


def test_defaults_fill_what_is_open_however_deep() -> None:
    """They replace nothing, not even an empty or false value."""
    given = {"a": {"b": False, "c": {}, "d": []}, "e": 0}
    defaults = {"a": {"b": True, "c": {"x": 1}, "d": [1], "f": 2}, "e": {"g": 1}, "h": 3}
    assert with_defaults(given, defaults) == {"a": {"b": False, "c": {"x": 1}, "d": [], "f": 2}, "e": 0, "h": 3}


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
            containers({"name": "audit"}, {"name": "instance", "image": "a"}),
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
                    {"name": "B", "value": "beneath"},
                    {"name": "A", "valueFrom": {"fieldRef": {}}},
                    {"name": "C", "value": "given"},
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
            seen_at_data("new", {"name": "new"}),
            seen_at_data("old", {"name": "old"}, {"name": "unseen"}),
            seen_at_data("new", {"name": "unseen"}, {"name": "new"}),
            id="a volume that nothing sees any more",
        ),
        pytest.param(
            instance(ports=[{"containerPort": 8000}], volumeDevices=[{"name": "a", "devicePath": "/dev/a"}]),
            instance(
                ports=[{"containerPort": 8000, "name": "http"}, {"containerPort": 8000, "protocol": "UDP"}],
                volumeDevices=[{"name": "b", "devicePath": "/dev/a"}],
            ),
            instance(
                ports=[{"containerPort": 8000, "protocol": "UDP"}, {"containerPort": 8000, "name": "http"}],
                volumeDevices=[{"name": "a", "devicePath": "/dev/a"}],
            ),
            id="ports and devices are told apart as in a merge",
        ),
        pytest.param(
            {"spec": {"volumes": [{"name": "edl-2", "emptyDir": {"medium": "Memory"}}]}},
            {"spec": {"volumes": [{"name": "edl-2", "emptyDir": {"sizeLimit": "8Gi"}}]}},
            {"spec": {"volumes": [{"name": "edl-2", "emptyDir": {"sizeLimit": "8Gi", "medium": "Memory"}}]}},
            id="more about the same source of a volume",
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
            id="a probe is one thing",
        ),
        pytest.param(
            {"spec": {"affinity": {"nodeAffinity": {"x": [1]}}}},
            {"spec": {"affinity": {"nodeAffinity": {"x": [2]}, "podAffinity": {"y": [3]}}}},
            {"spec": {"affinity": {"nodeAffinity": {"x": [1]}, "podAffinity": {"y": [3]}}}},
            id="an affinity of one sort",
        ),
        pytest.param(
            {"spec": {"serviceAccount": "given"}},
            {"spec": {"serviceAccountName": "beneath"}},
            {"spec": {"serviceAccount": "given"}},
            id="an account by its other name",
        ),
        pytest.param(
            {"spec": {"tolerations": [{"key": "a"}, {"key": "b"}]}},
            {"spec": {"tolerations": [{"key": "b"}, {"key": "c"}]}},
            {"spec": {"tolerations": [{"key": "b"}, {"key": "c"}, {"key": "a"}]}},
            id="of other lists each entry once",
        ),
        pytest.param(
            {"spec": {"volumes": [], "nodeSelector": {}}},
            {"spec": {"volumes": "odd", "nodeSelector": "odd"}},
            {"spec": {"volumes": [], "nodeSelector": {}}},
            id="what is not as it should be",
        ),
    ],
)
def test_what_is_given_hides_what_is_beneath(
    given: dict[str, Any], beneath: dict[str, Any], both: dict[str, Any]
) -> None:
    """And all else that is beneath is seen."""
    assert overlay(given, beneath) == both
    assert overlay(both, beneath) == both
