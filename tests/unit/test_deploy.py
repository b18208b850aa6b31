"""The files in deploy/, as far as they can be judged without a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from airflow.sdk import Connection
from prometheus_client.registry import Collector
from support.autoscale.jobs import capacity, node, pool
from support.autoscale.jobs import running_job as job
from support.paths import DEPLOY, ROOT

from edl_airflow.hooks.edl import EdlConnection
from edl_airflow.runtime.spec import KubernetesBackendRef
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.autoscale.traffic.schema import read_windows
from edl_runtime.cli import edl
from edl_runtime.compat import training_job
from edl_runtime.distill.metrics import ReaderCollector
from edl_runtime.distill.stats import ReaderStats
from edl_runtime.elastic.rendezvous.group_status import GroupStatus
from edl_runtime.errors import SpecError
from edl_runtime.monitor.exporter import MonitorCollector
from edl_runtime.monitor.reports import JobReport
from edl_runtime.monitor.snapshot import build_snapshot
from edl_runtime.pods import MOST_ENTRIES, Pod
from edl_runtime.pool_reports import StudentReport, TeacherReport
from edl_runtime.progress import Progress
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.registry.health import HEALTH_PATHS
from edl_runtime.specs import MOST_COMMAND, MOST_INSTANCES, check_name
from edl_runtime.teacher.http.server import HttpServer
from edl_runtime.teacher.metrics import DeviceLoad, TeacherMetrics
from edl_runtime.teacher.predictor.pool import PredictorPool
from edl_runtime.teacher.shm.arena import Arena

MANIFESTS = sorted({*DEPLOY.rglob("*.yaml")} - {*(DEPLOY / "chart").rglob("*")})


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: str(file.relative_to(DEPLOY)))
def test_each_file_begins_with_what_it_is_and_how_to_apply_it(file: Path) -> None:
    """In comments, with a command that names the file."""
    text = file.read_text()
    head = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
    assert head
    assert any(f"deploy/{file.relative_to(DEPLOY)}" in line for line in head)
    assert list(yaml.safe_load_all(text))


@pytest.mark.parametrize("name", ["redis", "discovery", "gateway"])
def test_no_password_or_token_stands_in_a_file(name: str) -> None:
    """The command that makes the secret stands there in its place, and names the key that is read."""
    text = (DEPLOY / f"{name}.yaml").read_text()
    objects = list(yaml.safe_load_all(text))
    assert "Secret" not in {one["kind"] for one in objects}
    (container,) = [
        container
        for one in objects
        if "template" in one["spec"]
        for container in one["spec"]["template"]["spec"]["containers"]
    ]
    keys = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry]
    (own,) = [one for one in keys if one["name"] == f"edl-{name}"]
    assert f"kubectl create secret generic {own['name']} -n edl --from-literal={own['key']}=" in text


@pytest.mark.parametrize("name", ["redis.yaml", "tls/redis.yaml"])
def test_redis_keeps_what_is_in_it(name: str) -> None:
    """Where it is full it refuses to write, and evicts nothing."""
    assert " --maxmemory-policy noeviction " in (DEPLOY / name).read_text()


@pytest.mark.parametrize("name", ["redis", "discovery", "controller"])
def test_a_patch_for_tls_fits_its_file(name: str) -> None:
    """It changes a container that is there, mounts what it declares, and speaks TLS with the same password."""
    objects = list(yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text()))
    (pod,) = (one["spec"]["template"]["spec"] for one in objects if one["kind"] in ("Deployment", "StatefulSet"))
    patch = yaml.safe_load((DEPLOY / "tls" / f"{name}.yaml").read_text())["spec"]["template"]["spec"]
    (container,), (patched,) = pod["containers"], patch["containers"]
    assert patched["name"] == container["name"]
    assert {one["name"] for one in patched["volumeMounts"]} == {one["name"] for one in patch["volumes"]}
    before, after = ({one["name"]: one.get("value") for one in part.get("env", [])} for part in (container, patched))
    if url := after.get("EDL_REDIS_URL"):
        assert url == re.sub(
            r"^redis:(.*)@edl-redis(\.edl)?:", r"rediss:\1@edl-redis.edl.svc:", before["EDL_REDIS_URL"]
        )


def test_airflow_has_the_connection_and_the_role() -> None:
    """The connection comes from a secret, and who starts jobs has the role's service account."""
    values = yaml.safe_load((DEPLOY / "airflow-values.yaml").read_text())
    account, role, binding = (
        {**one, **one["metadata"]} for one in yaml.safe_load_all((DEPLOY / "role.yaml").read_text())
    )
    assert [one["kind"] for one in (account, role, binding)] == ["ServiceAccount", "Role", "RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", **account["metadata"]}]
    assert role["namespace"] == binding["namespace"] != account["namespace"]  # Airflow's secrets are not the jobs'
    used = {"create": False, "name": account["name"]}
    assert values["workers"]["kubernetes"]["serviceAccount"] == values["triggerer"]["serviceAccount"] == used
    (secret,) = values["secret"]
    assert secret["envName"] == "AIRFLOW_CONN_EDL_DEFAULT"


