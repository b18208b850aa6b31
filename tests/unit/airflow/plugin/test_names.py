"""What no answer of the page has in it: names of hidden jobs, and hosts, for any state and any user."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.autoscale.jobs import capacity, running_job
from support.depth import examples

from edl_airflow.plugin import views
from edl_airflow.plugin.live import Seen
from edl_airflow.plugin.past import life_of, timeline
from edl_airflow.plugin.rights import Rights
from edl_airflow.plugin.texts import names_in
from edl_airflow.plugin.views import View, plain_problem
from edl_runtime.autoscale.history import HistoryPoint, JobPoint, RescaleOutcome
from edl_runtime.autoscale.outlook import ExpectedPlan
from edl_runtime.autoscale.planner import JobTarget, MeasuredTraffic, RescalingPlan, RescalingRules
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.backends.errors import ClusterUnavailableError
from edl_runtime.backends.interface import InstanceStatus, JobStatus
from edl_runtime.elastic.rendezvous.group_status import LastResize
from edl_runtime.elastic.rendezvous.redis_store import Event
from edl_runtime.errors import BackendError
from edl_runtime.monitor.snapshot import OUTDATED, UNKNOWN, JobLine, PoolLine, TeacherLine, build_snapshot
from edl_runtime.progress import Progress
from edl_runtime.store.errors import RegistryUnavailableError

NOW = 1_800_000_000.0
HOSTS = (
    "redis.inner.example:6379",
    "https://kube.inner.example:6443/api",
    "10.1.2.3:6379",
    "10.1.2.3",
    "[fd00::7]:6379",
)
HOST = re.compile(r"inner\.example|10\.1\.2\.3|fd00::7")
NAMES = st.from_regex(r"q[a-z0-9]{0,3}(-[a-z0-9]{1,3})?x", fullmatch=True)
"""Unlike all words of an answer."""


class World(msgspec.Struct, frozen=True):
    """A state, a user, and the names that they see or don't."""

    seen: Seen
    rights: Rights
    hidden: frozenset[str]
    events: tuple[Event, ...]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Jobs of two DAGs, one of which may be hidden, with texts that name each other, jobs that are gone, and hosts."""
    names = draw(st.lists(NAMES, min_size=2, max_size=7, unique=True))
    dags = {name: draw(st.sampled_from(["open", "secret"])) for name in names}
    there = [name for name in names if draw(st.booleans())]
    some = st.lists(st.sampled_from(names), unique=True)
    lost = draw(NAMES.filter(lambda name: name not in names))
    gone = [f"{draw(NAMES)}-{draw(st.integers(16**9, 16**10 - 1)):x}" for _ in range(2)]

    def text() -> str:
        name, host = draw(st.sampled_from([*names, *gone])), draw(st.sampled_from(HOSTS))
        return draw(
            st.sampled_from(
                [
                    "", f"{name} comes first", f"'{name}' comes first", f"stays at 2: preempted by {name}-0-x9z2k",
                    f"{host} does not answer", f"{name}: Redis at {host} is away", f"host={host}; all waits",
                ]
            )
        )  # fmt: skip

    def decision() -> str:
        return draw(st.sampled_from([text(), f"a size for '{lost}', which is not there"]))

    def texts() -> tuple[str, ...]:
        return tuple(decision() for _ in range(draw(st.integers(0, 2))))

    jobs = [_job(name, dags[name], text(), draw(st.sampled_from(["trainer", "pool"]))) for name in there]
    pools = tuple(
        PoolLine(
            name=name,
            jobs=tuple(draw(some)),
            members=(TeacherLine(id="t", address="teacher:1", quarantine=text()),),
        )
        for name in [*(job.name for job in jobs if job.kind == "pool"), "by-hand"]
    )
    plan = RescalingPlan(
        at=NOW, window="night", why=decision(), notes=texts(), capacity={},
        targets=tuple(JobTarget(name=name, kind="trainer", instances=1, target=1, reason=decision()) for name in names),
    )  # fmt: skip
    snapshot = msgspec.structs.replace(
        build_snapshot(jobs, capacity(), plan, {}, NOW, refused={name: text() for name in names}), pools=pools
    )
    lines = {
        line.name: msgspec.structs.replace(
            line,
            progress=Progress(step=1, updated_at=NOW, note=text()),
            resize=LastResize(before=1, after=2, at=NOW, reason=text()),
        )
        for line in snapshot.jobs
    }
    error = RegistryUnavailableError(draw(st.sampled_from(HOSTS)), text())
    every = frozenset(["", "open", "secret"])  # "" is for those who may read all DAGs
    sees = draw(st.just(every) | st.frozensets(st.sampled_from(["open", "secret"])))
    rights = Rights(sees=sees, reads_log=sees, changes=sees - {""}, cluster=draw(st.booleans()))
    seen = Seen(
        version="1", snapshot=snapshot, jobs={job.name: job for job in jobs}, lines=lines, problems=(*texts(), error),
        done=RescaleOutcome(plan=plan, refused={name: decision() for name in names}),
        expected=(ExpectedPlan(name="day", at=NOW + 60, end=NOW + 120, targets=dict.fromkeys(draw(some), 1)),),
    )  # fmt: skip
    visible = {name for name in there if dags[name] in sees}
    event = Event(kind="lost", instance=1, reason=text(), at=NOW - 1)
    return World(seen, rights, frozenset() if "" in sees else frozenset({*names, *gone, lost} - visible), (event,))


def _job(name: str, dag: str, text: str, kind: Any) -> JobStatus:
    instance = InstanceStatus(index=0, phase="running", started_at=NOW - 60, reason=text)
    status = running_job(name, 1, reason=text)
    return msgspec.structs.replace(status, kind=kind, token=f"{dag}/a/1", instances=(instance,))


def answers(world: World) -> list[Any]:
    """All that the user is told."""
    seen, view = world.seen, View(world.seen, world.rights)
    assert seen.done
    jobs = {line.name: line for line in seen.lines.values() if line.name in view.jobs}
    states = {name: JobPoint(running=1) for name in seen.jobs}
    traffic = MeasuredTraffic(resource="gpu", needed=12.5, at=NOW - 60)
    points = [HistoryPoint(jobs=states, use={}, window="night", traffic=traffic, at=NOW - 60)]
    lives = {name: life_of(seen.jobs[name]) for name in view.in_scope() & seen.jobs.keys()}
    past = timeline(points, dict.fromkeys(seen.jobs, world.events), seen, lives, NOW)
    pools = [view.pool(pool) for line in seen.snapshot.pools if (pool := view.pool_line(line.name))]
    return [
        view.overview("edl_default", ["edl_default"], 2.0), view.plan(seen.done), view.timeline(past), pools,
        *([view.job(line), view.instances(name), view.events(name, world.events)] for name, line in jobs.items()),
        view.problems(RegistryUnavailableError(HOSTS[0], "no route")),
    ]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=examples(40, 1000))
@given(worlds())
def test_no_answer_has_the_name_of_a_hidden_job_or_a_host_in_it(world: World) -> None:
    """Whatever texts say: of jobs there, planned, removed, in a pool or a mere word."""
    told = msgspec.json.encode(answers(world)).decode()
    visible = world.seen.jobs.keys() - world.hidden
    for name in world.hidden:
        if not any(each.startswith(f"{name}-") for each in visible):  # else its name is part of a visible one
            assert not re.search(rf"(?<![a-z0-9-]){name}(?![a-z0-9])", told), name
    if not world.rights.cluster:
        assert not HOST.search(told)
        assert "12.5" not in told, "measured traffic"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("stays at 2, its maximum", "stays at 2, its maximum"),
        ("keeps 2: image registry.example:5000/a can't be pulled", "keeps 2: image …/a can't be pulled"),
        ("window 'night' holds until 18:00", "window 'night' holds until 18:00"),
        ("ran from 10:15:30 until 12:00", "ran from 10:15:30 until 12:00"),
        ("ended 2026-11-29T10:15:30", "ended 2026-11-29T10:15:30"),
        ("7.kube-1.example:6443 is away", "… is away"),
        ("the checkpoint s3://bucket/night is damaged", "the checkpoint s3://bucket/night is damaged"),
    ],
)
def test_other_texts_stay_as_they_are(text: str, shown: str) -> None:
    """Times, windows and own names are neither hosts nor others' names."""
    job = msgspec.structs.replace(running_job("night", 1), token="open/a/1")
    snapshot = build_snapshot([job], capacity(), None, {}, NOW)
    lines = {line.name: line for line in snapshot.jobs}
    seen = Seen(version="1", snapshot=snapshot, jobs={job.name: job}, lines=lines)
    view = View(seen, Rights(sees=frozenset({"open"}), reads_log=frozenset(), changes=frozenset(), cluster=False))
    assert view.text(text) == shown


