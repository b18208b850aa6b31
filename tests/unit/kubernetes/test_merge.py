"""How a pod template and our own pod become one."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.kubernetes.merge import merge, with_defaults
from edl_runtime.errors import SpecError


def containers(*each: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"containers": list(each)}}


def instance(**parts: Any) -> dict[str, Any]:
    return containers({"name": "instance", **parts})


@pytest.mark.parametrize(
    ("ours", "template", "both"),
    [
        pytest.param({"spec": {"a": 1}}, {"spec": {"b": 2}}, {"spec": {"a": 1, "b": 2}}, id="mappings key by key"),
        pytest.param({"a": {"b": {"c": 1}}}, {"a": {"b": {"d": 2}}}, {"a": {"b": {"c": 1, "d": 2}}}, id="deep"),
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
        pytest.param(instance(command=["a"]), instance(command=["a"]), instance(command=["a"]), id="same command"),
        pytest.param({"env": [{"name": "A"}]}, {"env": ["B"]}, {"env": [{"name": "A"}, "B"]}, id="half of them named"),
        pytest.param({"x": [{"name": "A"}]}, {"x": [{"name": []}]}, {"x": [{"name": "A"}, {"name": []}]}, id="no name"),
    ],
)
def test_both_say_their_part(ours: dict[str, Any], template: dict[str, Any], both: dict[str, Any]) -> None:
    """The rules that the module states, one by one."""
    assert merge(ours, template) == both


@pytest.mark.parametrize(
    ("ours", "template", "place"),
    [
        ({"spec": {"restartPolicy": "Never"}}, {"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        ({"spec": {"a": {"b": 1}}}, {"spec": {"a": {"b": 2}}}, "spec.a.b"),
        ({"spec": {"a": {"b": 1}}}, {"spec": {"a": "b"}}, "spec.a"),
        ({"spec": {"a": [1]}}, {"spec": {"a": {}}}, "spec.a"),
        (instance(command=["a"]), instance(command=["a", "b"]), "spec.containers['instance'].command"),
        (instance(args=["a"]), instance(args=[]), "spec.containers['instance'].args"),
        (
            instance(env=[{"name": "A", "value": "1"}]),
            instance(env=[{"name": "A", "value": "2"}]),
            "spec.containers['instance'].env['A'].value",
        ),
        (
            instance(env=[{"name": "A", "value": "1"}]),
            instance(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
            "spec.containers['instance'].env['A']",
        ),
        (
            {"spec": {"volumes": [{"name": "edl-0", "emptyDir": {}}]}},
            {"spec": {"volumes": [{"name": "edl-0", "hostPath": {"path": "/"}}]}},
            "spec.volumes['edl-0']",
        ),
        (
            instance(volumeMounts=[{"name": "edl-1", "mountPath": "/tmp"}]),
            instance(volumeMounts=[{"name": "mine", "mountPath": "/tmp"}]),
            "spec.containers['instance'].volumeMounts['/tmp'].name",
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
        merge(ours, template)
    assert caught.value.field == f"pod.template.{place}"


def test_defaults_fill_what_is_open_however_deep() -> None:
    """They replace nothing, not even an empty or false value."""
    given = {"a": {"b": False, "c": {}, "d": []}, "e": 0}
    defaults = {"a": {"b": True, "c": {"x": 1}, "d": [1], "f": 2}, "e": {"g": 1}, "h": 3}
    assert with_defaults(given, defaults) == {"a": {"b": False, "c": {"x": 1}, "d": [], "f": 2}, "e": 0, "h": 3}
