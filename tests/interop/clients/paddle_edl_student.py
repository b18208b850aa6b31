"""Reads two epochs in each format by EDL's own DistillReader; prints them as JSON. Argument: the teacher's address."""

import json
import sys

import numpy as np
from paddle_edl.distill.distill_reader import DistillReader

IMAGES = np.arange(20 * 784, dtype=np.float32).reshape(20, 1, 28, 28) % 11


def samples():
    for number, image in enumerate(IMAGES):
        yield image, [number]


def lists():
    for start in range(0, 20, 8):
        yield list(samples())[start : start + 8]


def batches():
    for start in range(0, 20, 8):
        yield IMAGES[start : start + 8], np.arange(start, min(start + 8, 20)).reshape(-1, 1)


def rows(item, setter):
    if setter == "set_sample_generator":
        return [item]
    return item if setter == "set_sample_list_generator" else [*zip(*item)]  # noqa: B905 - Python 3.7


epochs = []
for setter, source in (
    ("set_sample_generator", samples),
    ("set_sample_list_generator", lists),
    ("set_batch_generator", batches),
):
    reader = DistillReader(ins=["image", "label"], predicts=["logits"])
    reader.set_teacher_batch_size(3)
    reader.set_fixed_teacher(sys.argv[1])
    train_reader = getattr(reader, setter)(source)
    for _ in range(2):
        found = [row for item in train_reader() for row in rows(item, setter)]
        epochs.append([[int(label[0]), np.asarray(logits).tolist()] for _, label, logits in found])
print(json.dumps(epochs))
