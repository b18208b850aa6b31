"""What one user sees of a connection's state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.autoscale.jobs import capacity, running_job

from edl_airflow.plugin.live import Seen, with_last_reports
from edl_airflow.plugin.log_lines import shown_line
from edl_airflow.plugin.rights import Rights
from edl_airflow.plugin.views import View
from edl_runtime.autoscale.history import ResourceUse
from edl_runtime.autoscale.outlook import ExpectedPlan
from edl_runtime.backends.interface import JobStatus
from edl_runtime.monitor.snapshot import JobLine, MonitorSnapshot, PoolLine, build_snapshot
from edl_runtime.progress import Progress


def seen(jobs: Sequence[JobStatus], **more: Any) -> Seen:
    snapshot = build_snapshot(jobs, capacity(), None, {}, 5.0)
    snapshot = msgspec.structs.replace(snapshot, **more.pop("snapshot", {}))
    lines = {line.name: line for line in (*snapshot.jobs, *snapshot.ended)}
    return Seen(version="1", snapshot=snapshot, jobs={job.name: job for job in jobs}, lines=lines, **more)


def rights(*sees: str, cluster: bool = True) -> Rights:
    return Rights(sees=frozenset(sees), reads_log=frozenset(sees), changes=frozenset(sees), cluster=cluster)


def of_dag(name: str, dag: str, **more: Any) -> JobStatus:
    return msgspec.structs.replace(running_job(name, 1, **more), token=f"{dag}/{name}/1")


def test_no_text_names_a_job_that_the_user_may_not_see() -> None:
    """In reasons, notes, problems and plans; others stay."""
    jobs = [of_dag("night", "open"), of_dag("pay", "secret")]
    pool = PoolLine(name="digits", jobs=("night", "pay"))
    told: dict[str, Any] = {
        "why": "pay has priority", "notes": ("is 'pay' meant?", "is 'night' meant?"), "pools": (pool,),
        "pending": ("night", "pay"),
    }  # fmt: skip
    state = seen(
        jobs,
        snapshot=told,
        problems=("pay: it can't be read", "Redis is away"),
        expected=(ExpectedPlan(name="w", at=9.0, end=None, targets={"night": 1, "pay": 2}),),
    )
    shown = View(state, rights("open")).overview("c", ["c"], 2.0)
    assert shown["cluster"]["notes"] == ["is 'night' meant?"]
    assert (shown["problems"], shown["cluster"]["why"]) == (["Part of this can't be read now.", "Redis is away"], "")
    assert shown["cluster"]["next"]["targets"] == {"night": 1}
    assert shown["pools"][0]["jobs"] == ["night"]
    assert '"pay"' not in msgspec.json.encode(shown).decode()


def test_a_job_says_what_the_next_window_gives_it() -> None:
    """The first window that comes; nothing where no plan knows the job."""
    plans = [ExpectedPlan(name="w", at=at, end=None, targets={"night": size}) for at, size in ((9.0, 2), (20.0, 1))]
    shown = View(seen([running_job("night", 1), running_job("new", 1)], expected=tuple(plans)), rights(""))
    found = {job["name"]: job["next"] for job in shown.overview("c", ["c"], 2.0)["jobs"]}
    assert found == {"night": {"at": 9.0, "target": 2}, "new": None}


def test_who_may_not_see_the_cluster_sees_no_pool_of_others() -> None:
    """Nor capacity and use."""
    state = seen([of_dag("night", "open")], snapshot={"pools": (PoolLine(name="by-hand"),)})
    shown = View(state, rights("open", cluster=False)).overview("c", ["c"], 2.0)
    assert (shown["cluster"], shown["pools"]) == (None, [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"elastic": False}, "log resize stop suspend"),
        ({"elastic": True, "kind": "trainer"}, "checkpoint log resize stop suspend"),
        ({"wanted": 0, "elastic": False}, "log resize resume stop"),
        ({"phase": "failed", "scaling": None, "elastic": False}, "log"),
    ],
)
def test_a_button_is_there_only_where_the_job_s_state_allows_it(changes: dict[str, Any], expected: str) -> None:
    """Whatever the user may do."""
    job = msgspec.structs.replace(of_dag("night", "open"), **{"kind": "pool", **changes})
    state = seen([job])
    can = View(state, rights("open")).job(state.lines["night"])["can"]
    assert " ".join(sorted(name for name, may in can.items() if may)) == expected


def test_without_redis_the_last_reports_stay() -> None:
    """With the states of now; of a pool that was started by hand all that was known."""
    line = JobLine(name="night", kind="trainer", state="running", running=2, wanted=2)
    known = msgspec.structs.replace(line, progress=Progress(step=3, updated_at=1.0), share=0.5, target=2, running=1)
    common: dict[str, Any] = {"submitted": (), "pending": (), "suspended": (), "trainers": {}}
    common["use"] = {"cpu": ResourceUse(total=1.0, reserved=0.0)}
    before = MonitorSnapshot(
        at=1.0, jobs=(known,), pools=(PoolLine(name="by-hand", teachers=2),), window="day", **common
    )
    now = with_last_reports(MonitorSnapshot(at=2.0, jobs=(line,), **common), before)
    assert now.jobs == (msgspec.structs.replace(known, running=2),)
    assert (now.at, now.window, [pool.teachers for pool in now.pools]) == (2.0, "day", [2])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain line, ümläut 漢", "a plain line, ümläut 漢"),
        ("10%\r50%\r100%", "100%"),
        ("100%\r", "100%"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://evil.example\x07link\x1b]8;;\x07", "link"),
        ("a\x00b\x07c\x9b1md", "abc1md"),
        ("\x1b[", ""),
        ("tab\tstays", "tab\tstays"),
        ("<img src=x onerror=alert(1)>", "<img src=x onerror=alert(1)>"),
    ],
)
def test_a_line_of_output_is_text(text: str, shown: str) -> None:
    """Without escape codes, in the last state of a progress bar; JSON and the browser do the rest."""
    assert shown_line(text) == shown
    assert json.loads(json.dumps(shown)) == shown


def test_a_very_long_line_is_cut() -> None:
    """As the page shows it, not in the file."""
    assert len(shown_line("x" * 1_000_000)) == 4_001
