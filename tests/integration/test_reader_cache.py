"""A reader with a cache, and real teachers that come back with another model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.students.readers import reader_of
from support.teachers.process import running_teacher

from edl_runtime.distill import AnswerCache, Fixed, Normalise, TopK
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

MODEL = """
from edl_runtime.protocol.oip import TensorSpec
from edl_runtime.teacher.callable_model import served

@served(inputs=[TensorSpec("x", "FP32", (-1, 4))], outputs=[TensorSpec("product", "FP32", (-1, 4))])
def product(inputs):
    return {{"product": inputs["x"] * {factor}}}
"""


def source() -> Iterator[tuple[Array, list[str]]]:
    for number in range(20):
        yield np.arange(32, dtype=np.uint8).reshape(8, 4) + number, [f"{number}/{row}" for row in range(8)]


@pytest.mark.slow
def test_a_teacher_that_returns_with_another_model_is_asked_again(tmp_path: Path) -> None:
    """One of the same model is not. What is kept is what was answered, to images as bytes and of the largest values."""
    cache = AnswerCache("name", folder=tmp_path / "answers")
    env = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    half = Normalise(mean=(0.0,), std=(2.0,))
    for factor, asked in ((2, True), (2, False), (6, True)):
        (tmp_path / "changing.py").write_text(MODEL.format(factor=factor))
        with running_teacher("changing:product", env=env) as teacher:
            reader = reader_of(
                source,
                Fixed((teacher.address,)),
                RuntimeSettings(),
                inputs=["x", "name"],
                outputs=[TopK("product", 2)],
                normalise={"x": half},
                cache=cache,
            )
            with reader:
                for epoch in (1, 2):
                    for x, _, values, indices in reader:
                        np.testing.assert_array_equal(values, x[:, :1:-1] * np.float32(factor / 2))
                        np.testing.assert_array_equal(indices, [[3, 2]] * 8)
                    assert reader.stats().cached == 160 * (epoch - asked)
                assert bool(reader.stats().answered) is asked
