"""Draws the pictures of docs/how-to/rescaling.md: a day of rescaling on a trace, and what pending costs in excess.

    python benchmarks/rescaling_pictures.py docs/images

Needs edl-airflow[plot].
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoscale import COMPARED, TRACES, curve
from simulation.comparison import POLICIES
from simulation.simulator import Planner, SimulatedJob, simulate
from simulation.traces import GPUS, Trace, read_trace

from edl_runtime.autoscale.traffic.forecast import Sample

HOUR_S = 3600.0
DAY = (24 * HOUR_S, 48 * HOUR_S)
"""The second day: a profile was learned by then."""

TITLES = {
    "original-windows": "The original's rules under declared windows",
    "windows": "Ours under declared windows",
    "learned": "Ours with a learned profile",
}


class Recorded:
    """A planner that records the GPUs in training and the pending jobs at each time."""

    def __init__(self, planner: Planner) -> None:
        self.pause_s = planner.pause_s
        self.points: list[tuple[float, int, int]] = []
        self._planner = planner

    def plan(self, now_s: float, jobs: Sequence[SimulatedJob], web: Sequence[Sample]) -> Mapping[str, int]:
        targets = self._planner.plan(now_s, jobs, web)
        counts = [targets.get(one.job.name, one.instances) for one in jobs]
        self.points.append((now_s, sum(counts), sum(not count for count in counts)))
        return targets

    def again_s(self, now_s: float) -> float:
        return self._planner.again_s(now_s)


def draw_day(trace: Trace, file: Path) -> None:
    """Draw the GPUs of web and training on one day, a panel for each policy."""
    plt = _pyplot()
    figure, axes = plt.subplots(len(COMPARED), 1, figsize=(9, 8), sharex=True, layout="constrained")
    for axis, name in zip(axes, COMPARED, strict=True):
        recorded = Recorded(POLICIES[name][1]())
        simulate(trace, recorded)
        web = [sample for sample in trace.web if DAY[0] <= sample.at_s < DAY[1]]
        points = [point for point in recorded.points if DAY[0] <= point[0] < DAY[1]]
        times = sorted({sample.at_s for sample in web} | {point[0] for point in points})
        needed = _steps(times, [(sample.at_s, sample.needed) for sample in web])
        trained = _steps(times, [(at_s, count) for at_s, count, _ in points])
        both = [sum(pair) for pair in zip(needed, trained, strict=True)]
        hours = [(at_s - DAY[0]) / HOUR_S for at_s in times]
        axis.fill_between(hours, needed, step="post", color="#c9d6e8", label="web")
        within = [min(used, GPUS) for used in both]
        axis.fill_between(hours, needed, within, step="post", color="#7fb77e", linewidth=0, label="training")
        axis.fill_between(hours, within, both, step="post", color="#d1495b", linewidth=0, label="more than there is")
        axis.axhline(GPUS, color="#333333", linewidth=1)
        waiting = axis.twinx()
        waiting.step([(at_s - DAY[0]) / HOUR_S for at_s, _, _ in points], [jobs for _, _, jobs in points], where="post",
                     color="#8c5e2a", linewidth=1, label="jobs that wait (right)")  # fmt: skip
        waiting.set_ylim(0, 12)
        axis.set_ylim(0, GPUS * 1.15)
        axis.set_ylabel("GPUs")
        axis.set_title(TITLES[name], loc="left", fontsize=10)
        if axis is axes[0]:
            handles = [*axis.get_legend_handles_labels()[0], *waiting.get_legend_handles_labels()[0]]
            axis.legend(handles=handles, loc="upper left", ncols=4, fontsize=8)
    axes[-1].set_xlabel("hour of a Tuesday")
    axes[-1].set_xticks(range(0, 25, 3))
    axes[-1].set_xlim(0, 24)
    figure.savefig(file, dpi=110)


def draw_curve(traces: Sequence[Trace], file: Path) -> None:
    """Draw mean pending against excess as more or fewer GPUs are kept for the web."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    points = [(100 * outcome.excess, outcome.pending_min, more) for more, outcome in curve(traces)]
    axis.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color="#7fb77e", label="ours, windows")
    for x, y, more in points:
        axis.annotate(f"{more:+d} kept" if more else "as declared", (x, y), textcoords="offset points", xytext=(6, 4))
    for name, colour in (("original-windows", "#8c5e2a"), ("learned", "#4a6fa5")):
        outcomes = [simulate(trace, POLICIES[name][1]()) for trace in traces]
        excess = 100 * sum(one.excess for one in outcomes) / len(outcomes)
        pending = sum(one.pending_min for one in outcomes) / len(outcomes)
        label = "the original's rules, windows" if name == "original-windows" else "ours, learned"
        axis.plot([excess], [pending], "s", color=colour, label=label)
    axis.set_xlabel("excess, % of the time")
    axis.set_ylabel("mean pending, minutes")
    axis.margins(x=0.15)
    axis.set_xlim(left=-0.05)
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(file, dpi=110)


def _steps(times: Sequence[float], changes: Sequence[tuple[float, float]]) -> list[float]:
    """Return the value of a step function at each time."""
    found, value, index = [], changes[0][1], 0
    for at_s in times:
        while index < len(changes) and changes[index][0] <= at_s:
            value = changes[index][1]
            index += 1
        found.append(value)
    return found


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def main() -> None:
    """Draw both into the given folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    traces = [read_trace(trace) for trace in TRACES]
    draw_day(traces[0], folder / "rescaling-day.png")
    draw_curve(traces, folder / "rescaling-curve.png")


if __name__ == "__main__":
    main()
