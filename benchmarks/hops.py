"""Through how many files of this project one thing goes: a batch, a checkpoint, a resize and a pod.

    python benchmarks/hops.py --json
    python benchmarks/hops.py --walk resize    # which functions, in the order of their first call

Each is done for real, in processes whose calls are noted. Files count once, whichever process or thread they run in.

- A batch: five of them in the student's process, once it has warmed up: from the source to the sockets and back.
- A checkpoint: what a trainer's process does in steps of which one writes a checkpoint, and does not in others.
- A resize: from `EdlResizeOperator.execute` to the first step that two trainers take together, in all processes.
- A pod: a training is submitted to a Kubernetes API (one of this script's own), looked at, its log read, and deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edl_runtime.store.redis_server import RedisServer

HERE = Path(__file__).parent
LIMIT_S = 120.0
MEASURED = ("batch", "checkpoint", "resize", "pod")


class Hops:
    """What has been noted below a folder; `environ` makes processes note it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "phase").write_bytes(b"\0")
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EDL_")},
            "EDL_HOPS": str(folder),
            "PYTHONPATH": str(HERE / "_hops"),
            "PYTHONWARNINGS": "ignore",
        }

    def calls(self, phase: int) -> list[tuple[str, str]]:
        """Return file and function of each first call in a phase: of the process in the file `only`, else of all."""
        only = self.folder / "only"
        files = sorted(self.folder.glob(f"calls-{only.read_text() if only.exists() else '*'}"))
        notes = [line.split() for file in files for line in file.read_text().splitlines()]
        return list(dict.fromkeys((file, function) for number, file, function in notes if number == str(phase)))


@contextlib.contextmanager
def hops() -> Iterator[Hops]:
    with tempfile.TemporaryDirectory(prefix="edl-hops-") as folder:
        yield Hops(Path(folder))


def walk(measured: str) -> list[tuple[str, str]]:
    """Return the functions that one thing goes through, as file and name."""
    with hops() as noted:
        if measured in ("batch", "pod"):
            run(noted, [sys.executable, str(HERE / f"_hops_{measured}.py")])
            return noted.calls(1)
        with RedisServer(noted.folder / "redis") as redis:
            noted.environ |= {"EDL_REDIS_URL": redis.url, "EDL_STATE_DIR": str(noted.folder / "work")}
            run(noted, [sys.executable, str(HERE / "_hops_training.py"), measured])
        found = noted.calls(1)
        others = set(noted.calls(2)) if measured == "checkpoint" else set()
        return [call for call in found if call not in others]


def run(noted: Hops, command: list[str]) -> None:
    ended = subprocess.run(command, env=noted.environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if ended.returncode:
        raise SystemExit(
            f"{command[1:]} ended with {ended.returncode}:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walk", choices=MEASURED, help="list the functions of one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    if flags.walk:
        for file, function in walk(flags.walk):
            print(f"{file}  {function}")
        return
    counts = {measured: len({file for file, _ in walk(measured)}) for measured in MEASURED}
    print(json.dumps(counts) if flags.json else "\n".join(f"{count:4} files: {name}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
