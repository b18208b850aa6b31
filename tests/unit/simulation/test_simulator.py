"""The simulator, and the policies that it compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import autoscale
import msgspec
import pytest
from simulation.comparison import POLICIES, compare
from simulation.planners import LEAD_S, FixedSizes, OriginalRules, OurPolicy, always, declared
from simulation.simulator import SimulatedJob, simulate
from simulation.traces import ENDS_S, Trace, TraceJob, make_trace, read_trace
from support.paths import BENCHMARKS

from edl_runtime.autoscale.policy.model import Speedup
from edl_runtime.autoscale.traffic.forecast import DAY_S, ForecastOptions, Sample
from edl_runtime.errors import SpecError
from edl_runtime.specs import Bounds

HOUR = 3600.0
COLUMNS = "id,submitted_s,min,max,work,a,phi"
TRACES = sorted((BENCHMARKS / "traces").iterdir())


def a_job(name: str, at_s: float, least: int, most: int, work: float) -> TraceJob:
    """Return a job that scales perfectly."""
    return TraceJob(name=name, submitted_s=at_s, bounds=Bounds(least, most), work=work, speedup=Speedup(a=0))


def a_trace(*jobs: TraceJob, web: Sequence[tuple[float, float]] = ((0, 0),)) -> Trace:
    """Return a trace of these jobs."""
    return Trace(name="test", jobs=jobs, web=tuple(Sample(at_s=at_s, needed=needed) for at_s, needed in web))


class ByClock:
    """Gives the one job what a table says."""

    pause_s = 10.0

    def __init__(self, table: Mapping[float, int]) -> None:
        self._table = table

    def plan(self, now_s: float, jobs: Sequence[SimulatedJob], web: Sequence[Sample]) -> Mapping[str, int]:
        """Look it up."""
        assert all(sample.at_s <= now_s for sample in web)
        return {one.job.name: self._table[now_s] for one in jobs if now_s in self._table}

    def again_s(self, now_s: float) -> float:
        """At the next time in the table."""
        return min((at_s for at_s in self._table if at_s > now_s), default=ENDS_S)


def test_progress_and_times_are_exact() -> None:
    """A job waits, starts, grows, is suspended, resumes and ends; each change stops it for the pause."""
    table = {60.0: 2, 160.0: 4, 260.0: 0, 360.0: 1}
    outcome = simulate(a_trace(a_job("a", 0, 1, 4, 600)), ByClock(table), ends_s=1000)
    # 90 s by 2 and 90 s by 4 are 540 of 600; the last 60 by one, after its pause of 10 s
    assert outcome.done == 1
    assert outcome.completion_min == pytest.approx(430 / 60)
    assert outcome.pending_min == pytest.approx((60 + 100) / 60)
    assert outcome.resizes == 3
    assert outcome.utilisation == pytest.approx((100 * 2 + 100 * 4 + 70 * 1) / (32 * 1000))


def test_excess_is_the_time_in_which_both_need_more_than_there_is() -> None:
    """A sample of the web holds until the next; what is full is not too much."""
    web = [(0, 28), (500, 28.5), (750, 10)]
    outcome = simulate(a_trace(a_job("a", 0, 4, 4, 1e9), web=web), ByClock({0.0: 4}), ends_s=1000)
    assert outcome.excess == 0.25
    assert outcome.utilisation == pytest.approx((32 * 750 + 14 * 250) / (32 * 1000))


def test_a_job_that_does_not_end_counts_until_the_end() -> None:
    """Pending and completion of one that never starts are as long as it was there."""
    outcome = simulate(a_trace(a_job("a", 400, 1, 1, 1)), ByClock({}), ends_s=1000)
    assert (outcome.done, outcome.pending_min, outcome.completion_min) == (0, 10, 10)


def test_a_job_that_has_next_to_nothing_to_do_ends() -> None:
    """Less than a clock can tell apart late in an experiment is no endless loop."""
    outcome = simulate(a_trace(a_job("a", 199_999, 1, 3, 1e-13)), ByClock({200_000.0: 3}))
    assert outcome.done == 1


def test_fixed_sizes_are_first_come_first_served() -> None:
    """A job that does not fit keeps later ones waiting."""
    jobs = [a_job("a", 0, 8, 16, 1e9), a_job("b", 1, 10, 20, 1e9), a_job("c", 2, 1, 1, 1e9)]
    outcome = simulate(a_trace(*jobs), FixedSizes(always(12)), ends_s=1000)
    assert outcome.utilisation == pytest.approx(12 / 32)


def test_the_original_shrinks_jobs_for_one_that_pends() -> None:
    """Down to their minimums, and no further when a window begins."""
    jobs = [a_job("a", 0, 10, 32, 1e9), a_job("b", 60, 10, 10, 1e9)]
    outcome = simulate(a_trace(*jobs, web=[(0, 12), (10 * HOUR, 13)]), OriginalRules(always(10)), ends_s=1000)
    assert outcome.pending_min == 0
    assert outcome.excess == pytest.approx(1000 / 1000)  # 22 and 12
    at_noon = simulate(a_trace(*jobs, web=[(0, 0)]), OriginalRules(declared()), ends_s=15 * HOUR)
    assert at_noon.utilisation == pytest.approx((24 * 10 + 20 * 5) / (32 * 15), abs=0.001)


def test_ours_gives_way_before_a_window_begins() -> None:
    """Jobs are suspended where their minimums do not fit, so that training stays below what windows leave."""
    jobs = [a_job("a", 0, 10, 32, 1e9), a_job("b", 60, 10, 10, 1e9)]
    web = [(0, 8), (10 * HOUR - LEAD_S, 15), (15 * HOUR, 8)]
    outcome = simulate(a_trace(*jobs, web=web), OurPolicy(declared()), ends_s=15 * HOUR)
    assert outcome.excess == 0


def test_a_learned_profile_leaves_the_web_what_it_will_need() -> None:
    """Jobs have shrunk when the rush begins, which no window tells, and have more than windows leave otherwise."""
    times = range(-7 * DAY_S, ENDS_S, 600)
    rush = [(at_s, 20 if 8 * 3600 <= at_s % DAY_S < 9 * 3600 else 2) for at_s in times]
    trace = a_trace(a_job("a", 0, 1, 32, 1e9), web=rush)
    learned = simulate(trace, OurPolicy(declared(), forecast_options=ForecastOptions(), late_s=60), ends_s=DAY_S)
    windows = simulate(trace, OurPolicy(declared()), ends_s=DAY_S)
    assert learned.excess == 0 < windows.excess
    assert learned.utilisation > windows.utilisation


@pytest.mark.parametrize("policy", ["windows", "learned", "learned-late"])
def test_no_policy_sees_what_is_to_come(policy: str) -> None:
    """Whatever the web does later changes nothing until then."""
    trace, until_s = make_trace(3), 10 * HOUR
    before = [sample for sample in trace.web if sample.at_s < until_s]
    other = msgspec.structs.replace(trace, web=(*before, Sample(at_s=until_s, needed=31)))
    one, two = (simulate(each, POLICIES[policy][1](), ends_s=until_s) for each in (trace, other))
    assert one == two


@pytest.mark.deep
def test_the_comparison_holds_on_the_traces() -> None:
    """What `benchmarks/autoscale.py` demands; the original's rules reach what they are known to reach."""
    results = dict(compare([read_trace(folder) for folder in TRACES], ["original-windows", "windows", "learned"]))
    original, windows, learned = results.values()
    assert original.pending_min == pytest.approx(28, abs=2)
    assert original.excess == pytest.approx(0.017, abs=0.001)
    assert windows.pending_min <= 0.6 * original.pending_min
    assert windows.excess <= 0.5 * original.excess
    assert learned.pending_min <= 0.75 * windows.pending_min
    assert learned.excess == 0
    assert learned.utilisation > windows.utilisation


