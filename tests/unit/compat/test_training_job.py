"""What the original's manifests say, in our own words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paths import EXAMPLES

from edl_runtime.compat.training_job import TrainingJob, read_training_job, to_training_job
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod, Volume
from edl_runtime.specs import Bounds

TUTORIAL = {
    "apiVersion": "paddlepaddle.org/v1",
    "kind": "TrainingJob",
    "metadata": {"name": "digits"},
    "spec": {
        "image": "registry.example/digits:1",
        "port": 7164,
        "ports_num": 1,
        "ports_num_for_sparse": 1,
        "fault_tolerant": True,
        "trainer": {
            "entrypoint": "python /workspace/train.py",
            "workspace": "/workspace",
            "passes": 50,
            "min-instance": 2,
            "max-instance": 6,
            "resources": {
                "limits": {"alpha.kubernetes.io/nvidia-gpu": 1, "cpu": "200m", "memory": "200Mi"},
                "requests": {"cpu": "100m", "memory": "200Mi"},
            },
        },
        "pserver": {"min-instance": 2, "max-instance": 2},
        "master": {"resources": {"requests": {"cpu": "500m"}}},
    },
}
"""As the tutorial of the original had it."""

DEFINITION = {
    "apiVersion": "paddlepaddle.org/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {
        "name": "digits",
        "namespace": "team",
        "uid": "1b4e28ba",
        "labels": {"team": "vision"},
        "annotations": {"owner": "Ada", "kubectl.kubernetes.io/last-applied-configuration": "{}"},
    },
    "spec": {
        "image": "registry.example/digits:1",
        "host_network": True,
        "passes": 3,
        "fault_tolerant": False,
        "local_job": False,
        "schedulerName": "volcano",
        "volumes": [
            {"name": "digits", "persistentVolumeClaim": {"claimName": "digits", "readOnly": True}},
            {"name": "models", "csi": {"driver": "models.example.com"}},
        ],
        "VolumeMounts": [
            {"name": "digits", "mountPath": "/data"},
            {"name": "models", "mountPath": "/models", "readOnly": False},
        ],
        "trainer": {
            "etcd-endpoint": "http://etcd:2379",
            "entrypoint": "python train.py",
            "workspace": "",
            "min-instance": 1,
            "max-instance": 0,
            "resources": {"limits": {"nvidia.com/gpu": 2}},
            "envs": {"LR": "0.1", "PADDLE_INIT_USE_GPU": "0"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "node_selector": {"gpu": "a100"},
            "imagePullSecrets": [{"name": "registry"}],
            "grace_period_seconds": 5,
        },
        "pserver": None,
        "master": {},
    },
    "status": {"phase": "Running"},
}
"""As the resource definition of the later controller had it."""


def read(manifest: Any, **given: Any) -> TrainingJob:
    (job,) = read_training_job(yaml.safe_dump(manifest), **given)
    return job


def changed(path: str, value: Any, manifest: Any = TUTORIAL) -> Any:
    """Return the manifest with another value there; `...` takes the field away."""
    other = copy.deepcopy(manifest)
    *above, last = path.split("/")
    place = other
    for name in above:
        place = place.setdefault(name, {})
    if value is ...:
        place.pop(last, None)
    else:
        place[last] = value
    return other


def trainer(field: str, value: Any) -> Any:
    return changed(f"spec/trainer/{field}", value)


def test_a_pull_secret_may_be_a_mapping() -> None:
    """As in some of EDL's own manifests, instead of a list."""
    for at in ("spec", "spec/trainer"):
        job = read(changed(f"{at}/imagePullSecrets", {"name": "registry"}))
        assert job.trainer.pod
        assert list(job.trainer.pod.pull_secrets) == ["registry"]


