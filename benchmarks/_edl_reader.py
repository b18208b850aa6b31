"""Reads synthetic data by the original's DistillReader, an epoch for each line of its input. For Python 3.7.

    _edl_reader.py DATA FORMAT BATCHES BATCH_SIZE TEACHER_BATCH_SIZE ADDRESS...

Prints the seconds of each epoch. The data are those of `_data.py`, which needs a newer Python.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from typing import Any, Callable, Iterable, Iterator

import numpy as np
import paddle_serving_client
from paddle_edl.distill.distill_reader import DistillReader

SHAPES: dict[str, list[tuple[int, ...]]] = {"img224": [(3, 224, 224)], "img28": [(1, 28, 28)], "tok128": [(128,)] * 4}


def source(kind: str, slots: list[Any], batches: int, batch_size: int) -> Callable[[], Iterator[Any]]:
    """Return the source in a format of the reader; every sample is a fresh copy."""
    arrays = [slot for slot in slots if isinstance(slot, np.ndarray)]
    label = tuple(slots[len(arrays) :])
    whole = [np.repeat(np.asarray(slot)[None], batch_size, axis=0) for slot in slots]

    def samples() -> Iterator[Any]:
        for _ in range(batches * batch_size):
            yield tuple([slot.copy() for slot in arrays]) + label

    def sample_lists() -> Iterator[Any]:
        for _ in range(batches):
            yield [tuple([slot.copy() for slot in arrays]) + label for _ in range(batch_size)]

    def whole_batches() -> Iterator[Any]:
        for _ in range(batches):
            yield tuple([slot.copy() for slot in whole])

    return {"sample": samples, "sample_list": sample_lists, "batch": whole_batches}[kind]


def consume(items: Iterable[Any], hold: int) -> Any:
    """Take all items, dropping them whenever `hold` are held; return their number and the last."""
    held, count, item = [], 0, None
    for item in items:
        held.append(item)
        count += 1
        if len(held) == hold:
            held.clear()
    return count, item


def main(data: str, kind: str, batches: int, batch_size: int, teacher_batch_size: int, *addresses: str) -> None:
    logging.disable(logging.CRITICAL)
    dtype = np.int64 if data == "tok128" else np.float32
    slots: list[Any] = [np.zeros(shape, dtype) for shape in SHAPES[data]]
    names = [f"input_{number}" for number in range(len(slots))]
    paddle_serving_client.feeds = {name: list(SHAPES[data][number]) for number, name in enumerate(names)}
    if data != "tok128":
        slots, names = [*slots, np.int64(7)], [*names, "label"]
    reader = DistillReader(names, ["logits"])
    reader.set_teacher_batch_size(teacher_batch_size)
    reader.set_fixed_teacher(list(addresses))
    with tempfile.NamedTemporaryFile() as empty:  # the stand-in needs no configuration
        reader.set_serving_conf_file(empty.name)
        getattr(reader, f"set_{kind}_generator")(source(kind, slots, batches, batch_size))
        items = batches * batch_size if kind == "sample" else batches
        for _ in sys.stdin:
            began = time.time()
            count, last = consume(reader(), batch_size if kind == "sample" else 1)
            took = time.time() - began
            if count != items or len(last[0] if kind == "sample_list" else last) != len(names) + 1:
                sys.exit(f"got {count} items, the last with {len(last)} slots")
            print(took, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), *sys.argv[6:])
