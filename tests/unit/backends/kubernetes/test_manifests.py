"""The objects that a job's spec becomes."""

from __future__ import annotations

from typing import Any

import pytest

from edl_runtime.backends.kubernetes import manifests
from edl_runtime.backends.kubernetes.pod_template import START
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod, Volume
from edl_runtime.specs import Bounds, JobSpec

OURS = {"app.kubernetes.io/managed-by": "edl-airflow", "edl-airflow/job": "job", "edl-airflow/kind": "trainer"}
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
POD_RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
SCRATCH = [
    {"name": "edl-0", "emptyDir": {}},
    {"name": "edl-1", "emptyDir": {}},
    {"name": "edl-2", "emptyDir": {"medium": "Memory"}},
]
DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def job(pod: Pod | None = None, **given: Any) -> JobSpec:
    basic = {"name": "job", "kind": "trainer", "command": ("python", "s.py"), "bounds": Bounds(1, 4), "instances": 3}
    return JobSpec(**{**basic, "pod": pod, **given})


def owner(spec: JobSpec, defaults: Pod | None = None) -> dict[str, Any]:
    return manifests.job_manifest(spec, token="me/1", created_at=1.5, defaults=defaults or Pod(image="runtime:1"))


def pod_spec(spec: JobSpec, defaults: Pod | None = None) -> dict[str, Any]:
    found: dict[str, Any] = owner(spec, defaults)["spec"]["template"]["spec"]
    return found


def instance(spec: JobSpec, defaults: Pod | None = None) -> dict[str, Any]:
    found: dict[str, Any] = pod_spec(spec, defaults)["containers"][0]
    return found


def variables(spec: JobSpec, defaults: Pod | None = None) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in instance(spec, defaults)["env"]}


def with_template(template: dict[str, Any], **given: Any) -> JobSpec:
    return job(Pod(template=template), **given)


def of_instance(**parts: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "instance", **parts}]}}


SHOWN = {"EDL_TLS_CERT": "/tls/tls.crt"}
SHOWN_BY_TEMPLATE = of_instance(env=[{"name": "EDL_TLS_CERT", "value": "/tls/tls.crt"}])


@pytest.mark.parametrize(
    ("pod", "env", "connection", "schemes"),
    [
        (None, SHOWN, None, {"HTTPS"}),
        (Pod(template=SHOWN_BY_TEMPLATE), {}, None, {"HTTPS"}),
        (Pod(secret_env={"EDL_TLS_CERT": "a/b"}), {}, None, {"HTTPS"}),
        (None, {}, Pod(image="runtime:1", template=SHOWN_BY_TEMPLATE), {"HTTPS"}),
        (None, {}, Pod(image="runtime:1", secret_env={"EDL_TLS_CERT": "a/b"}), {"HTTPS"}),
        (None, {"EDL_TLS_CERT": ""}, Pod(image="runtime:1", template=SHOWN_BY_TEMPLATE), {None}),
        (
            None,
            {},
            Pod(image="runtime:1", template={"spec": {"containers": [{"name": "instance", "env": {}}]}}),
            {None},
        ),
    ],
    ids=["spec", "template", "secret", "connection's template", "connection's secret", "not in this job", "odd"],
)
def test_teachers_that_speak_tls_are_asked_by_it_how_they_are(
    pod: Pod | None, env: dict[str, str], connection: Pod | None, schemes: set[str | None]
) -> None:
    """Which is a certificate among their variables, whoever says so."""
    container = instance(job(pod, kind="pool", serves_http=True, env=env), connection)
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert {container[probe]["httpGet"].get("scheme") for probe in probes} == schemes


