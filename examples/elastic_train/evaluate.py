"""Prints the accuracy of a checkpoint of train.py on the held-out digits.

    python evaluate.py checkpoints/NAME

The last line is JSON. Exits with 99 when the checkpoint was deleted by the retention policy, and with 1 when the path
is no checkpoint, or the checkpoint is damaged or of another model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from edl_runtime.checkpoint.errors import CheckpointError
from edl_runtime.checkpoint.file_format import Snapshot, is_checkpoint_name
from edl_runtime.checkpoint.store import CheckpointStore
from edl_runtime.elastic.training.state_parts import load_model
from edl_runtime.errors import EdlError, SpecError
from edl_runtime.specs import Checkpoint

sys.path.append(str(Path(__file__).resolve().parent.parent / "mnist_distill"))  # its digits and its networks

IS_GONE = 99
"""With this exit status, Airflow's BashOperator skips the task."""


def main() -> None:
    """Evaluate one checkpoint."""
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
    reached = accuracy(network, digits.test_images, digits.test_labels)
    print(f"step {snapshot.step}: {reached:.1%} of {len(digits.test_labels)} held-out digits", flush=True)
    print(json.dumps({"checkpoint": options.checkpoint, "step": snapshot.step, "accuracy": round(reached, 4)}))


def _load(url: str) -> Snapshot:
    """Load the checkpoint. Exits with IS_GONE if it was deleted from its folder. Raises EdlError."""
    folder, _, name = url.rstrip("/").rpartition("/")
    store = CheckpointStore(Checkpoint(url=folder or "."))
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
