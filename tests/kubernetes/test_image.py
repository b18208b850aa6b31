"""deploy/Dockerfile: its image, and jobs of that image in a namespace with the PodSecurity level `restricted`.

EDL_TEST_BUILD is the command that builds images, with its options, as in "podman build --network=host"; the
default is `docker build`, if a Docker engine answers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import skip_on_a_laptop
from support.backends.jobs import WAITS, ended, job, wait_for_line
from support.cluster.cluster import Cluster
from support.cluster.manifests import create, run_pod
from support.paths import ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

BUILT = "localhost/edl-runtime-test:built"
OUR_LAYER = 8_000_000
"""Most bytes of the layer that changes with our code: the code and its bytecode, 5 MB by now."""


def builder() -> list[str]:
    """Return the command that builds images, [] if there is none."""
    if given := os.environ.get("EDL_TEST_BUILD"):
        return shlex.split(given)
    docker = shutil.which("docker")
    answers = docker and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0
    return ["docker", "build"] if answers else []


@pytest.fixture(scope="module")
def engine() -> str:
    """The program that has built `BUILT`, an image of this source without Paddle."""
    command = builder()
    if not command:
        skip_on_a_laptop("no Docker engine answers, and EDL_TEST_BUILD names no other command that builds images")
    options = ["-f", "deploy/Dockerfile", "--build-arg", "DEVICE=none", "-t", BUILT, "."]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return command[0]


def output_of(engine: str, *command: str) -> str:
    return subprocess.run([engine, *command], capture_output=True, text=True, check=True).stdout


@pytest.mark.deep
def test_the_image_has_a_small_layer_of_our_code_and_a_user_other_than_root(engine: str) -> None:
    """Dependencies are in other layers, which are reused when only our code changes."""
    (image,) = json.loads(output_of(engine, "image", "inspect", BUILT))
    assert image["Config"]["User"] == "10001:10001"
    history = output_of(engine, "history", "--no-trunc", "--format", "{{.Size}}\t{{.CreatedBy}}", BUILT)
    steps = [line.split("\t", 1) for line in history.splitlines() if line]
    (others,) = [number for number, (_, step) in enumerate(steps) if "paddlepaddle-gpu" in step]
    assert 0 < sum(size_of(size) for size, _ in steps[:others]) < OUR_LAYER  # the newest come first


@pytest.mark.deep
def test_the_image_has_the_code_of_this_source(engine: str, tmp_path: Path) -> None:
    """No cached layer of an earlier build is used for another source."""
    made = output_of(engine, "create", BUILT).strip()
    try:
        output_of(engine, "cp", f"{made}:/usr/local/lib", str(tmp_path))
    finally:
        output_of(engine, "rm", made)
    (package,) = tmp_path.rglob("edl_runtime")
    built, source = (
        {(str(file.relative_to(folder)), file.read_text()) for file in folder.rglob("*.py")}
        for folder in (package, ROOT / "edl_runtime")
    )
    assert {name for name, _ in built ^ source} == set()


def size_of(text: str) -> float:
    """Return the bytes of a size such as "3.57 MB", as Docker and Podman print it."""
    found = re.fullmatch(r"([\d.]+) ?([kMG]?)B", text)
    assert found, text
    return float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]]


async def test_the_command_runs_without_airflow_and_with_a_read_only_file_system(restricted: Cluster) -> None:
    """As another user than root."""
    status, output = await run_pod(restricted, "version", ["edl", "--version"])
    assert (status, output.split(",")[0]) == (0, "edl")
    status, output = await run_pod(restricted, "writer", ["touch", "/edl/here"])
    assert (status, "Read-only file system" in output) == (1, True)
    find = "import importlib.util as u; print([name for name in ('airflow', 'sqlalchemy') if u.find_spec(name)])"
    assert await run_pod(restricted, "imports", ["python", "-c", find]) == (0, "[]\n")


async def test_pools_and_trainers_run_in_a_restricted_namespace(restricted: Cluster) -> None:
    """A pool runs and an elastic trainer job succeeds; a pod without a security context is refused."""
    unrestricted = {"containers": [{"name": "main", "image": restricted.image}]}
    with pytest.raises(RuntimeError, match="violates PodSecurity"):
        await create(
            restricted, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "unrestricted"}, "spec": unrestricted}
        )
    backend = restricted.backend()
    await backend.submit(job(WAITS, name="pool", instances=2), token="mine", secrets={"KEY": "x"})
    trainer = job("print('up')", name="trainer", kind="trainer", instances=2, elastic=True)
    await backend.submit(trainer, token="mine", secrets={})
    await wait_for_line(backend, "up", name="pool", instances=2)
    assert (await ended(backend, "trainer")).phase == "succeeded"
    await wait_for_line(backend, "up", name="trainer", instances=2)
