"""Compares policies on the same traces, for `benchmarks/autoscale.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

import msgspec
from simulation.planners import FixedSizes, OriginalRules, OurPolicy, always, declared
from simulation.simulator import Planner, SimulationResult, simulate
from simulation.traces import Trace

from edl_runtime.autoscale.traffic.forecast import ForecastOptions

POLICIES: Mapping[str, tuple[str, Callable[[], Planner]]] = {
    "fixed-20": ("fixed sizes, 20 GPUs kept for the web", lambda: FixedSizes(always(20))),
    "fixed-6": ("fixed sizes, 6 kept", lambda: FixedSizes(always(6))),
    "original-6": ("EDL's rules, 6 kept", lambda: OriginalRules(always(6))),
    "original-windows": ("EDL's rules, declared windows", lambda: OriginalRules(declared())),
    "windows": ("ours, declared windows", lambda: OurPolicy(declared())),
    "learned": ("ours, learned profile", lambda: OurPolicy(declared(), forecast_options=ForecastOptions())),
    "learned-late": (
        "ours, learned, the web seen 30 s late",
        lambda: OurPolicy(declared(), forecast_options=ForecastOptions(), late_s=30),
    ),
}
"""By name: a description, and a planner for one trace."""

HEADINGS = ("POLICY", "DONE", "PENDING", "P95", "COMPLETION", "UTILISATION", "EXCESS", "RESIZES")


def compare(traces: Sequence[Trace], names: Sequence[str]) -> Iterator[tuple[str, SimulationResult]]:
    """Yield each policy's means over the traces."""
    for name in names:
        _, planner = POLICIES[name]
        yield name, average([simulate(trace, planner()) for trace in traces])


def average(outcomes: Sequence[SimulationResult]) -> SimulationResult:
    """Return the mean of each figure."""
    fields = SimulationResult.__struct_fields__
    return SimulationResult(**{field: mean(getattr(outcome, field) for outcome in outcomes) for field in fields})


def cells(name: str, outcome: SimulationResult) -> list[str]:
    """Return a row below HEADINGS."""
    return [
        POLICIES[name][0],
        f"{outcome.done:.1f}/{outcome.jobs:.1f}",
        f"{outcome.pending_min:.1f} min",
        f"{outcome.pending_p95_min:.1f} min",
        f"{outcome.completion_min:.1f} min",
        f"{outcome.utilisation:.1%}",
        f"{outcome.excess:.2%}",
        f"{outcome.resizes:.1f}",
    ]


def plain(rows: Sequence[tuple[str, SimulationResult]]) -> dict[str, dict[str, float]]:
    """Return the rows for JSON."""
    return {name: msgspec.to_builtins(outcome) for name, outcome in rows}
