"""`edl controller`: TrainingJobs by kubectl alone, on a real cluster."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.backends.jobs import WAITS, add_slots, eventually, exits_without_slot, job, wait_for_line
from support.backends.jobs import reach as reach_status
from support.cluster.cluster import Cluster, RedisService, own_namespace
from support.cluster.controller_process import TIMES, Labelled, run_until_killed, running
from support.cluster.manifests import account_token, create, manifests, path_of
from support.cluster.pod_faults import kubeconfig_with, server_of
from support.cluster.recorder import Recorder, of_kueue, only, verbs_of
from support.cluster.trainingjobs import (
    controller,
    environ,
    events,
    forget_trainingjobs,
    kubectl,
    manifest,
    quick_controller,
    reach,
    runs,
    training_job,
    trainingjobs_served,
    wait_for_files,
)
from support.depth import DEEP
from support.network.proxy import running_proxy
from support.paths import DEPLOY, EXAMPLES, ROOT

from edl_runtime.backends.kubernetes import names
from edl_runtime.compat.job_specs import job_spec
from edl_runtime.compat.training_job import read_training_job
from edl_runtime.controller.passes import PassOptions
from edl_runtime.settings import KEPT_LOGS, RuntimeSettings

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

POINTS_OF_START = (1, 2, 3, 4, 6, 7) if DEEP else (2, 3)
"""After the finalizer, the Job, its Secret, its start, the recorded size, and the status."""


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[None]:
    """The resource definition."""
    with trainingjobs_served(cluster):
        yield


@pytest.fixture
def place(request: pytest.FixtureRequest, home: Cluster) -> Iterator[Cluster]:
    """A namespace of the test's own; its TrainingJobs are gone afterwards."""
    request.getfixturevalue("served")
    yield home
    forget_trainingjobs(home)


def objects(cluster: Cluster) -> list[str]:
    return asyncio.run(cluster.objects())


