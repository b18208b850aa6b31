"""`edl simulate`: policies that share a cluster out between the web and training, side by side on traces."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from edl_runtime.autoscale.comparison import HEADINGS, POLICIES, cells, compare, plain
from edl_runtime.autoscale.traces import make_trace, read_trace
from edl_runtime.cli.flags import words
from edl_runtime.cli.tables import print_table
from edl_runtime.errors import SpecError


@click.command
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option("--seed", "seeds", type=int, multiple=True, help="Make up a trace from it. May be given again.")
@click.option("--policies", default=",".join(POLICIES), show_default=True, help="Which to run, in this order.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the means of each policy, in minutes and shares.")
def simulate(*, folders: tuple[Path, ...], seeds: tuple[int, ...], policies: str, as_json: bool) -> None:
    """Run policies on the traces in FOLDERS, and print their means.

    A folder has jobs.csv (id, submitted_s, min, max, work, a, phi) and web.csv (time_s, gpus), as those in
    benchmarks/traces. The cluster has 32 GPUs, and 60 hours are simulated; time 0 is a Monday's midnight. Pending is
    how long a job has no instance, before it starts and while it is suspended; excess is the share of time in which web
    and training together would need more GPUs than there are.
    """
    names = words(policies)
    if unknown := [name for name in names if name not in POLICIES]:
        raise SpecError("policies", unknown[0], f"some of {', '.join(POLICIES)}")
    traces = [*map(read_trace, folders), *map(make_trace, seeds)]
    if not traces:
        raise SpecError("traces", "none", "folders with traces, as benchmarks/traces/seed1, or --seed 1")
    rows = list(compare(traces, names))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(plain(rows))))
    else:
        print_table(HEADINGS, [cells(name, outcome) for name, outcome in rows])