def test_made_up_traces_are_like_the_ones_from_files() -> None:
    """Jobs, their work and the web are within what four traces tell of each other; a seed is always the same trace."""

    def figures(trace: Trace) -> tuple[float, ...]:
        work = sum(job.work for job in trace.jobs)
        return len(trace.jobs), work, mean(sample.needed for sample in trace.web)

    files = [figures(read_trace(folder)) for folder in TRACES]
    made = [figures(make_trace(seed)) for seed in range(40)]
    for file, like in zip(zip(*files, strict=True), zip(*made, strict=True), strict=True):
        assert mean(like) == pytest.approx(mean(file), abs=max(1.5 * stdev(file), 0.01 * mean(file)))
    assert make_trace(5) == make_trace(5) != make_trace(6)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("web.csv", "time_s,gpus\n0,4\n600,many\n", "Expected `float`, got `str` - at `$[1].gpus`"),
        ("web.csv", "time_s,gpus\n0\n", "Expected `float`, got `null` - at `$[0].gpus`"),
        ("web.csv", "time_s\n0\n", "the columns time_s, gpus (Object missing required field `gpus` - at `$[0]`)"),
        (
            "web.csv",
            "time_s,gpus\n0,inf\n",
            "columns time_s, gpus (Expected `float` <=",
        ),
        ("web.csv", "time_s,gpus\n600,4\n", "web.csv: got 'no sample at time 0 or before'"),
        ("jobs.csv", f"{COLUMNS}\n0,0,2,4,9,0,4\n1,0,4,2,9,0,4\n", "bounds: got '4:2', allowed is"),
        ("jobs.csv", f"{COLUMNS}\n0,0,1.5,2,9,0,4\n", "Expected `int`, got `str` - at `$[0].min`"),
        ("jobs.csv", f"{COLUMNS}\n0,0,1,2,9,7,4\n", "speedup.a: got 7.0, allowed is 0 to 1"),
        ("jobs.csv", f"{COLUMNS}\n3,-1,1,2,9,0,4\n", "job-3: submitted_s: got -1.0, allowed is"),
        ("jobs.csv", f"{COLUMNS}\n3,0,1,2,0,0,4\n", "job-3: work: got 0.0, allowed is goodput-"),
    ],
)
def test_a_broken_trace_says_where(tmp_path: Path, name: str, text: str, says: str) -> None:
    """The file, its line, what is there and what should be."""
    for good in ("jobs.csv", "web.csv"):
        (tmp_path / good).write_text((TRACES[0] / good).read_text())
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as raised:
        read_trace(tmp_path)
    assert says in str(raised.value)


