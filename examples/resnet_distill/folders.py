"""Colour pictures of class folders, decoded when they are needed, as bytes."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paddle.io import Dataset
from paddle.vision import transforms
from pictures import DataError, list_folder
from PIL import Image


class Folder(Dataset):
    """The pictures of a folder of class folders. Each is [3, height, width] in bytes, with its label.

    With `augmented` it is cropped at random, resized and mirrored; otherwise its short side is resized, and the middle
    is cropped. Raises DataError, also when it is read.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, *, augmented: bool) -> None:
        super().__init__()
        if not folder.is_dir():
            raise DataError(folder, "no folder", "train/ and val/, each with a folder of pictures for each class")
        self.classes, self.listed = list_folder(folder)
        if len(self.classes) > options.class_dim:
            raise DataError(folder, f"{len(self.classes)} classes", f"{options.class_dim} at most, as --class_dim says")
        size = options.image_shape[1:]
        if augmented:
            scale, ratio = (options.lower_scale, 1.0), (options.lower_ratio, options.upper_ratio)
            steps = [transforms.RandomResizedCrop(size, scale, ratio), transforms.RandomHorizontalFlip()]
        else:
            steps = [transforms.Resize(options.resize_short_size), transforms.CenterCrop(size)]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], np.int64]:
        """Return a picture and its label."""
        file, label = self.listed[index]
        try:
            with Image.open(file) as picture:
                made = self.transform(picture.convert("RGB"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            allowed = "a format that Pillow reads, as PNG or JPEG"
            raise DataError(file, f"no readable picture ({error})", allowed) from None
        return np.asarray(made, np.uint8).transpose(2, 0, 1), np.int64(label)