def test_a_pool_is_a_deployment() -> None:
    """Its instances serve HTTP, come back always and are spread over nodes; it has none to begin with."""
    pod = Pod(
        image="teach:2",
        resources={"cpu": "500m", "memory": "2Gi", "gpu": 1},
        labels={"team": "vision"},
        annotations={"example.com/why": "speed"},
    )
    spec = job(pod, kind="pool", name="bert", command=("edl", "teacher"), serves_http=True, grace_s=30)
    labels = {
        "app.kubernetes.io/managed-by": "edl-airflow",
        "edl-airflow/job": "bert",
        "edl-airflow/kind": "pool",
        "team": "vision",
    }
    same = {"matchLabels": {"edl-airflow/job": "bert"}}
    live = {"httpGet": {"path": "/v2/health/live", "port": 8000}, "timeoutSeconds": 5}
    ready = {"httpGet": {"path": "/v2/health/ready", "port": 8000}, "timeoutSeconds": 5}
    assert owner(spec) == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "bert",
            "labels": labels,
            "annotations": {
                "example.com/why": "speed",
                "edl-airflow/token": "me/1",
                "edl-airflow/origin": "",
                "edl-airflow/digest": spec.digest,
                "edl-airflow/bounds": "1:4",
                "edl-airflow/priority": "0",
                "edl-airflow/weight": "1.0",
                "edl-airflow/wanted": "3",
                "edl-airflow/elastic": "false",
                "edl-airflow/created-at": "1.5",
                "edl-airflow/cwd": "",
            },
        },
        "spec": {
            "replicas": 0,
            "revisionHistoryLimit": 0,
            "selector": same,
            "template": {
                "metadata": {"labels": labels, "annotations": {"example.com/why": "speed"}},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "restartPolicy": "Always",
                    "terminationGracePeriodSeconds": 30,
                    "securityContext": POD_RESTRICTED,
                    "topologySpreadConstraints": [
                        {
                            "maxSkew": 1,
                            "topologyKey": "kubernetes.io/hostname",
                            "whenUnsatisfiable": "ScheduleAnyway",
                            "labelSelector": same,
                        }
                    ],
                    "containers": [
                        {
                            "name": "instance",
                            "image": "teach:2",
                            "command": ["python", "-P", "-c", START],
                            "args": ["edl", "teacher"],
                            "workingDir": "/edl",
                            "env": [
                                {"name": "EDL_JOB", "value": "bert"},
                                {"name": "EDL_GRACE_S", "value": "30.0"},
                                {"name": "EDL_RESULT_FILE", "value": "/edl/result.json"},
                                {"name": "HOME", "value": "/edl"},
                                {"name": "PYTHONUNBUFFERED", "value": "1"},
                                {"name": "EDL_PORT", "value": "8000"},
                                {"name": "EDL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                            ],
                            "envFrom": [{"secretRef": {"name": "bert-env"}}],
                            "volumeMounts": [
                                {"name": "edl-0", "mountPath": "/edl"},
                                {"name": "edl-1", "mountPath": "/tmp"},
                                {"name": "edl-2", "mountPath": "/dev/shm"},
                            ],
                            "terminationMessagePolicy": "FallbackToLogsOnError",
                            "resources": {
                                "requests": {"cpu": "500m", "memory": "2Gi", "nvidia.com/gpu": "1"},
                                "limits": {"memory": "2Gi", "nvidia.com/gpu": "1"},
                            },
                            "ports": [{"containerPort": 8000}],
                            "startupProbe": {**live, "periodSeconds": 2, "failureThreshold": 300},
                            "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 6},
                            "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 3},
                            "securityContext": RESTRICTED,
                        }
                    ],
                    "volumes": SCRATCH,
                },
            },
        },
    }


@pytest.mark.parametrize(("elastic", "most"), [(True, [2, 3, 0]), (False, [0, 0, 0])])
def test_only_elastic_trainers_go_on_without_those_that_were_given_up(most: list[int], *, elastic: bool) -> None:
    """A job of others that has lost one for good has failed, and its Job ends the rest."""
    made = owner(job(elastic=elastic))
    assert made["spec"]["maxFailedIndexes"] == most[0]
    found = [manifests.max_failed_indexes(count, Bounds(min=1, max=4), elastic=elastic) for count in (3, 4, 1)]
    assert found == most


