"""What a pod is given is valid once made, and the same however it was written."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.errors import SpecError
from edl_runtime.pods import HOME, MAX_QUANTITY, Pod, Volume, format_amount, reserved_resources
from edl_runtime.specs import Bounds, JobSpec

YAML = """
metadata:
  labels: {team: vision}
spec:
  hostNetwork: true
  runtimeClassName:
  containers:
  - name: instance
    tty: true
"""
AS_DICT = {
    "metadata": {"labels": {"team": "vision"}},
    "spec": {"hostNetwork": True, "containers": [{"name": "instance", "tty": True}]},
}


def job(pod: Pod | None) -> JobSpec:
    return JobSpec(name="job", kind="pool", command=("true",), bounds=Bounds(1, 1), instances=1, pod=pod)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("pod.image", {"image": "train: 1"}),
        ("pod.image", {"image": None}),
        ("pod.resources", {"resources": [("cpu", 1)]}),
        ("pod.resources['disk']", {"resources": {"disk": 1}}),
        ("pod.resources['rdma/']", {"resources": {"rdma/": 1}}),
        ("pod.resources['a b/c']", {"resources": {"a b/c": 1}}),
        ("pod.resources[5]", {"resources": {5: 1}}),
        ("pod.resources", {"resources": {"gpu": 1, "nvidia.com/gpu": 1}}),
        ("pod.node_selector", {"node_selector": "gpu"}),
        ("pod.node_selector", {"node_selector": {"a b": "c"}}),
        ("pod.node_selector['disk']", {"node_selector": {"disk": True}}),
        ("pod.tolerations", {"tolerations": {"key": "gpu"}}),
        ("pod.tolerations[0]", {"tolerations": ["gpu"]}),
        ("pod.affinity", {"affinity": "near"}),
        ("pod.priority_class", {"priority_class": "Very High"}),
        ("pod.queue", {"queue": "Team A"}),
        ("pod.queue['kueue.x-k8s.io/queue-name']", {"queue": "q" * 64}),
        ("pod.labels", {"queue": "team-a", "labels": {"kueue.x-k8s.io/queue-name": "team-a"}}),
        ("pod.volumes", {"volumes": Volume(path="/data", claim="data")}),
        ("pod.volumes[0]", {"volumes": [{"path": "/data", "claim": "data"}]}),
        ("pod.volumes", {"volumes": [Volume(path="/data", claim="a"), Volume(path="/data/", claim="b")]}),
        ("pod.secret_env", {"secret_env": ["KEY"]}),
        ("pod.secret_env", {"secret_env": {"A KEY": "aws/key"}}),
        ("pod.secret_env['KEY']", {"secret_env": {"KEY": "aws"}}),
        ("pod.secret_env['KEY']", {"secret_env": {"KEY": "aws/"}}),
        ("pod.secret_env['KEY']", {"secret_env": {"KEY": 5}}),
        ("pod.env_from_secrets", {"env_from_secrets": "aws"}),
        ("pod.env_from_secrets[0]", {"env_from_secrets": [5]}),
        ("pod.env_from_secrets", {"env_from_secrets": ["AWS"]}),
        ("pod.service_account", {"service_account": "a_b"}),
        ("pod.service_account", {"service_account": None}),
        ("pod.pull_secrets", {"pull_secrets": ["a" * 254]}),
        ("pod.pull_secrets", {"pull_secrets": [""]}),
        ("pod.labels['team']", {"labels": {"team": "a" * 64}}),
        ("pod.labels['team']", {"labels": {"team": "two words"}}),
        ("pod.labels", {"labels": {"-team": "a"}}),
        ("pod.labels", {"labels": {"edl-airflow/job": "x"}}),
        ("pod.labels", {"labels": {"app.kubernetes.io/managed-by": "Helm"}}),
        ("pod.labels", {"labels": {"batch.kubernetes.io/controller-uid": "x"}}),
        ("pod.annotations", {"annotations": {"edl-airflow/token": "x"}}),
        ("pod.annotations", {"annotations": {"": "x"}}),
        ("pod.annotations['a']", {"annotations": {"a": 1}}),
        ("pod.disruptions", {"disruptions": -1}),
        ("pod.disruptions", {"disruptions": True}),
        ("pod.disruptions", {"disruptions": 1.0}),
        ("pod.disruptions", {"disruptions": None}),
        ("pod.template", {"template": None}),
        ("pod.template", {"template": []}),
        ("pod.template", {"template": ""}),
        ("pod.volumes", {"volumes": [Volume(path=f"/{number}", claim="a") for number in range(1_001)]}),
        ("pod.labels", {"labels": {f"k{number}": "" for number in range(1_001)}}),
        ("pod.template", {"template": "a: [b"}),
        ("pod.template", {"template": "metadata: {annotations: {day: 2024-13-45}}"}),
        ("pod.template", {"template": "--- {}\n--- {}"}),
        ("pod.template", {"template": {"containers": []}}),
        ("pod.template", {"template": {"kind": "Deployment", "spec": {"template": {}}}}),
        ("pod.template", {"template": {"kind": ["Pod"]}}),
        ("pod.template", {"template": {"template": {"spec": {}}}}),
        ("pod.template", {"template": "&a {spec: *a}"}),
        ("pod.template.spec", {"template": {"spec": "none"}}),
        ("pod.template.metadata.labels", {"template": {"metadata": {"labels": ["team"]}}}),
        ("pod.template.metadata.annotations.day", {"template": "metadata: {annotations: {day: 2024-01-01}}"}),
        ("pod.template.metadata.labels", {"template": "metadata: {labels: {yes: a}}"}),
        ("pod.template.spec.containers", {"template": {"spec": {"containers": {"name": "instance"}}}}),
        ("pod.template.spec.containers", {"template": {"spec": {"containers": [{"image": "a"}]}}}),
        ("pod.template.spec.containers", {"template": {"spec": {"containers": ["instance"]}}}),
        ("pod.template.spec.initContainers", {"template": {"spec": {"initContainers": [{}]}}}),
        ("pod.template.spec.priority", {"template": {"spec": {"priority": 1 << 63}}}),
        ("pod.template.spec.priority", {"template": {"spec": {"priority": float("nan")}}}),
        ("pod.template.spec.tags", {"template": {"spec": {"tags": {"a", "b"}}}}),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(field: str, given: dict[str, Any]) -> None:
    """So that who wrote it finds the place."""
    with pytest.raises(SpecError) as caught:
        Pod(**given)
    assert caught.value.field == field


@pytest.mark.parametrize("quantity", [1, 0, 1.5, "500m", "8Gi", "1e3", "1E3", "90T", ".5", "5.", 1e14, 1e-05, "9" * 14])
def test_quantities_are_those_of_kubernetes(quantity: float | str) -> None:
    """Numbers, with or without a suffix or an exponent."""
    assert Pod(resources={"memory": quantity}).amounts() == {"memory": str(quantity)}


@pytest.mark.parametrize(
    "quantity",
    [
        *(-1, "-1", "+1", "", " 1", "1 ", "1\n", "1gb", "8GI", "1e3Gi", "1e", "1.2.3", ".", "\u0661", "Gi"),
        *(True, None, float("nan"), float("inf"), 1 << 63, [1]),
        *("200Ti", "1E", "1e400", "9" * 30, "9" * 5000, "0." + "0" * 50, 1e22),
        pytest.param(10**5000, id="a whole number without end"),
    ],
)
def test_what_is_no_quantity_is_refused(quantity: Any) -> None:
    """By the resource's name."""
    with pytest.raises(SpecError) as caught:
        Pod(resources={"memory": quantity})
    assert caught.value.field == "pod.resources['memory']"


