"""Students train with servers that people already run: Triton, KServe, MLServer and Paddle Serving."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.external_servers import KINDS, SERVERS, WEIGHTS, Server, StartServer
from support.teachers.process import running_teacher

from edl_runtime.distill import Discovered, DistillReader, Fixed, Normalise, TopK
from edl_runtime.distill.stats import ReaderStats
from edl_runtime.settings import RuntimeSettings

IMAGES = np.random.default_rng(18).integers(0, 256, (500, 1, 28, 28)).astype(np.float32)


def samples() -> Iterator[tuple[Any, int]]:
    return ((image, number) for number, image in enumerate(IMAGES))


def expected(images: Any) -> Any:
    return images.reshape(len(images), -1) @ WEIGHTS


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_gets_right_answers_in_order(
    kind: str, protocol: str, shared_servers: Callable[[str], Server]
) -> None:
    """Requests have 64 rows and more; Triton takes 16."""
    teachers = Fixed((getattr(shared_servers(kind), protocol),))
    with DistillReader(
        samples, inputs=["image", None], outputs=["logits"], format="sample", teachers=teachers
    ) as reader:
        items = list(reader)
    assert [number for _, number, _ in items] == list(range(500))
    assert np.array_equal([logits for *_, logits in items], expected(IMAGES))


@pytest.mark.parametrize("kind", KINDS)
def test_the_student_does_what_the_server_does_not(kind: str, shared_servers: Callable[[str], Server]) -> None:
    """Pixels are normalised, and the largest of an output chosen, as a teacher of ours would."""
    pixels = IMAGES.astype(np.uint8)
    with DistillReader(
        lambda: iter([(pixels,)]),
        inputs=["image"],
        outputs=[TopK("logits", 3)],
        normalise={"image": Normalise(mean=128, std=2)},
        teachers=Fixed((shared_servers(kind).http,)),
    ) as reader:
        ((_, values, indices),) = reader
    logits = expected((IMAGES - 128) / 2)
    assert np.array_equal(values, -np.sort(-logits, axis=1)[:, :3])
    assert np.array_equal(values, np.take_along_axis(logits, indices, axis=1))


@contextmanager
def registering(settings: RuntimeSettings, url: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "edl_runtime.cli", "register", "--pool", "images", "--url", url, "--model", "net"]
    sidecar = subprocess.Popen([*command, *flags], env={**settings.to_env(), "PATH": "/usr/bin"})
    try:
        yield sidecar
    finally:
        sidecar.terminate()
        sidecar.wait(60)


def checked_epochs(reader: DistillReader) -> Iterator[ReaderStats]:
    """Iterate over a reader epoch by epoch, and check each item; yields after each epoch."""
    while True:
        numbers = []
        for image, number, logits in reader:
            assert np.array_equal(logits, expected(image[None])[0])
            numbers.append(number)
        assert numbers == list(range(len(IMAGES)))
        yield reader.stats()


@pytest.mark.parametrize("kind", ["triton", "kserve", "paddle-serving"])
def test_ours_and_theirs_share_a_pool_and_theirs_is_killed_and_comes_back(
    kind: str, start_server: StartServer, settings: RuntimeSettings
) -> None:
    """Nothing is lost or doubled, and all answers are right; both take part before and after."""
    theirs = start_server(kind)
    flags = [] if kind == "triton" else ["--inputs", "image:FP32:-1.1.28.28", "--outputs", "logits:FP32:-1.10"]
    flags += ["--protocol", "paddle-pipeline"] if kind == "paddle-serving" else []
    env = {**settings.to_env(), "PYTHONPATH": str(SERVERS)}
    with (
        running_teacher("ours:slow_net", "--pool", "images", env=env) as ours,
        registering(settings, theirs.url, *flags),
        DistillReader(
            samples,
            inputs=["image", None],
            outputs=["logits"],
            format="sample",
            teachers=Discovered("images"),
            settings=settings,
        ) as reader,
    ):
        epochs = checked_epochs(reader)
        both = {ours.address, theirs.http}
        next(stats for stats in epochs if stats.answered.keys() == both)
        theirs.kill()
        alone = next(stats for stats in epochs if stats.teachers == 1)
        theirs.start()
        next(stats for stats in epochs if all(stats.answered[one] > alone.answered[one] for one in both))