def test_a_trainer_job_is_a_suspended_indexed_job() -> None:
    """Its instances know their number and run, end for good, and are placed near each other."""
    made = owner(job(cwd="/work", grace_s=0.5))
    template = made["spec"].pop("template")
    assert made["spec"] == {
        "suspend": True,
        "completionMode": "Indexed",
        "parallelism": 3,
        "completions": 3,
        "backoffLimitPerIndex": 4,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                DISRUPTED,
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "instance", "operator": "NotIn", "values": [0, 143]},
                },
            ]
        },
        "ttlSecondsAfterFinished": 604800,
    }
    assert (made["apiVersion"], made["kind"], made["metadata"]["labels"]) == ("batch/v1", "Job", OURS)
    assert template["metadata"] == {"labels": OURS}
    preferred = template["spec"].pop("affinity")["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [(one["weight"], one["podAffinityTerm"]["topologyKey"]) for one in preferred] == [
        (100, "kubernetes.io/hostname"),
        (50, "topology.kubernetes.io/zone"),
    ]
    (container,) = template["spec"].pop("containers")
    assert template["spec"] == {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": POD_RESTRICTED,
        "volumes": SCRATCH,
    }
    assert container["workingDir"] == "/work"
    assert container["env"][-3:] == [
        {"name": "EDL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {
            "name": "EDL_INSTANCE",
            "valueFrom": {
                "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
            },
        },
        {
            "name": "EDL_RUN",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
        },
    ]
    assert not container.keys() & {"ports", "startupProbe", "livenessProbe", "readinessProbe", "resources"}


def test_an_elastic_job_outlives_signals_and_status_78_of_an_instance() -> None:
    """Status 78 gives up that instance, a signal none, any other status fails all."""
    rules = owner(job(elastic=True))["spec"]["podFailurePolicy"]["rules"]
    assert rules[0] == DISRUPTED
    assert [(rule["action"], rule["onExitCodes"]["operator"]) for rule in rules[1:]] == [
        ("FailIndex", "In"),
        ("FailJob", "NotIn"),
    ]
    assert rules[1]["onExitCodes"]["values"] == [78]
    assert rules[2]["onExitCodes"]["values"] == [0, *range(129, 193)]
    assert all(sorted(rule["onExitCodes"]["values"]) == rule["onExitCodes"]["values"] for rule in rules[1:])
    assert owner(job(elastic=True))["metadata"]["annotations"]["edl-airflow/elastic"] == "true"


@pytest.mark.parametrize(
    ("given", "annotations", "said"),
    [
        ({"bounds": Bounds(1, 4)}, {}, "true"),
        ({"bounds": Bounds(1, 4)}, {"kueue.x-k8s.io/elastic-job": "false"}, "false"),
        ({"bounds": Bounds(2, 2), "instances": 2}, {}, None),
        ({"bounds": Bounds(1, 4), "kind": "pool"}, {}, None),
    ],
    ids=["has bounds", "the user says no", "has one size", "a pool's pods are queued one by one"],
)
def test_kueue_is_asked_to_let_a_job_be_resized(given: Any, annotations: dict[str, str], said: str | None) -> None:
    """It stops one that is resized otherwise, and hears of it only when the job is made."""
    metadata = owner(job(Pod(image="train:1", queue="gpus", annotations=annotations), **given))["metadata"]
    assert metadata["annotations"].get("kueue.x-k8s.io/elastic-job") == said
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    metadata = owner(job(**given))["metadata"]
    assert "kueue.x-k8s.io/elastic-job" not in metadata["annotations"]
    assert "kueue.x-k8s.io/queue-name" not in metadata["labels"]


