"""Trains a small student on texts: alone, or with teachers' answers.

    python student.py --data_dir ../../.datasets/wordnet                                  # alone
    python student.py --data_dir … --use_distill_service                                  # teachers of EDL_POOL
    python student.py --data_dir … --use_distill_service --distill_teachers=127.0.0.1:9000

Each epoch leaves out other words, so it asks teachers about new texts. With --labels, only so many labels are known:
alone, the student learns from those texts, repeated; with teachers from all. Steps and batches are the same. The loop
is `study` in ../mnist_distill/distilling.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import paddle

from edl_runtime.distill.losses import UNLABELLED
from edl_runtime.errors import SpecError

# What it shares with those examples.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in ("mnist_distill", "vision_distill"))

import distilling
from flags import whole
from models import STUDENTS
from text_flags import add_data_flags, mask
from texts import load_texts
from tokens import FILE, Tokenizer
from vision_flags import run


def main() -> None:
    """Train; write the checkpoint, the result, and the curve if that is wanted."""
    options = _options()
    texts = load_texts(options.data_dir, options.rows)
    tokenizer = Tokenizer.load(options.tokenizer)
    lesson = distilling.Lesson(
        samples=tokenizer.encode(texts.texts),
        labels=hide_labels(texts.labels, options.labels, options.seed) if options.labels else texts.labels,
        test_samples=tokenizer.encode(texts.test_texts),
        test_labels=texts.test_labels,
        augment=mask,
        input="tokens",
        tokenizer=options.tokenizer,
    )
    paddle.seed(options.seed)
    student = STUDENTS[options.student](len(tokenizer.vocabulary), texts.classes)
    distilling.study(student, lesson, options)


def hide_labels(labels: npt.NDArray[np.int64], keep: int, seed: int) -> npt.NDArray[np.int64]:
    """Return `labels` with all but `keep` of them, chosen at random, replaced by UNLABELLED. Raises SpecError."""
    if keep > len(labels):
        raise SpecError("labels", keep, f"at most {len(labels):,}, the number of texts for training")
    hidden = np.full_like(labels, UNLABELLED)
    kept = np.random.default_rng(seed).permutation(len(labels))[:keep]
    hidden[kept] = labels[kept]
    return hidden


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_flags(parser)
    distilling.add_flags(parser, epochs=4, batch_size=128, lr=5e-3, temperature=2.0, weight=0.5)
    parser.add_argument("--student", choices=sorted(STUDENTS), default="bow", help="bag of words, or convolutions")
    parser.add_argument("--tokenizer", type=Path, default=Path("teacher") / FILE, help="that of the teachers")
    parser.add_argument("--labels", type=whole(1), help="known labels, chosen at random; by default all")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
