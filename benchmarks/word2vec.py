"""What a number of instances that changes costs the N-gram model of examples/word2vec: its error on held-out n-grams.

    python examples/word2vec/prepare.py --data_dir .datasets/wordnet --out grams
    python benchmarks/word2vec.py --data grams --json

For each seed, one instance trains, three do, and one that becomes three after the first third of the passes, and one
again after the second. The global batch is the same, so is the order of n-grams; what differs is which of the hidden
units each rank drops. Exits with 1 when, for a seed, the changing run is more than 0.01 from a fixed one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from _flags import at_least_1

TRAIN = Path(__file__).resolve().parent.parent / "examples" / "word2vec" / "train.py"
EDL = [sys.executable, "-P", "-m", "edl_runtime.cli"]
TUTORIAL = 0.7356
MUST = 0.01

WAYS = {"1": [1], "3": [3], "1-3-1": [1, 3, 1]}
"""Instances in each part of the training."""

TESTED = re.compile(r"Pass (\d+), Testing metrics \{'classification_error_evaluator': ([\d.]+)\}")


def errors_of(sizes: list[int], seed: int, options: argparse.Namespace) -> list[float]:
    """Train once; return the error after each pass. Raises RuntimeError unless it had all the sizes."""
    with tempfile.TemporaryDirectory() as folder:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("EDL_")}
        quiet = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        environ = {**clean, **quiet, "EDL_WORK_DIR": f"{folder}/work"}
        flags = ["--instances", "1:3", "--start", str(sizes[0]), "--name", "word2vec", str(TRAIN)]
        flags += ["--data", str(options.data.absolute()), "--model_dir", f"{folder}/model", "--seed", str(seed)]
        flags += ["--passes", str(options.passes), "--batch_size", str(options.batch_size)]
        flags += ["--pause_s", str(options.pause_s)]
        errors, grouped = [], []
        with subprocess.Popen([*EDL, "run", *flags], env=environ, stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout or ():
                if "rank 0]" in line and (size := re.search(r"world_size=(\d+)", line)):
                    grouped.append(int(size[1]))
                if not (tested := TESTED.search(line)):
                    continue
                errors.append(float(tested[2]))
                print(f"seed {seed}: {'-'.join(map(str, sizes))}, pass {tested[1]}: {tested[2]}", file=sys.stderr)
                part, rest = divmod((int(tested[1]) + 1) * len(sizes), options.passes)
                if not rest and 0 < part < len(sizes):
                    resize = [*EDL, "resize", "word2vec", str(sizes[part])]
                    subprocess.run(resize, env=environ, check=True, stdout=subprocess.DEVNULL)
    if run.returncode or len(errors) != options.passes or grouped[-1:] != sizes[-1:] or not {*sizes} <= {*grouped}:
        raise RuntimeError(f"status {run.returncode}, {len(errors)} passes, by groups of {grouped} instances")
    return errors


def main() -> None:
    """Train all, print the last errors of each seed, and how far apart they are."""
    options = _options()
    found = [{way: errors_of(sizes, seed, options) for way, sizes in WAYS.items()} for seed in range(options.seeds)]
    last = [{way: errors[-1] for way, errors in by_way.items()} for by_way in found]
    apart = max(abs(one["1-3-1"] - one[way]) for one in last for way in ("1", "3"))
    highest = max(max(one.values()) for one in last)
    if options.json:
        print(json.dumps({"errors": found, "apart": round(apart, 6), "highest": highest, "tutorial": TUTORIAL}))
    else:
        for seed, one in enumerate(last):
            print(f"seed {seed}: " + ", ".join(f"{way} instances {error:.4f}" for way, error in one.items()))
        print(f"at most {apart:.4f} apart, at most {highest:.4f}; the tutorial reached {TUTORIAL}")
    sys.exit(apart > MUST)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of prepare.py")
    parser.add_argument("--seeds", type=at_least_1, default=3)
    parser.add_argument("--passes", type=at_least_1, default=3, help="a multiple of 3")
    parser.add_argument("--batch_size", type=at_least_1, default=256)
    parser.add_argument("--pause_s", type=float, default=0.0, help="seconds added to each step, for little data")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.passes % 3:
        parser.error(f"--passes: got {options.passes}, allowed is a multiple of 3")
    return options


if __name__ == "__main__":
    main()
