"""The reader of pictures of the vision example: IDX files and class folders, whole and damaged."""

from __future__ import annotations

import gzip
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.paths import EXAMPLES, SUPPORT

SLICE = SUPPORT / "pictures"
TRAIN = "train-images-idx3-ubyte"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, imported as its scripts do."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / "vision_distill"), str(EXAMPLES / "mnist_distill"), *sys.path])
    import pictures

    yield pictures
    for name in {"pictures", "digits"} - before:
        del sys.modules[name]


def idx(*sizes: int, magic: bytes | None = None, data: bytes | None = None) -> bytes:
    """Return an IDX file of bytes, all 1 unless `data` is given."""
    head = (bytes([0, 0, 8, len(sizes)]) if magic is None else magic) + struct.pack(f">{len(sizes)}I", *sizes)
    return head + (b"\1" * int(np.prod(sizes)) if data is None else data)


def write_idx(folder: Path) -> None:
    """Write four small files: 20 pictures for training and 4 that are held out, of two classes."""
    for part, count in (("train", 20), ("t10k", 4)):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(count, 8, 8))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(count, data=bytes([0, 1] * (count // 2))))


def write_pictures(folder: Path, shade: int, count: int = 10, size: int = 8) -> None:
    """Write PNG files of one shade of grey."""
    from PIL import Image

    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("L", (size, size), shade).save(folder / f"{number}.png")


def test_idx_files_may_be_plain_or_gzipped(pictures: ModuleType, tmp_path: Path) -> None:
    """As bytes, with labels at the same places, in an order that is random and the same each time."""
    packed = pictures.load_pictures(SLICE, (1, 28, 28))
    for file in SLICE.glob("*.gz"):
        (tmp_path / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    plain = pictures.load_pictures(tmp_path, (1, 28, 28))
    assert packed.images.shape == (500, 1, 28, 28)
    assert (packed.images.dtype, packed.classes) == (np.uint8, 10)
    assert all(np.array_equal(one, other) for one, other in zip(packed, plain, strict=True))
    assert np.array_equal(pictures.load_pictures(SLICE, (1, 28, 28), rows=30).labels, packed.labels[:30])


DAMAGED: list[tuple[str, Callable[[bytes], bytes], str]] = [
    (TRAIN, lambda _: b"", f"{TRAIN}: got the header of 0 bytes, 0 bytes long, allowed is 00 00 08 03"),
    (TRAIN, lambda whole: whole[:9], "got the header 00 00 08 03, 9 bytes long, allowed is .* 3 sizes"),
    (TRAIN, lambda whole: b"\0\0\x0d\3" + whole[4:], "got the header 00 00 0d 03, .* allowed is 00 00 08 03"),
    (TRAIN, lambda _: idx(20), "got the header 00 00 08 01"),
    (TRAIN, lambda whole: whole[:-1], r"got 1,279 bytes after the header, allowed is 1,280, .*\(20 x 8 x 8\)"),
    (TRAIN, lambda whole: whole + b"\1", "got more than 1,280 bytes after the header"),
    (TRAIN, lambda _: idx(2**31, 2**31, 2**31, data=b""), "allowed is 1 to 4,000,000,000 bytes"),
    (TRAIN, lambda _: idx(0, 8, 8), "got a header of 0 x 8 x 8 bytes"),
    (TRAIN, lambda _: idx(20, 8, 9), "got grey pictures of 8 x 9, allowed is grey pictures of 8 x 8, as --image_shape"),
    ("train-labels-idx1-ubyte", lambda _: idx(19), "got 19 labels, allowed is 20, one for each picture of train-im"),
    ("t10k-labels-idx1-ubyte", lambda _: idx(4, data=b"\0\1\2\1"), "held-out pictures of class 2, allowed is classes"),
]


@pytest.mark.parametrize(("name", "damage", "complaint"), DAMAGED)
def test_a_damaged_idx_file_is_an_error(
    pictures: ModuleType, tmp_path: Path, name: str, damage: Callable[[bytes], bytes], complaint: str
) -> None:
    """That names the file, what is in it and what is allowed."""
    write_idx(tmp_path)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(pictures.DataError, match=complaint) as raised:
        pictures.load_pictures(tmp_path, (1, 8, 8))
    assert str(raised.value).startswith(str(tmp_path))


def test_a_damaged_gzip_file_is_an_error(pictures: ModuleType, tmp_path: Path) -> None:
    """Cut, of wrong content, or no gzip at all; and a file that is missing is named."""
    write_idx(tmp_path)
    (tmp_path / TRAIN).unlink()
    whole = gzip.compress(idx(20, 8, 8))
    for damaged in (whole[:-12], whole[:-8] + bytes(8), b"\1" * 50):
        (tmp_path / f"{TRAIN}.gz").write_bytes(damaged)
        with pytest.raises(pictures.DataError, match=rf"{TRAIN}.gz: got a file that can't be read"):
            pictures.load_pictures(tmp_path, (1, 8, 8))
    (tmp_path / f"{TRAIN}.gz").write_bytes(whole)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(pictures.DataError, match=r"got no t10k-labels-idx1-ubyte, allowed is .* or t10k.*gz"):
        pictures.load_pictures(tmp_path, (1, 8, 8))


@pytest.mark.parametrize("test", ["val", "test", ""])
def test_class_folders_may_be_split_or_not(pictures: ModuleType, tmp_path: Path, test: str) -> None:
    """Without a folder of held-out pictures a tenth is held out; each is resized, and classes are sorted by name."""
    for name, shade in (("dark", 10), ("light", 200)):
        write_pictures(tmp_path / "train" / name if test else tmp_path / name, shade, size=20)
        if test:
            write_pictures(tmp_path / test / name, shade, count=2)
    read = pictures.load_pictures(tmp_path, (1, 8, 8))
    assert (len(read.labels), len(read.test_labels)) == ((20, 4) if test else (18, 2))
    assert read.images.shape[1:] == (1, 8, 8)
    for images, labels in ((read.images, read.labels), (read.test_images, read.test_labels)):
        assert [int(image.max()) for image in images] == [(10, 200)[label] for label in labels]
    assert pictures.load_pictures(tmp_path, (3, 8, 8)).images.shape[1:] == (3, 8, 8)


def test_class_folders_that_cant_be_used_are_an_error(pictures: ModuleType, tmp_path: Path) -> None:
    """That names the file or folder."""

    def refused(complaint: str, **more: int) -> None:
        with pytest.raises(pictures.DataError, match=complaint):
            pictures.load_pictures(tmp_path, (1, 8, 8), **more)

    refused("got neither, allowed is a folder of IDX files, or of a folder of pictures for each class")
    write_pictures(tmp_path / "train" / "dark", 10)
    refused("got train/ alone, allowed is train/ beside val/ or test/")
    write_pictures(tmp_path / "val" / "dark", 10)
    refused("train: got 1 class folders, allowed is two or more")
    write_pictures(tmp_path / "train" / "light", 200)
    write_pictures(tmp_path / "val" / "lights", 200)
    refused(r"val: got other classes than train/ \(light, lights\)")
    (tmp_path / "val" / "lights").rename(tmp_path / "val" / "light")
    refused("got 20 pictures for training, allowed is 30 or more, as --rows says", rows=30)
    for damaged in (b"", b"not a picture", (tmp_path / "val" / "dark" / "0.png").read_bytes()[:50]):
        (tmp_path / "val" / "dark" / "1.png").write_bytes(damaged)
        refused(r"val/dark/1.png: got no readable picture \(.*\), allowed is a format that Pillow reads")
    for file in (tmp_path / "val" / "dark").iterdir():
        file.unlink()
    refused("val/dark: got no file, allowed is one picture or more")


def test_augmented_pictures_are_moved_and_mirrored(pictures: ModuleType) -> None:
    """Each differently, and the given ones stay as they are."""
    images = np.zeros((200, 1, 8, 8), np.uint8)
    images[:, :, 4, 2] = 255
    made = pictures.augment(images, np.random.default_rng(0))
    rows, columns = np.nonzero(made.sum(axis=(0, 1)))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (2, 6, 0, 7)
    assert images[:, :, 4, 2].min() == 255
