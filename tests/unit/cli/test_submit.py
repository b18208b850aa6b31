"""What `edl submit` makes of addresses and paths, here and in a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl_runtime.cli.submit import _checkpoints
from edl_runtime.compat.job_specs import job_spec, redis_of_pods
from edl_runtime.compat.training_job import TrainingJob
from edl_runtime.errors import SpecError
from edl_runtime.pods import Pod
from edl_runtime.settings import RuntimeSettings
from edl_runtime.specs import Bounds, TrainerSpec


@pytest.mark.parametrize(
    ("url", "for_pods", "reached"),
    [
        ("redis://:sesame@127.0.0.1:6379/0", "", "redis://:sesame@127.0.0.1:6379/0"),
        ("redis://:sesame@127.0.0.1:6379/0", "edl-redis.ml.svc:6380", "redis://:sesame@edl-redis.ml.svc:6380/0"),
        ("rediss://ada:a%40b@[::1]:6379/3", "[fd00::1]:6379", "rediss://ada:a%40b@[fd00::1]:6379/3"),
        ("redis://localhost", "10.96.0.7:6379", "redis://10.96.0.7:6379"),
        (
            "redis+sentinel://:s@a,b/main/0?x=1",
            "c.ml:26379,d.ml:26379",
            "redis+sentinel://:s@c.ml:26379,d.ml:26379/main/0?x=1",
        ),
    ],
)
def test_pods_reach_the_same_redis_by_their_own_address(url: str, for_pods: str, reached: str) -> None:
    """With the same login, encryption and database."""
    assert redis_of_pods(RuntimeSettings(redis_url=url, redis_for_pods=for_pods)) == reached


@pytest.mark.parametrize("for_pods", ["edl-redis", "redis://edl-redis:6379", "edl-redis:port", ":6379"])
def test_an_address_that_is_none_is_refused(for_pods: str) -> None:
    """The error shows how one looks."""
    settings = RuntimeSettings(redis_url="redis://:sesame@127.0.0.1", redis_for_pods=for_pods)
    with pytest.raises(SpecError, match=r"EDL_REDIS_FOR_PODS: got .* allowed is host:port") as refused:
        redis_of_pods(settings)
    assert "sesame" not in str(refused.value)


def test_a_job_gets_the_queue_of_the_command_or_of_its_manifest() -> None:
    """The command's comes first; the manifest's is Kueue's label."""
    settings = RuntimeSettings(redis_url="redis://localhost")
    found = []
    for labels in ({}, {"kueue.x-k8s.io/queue-name": "team-a"}):
        trainer = TrainerSpec(command=("python",), pod=Pod(image="train:1", labels=labels))
        job = TrainingJob(name="job", namespace="", trainer=trainer, bounds=Bounds(1, 2), notes=())
        for queue in ("", "team-b"):
            pod = job_spec(job, settings, queue=queue).pod
            assert pod
            assert pod.image == "train:1"
            found.append(pod.queue)
    assert found == ["", "team-b", "team-a", "team-b"]


def test_where_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is this machine's, below the present folder: pods have none of it."""
    monkeypatch.chdir(tmp_path)
    for is_here in (True, False):
        assert _checkpoints("s3://runs/", is_here=is_here) == "s3://runs"
        assert _checkpoints("/kept", is_here=is_here) == "/kept"
        assert _checkpoints("", is_here=is_here) == ""
    assert _checkpoints("kept", is_here=True) == str(tmp_path / "kept")
    with pytest.raises(SpecError, match=r"--checkpoint: got 'kept', allowed is a URL, or an absolute path"):
        _checkpoints("kept", is_here=False)
