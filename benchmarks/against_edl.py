"""How fast a student gets its batches with teachers' answers in them, beside EDL 0.3.1 in the same minutes.

    python3.7 -m venv edl && edl/bin/pip install paddle_edl==0.3.1 'numpy<1.20' six
    python benchmarks/against_edl.py --edl edl/bin/python [--data img28 --format batch]

Each cell reads the same made-up data by both readers, from two teachers that answer at once; epochs take turns, and the
medians count. The original's serving client loads on no current system: a stand-in takes its place (`_edl_client/`),
which sends the bare bytes of a request over a socket to `_edl_teacher.py` and takes the bare bytes of the answers, with
no format at all. That is less work than any client of Paddle Serving does, so the original is at its best here; it is
measured with requests of 16 samples, as its examples have it, and of 32, and its faster one counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from _data import DATA
from _measuring import peers
from _reading import FORMATS, Case, Format, reading

ROUNDS = 5
HERE = Path(__file__).parent


@contextlib.contextmanager
def original(python: str, case: Case, teacher_batch_size: int) -> Iterator[Callable[[], float]]:
    """Start the original's reader; yield a function that reads an epoch and returns its seconds."""
    arguments = case.data, case.format, case.passes, case.batch_size, teacher_batch_size
    with peers(case.teachers, "_edl_teacher.py") as teachers:
        process = subprocess.Popen(
            [python, HERE / "_edl_reader.py", *map(str, arguments), *(teacher.address for teacher in teachers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE / "_edl_client"), "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
        )

        def epoch() -> float:
            assert process.stdin
            assert process.stdout
            print(file=process.stdin, flush=True)
            if not (line := process.stdout.readline()):
                raise SystemExit(f"the original's reader has ended; see what {python} says above")
            return float(line)

        try:
            epoch()  # connects
            yield epoch
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its own processes would remain otherwise
            process.wait()


def compare(python: str, case: Case) -> tuple[float, float]:
    """Return the samples a second of the original and of ours."""
    seconds: dict[str, list[float]] = {}
    hold = case.batch_size if case.format == "sample" else 1
    with contextlib.ExitStack() as stack:
        theirs = {size: stack.enter_context(original(python, case, size)) for size in (16, 32)}
        ours = stack.enter_context(reading(case))
        for _ in range(ROUNDS):
            for size, epoch in theirs.items():
                seconds.setdefault(f"original {size}", []).append(epoch())
            seconds.setdefault("ours", []).append(ours.take(ours.distilled, hold).wall_s)
    rates = {reader: case.passes * case.batch_size / statistics.median(took) for reader, took in seconds.items()}
    return max(rate for reader, rate in rates.items() if reader != "ours"), rates["ours"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edl", required=True, metavar="PYTHON", help="a Python 3.7 that has paddle_edl 0.3.1")
    parser.add_argument("--data", choices=DATA, nargs="*", default=[*DATA])
    parser.add_argument("--format", choices=FORMATS, nargs="*", default=[*FORMATS])
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    print(f"{'data':8}{'format':14}{'original':>12}{'ours':>12}  times")
    for data in options.data:
        for kind in options.format:
            form: Format = kind
            batches = {"img224": 60, "img28": 1200, "tok128": 1000}[data]
            case = Case(data=data, format=form, batch_size=options.batch_size, batches=batches)
            theirs, ours = compare(options.edl, case)
            print(f"{data:8}{kind:14}{theirs:12,.0f}{ours:12,.0f}{ours / theirs:7.1f}", flush=True)


if __name__ == "__main__":
    main()