def test_a_trainingjob_is_created_scaled_and_deleted_by_kubectl(
    place: Cluster, redis_service: RedisService, tmp_path: Path
) -> None:
    """Its Job is that of `edl submit`; status, columns and events tell what happens; its last checkpoint is written."""
    kubectl(place, "create", "--dry-run=server", "-f", str(EXAMPLES / "training_job" / "examplejob.yaml"))
    text = manifest(place, "example", tmp_path)
    with controller(place, redis_service, "--no-rescale"):
        kubectl(place, "create", "-f", "-", text=text)
        reach(place, "example", runs(1))
        (job,) = asyncio.run(place.list_objects("jobs"))
        (described,) = read_training_job(text, volumes="hostPath")
        annotations = job["metadata"]["annotations"]
        assert annotations[names.DIGEST] == job_spec(described, RuntimeSettings()).digest
        (owner,) = job["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("TrainingJob", training_job(place, "example")["metadata"]["uid"])

        kubectl(place, "scale", "trainingjob/example", "--replicas=3")
        reach(place, "example", runs(3))
        with pytest.raises(AssertionError, match="allowed is min-instance to max-instance, or 0"):
            kubectl(place, "scale", "trainingjob/example", "--replicas=9")

        edl = [sys.executable, "-P", "-m", "edl_runtime.cli", "resize", "example", "2"]
        subprocess.run(edl, env=environ(place, redis_service), check=True)
        reach(place, "example", runs(2))
        heading, line = kubectl(place, "get", "tj").splitlines()
        assert heading.split() == ["NAME", "STATE", "INSTANCES", "WANTED", "PROGRESS", "AGE", "REASON"]
        assert line.split()[:4] == ["example", "running", "2", "2"]
        assert "example" in kubectl(place, "get", "trainingjobs.v1alpha1.paddlepaddle.org")

        wait_for_files(tmp_path, "up-example-0", "up-example-1")
        kubectl(place, "delete", "trainingjob", "example")
        assert objects(place) == []
        wait_for_files(tmp_path, "checkpoint-example-0", "checkpoint-example-1")
        seen = events(place, "example")
    assert seen.keys() >= {"Created", "Resized", "Stopping"}
    assert seen["Resized"] == "resized from 3 to 2"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metadata": {"name": "a.b"}}, "metadata.name: allowed is 1 to 52 of a-z"),
        ({"metadata": {"name": "a" * 53}}, "metadata.name: allowed is 1 to 52 of a-z"),
        ({"spec": {"image": "Upper:1"}}, "allowed is the name of an image"),
        (
            {"spec": {"trainer": {"max-instance": 1, "min-instance": 2}}},
            "max-instance: allowed is at least min-instance",
        ),
        ({"spec": {"trainer": {"instances": 9}}}, "instances: allowed is min-instance to max-instance, or 0"),
        ({"spec": {"trainer": {"entrypoint": "a\0b"}}}, "spec.trainer.entrypoint"),
    ],
)
def test_a_trainingjob_that_can_t_be_is_refused_at_once(
    place: Cluster, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    """By the API server: nobody has to look for the reason in its status."""
    given = yaml.safe_load(manifest(place, "example", tmp_path))
    given["metadata"].update(change.get("metadata", {}))
    spec = change.get("spec", {})
    given["spec"].update({name: value for name, value in spec.items() if name != "trainer"})
    given["spec"]["trainer"].update(spec.get("trainer", {}))
    with pytest.raises(AssertionError, match=re.escape(said)):
        kubectl(place, "create", "--dry-run=server", "-f", "-", text=json.dumps(given))


def test_a_controller_that_is_killed_after_a_change_leaves_one_job_or_none(
    request: pytest.FixtureRequest, cluster: Cluster, redis_service: RedisService, tmp_path: Path
) -> None:
    """At each point of a start and of a deletion, each in a namespace of its own; another controller completes it."""

    async def start_and_delete(home: Cluster, point: int, out: Path) -> None:
        await create(home, yaml.safe_load(manifest(home, "example", out)))
        await run_until_killed(home, redis_service, point)
        async with running(home, redis_service):
            await phase(home, "running")
            await asyncio.to_thread(wait_for_files, out, "up-example-0")
        assert kinds(await home.objects()) == ["jobs", "pods", "secrets"]
        await home.request("DELETE", path_of(home, "TrainingJob", "example"))
        await run_until_killed(home, redis_service, (point + 1) // 2)
        async with running(home, redis_service):
            await phase(home, "")
        assert await home.remaining_objects() == []
        wait_for_files(out, "checkpoint-example-0")

    request.getfixturevalue("served")
    with ExitStack() as stack:
        places = {
            point: stack.enter_context(own_namespace(cluster.kubeconfig, cluster.image)) for point in POINTS_OF_START
        }
        for home in places.values():
            stack.callback(forget_trainingjobs, home)

        async def all_at_once() -> None:
            async with asyncio.TaskGroup() as tasks:
                for point, home in places.items():
                    (tmp_path / str(point)).mkdir()
                    tasks.create_task(start_and_delete(home, point, tmp_path / str(point)))

        asyncio.run(all_at_once())


async def phase(cluster: Cluster, phase: str) -> None:
    """Wait until the TrainingJob "example" is in that phase; empty for gone."""

    async def is_there() -> bool:
        found = await cluster.request("GET", path_of(cluster, "TrainingJob", "example"))
        return str(found.get("status", {}).get("phase", "") if found["kind"] == "TrainingJob" else "") == phase

    await eventually(is_there, f"phase {phase!r}")


def kinds(objects: list[str]) -> list[str]:
    return [one.split()[0] for one in objects]


@pytest.mark.deep
def test_of_two_controllers_one_leads_and_the_other_takes_over(
    place: Cluster, redis_service: RedisService, tmp_path: Path
) -> None:
    """When the leader is killed; each job is made once."""

    def holder() -> str:
        lease = json.loads(kubectl(place, "get", "lease", "edl-controller", "-o", "json"))
        return str(lease["spec"]["holderIdentity"])

    with ExitStack() as stack:
        first = stack.enter_context(quick_controller(place, redis_service))
        stack.callback(first.kill)
        kubectl(place, "create", "-f", "-", text=manifest(place, "one", tmp_path))
        reach(place, "one", runs(1))
        led_by = holder()
        second = stack.enter_context(quick_controller(place, redis_service))
        stack.callback(second.kill)
        kubectl(place, "scale", "trainingjob/one", "--replicas=2")
        reach(place, "one", runs(2))
        assert holder() == led_by
        first.kill()
        kubectl(place, "create", "-f", "-", text=manifest(place, "two", tmp_path))
        reach(place, "two", runs(1))
        assert holder() != led_by
        assert sorted(job["metadata"]["name"] for job in asyncio.run(place.list_objects("jobs"))) == ["one", "two"]
        kubectl(place, "delete", "trainingjobs", "--all")
    assert objects(place) == []


@pytest.mark.deep
async def test_a_training_ends_once_and_another_spec_restarts_it(
    place: Cluster, redis_service: RedisService, tmp_path: Path
) -> None:
    """One succeeds, one fails, one lacks its image, one is refused, and one gets another environment."""
    trainings = {
        "ends": {"entrypoint": "sleep 0.1"},
        "fails": {"entrypoint": "sh -c 'exit 3'"},
        "odd": {"entrypoint": "a && b"},
        "goes": {},
    }
    async with running(place, redis_service):
        for name, trainer in trainings.items():
            await create(place, yaml.safe_load(manifest(place, name, tmp_path, **trainer)))
        absent = yaml.safe_load(manifest(place, "absent", tmp_path))
        absent["spec"]["image"] = "No/Image:1"
        await create(place, absent)
        for name, kind in (("ends", "Complete"), ("fails", "Failed"), ("goes", "Running"), ("absent", "Failed")):
            await asyncio.to_thread(
                kubectl, place, "wait", f"--for=condition={kind}", "--timeout=150s", f"trainingjob/{name}"
            )
        refused = await asyncio.to_thread(reach, place, "odd", lambda status: bool(status.get("reason")))
        assert refused["reason"].startswith("spec.trainer.entrypoint: got '&&'")

        (before,) = await place.list_objects("jobs", "goes")
        envs = json.dumps({"spec": {"trainer": {"envs": {"LR": "0.2"}}}})
        await asyncio.to_thread(kubectl, place, "patch", "trainingjob/goes", "--type=merge", "-p", envs)

        async def is_made_anew() -> bool:
            found = await place.list_objects("jobs", "goes")
            return bool(found) and found[0]["metadata"]["uid"] != before["metadata"]["uid"]

        await eventually(is_made_anew, "another Job")
        await asyncio.to_thread(reach, place, "goes", runs(1))
        await asyncio.to_thread(kubectl, place, "delete", "job", "ends")
        await asyncio.to_thread(kubectl, place, "delete", "trainingjobs", "goes", "odd")
        assert [pod["status"]["phase"] for pod in await place.list_objects("pods", "fails")] == ["Failed"]

        async def is_stopped() -> bool:
            return not await place.list_objects("pods", "absent")

        await eventually(is_stopped, "the pod without an image gone")
        names_of_ended = ("ends", "fails", "absent")
        ended = [(await asyncio.to_thread(training_job, place, name))["status"]["phase"] for name in names_of_ended]
        assert ended == ["succeeded", "failed", "failed"]
        assert "jobs ends" not in await place.objects()
        assert (await asyncio.to_thread(events, place, "fails"))["Failed"]
        assert (await asyncio.to_thread(events, place, "goes"))["Restarted"]


@pytest.mark.deep
async def test_one_controller_serves_all_namespaces_when_asked(
    place: Cluster, cluster: Cluster, redis_service: RedisService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs of one name in two namespaces don't meet in Redis, and log lines tell them apart."""
    labels = {"of-test": place.namespace}
    everywhere = Cluster(place.kubeconfig, place.image)
    everywhere.namespace = place.namespace
    everywhere.connect = Labelled(place.connect, f"of-test={place.namespace}").open
    async with running(everywhere, redis_service, all_namespaces=True):
        for one in (place, cluster):
            (tmp_path / one.namespace).mkdir()
            made = yaml.safe_load(manifest(one, "example", tmp_path / one.namespace))
            await create(one, {**made, "metadata": {**made["metadata"], "labels": labels}})
        for one in (place, cluster):
            await asyncio.to_thread(reach, one, "example", runs(1))
            await asyncio.to_thread(wait_for_files, tmp_path / one.namespace, "up-example-0")
        for one in (place, cluster):
            await asyncio.to_thread(kubectl, one, "delete", "trainingjobs", "--all")
    created = [line for line in capsys.readouterr().err.splitlines() if "reason=Created" in line]
    for one in (place, cluster):
        assert any(f"namespace={one.namespace}" in line for line in created), created


@pytest.mark.deep
async def test_changes_during_an_outage_of_the_api_are_made_after_it(
    place: Cluster, redis_service: RedisService, tmp_path: Path
) -> None:
    """The leader has lost its Lease meanwhile; nothing is lost or made twice."""
    with running_proxy(*server_of(place)) as proxy:
        far = Cluster(kubeconfig_with(place, tmp_path / "kubeconfig", port=proxy.port), place.image)
        far.namespace = place.namespace
        out = tmp_path / "out"
        out.mkdir()
        async with running(far, redis_service):
            for name in ("stays", "goes"):
                await create(place, yaml.safe_load(manifest(place, name, out)))
            for name in ("stays", "goes"):
                await asyncio.to_thread(reach, place, name, runs(1))
            proxy.cut()
            await asyncio.to_thread(kubectl, place, "scale", "trainingjob/stays", "--replicas=2")
            await create(place, yaml.safe_load(manifest(place, "comes", out)))
            await place.request("DELETE", path_of(place, "TrainingJob", "goes"))
            await asyncio.sleep(TIMES.give_up_s + TIMES.retry_s)
            assert kinds(await place.objects()).count("jobs") == 2
            proxy.mend()
            await asyncio.to_thread(reach, place, "stays", runs(2))
            await asyncio.to_thread(reach, place, "comes", runs(1))

            async def is_gone() -> bool:
                return "jobs goes" not in await place.objects()

            await eventually(is_gone, "the Job of the deleted one gone")
            assert kinds(await place.objects()).count("jobs") == 2
            await asyncio.to_thread(kubectl, place, "delete", "trainingjobs", "--all")


@pytest.mark.deep
async def test_traffic_windows_are_those_of_a_configmap(
    place: Cluster, redis_service: RedisService, tmp_path: Path
) -> None:
    """They hold as soon as they change; invalid ones make an event, and the last valid ones stay."""

    async def write(text: str) -> None:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "edl-windows"}}
        applied = json.dumps({**body, "data": {"windows.yaml": text}})
        await asyncio.to_thread(kubectl, place, "apply", "-f", "-", text=applied)

    async def is_reported() -> bool:
        found = await place.request("GET", f"/api/v1/namespaces/{place.namespace}/events")
        own = [one for one in found["items"] if one["involvedObject"]["kind"] == "ConfigMap"]
        told = [(one["reason"], "the last valid ones hold" in one["message"]) for one in own]
        return told == [("InvalidWindows", True)]

    await write("default: {cluster: 100%, jobs: {example: 3}}")
    passes = PassOptions(interval_s=20.0)
    async with running(place, redis_service, passes=passes, windows_configmap="edl-windows"):
        await create(place, yaml.safe_load(manifest(place, "example", tmp_path)))
        await asyncio.to_thread(reach, place, "example", runs(3))
        await write("default: {cluster: most}")
        await eventually(is_reported, "an event of the ConfigMap")
        await write("default: {cluster: 100%, jobs: {example: 1}}")
        await asyncio.to_thread(reach, place, "example", runs(1))
        seen = await asyncio.to_thread(training_job, place, "example")
        assert seen["spec"]["trainer"]["instances"] == 1
        told = await asyncio.to_thread(events, place, "example")
        assert told["Resized"].startswith("resized from 3 to 1: ")
        await asyncio.to_thread(kubectl, place, "delete", "trainingjobs", "--all")


async def test_the_role_grants_exactly_the_verbs_that_are_used(
    place: Cluster, redis_service: RedisService, tmp_path: Path
) -> None:
    """Of the controller, and of the passes that resize pools of others."""
    rights = [one for one in manifests("controller.yaml", place.namespace) if one["kind"] != "Deployment"]
    await create(place, *rights)
    for number in range(KEPT_LOGS):  # so that the next archived log is one too many
        label = {names.LOG_OF: f"old-{number}"}
        metadata = {"name": f"old-{number}-log", "labels": label, "annotations": {"edl-airflow/deleted-at": "1.0"}}
        await create(place, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    token = await account_token(place, "edl-controller")
    limited = Cluster(kubeconfig_with(place, tmp_path / "kubeconfig", token=token), place.image)
    limited.namespace = place.namespace
    recorder = Recorder(limited.connect, place)
    limited.connect = recorder.open
    shared = tmp_path / "shared"
    shared.mkdir()
    own, admin = limited.backend(shared), place.backend(shared)
    gives_up = exits_without_slot(shared) + WAITS
    add_slots(shared, 1)
    await admin.submit(job(gives_up, name="pool", instances=2), token="mine", secrets={})
    await reach_status(admin, "pool", lambda status: any(one.given_up for one in status.instances))
    await own.resize("pool", 3)
    await own.resize("pool", 1)
    async with own._api() as api:
        (pod, *_), _ = await api.list("Pod", labels=names.selector("pool"))
        await api.evict(pod)
    again = job(WAITS, name="again", kind="trainer")
    for _ in range(2):  # the second one's log replaces the first one's
        for token in ("mine", "mine, adopted"):
            await own.submit(again, token=token, secrets={})
        await wait_for_line(own, "up", name="again")
        await own.delete("again")
    passes = PassOptions(interval_s=5.0)
    async with running(limited, redis_service, passes=passes, windows_configmap="edl-windows"):
        await create(place, yaml.safe_load(manifest(place, "example", shared)))
        await asyncio.to_thread(reach, place, "example", runs(1))
        await asyncio.to_thread(kubectl, place, "scale", "trainingjob/example", "--replicas=2")
        await asyncio.to_thread(reach, place, "example", runs(2))
        await asyncio.to_thread(kubectl, place, "scale", "trainingjob/example", "--replicas=0")
        await asyncio.to_thread(reach, place, "example", lambda status: status["phase"] == "suspended")
        await asyncio.to_thread(kubectl, place, "scale", "trainingjob/example", "--replicas=1")
        await asyncio.to_thread(reach, place, "example", runs(1))
        await asyncio.to_thread(kubectl, place, "delete", "trainingjobs", "--all")
    await admin.delete("pool")
    granted = verbs_of(only("Role", rights))
    assert sorted(recorder.used) == sorted(granted - of_kueue(granted))


PAGE = (ROOT / "docs" / "how-to" / "controller.md").read_text()


def test_the_page_is_true_as_it_is_printed(place: Cluster, tmp_path: Path) -> None:
    """Its steps, with a namespace, an image and a small training of the test's own."""
    steps = PAGE[PAGE.index("## Step by step") : PAGE.index("Rescaling needs to know")]
    commands = [line for line in steps.splitlines() if line.startswith("kubectl ")]
    assert len(commands) >= 9
    for file in (DEPLOY / "trainingjob-crd.yaml", DEPLOY / "controller.yaml"):
        text = file.read_text().replace("namespace: edl\n", f"namespace: {place.namespace}\n")
        text = text.replace("edl-redis.edl:", f"edl-redis.{place.namespace}:").replace("edl-runtime:cpu", place.image)
        text = text.replace('"hostPath,nfs"\n              value: ""', "more\n              value: hostPath")
        (tmp_path / "deploy").mkdir(exist_ok=True)
        (tmp_path / "deploy" / file.name).write_text(text)
    (tmp_path / "examples" / "training_job").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "examples/training_job/examplejob.yaml").write_text(manifest(place, "example", tmp_path / "out"))
    password = "sesame"
    kubectl(place, "create", "secret", "generic", "edl-redis", f"--from-literal=password={password}")
    with RedisService(place, password):
        shell = "set -e\n" + "\n".join(commands).replace("-n edl ", f"-n {place.namespace} ")
        first = "kubectl create -f deploy/trainingjob-crd.yaml"  # other tests have made it
        shell = shell.replace(first, first.replace("create", "apply --server-side --force-conflicts"))
        environ = {**os.environ, "KUBECONFIG": place.kubeconfig}
        done = subprocess.run(
            ["bash", "-c", shell], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + kubectl(place, "logs", "deployment/edl-controller", "--all-pods")
    shown = [line.split() for line in done.stdout.splitlines()]
    assert ["NAME", "STATE", "INSTANCES", "WANTED", "PROGRESS", "AGE", "REASON"] in shown
    assert "created a Job of 1 instance" in done.stdout
    assert asyncio.run(place.objects()) == []