def test_a_trainer_job_says_how_often_the_cluster_may_end_an_instance() -> None:
    """What the spec says, else the connection, else we; a pool's instances are replaced without end."""
    key = "edl-airflow/most-disruptions"
    connection = Pod(image="runtime:1", disruptions=50)
    found = [
        owner(spec, defaults)["metadata"]["annotations"][key]
        for spec, defaults in ((job(), None), (job(), connection), (job(Pod(disruptions=0)), connection))
    ]
    assert found == ["20", "50", "0"]
    assert key not in owner(job(kind="pool"), connection)["metadata"]["annotations"]


def test_words_are_passed_on_as_they_are() -> None:
    """Kubernetes would replace $(NAME) in commands and variables."""
    spec = job(command=("sh", "-c", "echo $(HOME) $$ $X"), env={"A": "$(EDL_JOB)", "B": "$$(C)"})
    assert instance(spec)["args"] == ["sh", "-c", "echo $$(HOME) $$$$ $$X"]
    assert (variables(spec)["A"], variables(spec)["B"]) == ("$$(EDL_JOB)", "$$$$(C)")


def test_variables_come_each_once_and_ours_win() -> None:
    """The spec's first, what the pod tells of itself, secrets last; what only the backend knows is not to be set."""
    pod = Pod(secret_env={"KEY": "aws/secret/key"}, env_from_secrets=["more"])
    spec = job(pod, env={"LR": "0.1", "EDL_JOB": "other", "EDL_HOST": "127.0.0.1"})
    names = [one["name"] for one in instance(spec)["env"]]
    assert names == [
        "LR", "EDL_JOB", "EDL_GRACE_S", "EDL_RESULT_FILE", "HOME", "PYTHONUNBUFFERED",
        "EDL_HOST", "EDL_INSTANCE", "EDL_RUN", "KEY",
    ]  # fmt: skip
    found = variables(spec)
    assert found["EDL_JOB"] == "job"
    assert found["EDL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert found["KEY"] == {"secretKeyRef": {"name": "aws", "key": "secret/key"}}
    assert instance(spec)["envFrom"] == [{"secretRef": {"name": "more"}}, {"secretRef": {"name": "job-env"}}]


@pytest.mark.parametrize("variable", ["LR", "EDL_JOB", "EDL_HOST", "EDL_INSTANCE", "HOME"])
def test_a_variable_is_not_set_twice(variable: str) -> None:
    """Of two of a name the cluster would take one, without a word."""
    with pytest.raises(SpecError) as caught:
        owner(job(Pod(secret_env={variable: "a/b"}), env={"LR": "0.1"}))
    assert (caught.value.field, caught.value.given) == ("pod.secret_env", variable)


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 60}},
        {"metadata": {"labels": {"edl-airflow/job": "x"}}},
        {"spec": {"volumes": [{"name": "edl-0", "hostPath": {"path": "/"}}]}},
        of_instance(command=["python"], args=["python", "t.py"], image="other:1", workingDir="/"),
        of_instance(env=[{"name": "EDL_JOB", "value": "x"}, {"name": "EDL_HOST", "value": "x"}]),
        of_instance(terminationMessagePolicy="File", resources={"limits": {"memory": "9Gi"}}),
        of_instance(volumeMounts=[{"name": "mine", "mountPath": "/edl/"}]),
    ],
)
def test_the_runtime_and_the_fields_of_a_pod_win_over_its_template(template: dict[str, Any]) -> None:
    """A template that sets only what they set changes nothing."""
    pod = Pod(image="runtime:1", resources={"memory": "1Gi"})
    changed = Pod(image="runtime:1", resources={"memory": "1Gi"}, template=template)
    assert owner(job(changed))["spec"] == owner(job(pod))["spec"]


def test_a_template_replaces_probes_and_scratch_folders() -> None:
    """Each as a whole."""
    probe = {"httpGet": {"path": "/v2/health/live", "port": 8000}, "failureThreshold": 9}
    template = of_instance(startupProbe=probe, volumeMounts=[{"name": "big", "mountPath": "/tmp"}])
    template["spec"]["volumes"] = [{"name": "big", "emptyDir": {"sizeLimit": "8Gi"}}]
    spec = pod_spec(with_template(template, serves_http=True))
    assert spec["containers"][0]["startupProbe"] == probe
    assert spec["containers"][0]["livenessProbe"]["failureThreshold"] == 6
    assert [one["name"] for one in spec["volumes"]] == ["edl-0", "big", "edl-2"]


