"""Policies side by side on the same traces: what `edl simulate` and `benchmarks/autoscale.py` print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

import msgspec

from edl_runtime.autoscale.planners import Fixed, Original, Ours, always, declared
from edl_runtime.autoscale.profile import Foresight
from edl_runtime.autoscale.simulate import Outcome, Planner, simulate
from edl_runtime.autoscale.traces import Trace

POLICIES: Mapping[str, tuple[str, Callable[[], Planner]]] = {
    "fixed-20": ("fixed sizes, 20 GPUs kept for the web", lambda: Fixed(always(20))),
    "fixed-6": ("fixed sizes, 6 kept", lambda: Fixed(always(6))),
    "original-6": ("EDL's rules, 6 kept", lambda: Original(always(6))),
    "original-windows": ("EDL's rules, declared windows", lambda: Original(declared())),
    "windows": ("ours, declared windows", lambda: Ours(declared())),
    "learned": ("ours, learned profile", lambda: Ours(declared(), foresight=Foresight())),
    "learned-late": (
        "ours, learned, the web seen 30 s late",
        lambda: Ours(declared(), foresight=Foresight(), late_s=30),
    ),
}
"""Each policy by its name: what it is, and a planner for one trace."""

HEADINGS = ("POLICY", "DONE", "PENDING", "P95", "COMPLETION", "UTILISATION", "EXCESS", "RESIZES")


def compare(traces: Sequence[Trace], names: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    """Yield each policy's means over the traces."""
    for name in names:
        _, planner = POLICIES[name]
        yield name, average([simulate(trace, planner()) for trace in traces])


def average(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the mean of each figure."""
    fields = Outcome.__struct_fields__
    return Outcome(**{field: mean(getattr(outcome, field) for outcome in outcomes) for field in fields})


def cells(name: str, outcome: Outcome) -> list[str]:
    """Return a row below HEADINGS: minutes, and shares in percent."""
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


def plain(rows: Sequence[tuple[str, Outcome]]) -> dict[str, dict[str, float]]:
    """Return the rows as JSON has them."""
    return {name: msgspec.to_builtins(outcome) for name, outcome in rows}
