"""A residual teacher and a small student, for pictures of any size."""

from __future__ import annotations

from networks import Residual
from paddle import nn


class ResidualTeacher(nn.Sequential):
    """Six convolutions with two shortcuts: 113,000 weights, 8 million multiplications for a picture of 28x28."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(
            *_convolution(channels, 32, stride=2),
            Residual(32),
            *_convolution(32, 64, stride=2),
            Residual(64),
            nn.AdaptiveAvgPool2D(1),
            nn.Flatten(),
            nn.Linear(64, classes),
        )


class SmallStudent(nn.Sequential):
    """Two convolutions: 5,300 weights, 61,000 multiplications for a picture of 28x28."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(
            *_convolution(channels, 8, stride=2),
            *_convolution(8, 12, stride=2),
            nn.AdaptiveAvgPool2D(6),
            nn.Flatten(),
            nn.Linear(12 * 6 * 6, classes),
        )


def _convolution(channels: int, filters: int, *, stride: int) -> list[nn.Layer]:
    convolution = nn.Conv2D(channels, filters, 3, stride=stride, padding=1, bias_attr=False)
    return [convolution, nn.BatchNorm2D(filters), nn.ReLU()]
