"""The N-gram model of Paddle's word2vec tutorial, and its optimizer."""

from __future__ import annotations

import math
from typing import Any

import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
from corpus import N
from paddle import ParamAttr
from paddle.nn.initializer import Constant, Normal
from paddle.regularizer import L2Decay

EMBEDDING = 32
HIDDEN = 256
DROPOUT = 0.5

LEARNING_RATE = 3e-3
L2 = 8e-4 / 32
"""The tutorial's 8e-4 was added to the gradient of the sum over a batch of 32; ours is that of the mean."""

BIAS_FACTOR = 2.0
"""Of the learning rate."""


class NGram(paddle.nn.Layer):  # type: ignore[misc]
    """Predicts a word from the N - 1 before it: [n, N - 1] word ids → [n, words] logits."""

    def __init__(self, words: int) -> None:
        super().__init__()
        context = (N - 1) * EMBEDDING
        self.embedding = paddle.nn.Embedding(words, EMBEDDING, weight_attr=ParamAttr(initializer=Normal(0.0, 0.001)))
        self.hidden = paddle.nn.Linear(context, HIDDEN, weight_attr=_weight(context), bias_attr=_bias())
        self.dropout = paddle.nn.Dropout(DROPOUT)
        self.output = paddle.nn.Linear(HIDDEN, words, weight_attr=_weight(HIDDEN), bias_attr=_bias())

    def forward(self, context: Any) -> Any:
        """Return logits."""
        found = self.embedding(context).flatten(1)
        return self.output(self.dropout(F.sigmoid(self.hidden(found))))


def adagrad(model: NGram) -> Any:
    """Return the tutorial's optimizer; what differs by parameter is in the parameters' attributes."""
    return paddle.optimizer.Adagrad(LEARNING_RATE, parameters=model.parameters())


def _weight(inputs: int) -> ParamAttr:
    return ParamAttr(initializer=Normal(0.0, 1 / math.sqrt(inputs)), regularizer=L2Decay(L2))


def _bias() -> ParamAttr:
    return ParamAttr(initializer=Constant(0.0), learning_rate=BIAS_FACTOR, regularizer=L2Decay(L2))
