"""The Helm chart, as far as it can be judged without a cluster."""

from __future__ import annotations

import json
import re
from typing import Any

import click
import jsonschema
import pytest
import yaml
from support.helm import CHART, HelmError, helm, rendered, values
from support.paths import DEPLOY, ROOT

import edl_runtime
from edl_runtime.autoscale.traffic.schema import read_windows
from edl_runtime.cli import edl
from edl_runtime.compat.job_specs import checkpoints_of_pods
from edl_runtime.errors import SpecError

SCHEMA = json.loads((CHART / "values.schema.json").read_text())

EVERYTHING = {
    "capacity__create": "true",
    "controller__allNamespaces": "true",
    "dashboard__create": "true",
    "gateway__create": "true",
}

Objects = dict[tuple[str, str], dict[str, Any]]


def by_name(objects: list[dict[str, Any]]) -> Objects:
    """Return objects by kind and name; those of no namespace are put into `edl`, where the chart is installed."""
    for one in objects:
        if not one["kind"].startswith("Cluster"):
            one["metadata"].setdefault("namespace", "edl")
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def applied(*files: str) -> Objects:
    """Return the objects of files in deploy/, with Redis's full name where a file has one for its namespace alone."""
    texts = [(DEPLOY / file).read_text().replace("@edl-redis:", "@edl-redis.edl:") for file in files]
    return by_name([one for text in texts for one in yaml.safe_load_all(text)])


@pytest.mark.parametrize("given", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_helm_finds_nothing_to_complain_about(given: dict[str, str]) -> None:
    """Neither in the chart nor in what it makes."""
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), *values(**given))


def test_its_objects_are_those_of_the_files() -> None:
    """Who installs by Helm has what `kubectl apply` of deploy/ makes, no more and no less."""
    assert by_name(rendered()) == applied("redis.yaml", "discovery.yaml", "controller.yaml", "role.yaml")


def test_its_controller_has_the_rights_of_the_file() -> None:
    """Also seen where there is no Helm: the rules are plain YAML in a template."""
    (rules,) = re.findall(
        r'(?s)define "edl.controllerRules" -}}\n(.*?){{- end }}', (CHART / "templates/_helpers.tpl").read_text()
    )
    assert yaml.safe_load(rules) == applied("controller.yaml")["Role", "edl-controller"]["rules"]


def test_what_nodes_have_free_is_read_by_the_same_role() -> None:
    """And by the controller, by the binding that its file's head makes."""
    more = by_name(rendered(capacity__create="true"))
    for name, one in applied("cluster-role.yaml").items():
        assert more[name] == one
    binding = more["ClusterRoleBinding", "edl-controller-capacity"]
    assert binding["roleRef"]["name"] == "edl-capacity"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "edl-controller", "namespace": "edl"}]


def test_a_gateway_is_that_of_its_file() -> None:
    """It is made on demand, and nothing else changes by it."""
    more = by_name(rendered(gateway__create="true"))
    assert more == by_name(rendered()) | applied("gateway.yaml")


def test_a_controller_of_all_namespaces_is_that_of_the_files() -> None:
    """With the flag that the file's head adds."""
    more = by_name(rendered(controller__allNamespaces="true"))
    for name, one in applied("controller-cluster.yaml").items():
        assert more[name] == one
    plain = applied("controller.yaml")["Deployment", "edl-controller"]
    plain["spec"]["template"]["spec"]["containers"][0]["args"].append("--all-namespaces")
    assert more["Deployment", "edl-controller"] == plain


def test_a_redis_that_is_there_is_used() -> None:
    """By TLS where it has it; without an address the error says what is missing."""
    objects = by_name(rendered(redis__create="false", redis__address="redis.example:6380", redis__tls="true"))
    assert ("StatefulSet", "edl-redis") not in objects
    for name in ("edl-controller", "edl-discovery"):
        (container,) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"]
        (url,) = [one["value"] for one in container["env"] if one["name"] == "EDL_REDIS_URL"]
        assert url == "rediss://:$(REDIS_PASSWORD)@redis.example:6380/0"
    with pytest.raises(HelmError, match=r"redis\.address is empty"):
        rendered(redis__create="false")


