"""`DistillReader` as scripts of the original EDL use it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.external_servers import SERVERS, WEIGHTS
from support.network.ports import free_ports
from support.teachers.process import running_teacher

from edl_runtime.compat.paddle_edl import DistillReader
from edl_runtime.errors import SpecError
from edl_runtime.settings import RuntimeSettings

IMAGES = np.random.default_rng(18).integers(0, 256, (20, 1, 28, 28)).astype(np.float32)
LOGITS = IMAGES.reshape(-1, 784) @ WEIGHTS


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_teacher("ours:net", env={"PYTHONPATH": str(SERVERS)}) as teacher:
        yield teacher.address


def lists() -> Iterator[list[tuple[Any, list[int]]]]:
    """Batches of eight, and the rest."""
    for start in range(0, 20, 8):
        yield [(image, [number]) for number, image in enumerate(IMAGES[start : start + 8], start)]


def reader(address: str) -> DistillReader:
    return DistillReader(ins=["image", "label"], predicts=["logits"]).set_fixed_teacher(address)


def test_its_documented_example_runs(address: str) -> None:
    """With the flags `use_distill_service` and `distill_teachers`; a call returns an epoch."""
    use_distill_service, distill_teachers = True, address

    train_reader: Callable[[], Any] = lists
    if use_distill_service:
        distill_reader = DistillReader(ins=["image", "label"], predicts=["logits"])
        distill_reader.set_teacher_batch_size(3)
        distill_reader.set_fixed_teacher(distill_teachers)
        train_reader = distill_reader.set_sample_list_generator(train_reader)
    for _ in range(2):
        batches = list(train_reader())
        assert [len(batch) for batch in batches] == [8, 8, 4]
        assert np.array_equal([logits for batch in batches for *_, logits in batch], LOGITS)
        assert [int(label[0]) for batch in batches for _, label, _ in batch] == list(range(20))
    distill_reader.close()


def test_samples_and_batches_have_their_predictions_behind_their_slots(address: str) -> None:
    samples = reader(address).set_sample_generator(lambda: ((image, number) for number, image in enumerate(IMAGES)))
    assert np.array_equal([logits for _, _, logits in samples()], LOGITS)
    batches = reader(address).set_batch_generator(lambda: iter([(IMAGES, np.arange(20))]))
    ((images, labels, logits),) = batches()
    assert np.array_equal(images, IMAGES)
    assert labels.tolist() == list(range(20))
    assert np.array_equal(logits, LOGITS)
    samples.close()
    batches.close()


def test_the_environment_names_a_pool_and_who_assigns_its_teachers(
    settings: RuntimeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    env = {**settings.to_env(), "PYTHONPATH": str(SERVERS)}
    command = [sys.executable, "-m", "edl_runtime.cli", "discovery", "--port", str(port)]
    with (
        running_teacher("ours:net", "--pool", "images", env=env),
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as discovery,
    ):
        assert discovery.stdout is not None
        assert "ready" in discovery.stdout.readline()
        for name, value in {"BALANCE_SERVER": f"127.0.0.1:{port}", "SERVICE_NAME": "images"}.items():
            monkeypatch.setenv(f"PADDLE_DISTILL_{name}", value)
        ours = reader("127.0.0.1:9").set_batch_generator(lambda: iter([(IMAGES, np.arange(20))]))
        try:
            ((*_, logits),) = ours()
        finally:
            ours.close()
            discovery.terminate()
        assert np.array_equal(logits, LOGITS)


def test_what_is_missing_or_set_twice_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="set_batch_generator"):
        reader(address)()
    with pytest.raises(SpecError, match="set once"):
        reader(address).set_fixed_teacher(address)
    with pytest.raises(SpecError, match="set once"):
        reader(address).set_sample_generator(lists).set_batch_generator(lists)
    monkeypatch.setenv("PADDLE_DISTILL_BALANCE_SERVER", "127.0.0.1:7001")
    with pytest.raises(SpecError, match="PADDLE_DISTILL_SERVICE_NAME"):
        reader(address).set_sample_generator(lists)()
