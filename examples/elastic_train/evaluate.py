"""Loads a checkpoint of train.py and says how many of the held-out digits it names right.

    python evaluate.py checkpoints/NAME

Prints one line of JSON at last. Exits with 99 when the checkpoint is there no more, for only some are kept, and with 1
for what is none, or is damaged, or of another model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import paddle

from edl_runtime.checkpoint.errors import CheckpointError
from edl_runtime.checkpoint.file_format import Snapshot, is_checkpoint_name
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic.training.state_parts import load_model
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.specs import Checkpoint

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))  # its digits and its networks

IS_GONE = 99
"""What Airflow's BashOperator takes for a task that is to be skipped."""


def main() -> None:
    """Evaluate the checkpoint that is named."""
    from digits import load_digits
    from networks import Convolutions, accuracy

    options = _options()
    network = Convolutions()
    try:
        snapshot = _load(options.checkpoint)
        load_model(network, snapshot.arrays, f"checkpoint {options.checkpoint}")
    except EdlError as error:
        sys.exit(f"evaluate.py: {error}")
    digits = load_digits(options.data_dir)
    reached = accuracy(network, paddle.to_tensor(digits.test_images), paddle.to_tensor(digits.test_labels))
    print(f"step {snapshot.step}: {reached:.1%} of {len(digits.test_labels)} held-out digits", flush=True)
    print(json.dumps({"checkpoint": options.checkpoint, "step": snapshot.step, "accuracy": round(reached, 4)}))


def _load(url: str) -> Snapshot:
    """Return what the checkpoint holds. Exits with IS_GONE where others are; raises EdlError for all else."""
    place, _, name = url.rstrip("/").rpartition("/")
    store = CheckpointStore(Checkpoint(url=place or "."))
    if not is_checkpoint_name(name) or not store.exists():
        raise SpecError("checkpoint", url, "the path or URL of one, as in `edl checkpoints ls PLACE --json`")
    try:
        return store.load(store.info(name))
    except CheckpointError as error:
        if name in store.names():
            raise
        print(f"{url} was deleted: {error}", file=sys.stderr)
        sys.exit(IS_GONE)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="path or URL of one checkpoint")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="caches the digits")
    return parser.parse_args()


if __name__ == "__main__":
    main()
