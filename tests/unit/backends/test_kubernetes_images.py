"""Which images can't be pulled now, and which never."""

from __future__ import annotations

import pytest

from edl_runtime.backends.kubernetes.status import is_never_pulled

PULL = 'failed to pull and unpack image "train:1": failed to resolve reference "docker.io/library/train:1"'


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("InvalidImageName", "Failed to apply default image tag"),
        ("ErrImageNeverPull", "Container image is not present with pull policy of Never"),
        ("ErrImagePull", f"rpc error: code = NotFound desc = {PULL}: docker.io/library/train:1: not found"),
        ("ErrImagePull", "pull access denied, repository does not exist or may require authorization"),
        ("ErrImagePull", f"{PULL}: unexpected status from HEAD request to https://r/v2/train: 401 Unauthorized"),
        ("ErrImagePull", f"{PULL}: failed to fetch oauth token: unexpected status: 403 Forbidden"),
        ("ImagePullBackOff", "Back-off pulling image: ErrImagePull: reading manifest 1: manifest unknown"),
        ("ErrImagePull", f"{PULL}: no match for platform in manifest: not found"),
    ],
)
def test_a_registry_that_answers_that_there_is_none_ends_the_wait(reason: str, message: str) -> None:
    """The image has to be given another name, or the pod a pull secret."""
    assert is_never_pulled(reason, message)


@pytest.mark.parametrize(
    "message",
    [
        f'{PULL}: failed to do request: Head "https://r/v2/train": dial tcp: lookup r on 10.0.0.1:53: no such host',
        f'{PULL}: failed to do request: Head "https://r/v2/train": dial tcp 10.0.0.2:443: i/o timeout',
        f'{PULL}: failed to do request: Head "https://r/v2/train": dial tcp 10.0.0.2:443: connect: connection refused',
        f"{PULL}: unexpected status from HEAD request to https://r/v2/train: 503 Service Unavailable",
        f"{PULL}: 429 Too Many Requests - Server message: toomanyrequests: You have reached your pull rate limit",
        'Back-off pulling image "registry.example/notfound:1"',
    ],
)
def test_a_registry_that_does_not_answer_is_waited_for(message: str) -> None:
    """It, or the way to it, may be there again soon."""
    assert not is_never_pulled("ErrImagePull", message)
