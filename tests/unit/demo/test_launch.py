"""The trainers of a JobServer's pod."""

from __future__ import annotations

from edl_runtime.demo.launch import trainer_environments
from edl_runtime.demo.pod_sets import DEFAULT_JOB, Nodes, first_pods
from edl_runtime.settings import PaddleJob, RuntimeSettings

PODS = first_pods(Nodes(("10.0.0.1", "10.0.0.2"), pods=2, gpus=4), DEFAULT_JOB)
JOB = PaddleJob("http://10.0.0.1:8180", DEFAULT_JOB, "pod_3_0", "", "/kept")


def test_trainers_are_instances_of_one_job() -> None:
    """Numbered over all pods, at their node's address, with the job's checkpoints."""
    environments = trainer_environments(PODS, 3, JOB, RuntimeSettings(redis_url="redis://r"), {"EDL_INSTANCE": "9"})
    assert [environ["EDL_INSTANCE"] for environ in environments] == ["6", "7"]
    read = RuntimeSettings.from_env(environments[0])
    assert (read.job, read.run, read.host) == ("test-job-id-1234", "test-job-id-1234", "10.0.0.2")
    assert (read.checkpoint, read.redis_url) == ("/kept", "redis://r")


def test_own_settings_win_over_the_original_ones() -> None:
    """EDL_CHECKPOINT and EDL_RUN over what the JobServer's variables say; POD_IP over the node's address."""
    settings = RuntimeSettings(checkpoint="s3://bucket/job", run="second")
    environ = trainer_environments(PODS, 0, JOB._replace(host="192.0.2.7"), settings, {})[0]
    read = RuntimeSettings.from_env(environ)
    assert (read.instance, read.checkpoint, read.run, read.host) == (0, "s3://bucket/job", "second", "192.0.2.7")