def test_annotations_are_as_many_as_kubernetes_takes() -> None:
    """More are refused before anything is sent to the cluster."""
    Pod(annotations={"example.com/about": "x" * 200_000})
    with pytest.raises(SpecError, match=r"pod\.annotations: got '5,000,017 bytes', allowed is 262,144 bytes"):
        Pod(annotations={"example.com/about": "x" * 5_000_000})


def test_a_pod_reserves_no_more_than_counts() -> None:
    """Whatever the cluster lets it ask for: sums of such numbers would be no numbers any more."""
    container = {"resources": {"requests": {"memory": "1e400", "cpu": "90T"}}}
    pod = {"spec": {"containers": [container, container]}}
    assert reserved_resources(pod) == {"memory": MAX_QUANTITY, "cpu": MAX_QUANTITY, "pods": 1.0}


@pytest.mark.parametrize("quantity", ["1.5", 1.5, "500m", "1Ki", 1.0, "1e3", -1, "\u0663"])
@pytest.mark.parametrize("name", ["gpu", "nvidia.com/gpu", "rdma/hca"])
def test_devices_come_whole(name: str, quantity: Any) -> None:
    """There is no half a GPU to be had from Kubernetes."""
    with pytest.raises(SpecError):
        Pod(resources={name: quantity})


