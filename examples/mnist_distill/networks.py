"""The teacher's and the students' networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F  # noqa: N812 -- as Paddle's own documents name it
import safetensors.numpy
from paddle import nn

paddle.disable_signal_handler()  # Paddle reports SIGTERM as a crash; a script should just end

AT_ONCE = 1_000
"""Images that are classified at once to measure the accuracy."""


class Residual(nn.Layer):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2D(channels, channels, 3, padding=1, bias_attr=False)
        self.first_norm = nn.BatchNorm2D(channels)
        self.second = nn.Conv2D(channels, channels, 3, padding=1, bias_attr=False)
        self.second_norm = nn.BatchNorm2D(channels)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        """Return features of the same shape."""
        inner = F.relu(self.first_norm(self.first(images)))
        return F.relu(images + self.second_norm(self.second(inner)))


class Teacher(nn.Sequential):
    """A small residual network: 40,000 weights, 1.6 million multiplications an image."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2D(1, 16, 5, stride=2, padding=2, bias_attr=False),
            nn.BatchNorm2D(16),
            nn.ReLU(),
            nn.Conv2D(16, 32, 3, stride=2, padding=1, bias_attr=False),
            nn.BatchNorm2D(32),
            nn.ReLU(),
            Residual(32),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )


class Perceptron(nn.Sequential):
    """One hidden layer: 25,000 weights, 25,000 multiplications an image."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))


class Convolutions(nn.Sequential):
    """Two convolutions: 7,000 weights, 79,000 multiplications an image."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2D(1, 6, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2D(6, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12 * 7 * 7, 10),
        )


STUDENTS = {"mlp": Perceptron, "cnn": Convolutions}


def to_input(images: npt.NDArray[Any]) -> paddle.Tensor:
    """Return images as a network takes them: float32, bytes as 0 to 1."""
    tensor = paddle.to_tensor(images)
    return tensor.astype("float32") / 255 if images.dtype == np.uint8 else tensor


def accuracy(network: nn.Layer, images: npt.NDArray[Any], labels: npt.NDArray[np.int64]) -> float:
    """Return the share of images, 0 to 1, that the network classifies correctly."""
    network.eval()
    right = 0
    with paddle.no_grad():
        for first in range(0, len(labels), AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            right += int((network(to_input(images[rows])).argmax(axis=1).numpy() == labels[rows]).sum())
    network.train()
    return right / len(labels)


def save_weights(network: nn.Layer, file: Path) -> None:
    """Write a network's weights as safetensors, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"partial-{file.name}")
    safetensors.numpy.save_file({name: weight.numpy() for name, weight in network.state_dict().items()}, partial)
    partial.replace(file)