@pytest.mark.parametrize(
    ("problem", "plain"),
    [
        (f"{UNKNOWN}: Redis at a:1 can't be used", "Redis can't be read now."),
        (RegistryUnavailableError("a:1", "no route"), "Redis can't be read now."),
        (ClusterUnavailableError("https://a:1", "no route"), "The backend can't be reached now."),
        (BackendError("/srv/jobs is full"), "The backend can't do that now."),
        (OSError("/srv/jobs"), "Part of this can't be read now."),
        (f"the last rescaling was 60 min ago; {OUTDATED}", ""),
    ],
)
def test_a_problem_is_told_in_plain_words(problem: str | Exception, plain: str) -> None:
    """To those who may not see the cluster."""
    assert plain_problem(problem) == plain


def test_a_job_s_own_words_may_quote_what_they_like() -> None:
    """As why an image can't be pulled; a policy's reasons may not."""
    job = msgspec.structs.replace(running_job("night", 1, reason="no secret 'hub'"), token="open/a/1")
    line = JobLine(
        name="night", kind="trainer", state="running", running=1, wanted=1, trouble=job.reason, reason=job.reason
    )
    snapshot = build_snapshot([job], capacity(), None, {}, NOW)
    seen = Seen(version="1", snapshot=snapshot, jobs={"night": job}, lines={"night": line})
    rights = Rights(sees=frozenset({"open"}), reads_log=frozenset(), changes=frozenset(), cluster=True)
    shown = View(seen, rights).job(line)
    assert (shown["trouble"], shown["reason"]) == ("no secret 'hub'", "")


