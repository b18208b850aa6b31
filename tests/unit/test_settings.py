"""Settings from the environment and to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl_runtime.errors import SpecError
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.settings import RuntimeSettings, paddle_job, paddle_pod_environment, split_secrets, visible_gpu
from edl_runtime.specs import Checkpoint

BAD_TOKENS = ["päss", "a\r\nX-Evil: 1", "secret\n", "two words", "ta\tb", "nul\0", "del\x7f"]


def test_what_is_set_is_read_back() -> None:
    """An instance gets from its environment what the backend put there; defaults are left out."""
    settings = RuntimeSettings(
        redis_url="redis://:pw@h:1",
        job="job",
        instance=2,
        teacher_wait_s=0.0,
        teacher_timeout_s=1.5,
        teacher_token="t~!",
        discovery_url="https://h:2",
        discovery_token="d~!",
        metrics_port=9400,
        teacher_ca="/tls/ca.crt",
        teacher_tls_name="teachers",
        tls_cert="/tls/tls.crt",
        tls_key="/tls/tls.key",
    )
    environ = settings.to_env()
    assert environ["EDL_TEACHER_TIMEOUT_S"] == "1.5"
    assert "EDL_LEASE_TTL_S" not in environ
    assert RuntimeSettings.from_env(environ) == settings
    assert RuntimeSettings.from_env({}) == RuntimeSettings()


WRONG = {
    "MANIFEST_VOLUMES": (["host/path", "hostPath;nfs"], "kinds of volumes"),
    "TEACHER_WAIT_S": (["nan", "inf", "-inf", "-1"], "a number of seconds, 0 or more"),
    "TEACHER_TIMEOUT_S": (["nan", "inf", "-1", "0"], "a number of seconds above 0"),
    "LEASE_TTL_S": (["nan", "inf", "-1", "0"], "a number of seconds above 0"),
    "GRACE_S": (["soon"], "a number of seconds"),
    "METRICS_PORT": (["-1", "65536"], "a port"),
    "PORT": (["9400.5", "metrics"], "a whole number"),
    "CHECKPOINT_EVERY_STEPS": (["-1", "often"], "a whole number"),
    "CHECKPOINT_EVERY_S": (["nan"], "a number of seconds"),
    "CHECKPOINT_KEEP_LAST": (["0"], "1 or more"),
    "CHECKPOINT_KEEP_EVERY": (["-1"], "a whole number of steps"),
    "NOT_FINITE": (["", "stop"], "'warn' or 'fail'"),
    "TLS_KEY": (["given"], "nothing without EDL_TLS_CERT"),
    "TEACHER_TLS_NAME": (["given"], "nothing without EDL_TEACHER_CA"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_is_refused(name: str) -> None:
    """The error names the variable and says what is allowed: a wait of nan seconds would never end."""
    texts, allowed = WRONG[name]
    for text in texts:
        with pytest.raises(SpecError, match=f"EDL_{name}.*: got .*allowed is {allowed}"):
            RuntimeSettings.from_env({f"EDL_{name}": text})


def test_an_empty_number_is_none() -> None:
    """As a variable that is not there; and only the wait for teachers may be 0."""
    assert RuntimeSettings.from_env({"EDL_METRICS_PORT": ""}).metrics_port == 0
    assert RuntimeSettings.from_env({"EDL_TEACHER_WAIT_S": "0"}).teacher_wait_s == 0


@pytest.mark.parametrize(
    "spec",
    [
        Checkpoint(url="s3://bucket/job"),
        Checkpoint(url="/a b/c", every_steps=50, keep_last=5, keep_every=1000),
        Checkpoint(url="x", every_steps=50, every_s=0.5),
    ],
)
def test_where_checkpoints_are_kept_goes_through_the_environment(spec: Checkpoint) -> None:
    """From whoever starts a training to the training."""
    settings = RuntimeSettings.from_env(spec.to_env())
    assert settings.checkpoint_spec() == spec
    assert RuntimeSettings.from_env(settings.to_env()).checkpoint_spec() == spec
    assert RuntimeSettings().checkpoint_spec() is None


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(token: str) -> None:
    """Wherever it comes from: it could add a header, or be another one at the other end."""
    with pytest.raises(SpecError, match="EDL_TEACHER_TOKEN") as from_environment:
        RuntimeSettings.from_env({"EDL_TEACHER_TOKEN": token})
    with pytest.raises(SpecError, match="EDL_DISCOVERY_TOKEN") as of_discovery:
        RuntimeSettings.from_env({"EDL_DISCOVERY_TOKEN": token})
    with pytest.raises(SpecError, match="token") as from_code:
        TeacherConnection("127.0.0.1:1", token=token)
    for caught in (from_environment, of_discovery, from_code):
        assert token.strip() not in str(caught.value)
        assert caught.value.given != token


def test_secrets_are_told_apart() -> None:
    """Redis' URL and the tokens never go where plain settings go."""
    settings = RuntimeSettings(
        redis_url="redis://:pw@h:1",
        teacher_token="t",
        discovery_token="d",
        monitor_token="m",
        gateway_token="g",
        job_server_token="j",
        pool="p",
    )
    plain, secret = split_secrets(settings.to_env())
    assert plain == {"EDL_POOL": "p"}
    tokens = {f"EDL_{name}_TOKEN" for name in ("DISCOVERY", "GATEWAY", "JOB_SERVER", "MONITOR", "TEACHER")}
    assert set(secret) == {"EDL_REDIS_URL", *tokens}


PADDLE_JOB = {"PADDLE_JOBSERVER": "http://h:8180", "PADDLE_JOB_ID": "j", "PADDLE_RUNING_ENV": "PADDLE_EDL"}


def test_a_pod_sees_the_variables_of_the_original() -> None:
    """Without proxies, through which it would not reach the JobServer."""
    environ = {**PADDLE_JOB, "http_proxy": "p", "https_proxy": "p", "PADDLE_POD_ID": "not set", "HOME": "/h"}
    assert paddle_pod_environment(environ, paddle_job(environ), "pod_0_0", (2, 3), Path("/p/pod_0_0")) == {
        **PADDLE_JOB,
        "PADDLE_POD_ID": "pod_0_0",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "EDL_POD_PATH": "/p/pod_0_0",
        "HOME": "/h",
    }


@pytest.mark.parametrize("changed", [{"PADDLE_JOBSERVER": ""}, {"PADDLE_JOB_ID": ""}, {"PADDLE_RUNING_ENV": "K8S"}])
def test_a_job_of_no_job_server_is_refused(changed: dict[str, str]) -> None:
    (variable,) = changed
    with pytest.raises(SpecError, match=variable):
        paddle_job(PADDLE_JOB | changed)


def test_a_trainer_sees_one_of_the_gpus(tmp_path: Path) -> None:
    """The one of its number among those of the pod, if this machine has any."""
    driver = tmp_path / "gpus"
    assert visible_gpu({"CUDA_VISIBLE_DEVICES": "4,5"}, 1, driver) == ""
    for name in "01":
        (driver / name).mkdir(parents=True)
    assert [visible_gpu({"CUDA_VISIBLE_DEVICES": "4,5"}, number, driver) for number in (0, 1, 2)] == ["4", "5", ""]
    assert visible_gpu({}, 1, driver) == "1"
