"""Policies on the traces in `benchmarks/traces`, and on other seeds of the same setting.

    python benchmarks/autoscale.py --json
    python benchmarks/autoscale.py FOLDER    # a trace of one's own: jobs.csv and web.csv, as in benchmarks/traces/seed1

Must, in the mean over the traces and over the other seeds: with declared windows ours has at most 0.6 times the mean
pending time and 0.5 times the excess of the original's rules under the same windows (aimed at: 0.4 and 0.3); with a
learned profile no more excess than with declared windows, and at most 0.75 times their pending time (aimed at: no
excess at all, and more of the cluster used). Exit status 1 if one is missed. `--curve` shows what pending costs when
more GPUs than declared are kept for the web, or fewer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from _flags import at_least_1
from simulation.comparison import HEADINGS, POLICIES, average, cells, compare, plain
from simulation.planners import OurPolicy, declared
from simulation.simulator import SimulationResult, simulate
from simulation.traces import Trace, make_trace, read_trace

from edl_runtime.cli.options import print_table

TRACES = sorted((Path(__file__).parent / "traces").iterdir())
COMPARED = ("original-windows", "windows", "learned")


def ratios(results: dict[str, SimulationResult]) -> dict[str, tuple[float, float]]:
    """Return the compared ratios with their limits."""
    original, windows, learned = (results[name] for name in COMPARED)
    return {
        "windows: pending / original's": (windows.pending_min / original.pending_min, 0.6),
        "windows: excess / original's": (windows.excess / original.excess, 0.5),
        "learned: pending / windows'": (learned.pending_min / windows.pending_min, 0.75),
        "learned: excess / windows'": (learned.excess / windows.excess, 1.0),
    }


def curve(traces: Sequence[Trace]) -> list[tuple[int, SimulationResult]]:
    """Return the results of our policy with -1 to 3 more GPUs kept than declared."""
    return [
        (more, average([simulate(trace, OurPolicy(declared(18 + more, 15 + more, 8 + more))) for trace in traces]))
        for more in range(-1, 4)
    ]


def main() -> None:
    """Simulate, print the results, and exit with 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="traces of one's own: compare all policies on them alone")
    parser.add_argument("--seeds", type=at_least_1, default=60, help="how many other seeds, from 1 on")
    parser.add_argument("--curve", action="store_true", help="show pending and excess as more or fewer GPUs are kept")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    options = parser.parse_args()
    if options.folders:
        rows = list(compare([read_trace(folder) for folder in options.folders], list(POLICIES)))
        if options.json:
            print(json.dumps(plain(rows)))
        else:
            print_table(HEADINGS, [cells(name, outcome) for name, outcome in rows])
        return
    sets = {
        "traces": [read_trace(folder) for folder in TRACES],
        "other seeds": [make_trace(seed) for seed in range(1, options.seeds + 1)],
    }
    missed = False
    report: dict[str, object] = {}
    for title, traces in sets.items():
        rows = list(compare(traces, list(POLICIES) if title == "traces" else COMPARED))
        found = ratios(dict(rows))
        missed = missed or any(ratio > most for ratio, most in found.values())
        report[title] = {**plain(rows), "ratios": {name: round(ratio, 3) for name, (ratio, _) in found.items()}}
        if not options.json:
            print(f"\n{title}, {len(traces)}")
            print_table(HEADINGS, [cells(name, outcome) for name, outcome in rows])
            for name, (ratio, most) in found.items():
                print(f"{name:32} {ratio:.2f} (at most {most})")
        if options.curve:
            points = curve(traces)
            report[f"curve, {title}"] = [(more, point.pending_min, point.excess) for more, point in points]
            if not options.json:
                for more, point in points:
                    print(f"{more:+} GPUs kept: pending {point.pending_min:.1f} min, excess {point.excess:.2%}")
    if options.json:
        print(json.dumps(report))
    sys.exit(missed)


if __name__ == "__main__":
    main()