def test_no_error_shows_a_secret() -> None:
    """Errors end up in logs."""
    with pytest.raises(SpecError) as caught:
        owner(with_template(of_instance(env=[{"name": "EDL_REDIS_URL", "value": "redis://:open-sesame@redis"}])))
    assert "open-sesame" not in str(caught.value)
    taken = with_template(
        of_instance(env=[{"name": "EDL_REDIS_URL", "valueFrom": {"secretKeyRef": {"name": "redis"}}}])
    )
    assert variables(taken)["EDL_REDIS_URL"] == {"secretKeyRef": {"name": "redis"}}


def test_a_template_that_repeats_the_pod_changes_nothing() -> None:
    """What `kubectl get -o yaml` shows of one may be given back."""
    made = owner(job(serves_http=True))["spec"]["template"]
    assert owner(with_template(made, serves_http=True))["spec"]["template"] == made


def test_other_containers_are_restricted_too_unless_they_say_otherwise() -> None:
    """Namespaces that admit nothing else are common."""
    template = {
        "spec": {
            "containers": [{"name": "audit", "image": "audit:1", "securityContext": {"readOnlyRootFilesystem": False}}],
            "initContainers": [
                {"name": "fetch", "image": "fetch:1"},
                {"name": "tune", "image": "tune:1", "securityContext": {"capabilities": {"add": ["SYS_NICE"]}}},
            ],
        }
    }
    spec = pod_spec(with_template(template))
    assert [one["name"] for one in spec["containers"]] == ["instance", "audit"]
    assert spec["containers"][0]["securityContext"] == RESTRICTED
    assert spec["containers"][1]["securityContext"] == {**RESTRICTED, "readOnlyRootFilesystem": False}
    fetch, tune = (one["securityContext"] for one in spec["initContainers"])
    assert fetch == RESTRICTED
    assert tune == {**RESTRICTED, "capabilities": {"drop": ["ALL"], "add": ["SYS_NICE"]}}


def test_a_template_replaces_what_is_only_our_default() -> None:
    """Users, tokens, links and placement are nobody's statement."""
    template = {
        "spec": {
            "securityContext": {"runAsUser": 7, "seccompProfile": {"type": "Unconfined"}},
            "automountServiceAccountToken": True,
            "topologySpreadConstraints": [],
            "containers": [{"name": "instance", "securityContext": {"capabilities": {"drop": []}}}],
        }
    }
    spec = pod_spec(with_template(template))
    assert spec["securityContext"] == {
        **POD_RESTRICTED,
        "runAsUser": 7,
        "seccompProfile": {"type": "Unconfined"},
    }
    assert spec["automountServiceAccountToken"] is True
    assert spec["containers"][0]["securityContext"] == {**RESTRICTED, "capabilities": {"drop": []}}
    assert "affinity" not in spec
    assert spec["topologySpreadConstraints"] == []


def test_an_affinity_that_is_given_is_all_there_is() -> None:
    """It may well be against being near."""
    affinity = {"nodeAffinity": {}}
    assert pod_spec(job(Pod(affinity=affinity)))["affinity"] == affinity
    assert "topologySpreadConstraints" not in pod_spec(job(Pod(affinity=affinity), kind="pool"))