def test_lines_may_be_in_any_order_and_ids_any_text(tmp_path: Path) -> None:
    """Ids that differ in their last digit alone are those of two jobs."""
    (tmp_path / "jobs.csv").write_text(f"{COLUMNS}\n1234568,9,1,2,9,0,4\n1234567,0,1,2,9,0,4\nnight,4,1,2,9,0,4\n")
    (tmp_path / "web.csv").write_text("time_s,gpus\n600,5\n0,7\n")
    trace = read_trace(tmp_path)
    assert [job.name for job in trace.jobs] == ["job-1234567", "job-night", "job-1234568"]
    assert trace.web == (Sample(0, 7), Sample(600, 5))


def test_the_benchmark_compares_policies_on_traces_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As JSON; a folder without a trace is said."""
    monkeypatch.setattr(autoscale, "POLICIES", {"fixed-20": POLICIES["fixed-20"]})
    monkeypatch.setattr(sys, "argv", ["autoscale.py", str(TRACES[0]), "--json"])
    autoscale.main()
    assert json.loads(capsys.readouterr().out)["fixed-20"]["pending_min"] == pytest.approx(1070.6, abs=0.1)
    monkeypatch.setattr(sys, "argv", ["autoscale.py", str(tmp_path)])
    with pytest.raises(SpecError, match=r"^trace: got"):
        autoscale.main()
