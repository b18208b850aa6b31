"""A teacher of another protocol that answers wrongly is refused and quarantined, and the others serve on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.external_servers import SERVERS, WEIGHTS
from support.hostile_servers import LIES, OTHER_LIES, lying_server
from support.teachers.process import PATIENCE_S, running_teacher

from edl_runtime.distill import DistillReader, Fixed
from edl_runtime.external.address import SCHEMES
from edl_runtime.protocol.tensors import Array

ROWS = 16
IMAGES = np.random.default_rng(18).integers(0, 256, (8, ROWS, 1, 28, 28)).astype(np.float32)
EXPECTED = IMAGES.reshape(8, ROWS, 784) @ WEIGHTS


def batches() -> Iterator[tuple[Array, int]]:
    return ((images, np.full(ROWS, number)) for number, images in enumerate(IMAGES))


@pytest.fixture(scope="module")
def honest() -> Iterator[str]:
    with running_teacher("ours:net", env={"PYTHONPATH": str(SERVERS)}) as teacher:
        yield teacher.address


def can_be_told(scheme: str, lie: str) -> bool:
    """A pipeline prints numbers without their dtype; messages of gRPC have the size that they have; few have ids."""
    if lie == "the answer to another request":
        return scheme.startswith("oip")
    if lie == "another dtype":
        return not scheme.startswith("paddle-pipeline")
    return lie != "a huge size" or "grpc" not in scheme


LANGUAGE_MODELS = ("vllm", "sglang", "swift")
"""The gateway asks these, no reader: see test_gateway.py."""

CASES = [
    (scheme, lie)
    for scheme in SCHEMES
    if not scheme.endswith("s") and scheme.partition("+")[0] not in LANGUAGE_MODELS
    for lie in (*LIES, *OTHER_LIES)
    if can_be_told(scheme, lie)
]


def serve_on(honest: str, liar: str) -> None:
    """Read epochs until `liar` is in quarantine; all batches come in order, with right answers."""
    caught, until = False, time.monotonic() + PATIENCE_S
    with DistillReader(
        batches,
        inputs=["image", None],
        outputs=["logits"],
        teachers=Fixed((honest, liar)),
        teacher_batch_size=ROWS,
    ) as reader:
        while not caught:
            assert time.monotonic() < until, "it was never asked, or nobody noticed"
            for number, (_, numbers, logits) in enumerate(reader):
                assert numbers[0] == number
                assert np.array_equal(logits, EXPECTED[number])
                caught = caught or liar in reader.stats().quarantined
        assert liar not in reader.stats().answered


@pytest.mark.parametrize(("scheme", "lie"), CASES)
def test_a_liar_is_quarantined_and_the_other_teacher_serves_on(scheme: str, lie: str, honest: str) -> None:
    """However often it is asked again."""
    with lying_server(scheme, lie) as liar:
        serve_on(honest, liar)


@pytest.mark.parametrize("shape", [(-1, *[1] * 64), (-1, 1 << 31), (-1, -7)], ids=["65 axes", "8 GB", "-7"])
@pytest.mark.parametrize("scheme", ["oip+http", "oip+grpc"])
def test_so_is_a_server_whose_metadata_no_model_has(scheme: str, shape: tuple[int, ...], honest: str) -> None:
    """Nothing is made by them: 65 axes are one more than numpy has."""
    with lying_server(scheme, "nothing", shape) as liar:
        serve_on(honest, liar)
