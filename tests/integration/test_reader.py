"""DistillReader with a real teacher: `edl teacher` processes, sockets, Redis; scripts of its own; its benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.paths import BENCHMARKS
from support.students.fake_readers import Source
from support.students.readers import Batches, await_cause, reader_of
from support.teachers.process import PATIENCE_S, running_teacher

from edl_runtime import progress
from edl_runtime.distill import AnswerCache, Discovered, Fixed, Normalise, TopK
from edl_runtime.distill.errors import NoTeacherError
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings
from edl_runtime.store.redis_client import connect


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a teacher that doubles and sums."""
    with running_teacher("support.models:arithmetic") as teacher:
        yield teacher.address


def test_all_three_formats(address: str) -> None:
    """What goes over the wire comes back at its place, in every format and with every size of request."""
    for kind in ("sample", "sample_list", "batch"):
        source = Source(kind)
        for size in (1, 4, 16):
            options = {"format": kind, "inputs": ["x", "label"], "outputs": ["double", "sum"]}
            with reader_of(source, Fixed((address,)), RuntimeSettings(), teacher_batch_size=size, **options) as reader:
                source.check(list(reader))


@pytest.mark.parametrize("wrong", ["lost", "doubled", "out of order", "another's answer"])
def test_a_batch_that_is_wrong_is_noticed(wrong: str) -> None:
    """What all tests of real teachers check epochs by can fail."""
    batches = Batches(3)
    epoch = [(x, x * 2) for (x,) in batches()]
    batches.check(epoch)
    match wrong:
        case "lost":
            del epoch[1]
        case "doubled":
            epoch.insert(1, epoch[1])
        case "out of order":
            epoch.reverse()
        case _:
            epoch[1] = epoch[1][0], epoch[2][1]
    with pytest.raises(AssertionError):
        batches.check(epoch)


def test_a_pool_without_members_is_an_error(settings: RuntimeSettings) -> None:
    """The error names the pool and why there is nobody."""
    impatient = msgspec.structs.replace(settings, teacher_wait_s=0.4)
    reader = reader_of(Batches(1), Discovered("nobody"), impatient)
    with reader:
        await_cause(reader)
        with pytest.raises(NoTeacherError, match=r"'nobody' after \d+ s.*no teacher is registered, and namespace"):
            list(reader)


async def test_progress_is_published(settings: RuntimeSettings, address: str) -> None:
    """A job with fixed teachers, too, tells Redis how far it is; the last report is the final one."""
    settings = msgspec.structs.replace(settings, job="job")
    batches = Batches(20)
    with reader_of(batches, Fixed((address,)), settings, total_steps=40) as reader:
        batches.check(list(reader))
        reader.report(loss=1.5, note="halfway")
    async with connect(settings.redis_url) as client:
        told = await progress.read_progress(client, settings.namespace, "job")
    assert told is not None
    assert (told.step, told.total_steps, told.loss, told.note) == (20, 40, 1.5, "halfway")
    assert told.answered == {address: 40}


MODEL = """
from edl_runtime.teacher import TensorSpec, served

@served(inputs=[TensorSpec("x", "FP32", (-1, 4))], outputs=[TensorSpec("product", "FP32", (-1, 4))])
def product(inputs):
    return {{"product": inputs["x"] * {factor}}}
"""


def images() -> Iterator[tuple[Array, list[str]]]:
    for number in range(20):
        yield np.arange(32, dtype=np.uint8).reshape(8, 4) + number, [f"{number}/{row}" for row in range(8)]


@pytest.mark.slow
def test_samples_are_requested_again_from_another_model(tmp_path: Path) -> None:
    """One of the same model is not. What is kept is what was answered, to images as bytes and of the largest values."""
    cache = AnswerCache("name", folder=tmp_path / "answers")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    half = Normalise(mean=(0.0,), std=(2.0,))
    for factor, asked in ((2, True), (2, False), (6, True)):
        (tmp_path / "changing.py").write_text(MODEL.format(factor=factor))
        with (
            running_teacher("changing:product", env=env) as teacher,
            reader_of(
                images,
                Fixed((teacher.address,)),
                RuntimeSettings(),
                inputs=["x", "name"],
                outputs=[TopK("product", 2)],
                normalise={"x": half},
                cache=cache,
            ) as reader,
        ):
            for epoch in (1, 2):
                for x, _, values, indices in reader:
                    np.testing.assert_array_equal(values, x[:, :1:-1] * np.float32(factor / 2))
                    np.testing.assert_array_equal(indices, [[3, 2]] * 8)
                assert reader.stats().cached == 160 * (epoch - asked)
            assert bool(reader.stats().answered) is asked


SCRIPT = """
import numpy as np
from edl_runtime.distill import DistillReader
source = [(np.zeros((4, 4), np.float32),)] * 1000
reader = DistillReader(source, inputs=["x"], outputs=["double"])
print(len(next(iter(reader))))
iterator = iter(reader)
next(iterator)
"""


def test_a_script_that_closes_nothing_ends(address: str) -> None:
    """Neither threads nor an epoch that was left open keep a process alive, and nothing is said about them."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env={**os.environ, "EDL_TEACHERS": address},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "2\n", "")


@pytest.mark.deep
@pytest.mark.parametrize("flag", ["--batches=-1", "--teachers=0", "--batch-size=0"])
def test_the_benchmark_refuses_what_can_t_be_measured(flag: str) -> None:
    """It names the flag, and prints no figures."""
    command = [sys.executable, str(BENCHMARKS / "distill_reader.py"), flag]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"argument {flag.partition('=')[0]}: got" in ran.stderr
