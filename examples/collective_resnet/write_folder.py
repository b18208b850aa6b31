"""Writes pictures of IDX files, as those of Fashion-MNIST, as an ImageFolder: train/CLASS/N.png and val/CLASS/N.png."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).resolve().parent.parent / "vision_distill"))  # what it shares with these examples
sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))

from flags import whole
from pictures import Images, Labels, load_pictures
from vision_flags import add_data_flags, run


def write(images: Images, labels: Labels, folder: Path) -> None:
    """Write [n, 1, height, width] bytes into a folder of each label."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = folder / str(label) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(file)


def main() -> None:
    """Write both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_data_flags(parser)
    parser.add_argument("--test_rows", type=whole(10), default=1000, help="held-out pictures")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    pictures = load_pictures(options.data_dir, options.image_shape, options.rows)
    write(pictures.images, pictures.labels, options.folder / "train")
    tested = slice(options.test_rows)
    write(pictures.test_images[tested], pictures.test_labels[tested], options.folder / "val")


if __name__ == "__main__":
    run(main)