def test_what_a_pod_says_is_in_its_manifest() -> None:
    """Under the names that Kubernetes has for it."""
    pod = Pod(
        node_selector={"disk": "ssd"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        priority_class="high",
        service_account="trainer",
        pull_secrets=["pull"],
    )
    spec = pod_spec(job(pod))
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("high", "trainer")
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert not pod_spec(job()).keys() & {
        "nodeSelector", "tolerations", "priorityClassName", "serviceAccountName", "imagePullSecrets",
    }  # fmt: skip


def test_volumes_are_seen_where_they_are_wanted() -> None:
    """Also in the place of our own folders for scratch. They are named after their paths."""
    pod = Pod(
        volumes=[
            Volume(path="/data", claim="data", read_only=True),
            Volume(path="/dev/shm/", source={"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}),
        ]
    )
    spec = pod_spec(job(pod))
    assert spec["volumes"] == [
        SCRATCH[0],
        {"name": "volume-090463b7", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "volume-24e7d9c8", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        SCRATCH[1],
    ]
    assert spec["containers"][0]["volumeMounts"] == [
        {"name": "edl-0", "mountPath": "/edl"},
        {"name": "volume-090463b7", "mountPath": "/data", "readOnly": True},
        {"name": "volume-24e7d9c8", "mountPath": "/dev/shm/"},
        {"name": "edl-1", "mountPath": "/tmp"},
    ]


@pytest.mark.parametrize(
    ("resources", "made"),
    [
        ({"cpu": 2}, {"requests": {"cpu": "2"}}),
        ({"gpu": 8}, {"requests": {"nvidia.com/gpu": "8"}, "limits": {"nvidia.com/gpu": "8"}}),
        ({"rdma/hca": "1"}, {"requests": {"rdma/hca": "1"}, "limits": {"rdma/hca": "1"}}),
        (
            {"cpu": 0.5, "memory": 1 << 30},
            {"requests": {"cpu": "0.5", "memory": "1073741824"}, "limits": {"memory": "1073741824"}},
        ),
    ],
)
def test_all_but_the_cpu_is_a_limit_too(resources: dict[str, Any], made: dict[str, Any]) -> None:
    """Devices need both to be the same; a CPU that is idle is anybody's."""
    assert instance(job(Pod(resources=resources)))["resources"] == made


def test_the_image_is_the_nearest_that_is_named() -> None:
    """The pod's, or its template's, or the connection's; without one there is nothing to run."""
    template = of_instance(image="template:1")
    assert instance(job())["image"] == "runtime:1"
    assert instance(job(Pod(image="pod:1")))["image"] == "pod:1"
    assert instance(with_template(template))["image"] == "template:1"
    assert instance(job(), Pod(template=template))["image"] == "template:1"
    assert instance(job(Pod(image="template:1", template=template)))["image"] == "template:1"
    with pytest.raises(SpecError) as caught:
        owner(job(), Pod())
    assert caught.value.field == "pod.image"


def test_a_folder_to_start_in_is_absolute() -> None:
    """There is no folder that a pod and this machine have in common, for a path to begin at."""
    with pytest.raises(SpecError) as caught:
        owner(job(cwd="jobs/student"))
    assert caught.value.field == "cwd"


def test_a_pool_is_protected_and_its_secrets_are_a_secret() -> None:
    """Nodes are drained one instance at a time; secrets stand nowhere else."""
    spec = job(kind="pool")
    labels = {**OURS, "edl-airflow/kind": "pool"}
    assert manifests.disruption_budget_manifest(spec) == {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "job", "labels": labels},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"edl-airflow/job": "job"}}},
    }
    assert manifests.secret_manifest(spec, {"EDL_REDIS_URL": "redis://$x"}) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "job-env", "labels": labels},
        "stringData": {"EDL_REDIS_URL": "redis://$x"},
    }


def test_making_a_manifest_leaves_the_spec_alone() -> None:
    """What is done to one manifest is not in the next."""
    spec = job(Pod(labels={"a": "b"}, template={"spec": {"hostNetwork": True}}))
    made = owner(spec)
    made["metadata"]["labels"]["a"] = made["spec"]["template"]["spec"]["hostNetwork"] = "changed"
    assert owner(spec)["metadata"]["labels"]["a"] == "b"
    assert owner(spec)["spec"]["template"]["spec"]["hostNetwork"] is True
