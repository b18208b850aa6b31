"""What it costs a student to find out which teachers are its own, for pools of several sizes.

    python benchmarks/assign.py --json

CPU of this process for one call of `assign`, the least of several. `weights` is "alike" when all teachers have the
same and "own" when no two have.
"""

from __future__ import annotations

import argparse
import json

from _cpu import least_cpu_ms
from _flags import at_least_1

from edl_runtime.balance.assign import assign

SIZES = [(3, 3), (300, 300), (300, 1000), (1000, 300), (1000, 1000)]
WEIGHTS = ("alike", "own")


def cpu_ms(teachers: int, students: int, weights: str, rounds: int) -> float:
    """Return the least of `rounds` measurements."""
    pool = {f"teacher-{n}": 1.0 + (n / teachers if weights == "own" else 0) for n in range(teachers)}
    served = dict.fromkeys((f"student-{n}" for n in range(students)), None)
    return round(least_cpu_ms(lambda: assign(pool, served), rounds), 3)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least_1, default=5)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    results = {
        f"{teachers} teachers, {students} students, weights {weights}": cpu_ms(
            teachers, students, weights, options.rounds
        )
        for teachers, students in SIZES
        for weights in WEIGHTS
    }
    if options.json:
        print(json.dumps(results))
        return
    for case, result in results.items():
        print(f"{case:48} {result:>10,} ms")


if __name__ == "__main__":
    main()
