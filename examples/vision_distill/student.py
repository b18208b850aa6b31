"""Trains a small student on pictures: alone, or with teachers' answers.

    python student.py --data_dir ../../.datasets/fashion                                  # alone
    python student.py --data_dir … --use_distill_service                                  # teachers of EDL_POOL
    python student.py --data_dir … --use_distill_service --distill_teachers=127.0.0.1:9000

Pictures are moved and mirrored at random, so every epoch asks teachers about new ones. With --labels, only so many
labels are known: alone, the student learns from those pictures, repeated; with teachers from all. Steps and batches are
the same. The loop is `study` in ../mnist_distill/distilling.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import paddle

from edl_runtime.distill import Normalise

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))  # what it shares with that example

import distilling
from digits import hide_labels
from flags import whole
from models import SmallStudent
from pictures import augment, load_pictures
from vision_flags import add_data_flags, run

AS_BYTES = {"image": Normalise(mean=0.0, std=255.0)}
"""Pictures travel as bytes; teachers make 0 to 1 of them."""


def main() -> None:
    """Train; write the checkpoint, the result, and the curve if that is wanted."""
    options = _options()
    pictures = load_pictures(options.data_dir, options.image_shape, options.rows)
    if options.labels:
        labels = hide_labels(pictures.labels, options.labels, options.seed, pictures.classes)
        pictures = pictures._replace(labels=labels)
    paddle.seed(options.seed)
    student = SmallStudent(options.image_shape[0], pictures.classes)
    distilling.study(student, distilling.Lesson(*pictures, augment, "image", AS_BYTES), options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_flags(parser)
    distilling.add_flags(parser, epochs=6, batch_size=64, lr=5e-3, temperature=4.0, weight=0.9)
    parser.add_argument("--labels", type=whole(1), help="known labels, the same number of each class; by default all")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
