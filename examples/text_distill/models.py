"""A transformer as the teacher, and two students: a bag of words, and convolutions. They take numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable

import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
from paddle import nn
from tokens import PADDING

HIDDEN = -1e4
"""Added to what a softmax or a maximum shall not choose."""


class TransformerTeacher(nn.Layer):
    """Attention between all tokens of a text, in `layers` layers; then their mean and maximum."""

    def __init__(self, vocabulary: int, length: int, classes: int, layers: int = 1, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, activation="gelu", normalize_before=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width))
        self.dropout = nn.Dropout(0.1)
        self.logits = nn.Linear(2 * width, classes)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Return logits."""
        hidden = _is_padding(tokens) * HIDDEN
        features = self.dropout(self.tokens(tokens) + self.positions.weight)
        features = self.layers(features, hidden.unsqueeze([1, 2]))
        mean = _sum(tokens, features) / _count(tokens)
        return self.logits(paddle.concat([mean, _maximum(features + hidden.unsqueeze(-1))], axis=-1))


class BagOfWords(nn.Layer):
    """A sum of the tokens' vectors, whatever their order: 480,000 weights for 15,000 words, 32 of them for each."""

    def __init__(self, vocabulary: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.logits = nn.Linear(width, classes)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Return logits."""
        return self.logits(paddle.tanh(_sum(tokens, self.tokens(tokens)) / _count(tokens).sqrt()))


class Convolutions(nn.Layer):
    """Filters over each three neighbouring tokens, and the maximum of each: 8,000 weights more than a bag of words."""

    def __init__(self, vocabulary: int, classes: int, width: int = 32, filters: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.filters = nn.Conv1D(width, filters, 3, padding=1, data_format="NLC")
        self.logits = nn.Linear(filters, classes)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Return logits."""
        return self.logits(_maximum(F.relu(self.filters(self.tokens(tokens)))))


STUDENTS: dict[str, Callable[[int, int], nn.Layer]] = {"bow": BagOfWords, "cnn": Convolutions}


def _is_padding(tokens: paddle.Tensor) -> paddle.Tensor:
    return (tokens == PADDING).astype("float32")


def _count(tokens: paddle.Tensor) -> paddle.Tensor:
    """Return the number of each text's tokens, at least 1, as [B, 1]."""
    return (1 - _is_padding(tokens)).sum(axis=1, keepdim=True).clip(min=1.0)


def _sum(tokens: paddle.Tensor, features: paddle.Tensor) -> paddle.Tensor:
    return (features * (1 - _is_padding(tokens)).unsqueeze(-1)).sum(axis=1)


def _maximum(features: paddle.Tensor) -> paddle.Tensor:
    """Return the maximum over each text's tokens; a hundred times faster to train than `max` on CPUs."""
    return F.max_pool1d(features.transpose([0, 2, 1]), features.shape[1]).squeeze(-1)