POOL = PoolLine(name="by-hand", jobs=("night", "gone"))
TARGET = JobTarget(name="gone", kind="trainer", instances=1, target=1, reason="")
PLAN = RescalingPlan(at=NOW, capacity={})
WINDOWS = to_windows({"windows": [], "default": {"jobs": {"gone": 1}}})


@pytest.mark.parametrize(
    "more",
    [
        {"snapshot": {"pools": (POOL,)}},
        {"done": RescaleOutcome(plan=msgspec.structs.replace(PLAN, targets=(TARGET,)))},
        {"done": RescaleOutcome(plan=PLAN, refused={"gone": "it was removed"})},
        {"done": RescaleOutcome(plan=PLAN, rules=RescalingRules(windows=WINDOWS))},
        {"expected": (ExpectedPlan(name="day", at=NOW, end=None, targets={"gone": 1}),)},
    ],
    ids=["pool", "plan", "refused", "windows", "expected"],
)
def test_a_name_that_is_known_from_anywhere_is_hidden_while_it_is_not_seen(more: dict[str, Any]) -> None:
    """Also without quotes, of a job that was removed, or never was."""
    job = msgspec.structs.replace(running_job("night", 1), token="open/a/1")
    snapshot = msgspec.structs.replace(build_snapshot([job], capacity(), None, {}, NOW), **more.pop("snapshot", {}))
    rights = Rights(sees=frozenset({"open"}), reads_log=frozenset(), changes=frozenset(), cluster=True)
    view = View(Seen(version="1", snapshot=snapshot, jobs={"night": job}, lines={}, **more), rights)
    assert [view.text("waits for gone"), view.text("waits for gone", "night"), view.text("night waits")] == [
        "", "", "night waits",
    ]  # fmt: skip


@pytest.mark.parametrize("part", ["_.", "a-", "a.", "'a", "[:", "1.1.1.", "1:", "http://", "-", "é."])
def test_the_time_for_a_text_grows_with_its_length_alone(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the text takes four times the work, whatever a job has written; sixteen times would be quadratic."""
    monkeypatch.setattr(views, "MOST_CHARACTERS", 1_000_000)
    job = msgspec.structs.replace(running_job("night", 1), token="open/a/1")
    snapshot = build_snapshot([job], capacity(), None, {}, NOW)
    rights = Rights(sees=frozenset({"open"}), reads_log=frozenset(), changes=frozenset(), cluster=False)

    def cpu_s(size: int) -> float:
        took = []
        for number in range(5):
            view = View(Seen(version="1", snapshot=snapshot, jobs={"night": job}, lines={}), rights)
            text = f"{number} a{part * size}!"
            began = time.thread_time()
            view.text(text, "night")
            took.append(time.thread_time() - began)
        return min(took)

    assert cpu_s(20_000) < 8 * max(cpu_s(5_000), 0.001)


def test_of_a_long_text_the_beginning_is_shown() -> None:
    """It is cut before anything is looked for in it, behind a name at the end."""
    job = msgspec.structs.replace(running_job("night", 1), token="open/a/1")
    seen = Seen(version="1", snapshot=build_snapshot([job], capacity(), None, {}, NOW), jobs={"night": job}, lines={})
    rights = Rights(sees=frozenset({"open"}), reads_log=frozenset(), changes=frozenset(), cluster=False)
    shown = View(seen, rights).text("x " * 3_000 + "secret-0123456789")
    assert shown == "x " * (views.MOST_CHARACTERS // 2) + "…"
    hidden = "secret-0123456789"
    assert View(seen, rights).text(f"{'x' * (views.MOST_CHARACTERS - 10)} {hidden} x") == "", "not even its beginning"


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("a-b-0", ["a-b-0", "a-b", "a"]),
        (f"{'n' * 52}-0-x9z2k", [f"{'n' * 52}-0-x9z2k", f"{'n' * 52}-0", "n" * 52]),
        (f"{'n' * 52}-{'x' * 5000}", ["n" * 52]),
        ("x" * 5000, []),
    ],
)
def test_a_word_may_be_or_begin_with_names_of_jobs(word: str, names: list[str]) -> None:
    """No longer than a name and an instance's number can be."""
    assert list(names_in(word)) == names
