"""The loss of a distilled student, computed by hand in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl_runtime.distill.losses import distill_loss
from edl_runtime.errors import SpecError
from edl_runtime.protocol.tensors import Array

paddle = pytest.importorskip("paddle")

rng = np.random.default_rng(7)
STUDENT = rng.normal(size=(5, 3)).astype(np.float32)
TEACHER = rng.normal(size=(5, 3)).astype(np.float32)


def log_softmax(logits: Array) -> Array:
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))  # type: ignore[no-any-return]


def loss(labels: Any, *, temperature: float = 2.0, weight: float = 0.7) -> float:
    tensors = [paddle.to_tensor(array) for array in (STUDENT, np.asarray(labels), TEACHER)]
    return float(distill_loss(*tensors, temperature=temperature, weight=weight))


def divergence(temperature: float) -> float:
    teacher, student = log_softmax(TEACHER / temperature), log_softmax(STUDENT / temperature)
    return float((np.exp(teacher) * (teacher - student)).sum(axis=1).mean())


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_it_is_the_weighted_sum_of_both_parts(temperature: float) -> None:
    """T² times the divergence of all rows, and the cross entropy of those with a label."""
    labels = np.array([0, -1, 2, -1, 1])
    labelled = labels >= 0
    entropy = -log_softmax(STUDENT)[labelled, labels[labelled]].mean()
    expected = 0.7 * temperature**2 * divergence(temperature) + 0.3 * entropy
    assert loss(labels, temperature=temperature) == pytest.approx(expected, rel=1e-5)
    assert loss(labels[:, None], temperature=temperature) == pytest.approx(expected, rel=1e-5)


def test_rows_without_labels_learn_from_the_teacher_alone() -> None:
    """Without any label the second part is 0, not a division by it."""
    assert loss([-1] * 5) == pytest.approx(0.7 * 4 * divergence(2.0), rel=1e-5)


@pytest.mark.parametrize(("temperature", "weight"), [(0.0, 0.5), (-1.0, 0.5), (1.0, 1.1), (1.0, -0.1)])
def test_what_makes_no_sense_is_refused(temperature: float, weight: float) -> None:
    """Temperature above 0, weight between 0 and 1."""
    with pytest.raises(SpecError):
        loss([0] * 5, temperature=temperature, weight=weight)


def test_gradients_reach_the_student_only() -> None:
    """The teacher's logits are data."""
    student, teacher = paddle.to_tensor(STUDENT, stop_gradient=False), paddle.to_tensor(TEACHER, stop_gradient=False)
    distill_loss(student, paddle.to_tensor([0, -1, 2, -1, 1]), teacher, temperature=2.0, weight=0.5).backward()
    assert teacher.grad is None
    assert np.isfinite(student.grad.numpy()).all()