def test_a_gpu_has_one_name() -> None:
    """Both ways to write it are the same pod, so neither starts a running job anew."""
    short, long = Pod(resources={"gpu": 2}), Pod(resources={"nvidia.com/gpu": 2})
    assert short == long
    assert short.amounts() == long.amounts() == {"nvidia.com/gpu": "2"}
    assert long.over(Pod(resources={"gpu": 1})).amounts() == {"nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("pod.volumes[].path", {"path": "data"}),
        ("pod.volumes[].path", {"path": "/"}),
        ("pod.volumes[].path", {"path": ""}),
        ("pod.volumes[].path", {"path": 5}),
        ("pod.volumes[].path", {"path": "/data\0"}),
        ("pod.volumes[].path", {"path": "/data:ro"}),
        ("pod.volumes[].path", {"path": "/data/../etc"}),
        ("pod.volumes[].path", {"path": HOME}),
        ("pod.volumes['/data']", {"claim": ""}),
        ("pod.volumes['/data']", {"source": {"emptyDir": {}}}),
        ("pod.volumes['/data'].claim", {"claim": "My_Data"}),
        ("pod.volumes['/data'].claim", {"claim": 5}),
        ("pod.volumes['/data'].source", {"claim": "", "source": "emptyDir"}),
        ("pod.volumes['/data'].source", {"claim": "", "source": {"emptyDir": {}, "hostPath": {}}}),
        ("pod.volumes['/data'].source", {"claim": "", "source": {"configMap": "lexicon"}}),
        ("pod.volumes['/data'].read_only", {"read_only": "yes"}),
    ],
)
def test_a_volume_has_a_place_and_one_source(field: str, given: dict[str, Any]) -> None:
    """The error names the volume by its path where it has one."""
    with pytest.raises(SpecError) as caught:
        Volume(**{"path": "/data", "claim": "data", **given})
    assert caught.value.field == field


def test_a_template_is_the_same_however_it_is_written() -> None:
    """As a dict, as YAML, as a whole PodTemplate or as models of the official client."""
    from kubernetes import client

    models = client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels={"team": "vision"}),
        spec=client.V1PodSpec(host_network=True, containers=[client.V1Container(name="instance", tty=True)]),
    )
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "template": AS_DICT}
    pods = [Pod(template=template) for template in (AS_DICT, YAML, models, whole)]  # type: ignore[arg-type]
    assert [pod.template for pod in pods] == [AS_DICT] * 4
    assert len({job(pod).digest for pod in pods}) == 1


def test_other_parts_may_be_models_too() -> None:
    """Tolerations, an affinity and a volume's source are often at hand as such."""
    from kubernetes import client

    volume = Volume(path="/words", source={"configMap": client.V1ConfigMapVolumeSource(name="lexicon")})
    pod = Pod(
        tolerations=[client.V1Toleration(key="gpu", operator="Exists")],
        affinity=client.V1Affinity(node_affinity=client.V1NodeAffinity()),
        volumes=[volume],
    )
    assert volume.source == {"configMap": {"name": "lexicon"}}
    assert (pod.tolerations, pod.affinity) == (({"key": "gpu", "operator": "Exists"},), {"nodeAffinity": {}})


def test_what_is_changed_later_does_not_change_the_pod() -> None:
    """A spec that is valid stays as it is."""
    labels, template, source = {"team": "a"}, {"spec": {"nodeName": "a"}}, {"configMap": {"name": "a"}}
    tolerations = [{"key": "a"}]
    volume = Volume(path="/data", source=source)
    pod = Pod(labels=labels, template=template, tolerations=tolerations, volumes=[volume])
    labels["team"] = template["spec"]["nodeName"] = source["configMap"]["name"] = tolerations[0]["key"] = "b"
    assert (pod.labels, pod.template["spec"], volume.source) == (
        {"team": "a"},
        {"nodeName": "a"},
        {"configMap": {"name": "a"}},
    )
    assert pod.tolerations == ({"key": "a"},)