def test_a_value_that_there_is_not_is_refused() -> None:
    """A slip of the pen does not go unnoticed."""
    with pytest.raises(HelmError, match="'adress' not allowed"):
        rendered(redis__adress="redis.example:6379")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("controller__maxLoad", "3", "maximum"),
        ("redis__storage", "lots", "redis/storage"),
        ("airflow__namespace", "My_Airflow", "airflow/namespace"),
        ("redis__tls", "true", "set redis.create=false"),
        ("redis__address", "redis.example:6379", "set redis.create=false"),
        ("registryNamespace", "Bad Name", "registryNamespace"),
        ("controller__checkpoint", "relative/path", "controller/checkpoint"),
        ("controller__windows__foo__cluster", "150%", "'foo' not allowed"),
    ],
)
def test_a_value_that_would_fail_later_or_change_nothing_is_refused(name: str, value: str, words: str) -> None:
    """By words that name it, before anything is installed."""
    with pytest.raises(HelmError, match=words):
        rendered(**{name: value})


WINDOW = {"name": "night", "start": "22:00", "end": "06:00", "sizes": {"cluster": "100%"}}
DOCUMENTED = yaml.load((ROOT / "dags/traffic_windows.yaml").read_text(), yaml.BaseLoader)
SOURCE = {"resource": "gpu", "prometheus": {"url": "http://p:9090", "query": "sum(x)", "step_s": "60"}, "times": 0.002}


def windows(**of_window: Any) -> dict[str, Any]:
    return {"windows": [{**WINDOW, **of_window}], "default": {}}


@pytest.mark.parametrize(
    "given",
    [
        DOCUMENTED,
        {"default": {"cluster": "100%"}},
        {"time_zone": "Europe/Berlin", "holidays": ["2026-12-25"], **windows(days=["Mon", "weekend", "holiday"])},
        windows(days="weekdays", end="24:00", start=" 7:05"),
        windows(sizes={"cluster": {"gpu": 14, "cpu": "40 %"}, "jobs": {"a": "25.5%", "b": 2}, "pools": {"p": "2."}}),
        {"default": {"cluster": "75%"}, "traffic": {**SOURCE, "headroom": 1.2, "slot_s": 600}},
        {"default": {"cluster": "75%"}, "traffic": {"resource": "cpu", "redis": {"stream": "web-load"}}},
    ],
)
def test_traffic_windows_that_are_valid_are_valid_values(given: dict[str, Any]) -> None:
    """All that the controller reads."""
    read_windows(yaml.safe_dump(given))
    jsonschema.validate({"controller": {"windows": given}}, SCHEMA)


@pytest.mark.parametrize(
    "given",
    [
        {"foo": {"cluster": "150%"}},
        {"default": {"cluster": "150%"}},
        {"default": {"cluster": 5}},
        {"default": {"jobs": {"a": -1}}},
        {"default": {"jobs": {"a": "many"}}},
        {"default": {"machines": "50%"}},
        {"default": {}, "holidays": ["Christmas"]},
        {"default": {}, "time_zone": 1},
        windows(name=""),
        windows(start="25:00"),
        windows(end="evening"),
        windows(days=["someday"]),
        windows(days=[]),
        windows(sizes="50%"),
        {"default": {}, "windows": [{"name": "night"}]},
        {"default": {}, "traffic": {"resource": "gpu"}},
        {"default": {}, "traffic": {**SOURCE, "csv": {"path": "a"}}},
        {"default": {}, "traffic": {"resource": "gpu", "prometheus": {"url": "http://p:9090"}}},
    ],
)
def test_traffic_windows_that_no_controller_takes_are_no_values(given: dict[str, Any]) -> None:
    """`helm install` refuses them, where the controller would rescale nothing."""
    with pytest.raises(SpecError):
        read_windows(yaml.safe_dump(given))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"controller": {"windows": given}}, SCHEMA)


@pytest.mark.parametrize(
    ("namespace", "valid"), [("default", True), ("team_a.1", True), ("Bad Name", False), ("", False)]
)
def test_the_registrys_namespace_is_as_in_the_connection(namespace: str, *, valid: bool) -> None:
    """Tasks in Airflow could not have another."""
    assert jsonschema.Draft7Validator(SCHEMA).is_valid({"registryNamespace": namespace}) is valid


