"""Pictures with labels, as bytes: from IDX files, as MNIST's and Fashion-MNIST's, or from a folder for each class."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from digits import shift

Images = npt.NDArray[np.uint8]  # [n, channels, height, width]
Labels = npt.NDArray[np.int64]  # [n], from 0

Shape = tuple[int, int, int]
"""Channels (1 is grey, 3 is colour), height and width."""

ORDER_SEED = 2026
TEST_FOLDERS = ("val", "test")
MOST_BYTES = 4 * 10**9
"""Of one file: more is taken for a damaged header."""


@dataclass(eq=False)
class DataError(Exception):
    """Raised for data that can't be used: a file, what is in it, and what is allowed."""

    file: Path
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.file}: got {self.found}, allowed is {self.allowed}"


class Pictures(NamedTuple):
    """Pictures for training in random order, and those that are held out."""

    images: Images
    labels: Labels
    test_images: Images
    test_labels: Labels

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.labels.max()) + 1


def load_pictures(data_dir: Path, shape: Shape, rows: int | None = None) -> Pictures:
    """Return the pictures of a folder, `rows` of those for training (None for all) and all that are held out.

    The folder has either

    - the files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte,
      each plain or as .gz, of pictures of this `shape`, or
    - train/CLASS/*.png (or another format) and the same in val/ or test/, or CLASS/*.png alone: then a tenth is held
      out. Pictures are resized to `shape`.

    Raises DataError.
    """
    if any(_idx_path(data_dir, "train-images-idx3-ubyte")):
        train, test = (_read_idx_pair(data_dir, name, shape) for name in ("train", "t10k"))
    else:
        train, test = _read_folders(data_dir, shape)
    if rows is not None and rows > len(train[1]):
        raise DataError(data_dir, f"{len(train[1]):,} pictures for training", f"{rows:,} or more, as --rows says")
    kept = np.random.default_rng(ORDER_SEED).permutation(len(train[1]))[:rows]
    if train[1].max() < test[1].max():
        raise DataError(data_dir, f"held-out pictures of class {test[1].max()}", "classes that are trained on")
    return Pictures(train[0][kept], train[1][kept], *test)


def augment(images: Images, rng: np.random.Generator) -> Images:
    """Return the images, each moved by up to two pixels and half of them mirrored, so that no answer can be reused."""
    moved = shift(images, rng)
    mirrored = rng.random(len(moved)) < 0.5
    moved[mirrored] = moved[mirrored, :, :, ::-1]
    return moved


def list_folder(folder: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """Return the classes of a folder of class folders, sorted, and each picture with its class's number.

    Raises DataError for less than two classes and for a class without pictures.
    """
    classes = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if len(classes) < 2:
        raise DataError(folder, f"{len(classes)} class folders", "two or more, each with pictures of one class")
    listed = []
    for number, name in enumerate(classes):
        files = sorted(each for each in (folder / name).iterdir() if each.is_file() and not each.name.startswith("."))
        if not files:
            raise DataError(folder / name, "no file", "one picture or more")
        listed += [(file, number) for file in files]
    return classes, listed


def read_picture(file: Path, shape: Shape) -> Images:
    """Return one picture as [channels, height, width], resized to `shape`. Raises DataError."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            resized = picture.convert("RGB" if shape[0] == 3 else "L").resize((shape[2], shape[1]))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(file, f"no readable picture ({error})", "a format that Pillow reads, as PNG or JPEG") from None
    pixels = np.asarray(resized, np.uint8)
    return pixels.transpose(2, 0, 1) if shape[0] == 3 else pixels[np.newaxis]


def read_idx(file: Path, dimensions: int) -> Images:
    """Return the bytes of an IDX file, plain or gzipped, as an array. Raises DataError."""
    opened = gzip.open if file.suffix == ".gz" else open
    expected = bytes([0, 0, 8, dimensions])
    try:
        with opened(file, "rb") as stream:
            head = stream.read(4 + 4 * dimensions)
            if not head.startswith(expected) or len(head) < 4 + 4 * dimensions:
                allowed = f"{expected.hex(' ')} (bytes in {dimensions} dimensions), then {dimensions} sizes"
                raise DataError(
                    file, f"the header {head[:4].hex(' ') or 'of 0 bytes'}, {len(head)} bytes long", allowed
                )
            sizes = struct.unpack(f">{dimensions}I", head[4:])
            size = math.prod(sizes)
            told = " x ".join(f"{each:,}" for each in sizes)
            if not 0 < size <= MOST_BYTES:
                raise DataError(file, f"a header of {told} bytes", f"1 to {MOST_BYTES:,} bytes")
            data = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(file, f"a file that can't be read ({error})", "an IDX file, plain or gzipped") from None
    if len(data) != size:
        more = f"more than {size:,}" if len(data) > size else f"{len(data):,}"
        raise DataError(file, f"{more} bytes after the header", f"{size:,}, as its header says ({told})")
    return np.frombuffer(data, np.uint8).reshape(sizes)


def _read_idx_pair(folder: Path, part: str, shape: Shape) -> tuple[Images, Labels]:
    files = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        found = next(iter(_idx_path(folder, name)), None)
        if found is None:
            raise DataError(folder, f"no {name}", f"{name} or {name}.gz beside the others")
        files.append(found)
    images, labels = read_idx(files[0], 3), read_idx(files[1], 1)
    if (1, *images.shape[1:]) != shape:
        raise DataError(
            files[0],
            f"grey pictures of {images.shape[1]} x {images.shape[2]}",
            f"{_told(shape)}, as --image_shape says",
        )
    if len(images) != len(labels):
        raise DataError(
            files[1], f"{len(labels):,} labels", f"{len(images):,}, one for each picture of {files[0].name}"
        )
    return images[:, np.newaxis], labels.astype(np.int64)


def _idx_path(folder: Path, name: str) -> list[Path]:
    return [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]


def _read_folders(data_dir: Path, shape: Shape) -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    if not data_dir.is_dir() or not any(each.is_dir() for each in data_dir.iterdir()):
        raise DataError(data_dir, "neither", "a folder of IDX files, or of a folder of pictures for each class")
    if not (data_dir / "train").is_dir():
        _, listed = list_folder(data_dir)
        order = np.random.default_rng(ORDER_SEED).permutation(len(listed))
        held_out = max(1, len(listed) // 10)
        parts = [[listed[index] for index in chosen] for chosen in (order[held_out:], order[:held_out])]
        return _read_all(parts[0], shape), _read_all(parts[1], shape)
    test = next((data_dir / name for name in TEST_FOLDERS if (data_dir / name).is_dir()), None)
    if test is None:
        raise DataError(data_dir, "train/ alone", f"train/ beside {'/ or '.join(TEST_FOLDERS)}/")
    (classes, listed), (same, tested) = list_folder(data_dir / "train"), list_folder(test)
    if classes != same:
        different = ", ".join(sorted(set(classes) ^ set(same)))
        raise DataError(test, f"other classes than train/ ({different})", "the same class folders")
    return _read_all(listed, shape), _read_all(tested, shape)


def _read_all(listed: Sequence[tuple[Path, int]], shape: Shape) -> tuple[Images, Labels]:
    images = np.stack([read_picture(file, shape) for file, _ in listed])
    return images, np.array([label for _, label in listed], np.int64)


def _told(shape: Shape) -> str:
    return f"{'colour' if shape[0] == 3 else 'grey'} pictures of {shape[1]} x {shape[2]}"