def test_a_queue_is_its_field_and_the_label_that_kueue_knows_it_by() -> None:
    """The same pod by either; the connection has a default."""
    by_label = Pod(labels={"kueue.x-k8s.io/queue-name": "team-a", "team": "a"})
    assert by_label == Pod(queue="team-a", labels={"team": "a"})
    assert [one.over(by_label).queue for one in (Pod(), Pod(queue="team-b"))] == ["team-a", "team-b"]


def test_how_many_disruptions_are_allowed_may_be_the_connections() -> None:
    """Also none at all, which is not the same as nothing said."""
    connection = Pod(disruptions=50)
    found = [given.over(connection).disruptions for given in (Pod(), Pod(disruptions=0), Pod(disruptions=3))]
    assert found == [50, 0, 3]
    assert Pod().over(Pod()) == Pod()


def test_the_order_of_keys_makes_no_other_job() -> None:
    """A digest is of what is said, not of how."""
    one, other = Pod(labels={"a": "1", "b": "2"}), Pod(labels={"b": "2", "a": "1"})
    assert one == other
    assert job(one).digest == job(other).digest != job(Pod(labels={"a": "1"})).digest != job(None).digest


def test_what_is_left_open_comes_from_the_defaults() -> None:
    """Of a mapping each key, of a list the entries before, of volumes those at other paths; the pod's own wins."""
    defaults = Pod(
        image="default",
        resources={"cpu": 1, "memory": "1Gi"},
        tolerations=[{"key": "a"}, {"key": "b"}],
        volumes=[Volume(path="/data", claim="all"), Volume(path="/words", claim="words")],
        service_account="default",
        pull_secrets=["pull"],
        labels={"team": "x"},
    )
    pod = Pod(
        image="own",
        resources={"memory": "8Gi", "gpu": 1},
        tolerations=[{"key": "b"}, {"key": "c"}],
        volumes=[Volume(path="/data/", claim="own")],
        labels={"stage": "test"},
    )
    both = pod.over(defaults)
    assert both == Pod(
        image="own",
        resources={"cpu": 1, "memory": "8Gi", "gpu": 1},
        tolerations=[{"key": "a"}, {"key": "b"}, {"key": "c"}],
        volumes=[Volume(path="/words", claim="words"), Volume(path="/data/", claim="own")],
        service_account="default",
        pull_secrets=["pull"],
        labels={"team": "x", "stage": "test"},
    )
    assert both.over(defaults) == both


def test_a_pod_s_template_takes_the_place_of_the_default_one() -> None:
    """How one is laid over another is the backend's to say."""
    defaults, pod = Pod(template={"spec": {"hostNetwork": True}}), Pod(template={"spec": {"dnsPolicy": "Default"}})
    assert pod.over(defaults).template == pod.template
    assert Pod(image="own").over(defaults).template == defaults.template


def test_a_few_lines_of_yaml_can_not_stand_for_billions_of_values() -> None:
    """Aliases count as all that they stand for, merged or not, and no time is taken to write them out."""
    listed = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    merged = "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12))
    for bomb in (f"a0: &a0 [x]\n{listed}", f"a0: &a0 {{x: y}}\n{merged}"):
        with pytest.raises(SpecError, match=r"pod.template: .*more than 10000 values, aliases written out"):
            Pod(template=bomb)
    labels = Pod(template="metadata: {labels: &l {a: b}, annotations: *l}").template["metadata"]
    assert labels == {"labels": {"a": "b"}, "annotations": {"a": "b"}}


@pytest.mark.parametrize(
    ("amount", "resource", "text"),
    [
        (900 * 2.0**30, "memory", "900 GiB"),
        (1.5 * 2**40, "ephemeral-storage", "1,536 GiB"),
        (2.0**29, "hugepages-2Mi", "0.5 GiB"),
        (14.2, "cpu", "14.2"),
        (0.25, "cpu", "0.25"),
        (65536.0, "gpu", "65,536"),
        (0.0, "memory", "0 GiB"),
    ],
)
def test_an_amount_is_written_for_people(amount: float, resource: str, text: str) -> None:
    """Nobody reads 9.66368e+11 bytes."""
    assert format_amount(amount, resource) == text