@pytest.mark.parametrize(
    ("url", "valid"), [("", True), ("/data", True), ("s3://bucket/a", True), ("relative/path", False)]
)
def test_checkpoints_are_where_all_pods_find_them(url: str, *, valid: bool) -> None:
    """The controller would exit at once with another one."""
    assert jsonschema.Draft7Validator(SCHEMA).is_valid({"controller": {"checkpoint": url}}) is valid
    if valid:
        checkpoints_of_pods(url)
        return
    with pytest.raises(SpecError):
        checkpoints_of_pods(url)


def test_all_pods_run_on_the_nodes_that_values_name() -> None:
    """Redis too."""
    more = {"nodeSelector__pool": "system", "tolerations[0]__key": "system", "tolerations[0]__operator": "Exists"}
    objects = by_name(rendered(**EVERYTHING, **more))
    pods = [one["spec"]["template"]["spec"] for one in objects.values() if "template" in one.get("spec", {})]
    assert len(pods) == 5
    for pod in pods:
        assert pod["nodeSelector"] == {"pool": "system"}
        assert pod["tolerations"] == [{"key": "system", "operator": "Exists"}]


def test_a_second_namespace_shares_the_account_of_airflow() -> None:
    """Which Helm would refuse to make twice; its rights there are its own release's."""
    objects = by_name(rendered(role__serviceAccount="false"))
    assert ("ServiceAccount", "edl") not in objects
    (subject,) = objects["RoleBinding", "edl"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "edl", "namespace": "airflow"}


def unchangeable(one: dict[str, Any]) -> Any:
    """Return what Kubernetes lets no upgrade change of an object."""
    spec = one.get("spec", {})
    if one["kind"] == "StatefulSet":
        return {name: value for name, value in spec.items() if name not in {"replicas", "template", "updateStrategy"}}
    return one.get("roleRef") or (one["kind"] == "Deployment" and spec["selector"])


def test_an_upgrade_may_change_all_values_but_those_of_redis_s_volume() -> None:
    """Kubernetes would refuse the others in the middle of the upgrade; `values.yaml` says so of these."""
    more = {
        "image__tag": "next",
        "registryNamespace": "other",
        "redis__image": "redis:8",
        "redis__secret__name": "other",
        "redis__resources__limits__memory": "2Gi",
        "discovery__replicas": "3",
        "controller__replicas": "1",
        "controller__checkpoint": "/data",
        "airflow__namespace": "other",
        "nodeSelector__pool": "system",
    }
    before, after = by_name(rendered()), by_name(rendered(**EVERYTHING, **more))
    kept = before.keys() & after.keys()
    assert len(kept) > 10
    assert [name for name in kept if unchangeable(before[name]) != unchangeable(after[name])] == []
    for value in ({"redis__storage": "2Gi"}, {"redis__storageClass": "fast"}):
        grown = by_name(rendered(**value))
        assert [name for name in before if unchangeable(before[name]) != unchangeable(grown[name])] == [
            ("StatefulSet", "edl-redis")
        ]


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    """None is root, writes to its image or has an account's token without a role; no password is among the objects."""
    objects = by_name(rendered(**EVERYTHING))
    assert "Secret" not in {kind for kind, _ in objects}
    pods = [one["spec"]["template"]["spec"] for one in objects.values() if "template" in one.get("spec", {})]
    assert len(pods) == 5
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.get("automountServiceAccountToken") is False or ("Role", pod["serviceAccountName"]) in objects
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_commands_of_its_pods_are_valid() -> None:
    """Their flags exist, and take these values."""
    for (kind, _), one in by_name(rendered(**EVERYTHING)).items():
        if kind == "Deployment":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            name, *flags = container["args"]
            command = edl.get_command(click.Context(edl), name)
            assert command is not None
            command.make_context(name, flags)


def test_grafana_gets_the_dashboard() -> None:
    """The one that can be imported by hand."""
    (config,) = [one for one in rendered(dashboard__create="true") if one["metadata"]["name"] == "edl-dashboard"]
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(config["data"]["edl.json"]) == json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def test_the_chart_is_of_this_version() -> None:
    """Chart and runtime are released together, and it defines what the files define."""
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == edl_runtime.__version__
    assert (CHART / "crds/trainingjob-crd.yaml").read_text() == (DEPLOY / "trainingjob-crd.yaml").read_text()