def test_the_tutorials_form() -> None:
    """Name, script, bounds, image and resources; passes are told the script as they always were."""
    job = read(TUTORIAL)
    assert (job.name, job.namespace, job.bounds) == ("digits", "", Bounds(2, 6))
    assert job.trainer.command == ("python", "/workspace/train.py")
    assert job.trainer.cwd == "/workspace"
    assert job.trainer.env == {
        "PADDLE_JOB_NAME": "digits",
        "PADDLE_INIT_NUM_PASSES": "50",
        "PADDLE_INIT_USE_GPU": "1",
    }
    resources: dict[str, str | int | float] = {"cpu": "100m", "memory": "200Mi", "gpu": 1}
    assert job.trainer.pod == Pod(image="registry.example/digits:1", resources=resources)


def test_a_size_is_within_the_bounds_or_zero() -> None:
    """`kubectl scale` sets it; 0 suspends a job."""
    assert read(TUTORIAL).instances is None
    assert [read(trainer("instances", size)).instances for size in (0, 2, 6)] == [0, 2, 6]
    for size in (1, 7, -1, True, "2"):
        with pytest.raises(SpecError, match=r"spec\.trainer\.instances: got"):
            read(trainer("instances", size))


def test_the_definitions_form() -> None:
    """Volumes, environment, tolerations, node selectors, secrets, labels and the scheduler come along as well."""
    job = read(DEFINITION)
    assert (job.name, job.namespace, job.bounds) == ("digits", "team", Bounds(1, 1))
    assert job.trainer.cwd == ""
    assert job.trainer.env == {
        "PADDLE_JOB_NAME": "digits",
        "PADDLE_INIT_NUM_PASSES": "3",
        "PADDLE_INIT_USE_GPU": "0",
        "LR": "0.1",
    }
    assert job.trainer.pod == Pod(
        image="registry.example/digits:1",
        resources={"gpu": 2},
        volumes=[
            Volume(path="/data", claim="digits", read_only=True),
            Volume(path="/models", source={"csi": {"driver": "models.example.com"}}),
        ],
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        node_selector={"gpu": "a100"},
        pull_secrets=["registry"],
        labels={"team": "vision"},
        annotations={"owner": "Ada"},
        template={"spec": {"schedulerName": "volcano"}},
    )


def test_ignored_fields_are_reported_with_their_replacement() -> None:
    """One sentence each, and none for a field that says nothing."""
    assert [note.partition(":")[0] for note in read(DEFINITION).notes] == [
        "status is ignored",
        "metadata.uid is ignored",
        "spec.host_network is ignored",
        "spec.trainer.etcd-endpoint is ignored",
        "spec.trainer.grace_period_seconds is ignored",
        "metadata.namespace is ignored",
        "spec.fault_tolerant need not be true",
    ]
    notes = "\n".join(read(TUTORIAL).notes)
    assert "spec.pserver is ignored: every trainer holds the whole model" in notes
    assert "spec.master is ignored: a ledger in Redis" in notes
    assert "spec.port is ignored: there are no parameter servers" in notes
    assert "spec.fault_tolerant is not needed" in notes
    assert "spec.trainer.resources.limits.cpu is no limit" in notes


def test_every_job_is_elastic() -> None:
    """The original wanted fault_tolerant for that; here it is only said."""
    job = read(changed("spec/fault_tolerant", ...))
    assert job.bounds == Bounds(2, 6)
    assert any(note.startswith("spec.fault_tolerant need not be true") for note in job.notes)


def test_memory_that_is_promised_is_all_that_there_may_be() -> None:
    """The limit counts, and it is said that the request does not."""
    resources = {"requests": {"memory": "1Gi", "cpu": 1}, "limits": {"memory": "2Gi"}}
    job = read(trainer("resources", resources))
    assert job.trainer.pod
    assert job.trainer.pod.resources == {"memory": "2Gi", "cpu": 1}
    assert any(note.startswith("spec.trainer.resources.requests.memory is ignored") for note in job.notes)


