"""The loss of a distilled student, for Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edl_runtime.errors import SpecError

if TYPE_CHECKING:
    from paddle import Tensor

UNLABELLED = -1
"""The label of a row that has none."""


def distill_loss(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor, *, temperature: float, weight: float
) -> Tensor:
    """Return `weight`·T²·KL(teacher‖student) + (1 - `weight`)·CE as a scalar tensor (Hinton et al. 2015).

    KL compares softmax(teacher_logits/T) with softmax(logits/T), T being `temperature`, and is the mean over all rows;
    T² keeps its gradients of one size whatever T is. CE is the mean cross entropy over the rows that have a label
    (not -1), 0 without any. Logits are [B, classes], labels integers [B] or [B, 1].

    Raises SpecError for a `temperature` that is not above 0 and a `weight` outside 0 to 1.
    """
    import paddle
    import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it

    if not temperature > 0:
        raise SpecError("temperature", temperature, "above 0")
    if not 0 <= weight <= 1:
        raise SpecError("weight", weight, "0 to 1")
    student = F.log_softmax(logits / temperature, axis=-1)
    teacher = F.log_softmax(teacher_logits.detach() / temperature, axis=-1)
    divergence = (teacher.exp() * (teacher - student)).sum(axis=-1).mean()
    labels = labels.reshape([-1])
    labelled = (labels != UNLABELLED).astype(logits.dtype)
    entropies = F.cross_entropy(logits, labels, ignore_index=UNLABELLED, reduction="none").reshape([-1])
    entropy = (entropies * labelled).sum() / paddle.clip(labelled.sum(), min=1.0)
    return weight * temperature**2 * divergence + (1 - weight) * entropy