def rules_of(file: str, kind: str) -> list[dict[str, Any]]:
    objects = list(yaml.safe_load_all((DEPLOY / file).read_text()))
    (role,) = [one for one in objects if one["kind"] == kind]
    rules: list[dict[str, Any]] = role["rules"]
    return rules


def test_the_controller_has_the_same_rights_in_all_namespaces() -> None:
    """And reads nodes, which are in none."""
    nodes = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}
    assert rules_of("controller-cluster.yaml", "ClusterRole") == [*rules_of("controller.yaml", "Role"), nodes]


def test_the_controllers_command_and_windows_are_valid() -> None:
    """The Deployment's flags exist, and the ConfigMap that they name has windows."""
    objects = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "controller.yaml").read_text())}
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    name, *flags = container["args"]
    command = edl.get_command(click.Context(edl), name)
    assert command is not None
    given = command.make_context(name, flags).params
    windows = objects["ConfigMap"]
    assert given["windows_configmap"] == windows["metadata"]["name"]
    assert read_windows(windows["data"]["windows.yaml"]).default is not None


def test_a_controller_that_is_not_ready_or_hangs_is_seen_by_the_kubelet() -> None:
    """So that `helm --wait` fails for one that crashes or whose windows are invalid."""
    objects = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "controller.yaml").read_text())}
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    asked = [container[probe]["httpGet"] for probe in ("readinessProbe", "livenessProbe")]
    assert [one["path"] for one in asked] == [f"{HEALTH_PATHS}ready", f"{HEALTH_PATHS}live"]
    (port,) = container["ports"]
    assert {one["port"] for one in asked} == {port["name"]}
    assert str(port["containerPort"]) == container["args"][container["args"].index("--port") + 1]