@pytest.mark.parametrize("name", ["alpha.kubernetes.io/nvidia-gpu", "nvidia.com/gpu"])
@pytest.mark.parametrize("part", ["limits", "requests"])
def test_gpus_by_either_name(name: str, part: str) -> None:
    """None are wanted by 0."""
    for count, amounts in ((2, {"gpu": 2}), (0, {})):
        job = read(trainer("resources", {part: {name: count}}))
        assert job.trainer.pod
        assert job.trainer.pod.resources == amounts
        assert job.trainer.env["PADDLE_INIT_USE_GPU"] == str(int(bool(count)))


@pytest.mark.parametrize(
    ("entrypoint", "command"),
    [
        ("python train.py --lr 0.1", ("python", "train.py", "--lr", "0.1")),
        ("python 'my script.py' \"a;b\" ", ("python", "my script.py", "a;b")),
        ("python train.py --epochs $PADDLE_INIT_NUM_PASSES", ("python", "train.py", "--epochs", "50")),
        ("python train.py --to=/out/${PADDLE_JOB_NAME}.x", ("python", "train.py", "--to=/out/digits.x")),
        ("python train.py '#1' --match a$", ("python", "train.py", "#1", "--match", "a$")),
        ("sh -c 'cd src && exec python train.py $HOME'", ("sh", "-c", "cd src && exec python train.py $HOME")),
        ("train.py\n  --fast", ("train.py", "--fast")),
    ],
)
def test_the_entrypoint_is_a_command(entrypoint: str, command: tuple[str, ...]) -> None:
    """Split as a shell does it, with the variables that the manifest gives; a shell runs it only if it says so."""
    assert read(trainer("entrypoint", entrypoint)).trainer.command == command


def test_another_name_is_the_scripts_too() -> None:
    """A copy does not take itself for the first."""
    job = read(trainer("entrypoint", "python t.py $PADDLE_JOB_NAME"), name="digits-2")
    assert (job.name, job.trainer.env["PADDLE_JOB_NAME"]) == ("digits-2", "digits-2")
    assert job.trainer.command == ("python", "t.py", "digits-2")


def test_passes_stand_beside_or_within_the_trainer() -> None:
    """As the definition has it, and as all examples had it; it is one by default."""
    without = trainer("passes", ...)
    assert read(without).trainer.env["PADDLE_INIT_NUM_PASSES"] == "1"
    assert read(changed("spec/passes", 7, without)).trainer.env["PADDLE_INIT_NUM_PASSES"] == "7"
    assert read(changed("spec/passes", 50)).trainer.env["PADDLE_INIT_NUM_PASSES"] == "50"
    with pytest.raises(SpecError, match=r"spec\.trainer\.passes: got 50, allowed is the same as spec\.passes"):
        read(changed("spec/passes", 7))


TOKEN = {"sources": [{"configMap": {"name": "lexicon"}}, {"serviceAccountToken": {"path": "token"}}]}


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"hostPath": {"path": "/"}}, "hostPath: got {'path': '/'}"),
        ({"nfs": {"path": "/", "server": "files"}}, "nfs: got {'path': '/', 'server': 'files'}"),
        ({"projected": TOKEN}, "projected.sources[1].serviceAccountToken: got {'path': 'token'}"),
    ],
)
def test_volumes_that_give_more_than_the_namespace_s_own_are_refused(source: dict[str, Any], field: str) -> None:
    """Else who may create a TrainingJob had the node's files, or the rights of a service account."""
    mounts = [{"name": "first", "mountPath": "/first"}, {"name": "data", "mountPath": "/data"}]
    volumes = [{"name": "first", "secret": {"secretName": "s3"}}, {"name": "data", **source}]
    manifest = changed("spec/volumes", volumes, changed("spec/volumeMounts", mounts))
    with pytest.raises(SpecError) as refused:
        read(manifest)
    assert str(refused.value).startswith(f"spec.volumes[1].{field}, allowed is one of ")
    assert "EDL_MANIFEST_VOLUMES" in str(refused.value)
    kinds = "hostPath, nfs,serviceAccountToken"
    assert read(manifest, volumes=kinds).trainer.pod.volumes[1] == Volume(path="/data", source=source)


