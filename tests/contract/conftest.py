"""The backends that the contract is tested with.

On a cluster CI runs only the tests marked `on_pods`, with the backend that operators use, which watches its jobs.
`make test-deep` runs all tests, also with the plain backend, which sends a request each time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edl_runtime.backends.interface import Backend
from edl_runtime.backends.kubernetes.backend import KubernetesBackend
from edl_runtime.backends.local.backend import LocalBackend

ON_A_CLUSTER = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with each backend."""
    if "backend" in metafunc.fixturenames:
        in_ci = metafunc.definition.get_closest_marker("on_pods") is not None
        followed = pytest.param("kubernetes, followed", marks=[*ON_A_CLUSTER, *([] if in_ci else [pytest.mark.deep])])
        local = pytest.param("local", marks=pytest.mark.timeout(600))
        plain = pytest.param("kubernetes", marks=[*ON_A_CLUSTER, pytest.mark.deep])
        metafunc.parametrize("new_backend", [local, followed, plain], indirect=True)


@pytest.fixture
def new_backend(request: pytest.FixtureRequest, work_dir: Path, tmp_path: Path) -> Backend:
    """Each backend in turn. Its instances can use the test's `tmp_path`."""
    if request.param == "local":
        return LocalBackend(work_dir)
    made: Backend = request.getfixturevalue("cluster").backend(tmp_path)
    return made


@pytest.fixture
async def backend(new_backend: Backend, request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """Each backend in turn, without jobs; a test's jobs are deleted afterwards."""
    if isinstance(new_backend, KubernetesBackend) and "followed" in request.node.callspec.id:
        async with new_backend.following() as followed:
            yield followed
    else:
        yield new_backend
    for status in await new_backend.list():
        await new_backend.delete(status.name)