def test_the_resource_definition_refuses_what_no_pod_can_be_made_of() -> None:
    """No image, as there is no connection to have one, and a workspace that is relative to nothing."""
    (definition,) = yaml.safe_load_all((DEPLOY / "trainingjob-crd.yaml").read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert "image" in spec["required"]
    assert spec["properties"]["image"]["minLength"] == 1
    folder = re.compile(spec["properties"]["trainer"]["properties"]["workspace"]["pattern"])
    assert [text for text in ("", "/home/job-1/", "job-1", "./job-1") if folder.search(text)] == ["", "/home/job-1/"]


def test_the_resource_definition_bounds_sizes() -> None:
    """A slip of the finger must not make so many pods that nobody else is served."""
    (definition,) = yaml.safe_load_all((DEPLOY / "trainingjob-crd.yaml").read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    trainer = spec["properties"]["trainer"]["properties"]
    assert {trainer[size]["maximum"] for size in ("min-instance", "max-instance", "instances")} == {10_000}


def test_the_resource_definition_has_the_fields_of_manifests() -> None:
    """Both versions, those that are ignored too; what the API server sets is its own."""
    (definition,) = yaml.safe_load_all((DEPLOY / "trainingjob-crd.yaml").read_text())
    spec = definition["spec"]
    served = {f"{spec['group']}/{version['name']}": version for version in spec["versions"]}
    assert tuple(served) == training_job.API_VERSIONS
    first, second = served.values()
    assert {**first, "name": "", "storage": ""} == {**second, "name": "", "storage": ""}
    fields = first["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert fields.keys() == {*training_job.SPEC.used, *training_job.SPEC.ignored}
    trainer = fields["trainer"]["properties"]
    assert trainer.keys() == {*training_job.TRAINER.used, *training_job.TRAINER.ignored}
    assert trainer["resources"]["properties"].keys() == {*training_job.RESOURCES.used}


def schema_of_trainingjobs() -> dict[str, Any]:
    (definition,) = yaml.safe_load_all((DEPLOY / "trainingjob-crd.yaml").read_text())
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def test_the_resource_definition_explains_each_field() -> None:
    """For `kubectl explain`; of those that are ignored, by what the event of such a manifest says."""

    def unexplained(path: str, schema: dict[str, Any]) -> list[str]:
        found = [] if schema.get("description") else [path]
        return found + [
            one
            for name, below in {**schema.get("properties", {}), **schema.get("items", {}).get("properties", {})}.items()
            for one in unexplained(f"{path}.{name}", below)
        ]

    schema = schema_of_trainingjobs()
    assert unexplained("trainingjob", schema) == []
    spec = schema["properties"]["spec"]["properties"]
    for known, fields in ((training_job.SPEC, spec), (training_job.TRAINER, spec["trainer"]["properties"])):
        assert {name: fields[name]["description"] for name in known.ignored} == {
            name: f"Ignored: {why}." for name, why in known.ignored.items()
        }


def test_kubectl_get_shows_how_far_a_training_is_and_why_it_waits() -> None:
    """Without `-o wide`; the longest text comes last."""
    (definition,) = yaml.safe_load_all((DEPLOY / "trainingjob-crd.yaml").read_text())
    columns = definition["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"] for column in columns] == ["State", "Instances", "Wanted", "Progress", "Age", "Reason"]
    assert not any(column.get("priority") for column in columns)
    shown = set(schema_of_trainingjobs()["properties"]["status"]["properties"])
    assert {
        column["jsonPath"].removeprefix(".status.") for column in columns if ".status." in column["jsonPath"]
    } <= shown


@pytest.mark.parametrize("name", ["a", "a-1", "a" * 52, "a" * 53, "a.b", "A", "-a", "a-", ""])
def test_the_resource_definition_takes_the_names_that_jobs_can_have(name: str) -> None:
    """Others would stay without a Job."""
    (rule,) = schema_of_trainingjobs()["x-kubernetes-validations"]
    (pattern,) = re.findall(r"matches\('(.*)'\)", rule["rule"])
    valid = True
    try:
        check_name("name", name)
    except SpecError:
        valid = False
    assert bool(re.search(pattern, name)) is valid


IMAGES = [
    "train:1",
    "a",
    "registry.example:5000/team/train:1.0_a",
    f"ghcr.io/a/b_c--d.e@sha256:{'a' * 64}",
    "[::1]:5000/a",
]
NO_IMAGES = ["", "Upper:1", "a:b:c", "a b", "a/", "-a", "http://a/b", "a@sha256:1", "a//b"]


@pytest.mark.parametrize(("image", "valid"), [(one, True) for one in IMAGES] + [(one, False) for one in NO_IMAGES])
def test_the_resource_definition_takes_what_a_container_runtime_can_pull(image: str, *, valid: bool) -> None:
    """A pod with another name of an image never starts."""
    spec = schema_of_trainingjobs()["properties"]["spec"]["properties"]
    (rule,) = spec["image"]["x-kubernetes-validations"]
    assert bool(re.search("".join(re.findall(r"r'(.*?)'", rule["rule"])), image)) is valid


def test_the_resource_definition_has_the_limits_of_manifests() -> None:
    """What it takes is taken by the controller, too."""
    trainer = schema_of_trainingjobs()["properties"]["spec"]["properties"]["trainer"]["properties"]
    assert trainer["max-instance"]["maximum"] == MOST_INSTANCES
    assert trainer["entrypoint"]["maxLength"] == MOST_COMMAND
    assert trainer["envs"]["maxProperties"] == trainer["tolerations"]["maxItems"] == MOST_ENTRIES
    command = re.compile(trainer["entrypoint"]["pattern"])
    assert [text for text in ("a\nb", "a\0b", "") if command.search(text)] == ["a\nb"]


def test_the_connection_that_they_show_is_one() -> None:
    """By the credentials of the pods that Airflow runs in."""
    text = (DEPLOY / "airflow-values.yaml").read_text()
    shown = re.search(r"^#   ({.*?}})$", text, re.DOTALL | re.MULTILINE)
    assert shown
    connection = Connection.from_json(shown[1].replace("\n#", "\n"))
    edl_connection = EdlConnection.of(connection, connection.extra_dejson)
    assert edl_connection.place == KubernetesBackendRef(
        namespace="edl", pod=Pod(image="registry.example/edl-runtime:gpu")
    )
    assert edl_connection.redis_url == "redis://:PASSWORD@edl-redis.edl:6379/0"


def test_the_airflow_is_the_one_that_is_tested() -> None:
    """In the chart's values and in the image."""
    (locked,) = re.findall(r"^apache-airflow==(\S+)", (DEPLOY.parent / "requirements.lock").read_text(), re.MULTILINE)
    values = yaml.safe_load((DEPLOY / "airflow-values.yaml").read_text())
    assert values["airflowVersion"] == locked
    assert f"ARG BASE=apache/airflow:{locked}\n" in (DEPLOY / "airflow.Dockerfile").read_text()


DOCKERFILE = DEPLOY / "Dockerfile"
BUILDS = {
    (file.name, line): dict(re.findall(r"--build-arg (\w+)=(\S*)", line))
    for file in (DOCKERFILE, *sorted((ROOT / "docs").rglob("*.md")))
    for line in re.findall(r"^#? *(docker build -f deploy/Dockerfile .*)$", file.read_text(), re.MULTILINE)
}
"""The commands that the docs show, and their build arguments."""

PADDLE_INDEX = "https://www.paddlepaddle.org.cn/packages/stable"


def installs(tmp_path: Path, **given: str) -> list[str]:
    """Run the steps of the Dockerfile's last image with these build arguments; return the arguments of each pip.

    No other program is found by them but those that read and write files, in `tmp_path`.
    """
    _, _, final = DOCKERFILE.read_text().rpartition("FROM ${BASE}\n")
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", final, re.MULTILINE))
    assert given.keys() <= defaults.keys()
    programs, build, log = tmp_path / "bin", tmp_path / "build", tmp_path / "log"
    programs.mkdir()
    build.mkdir()
    for name in ("pyproject.toml", "requirements.lock"):
        (build / name).symlink_to(ROOT / name)
    for name, does in {"pip": f'echo "$@" >> {log}', "apt-get": ":", "rm": ":"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    for name, target in {"python": sys.executable, "sed": shutil.which("sed")}.items():
        (programs / name).symlink_to(str(target))
    for step in re.findall(r"^RUN ((?:.*\\\n)*.*)$", final, re.MULTILINE):
        command = step.replace("/build/", f"{build}/")
        environ = {"PATH": str(programs), **defaults, **given}
        done = subprocess.run(["/bin/sh", "-c", command], env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
    return [*log.read_text().splitlines(), (build / "needed.txt").read_text()]


@pytest.mark.parametrize(
    ("given", "paddle", "index", "onnx"),
    [
        ({}, "paddlepaddle==", "", "onnxruntime>=1.20"),
        ({"DEVICE": "cu126"}, "paddlepaddle-gpu==", f"{PADDLE_INDEX}/cu126/", "onnxruntime-gpu>=1.20,<1.27"),
        ({"DEVICE": "gpu"}, "paddlepaddle-gpu==", f"{PADDLE_INDEX}/cu126/", "onnxruntime-gpu>=1.20,<1.27"),
        ({"DEVICE": "cu129"}, "paddlepaddle-gpu==", f"{PADDLE_INDEX}/cu129/", "onnxruntime-gpu>=1.20,<1.27"),
        ({"DEVICE": "cu129", "PADDLE_INDEX": "https://a.b/"}, "paddlepaddle-gpu==", "https://a.b/", "onnxruntime-gpu"),
        ({"DEVICE": "none"}, "", "", "onnxruntime>=1.20"),
    ],
    ids=str,
)
def test_an_image_has_what_its_device_needs(
    tmp_path: Path, given: dict[str, str], paddle: str, index: str, onnx: str
) -> None:
    """Paddle for GPUs is in Paddle's own index, one for each CUDA; ONNX models need another package there."""
    *pips, needed = installs(tmp_path, **given)
    assert len(pips) == 1 + bool(paddle)
    assert paddle in pips[-1]
    assert re.findall(r"--extra-index-url (\S+)", pips[-1]) == [index] * bool(index)
    assert [line for line in needed.splitlines() if line.startswith(onnx)]
    assert len(re.findall("^onnxruntime", needed, re.MULTILINE)) == 1


def test_an_image_for_no_such_device_is_refused(tmp_path: Path) -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match="DEVICE is cpu, cu126, cu129, gpu or none, and not 'tpu'"):
        installs(tmp_path, DEVICE="tpu")


@pytest.mark.parametrize("given", BUILDS.values(), ids=str)
def test_documented_builds_have_arguments_that_there_are(tmp_path: Path, given: dict[str, str]) -> None:
    """In the docs and at the Dockerfile's head."""
    installs(tmp_path, **given)


def test_the_image_leaves_it_to_the_cluster_which_gpus_a_container_sees() -> None:
    """It says only what it needs of the driver."""
    text = DOCKERFILE.read_text()
    assert "\nENV NVIDIA_DRIVER_CAPABILITIES=compute,utility\n" in text
    assert "NVIDIA_VISIBLE_DEVICES" not in text


def samples(collector: Collector) -> dict[str, set[str]]:
    """Return the names under which Prometheus knows what is collected, each with its labels."""
    return {sample.name: set(sample.labels) for metric in collector.collect() for sample in metric.samples}


@pytest.fixture
def shown() -> dict[str, set[str]]:
    """All that students, teachers and `edl monitor` show Prometheus."""
    stats = ReaderStats(answered={"a:1": 1})
    metrics = TeacherMetrics()
    metrics.count_answer(200)
    signature = ModelSignature(name="model")
    HttpServer(signature, PredictorPool([], signature, metrics, DeviceLoad(1)), Arena.create(1), metrics)
    target = JobTarget(name="job", kind="trainer", instances=1, target=2, reason="grows")
    trained = Progress(step=3, updated_at=1.0, instances=1)
    seen = build_snapshot(
        [job("job", 1)],
        capacity(node(total={"cpu": 2.0, "gpu": 1.0}, used={"cpu": 1.0})),
        RescalingPlan(at=1.0, window="night", capacity={"cpu": 1.0, "gpu": 1.0}, targets=(target,)),
        {"pool": pool("pool", {"t": TeacherReport(busy=1.0, over_s=10.0)}, {"s": StudentReport()})},
        2.0,
        reports={"job": JobReport(progress=trained, group=GroupStatus(stragglers={0: 2.0}))},
    )
    return samples(ReaderCollector(lambda: stats)) | samples(metrics) | samples(MonitorCollector(lambda: seen))


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are(shown: dict[str, set[str]]) -> None:
    """And for all of them, but for batches: samples tell more."""
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    asked = [target for panel in panels for target in panel.get("targets", ())]
    metrics = [re.findall(r"\bedl_\w+", target["expr"]) for target in asked]
    assert {name for names in metrics for name in names} == shown.keys() - {"edl_distill_batches_total"}
    for target, names in zip(asked, metrics, strict=True):
        labels = re.findall(r"by \((\w+)\)", target["expr"]) + re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert set(labels) <= {"instance"}.union(*(shown[name] for name in names)), target


def test_the_dashboards_panels_lie_side_by_side() -> None:
    """None has the place or the number of another."""
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    places = {
        (panel["gridPos"]["x"] + right, panel["gridPos"]["y"] + down): panel["id"]
        for panel in panels
        for right in range(panel["gridPos"]["w"])
        for down in range(panel["gridPos"]["h"])
    }
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
