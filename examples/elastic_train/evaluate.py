"""Loads a checkpoint of train.py and says how many of the held-out digits it names right.

    python evaluate.py checkpoints/NAME

Prints one line of JSON at last. Exits with 99 when the checkpoint is there no more: only some are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import paddle

from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.errors import CheckpointError
from edl_runtime.specs import Checkpoint

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))  # its digits and its networks

IS_GONE = 99
"""What Airflow's BashOperator takes for a task that is to be skipped."""


def main() -> None:
    """Evaluate the checkpoint that is named."""
    from digits import load_digits
    from networks import Convolutions, accuracy

    options = _options()
    place, _, name = options.checkpoint.rstrip("/").rpartition("/")
    store = CheckpointStore(Checkpoint(url=place or "."))
    try:
        snapshot = store.load(store.info(name))
    except CheckpointError as error:
        if name in store.names():
            raise
        print(f"{options.checkpoint} is there no more: {error}", file=sys.stderr)
        sys.exit(IS_GONE)
    network = Convolutions()
    network.set_state_dict({name: paddle.to_tensor(array) for name, array in snapshot.arrays["model"].items()})
    digits = load_digits(options.data_dir)
    reached = accuracy(network, paddle.to_tensor(digits.test_images), paddle.to_tensor(digits.test_labels))
    print(f"step {snapshot.step}: {reached:.1%} of {len(digits.test_labels)} held-out digits", flush=True)
    print(json.dumps({"checkpoint": options.checkpoint, "step": snapshot.step, "accuracy": round(reached, 4)}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", help="path or URL of one checkpoint")
    parser.add_argument("--data_dir", type=Path, default=Path("data"), help="keeps the digits")
    return parser.parse_args()


if __name__ == "__main__":
    main()