def test_a_volume_in_several_places_is_one_volume() -> None:
    """So is a part of one: a pod's template says what a Volume can't."""
    mounts = [
        {"name": "data", "mountPath": "/in"},
        {"name": "data", "mountPath": "/out"},
        {"name": "all", "mountPath": "/part", "subPath": "part"},
        {"name": "alone", "mountPath": "/alone", "readOnly": True},
    ]
    volumes = [
        {"name": "data"},
        {"name": "all", "persistentVolumeClaim": {"claimName": "all"}},
        {"name": "alone", "configMap": {"name": "lexicon"}},
        {"name": "nowhere", "emptyDir": {}},
    ]
    job = read(changed("spec/volumes", volumes, changed("spec/volumeMounts", mounts)))
    assert job.trainer.pod
    assert job.trainer.pod.volumes == (
        Volume(path="/alone", source={"configMap": {"name": "lexicon"}}, read_only=True),
    )
    assert job.trainer.pod.template == {
        "spec": {
            "volumes": [
                {"name": "manifest-0", "emptyDir": {}},
                {"name": "manifest-1", "persistentVolumeClaim": {"claimName": "all"}},
            ],
            "containers": [
                {
                    "name": "instance",
                    "volumeMounts": [
                        {"name": "manifest-0", "mountPath": "/in"},
                        {"name": "manifest-0", "mountPath": "/out"},
                        {"name": "manifest-1", "mountPath": "/part", "subPath": "part"},
                    ],
                }
            ],
        }
    }
    assert "spec.volumes has 'nowhere', which has no mount and is left out" in job.notes


def test_several_documents_and_lists() -> None:
    """All of them, in order; messages say which one they are about."""
    second = changed("metadata/name", "second")
    text = "---\n" + yaml.safe_dump_all([TUTORIAL, None, {"kind": "List", "apiVersion": "v1", "items": [second]}])
    first, other = read_training_job(text)
    assert (first.name, other.name) == ("digits", "second")
    assert "document 2: items[0].spec.pserver is ignored" in "\n".join(other.notes)
    bad = changed("spec/trainer/min-instance", 0, second)
    with pytest.raises(SpecError, match=r"^document 2: spec\.trainer\.min-instance: got 0, allowed is a whole number"):
        read_training_job(yaml.safe_dump_all([TUTORIAL, bad]))
    with pytest.raises(SpecError, match=r"^metadata\.name: got 'digits', allowed is a unique name"):
        read_training_job(yaml.safe_dump_all([TUTORIAL, TUTORIAL]))
    with pytest.raises(SpecError, match=r"^name: got 'copy', allowed is no name for 2 TrainingJobs"):
        read_training_job(yaml.safe_dump_all([TUTORIAL, second]), name="copy")


def test_the_example_has_all_fields_of_the_tutorials() -> None:
    """And runs the script beside it for as many epochs as it has passes."""
    examples = EXAMPLES
    job = read(yaml.safe_load((examples / "training_job" / "examplejob.yaml").read_text()))
    assert job.trainer.command == ("python", "train.py", "--epochs", "2")
    assert (examples / Path(job.trainer.cwd).name / "train.py").exists()
    assert job.bounds == Bounds(1, 4)


VOLUME = {"name": "data", "emptyDir": {}}
MOUNT = {"name": "data", "mountPath": "/data"}


def mounted(**mount: Any) -> Any:
    return changed("spec/volumes", [VOLUME], changed("spec/VolumeMounts", [{**MOUNT, **mount}]))


WRONG: list[tuple[Any, str]] = [
    (mounted(name="other"), "spec.VolumeMounts[0].name: got 'other', allowed is a volume's: data"),
    (mounted(mountPath="data"), "spec.VolumeMounts[0].mountPath: got 'data', allowed is an absolute path"),
    (mounted(mountPath=1), "spec.VolumeMounts[0].mountPath: got 1, allowed is an absolute path"),
    (mounted(readOnly="no"), "spec.VolumeMounts[0].readOnly: got 'no', allowed is true or false"),
    (mounted(path="/data"), "spec.VolumeMounts[0].path: got '/data', allowed is one of the fields mountPath,"),
    (changed("apiVersion", "batch/v1"), "apiVersion: got 'batch/v1', allowed is 'paddlepaddle.org/v1' or"),
    (changed("kind", "PaddleJob"), "kind: got 'PaddleJob', allowed is 'TrainingJob'"),
    (changed("metadata", ...), "metadata: got None, allowed is a mapping: 'metadata' is required"),
    (changed("metadata/name", "Digits"), "metadata.name: got 'Digits', allowed is 1 to 52 of a-z"),
    (changed("metadata/labels", {"a": 1}), "metadata.labels['a']: got 1, allowed is at most 63 letters"),
    (changed("metadata/annotations", []), "metadata.annotations: got [], allowed is a mapping"),
    (changed("spec/pservers", {}), "spec.pservers: got {}, allowed is one of the fields VolumeMounts, annotations,"),
    (changed("spec/image", 5), "spec.image: got 5, allowed is an image's name"),
    (changed("spec/fault_tolerant", "yes"), "spec.fault_tolerant: got 'yes', allowed is true or false"),
    (changed("spec/passes", -1), "spec.passes: got -1, allowed is a whole number, 0 to 2,147,483,647"),
    (changed("spec/imagePullSecrets", ["a"]), "spec.imagePullSecrets[0]: got 'a', allowed is a mapping"),
    (changed("spec/imagePullSecrets", "a"), "spec.imagePullSecrets: got 'a', allowed is a list of secrets by name"),
    (changed("spec/imagePullSecrets", {"names": "a"}), "spec.imagePullSecrets[0].name[0]: got None, allowed is"),
    (changed("spec/imagePullSecrets", [{"name": "A"}]), "spec.imagePullSecrets[0].name: got 'A', allowed is the name"),
    (changed("spec/volumes", {}), "spec.volumes: got {}, allowed is a list"),
    (changed("spec/volumes", [VOLUME, VOLUME]), "spec.volumes[1].name: got 'data', allowed is a unique name"),
    (changed("spec/VolumeMounts", [MOUNT]), "spec.VolumeMounts[0].name: got 'data', allowed is a volume's: there are"),
    (changed("spec/trainer", ...), "spec.trainer: got None, allowed is a mapping: 'trainer' is required"),
    (trainer("min_instance", 1), "spec.trainer.min_instance: got 1, allowed is one of the fields entrypoint, envs,"),
    (trainer("min-instance", 0), "spec.trainer.min-instance: got 0, allowed is a whole number, 1 to 10,000"),
    (trainer("min-instance", ...), "spec.trainer.min-instance: got None, allowed is a whole number, 1 to 10,000"),
    (trainer("min-instance", True), "spec.trainer.min-instance: got True, allowed is a whole number, 1 to 10,000"),
    (trainer("max-instance", 1), "spec.trainer.max-instance: got 1, allowed is at least min-instance, which is 2"),
    (trainer("entrypoint", ...), "spec.trainer.entrypoint: got None, allowed is a command"),
    (trainer("entrypoint", " "), "spec.trainer.entrypoint: got ' ', allowed is a command, as in 'python train.py'"),
    (trainer("entrypoint", "a 'b"), 'spec.trainer.entrypoint: got "a \'b", allowed is a command, as in'),
    (
        trainer("entrypoint", "cd a && b"),
        "spec.trainer.entrypoint: got '&&', allowed is one command without shell",
    ),
    (
        trainer("entrypoint", "a > b"),
        "spec.trainer.entrypoint: got '>', allowed is one command without shell",
    ),
    (trainer("entrypoint", "LR=1 a"), "spec.trainer.entrypoint: got 'LR=1', allowed is a command; set variables"),
    (trainer("entrypoint", "a $HOME"), "spec.trainer.entrypoint: got '$HOME', allowed is $PADDLE_JOB_NAME, $PADDLE_"),
    (
        changed("spec/volumes", [{"name": f"v{number}"} for number in range(1_001)]),
        "spec.volumes: got '1,001 entries', allowed is 1,000 at most",
    ),
    (
        trainer("resources", {"limits": {f"a/{number}": 1 for number in range(1_001)}}),
        "spec.trainer.resources.limits: got '1,001 entries', allowed is 1,000 at most",
    ),
    (trainer("entrypoint", "a" * 100_001), f"spec.trainer.entrypoint: got '{'a' * 499}… (100,003 characters), allowed"),
    (trainer("workspace", 5), "spec.trainer.workspace: got 5, allowed is text"),
    (trainer("envs", {"A": 1}), "spec.trainer.envs['A']: got 'int', allowed is text, as in '0.1'"),
    (trainer("envs", {"EDL_REDIS_URL": "x"}), "spec.trainer.envs: got 'EDL_REDIS_URL', allowed is none that may hold"),
    (trainer("tolerations", ["gpu"]), "spec.trainer.tolerations[0]: got 'gpu', allowed is a dict"),
    (trainer("node_selector", {"a b": ""}), "spec.trainer.node_selector: got 'a b', allowed is names as in 'team'"),
    (trainer("resources", {"cpu": 1}), "spec.trainer.resources.cpu: got 1, allowed is one of the fields limits, req"),
    (
        trainer("resources", {"limits": {"cpu": "many"}}),
        "spec.trainer.resources.limits.cpu: got 'many', allowed is a quantity, as in 2, '500m' or '8Gi'",
    ),
    (
        trainer("resources", {"limits": {"nvidia.com/gpu": "9" * 5000}}),
        f"spec.trainer.resources.limits.nvidia.com/gpu: got '{'9' * 499}… (5,002 characters), allowed is a quantity of",
    ),
    (
        trainer("resources", {"limits": {"memory": "200Ti"}}),
        "spec.trainer.resources.limits.memory: got '200Ti', allowed is a quantity of at most 1e+14 cores, bytes or",
    ),
    (
        changed("metadata/annotations", {"about": "x" * 5_000_000}),
        "metadata.annotations: got '5,000,005 bytes', allowed is 262,144 bytes",
    ),
    (
        trainer("resources", {"limits": {"disk": 1}}),
        "spec.trainer.resources.limits.disk: got 'disk', allowed is 'cpu', 'memory', 'gpu'",
    ),
    (
        trainer("resources", {"limits": {"alpha.kubernetes.io/nvidia-gpu": 1, "nvidia.com/gpu": 2}}),
        "spec.trainer.resources.limits.nvidia.com/gpu: got 2, allowed is 1, as under the other name of GPUs",
    ),
]


@pytest.mark.parametrize(("manifest", "said"), WRONG, ids=[said.partition(",")[0] for _, said in WRONG])
def test_what_is_wrong_is_named_by_its_path(manifest: Any, said: str) -> None:
    """With what was given, and what is allowed."""
    with pytest.raises(SpecError) as refused:
        read(manifest)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (trainer("entrypoint", "a\0b"), "spec.trainer.entrypoint: got 'a\\x00b', allowed is a command"),
        (trainer("min-instance", 10**30), f"spec.trainer.min-instance: got {10**30}, allowed is a whole number, 1 to"),
        (trainer("instances", 10**30), f"spec.trainer.instances: got {10**30}, allowed is a whole number, 0 to 10,000"),
        (trainer("passes", 10**30), f"spec.trainer.passes: got {10**30}, allowed is a whole number, 0 to 2,147,483,6"),
    ],
    ids=["entrypoint", "min-instance", "instances", "passes"],
)
def test_what_only_json_can_say_is_refused_as_well(manifest: Any, said: str) -> None:
    """An API server may pass it on, and no process could be started with it."""
    with pytest.raises(SpecError) as refused:
        to_training_job(manifest)
    assert str(refused.value).startswith(said)
