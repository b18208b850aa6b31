"""The answers of the page's API, from the state of a connection and a user's rights. Pure.

Names of jobs that the user may not see are in no answer: neither as entries, nor in the texts about others. Hosts of
Redis and the cluster are told to those alone who may see the cluster's activity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from edl_airflow.identity import dag_of
from edl_airflow.plugin.airflow_state import JobLink, TaskKey
from edl_airflow.plugin.live import Seen
from edl_airflow.plugin.log_lines import shown_line, shown_text
from edl_airflow.plugin.rights import Rights
from edl_airflow.plugin.texts import LONGEST_NAME, is_of_task, names_in, without_addresses, words
from edl_runtime.autoscale.history import RescaleOutcome
from edl_runtime.autoscale.traffic.windows import DeclaredWindows, Sizes
from edl_runtime.backends.interface import JobStatus, token_owner
from edl_runtime.elastic.rendezvous.group_status import LastResize
from edl_runtime.elastic.rendezvous.redis_store import Event
from edl_runtime.errors import BackendError
from edl_runtime.monitor.snapshot import OUTDATED, UNKNOWN, JobLine, MonitorSnapshot, PoolLine
from edl_runtime.pods import unit_of
from edl_runtime.progress import CurvePoint
from edl_runtime.store.errors import RegistryError

NOBODY = TaskKey()

MOST_CHARACTERS = 1_000
"""Of a reason, an event, a trouble: of a longer one the beginning is shown."""

MOST_OF_NOTE = 300
MOST_METRICS = 20
MOST_OF_NAME = 60
"""Metrics of a job, and characters of the name of one: a script may report thousands."""

_SHOWN_OF_PROGRESS = (
    "step", "total_steps", "epoch", "loss", "metrics", "samples_per_s", "time_left_s", "waiting", "busy", "teachers",
    "cached", "queued", "note", "updated_at",
)  # fmt: skip


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a connection that is shown: all, or what `owners` have started, and the pools that they use.

    `links`: to the jobs and pools of the task or run, in whatever connection, also to those that were removed.
    """

    task: TaskKey = NOBODY
    state: str = ""
    owners: frozenset[str] = frozenset()
    links: tuple[JobLink, ...] = ()

    @property
    def is_all(self) -> bool:
        return not self.task.dag_id

    def covers(self, job: JobStatus) -> bool:
        """Whether a job is of this scope."""
        return self.is_all or token_owner(job.token) in self.owners


class View:
    """What one user sees of a connection's state."""

    def __init__(self, seen: Seen, rights: Rights, scope: Scope = Scope()) -> None:  # noqa: B008 - frozen
        self._seen = seen
        self._rights = rights
        self.scope = scope
        self.jobs = {name: job for name, job in seen.jobs.items() if self._sees(job)}
        self._visible = self.jobs.keys() | {pool.name for pool in seen.snapshot.pools if self._sees_pool(pool)}
        self._hidden = _names_in(seen) - self._visible
        self._windows = _windows_in(seen)
        # of a removed job nobody knows here whose it was: who may read all DAGs reads texts that name it
        self._sees_all = rights.cluster and "" in rights.sees and len(self.jobs) == len(seen.jobs)
        self._texts: dict[tuple[str, str], str] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the user sees no job and no pool."""
        return not self._visible

    def overview(
        self, conn_id: str, conns: Sequence[str], poll_s: float, removed: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the answer of `overview`. `removed`: jobs and pools of the scope's tasks that are no more."""
        snapshot, scope = self._seen.snapshot, self.scope
        shown = [job for job in self.jobs.values() if job.kind == "trainer" and scope.covers(job)]
        names = {job.name for job in shown}
        pools = [self.pool(line) for line in self._pools(names)]
        return {
            "conn": conn_id,
            "conns": conns,
            "at": snapshot.at,
            "poll_s": poll_s,
            "problems": self.problems(),
            "scope": {**msgspec.structs.asdict(scope.task), "task": scope.state},
            "can": {"policy": self._rights.runs_policy},
            "cluster": self._cluster() if self._rights.cluster else None,
            "jobs": [self.job(self._seen.lines[job.name]) for job in sorted(shown, key=_active_first)],
            "pools": pools,
            "removed": removed,
            "other_conns": sorted({link.conn_id for link in scope.links} - {conn_id}),
        }

    def job(self, line: JobLine) -> dict[str, Any]:
        """Return a job's entry. It has to be visible."""
        status = self.jobs[line.name]
        return {
            **self._common(status, line),
            "kind": line.kind,
            "elastic": status.elastic,
            "created_at": status.created_at,
            "progress": self._progress(line),
            "share": line.share,
            "limit": line.limit,
            "generation": line.generation,
            "checkpoint": line.checkpoint,
            "resize": self._resize(line),
            "pools": [
                pool.name for pool in self._seen.snapshot.pools if line.name in pool.jobs and self._sees_pool(pool)
            ],
            "can": self._can(status),
        }

    def pool(self, line: PoolLine) -> dict[str, Any]:
        """Return a pool's entry. It has to be visible."""
        status = self.jobs.get(line.name)
        known = self._seen.lines.get(line.name)
        common = self._common(status, known) if status and known else {"name": line.name, "state": "", **_NO_JOB}
        own = "" if status is None else dag_of(token_owner(status.token))
        can = self._can(status) if status else dict.fromkeys(_ACTIONS, False)
        return {
            **common,
            "running": line.running,
            "wanted": line.wanted,
            "teachers": line.teachers,
            "students": line.students,
            "busy": line.busy,
            "waiting": line.waiting,
            "limit": line.limit,
            "members": [
                {
                    **msgspec.structs.asdict(one),
                    "address": shown_text(one.address, MOST_CHARACTERS),
                    "quarantine": self.text(one.quarantine),
                }
                for one in line.members
            ],
            "jobs": [name for name in line.jobs if name in self.jobs],
            "can": {**can, "drain": own in self._rights.changes, "checkpoint": False},
        }

    def line(self, name: str) -> JobLine | None:
        """Return the line of a visible job or pool, None if there is none."""
        return self._seen.lines.get(name) if name in self.jobs else None

    def pool_line(self, name: str) -> PoolLine | None:
        """Return the line of a visible pool, None if there is none."""
        found = next((pool for pool in self._seen.snapshot.pools if pool.name == name), None)
        return found if found and self._sees_pool(found) else None

    def instances(self, name: str, members: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return a visible job's instances. `members`: those that train together, by rank."""
        ranks = {instance: rank for rank, instance in enumerate(members)}
        status = self.jobs.get(name)
        return [
            {**msgspec.structs.asdict(one), "reason": self.text(one.reason, name), "rank": ranks.get(one.index)}
            for one in (status.instances if status else ())
        ]

    def last_lines(self, name: str) -> Sequence[str]:
        """Return the last lines of a failed instance, for those who may read the log."""
        status = self.jobs.get(name)
        return (
            [shown_line(line) for line in status.last_lines]
            if status and self.may(self._rights.reads_log, status)
            else ()
        )

    def curve(self, points: Iterable[CurvePoint]) -> list[CurvePoint]:
        """Return the points of a visible job's curve as they are shown."""
        return [msgspec.structs.replace(point, metrics=_metrics(point.metrics)) for point in points]

    def events(self, job: str, happened: Iterable[Event]) -> list[dict[str, Any]]:
        """Return the events of a job that the user may see."""
        return [
            {
                "at": one.at,
                "kind": one.kind,
                "generation": one.generation,
                "instance": one.instance,
                "text": self.text(shown_line(" ".join(one.text().split())), job),
            }
            for one in happened
        ]

    def timeline(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the timeline of visible jobs; windows and traffic for those who may see the cluster's activity."""
        shown = {**found, "marks": [{**mark, "text": self.text(mark["text"], mark["job"])} for mark in found["marks"]]}
        if not self._rights.cluster:
            ahead = (at for series in found["series"] for at, _ in series["ahead"])
            shown.update(windows=[], traffic=None, ahead_until=max(ahead, default=found["until"]))
        return shown

    def problems(self, *more: str | Exception) -> list[str]:
        """Return what can't be read now, with `more`; in plain words for those who may not see the cluster."""
        there = (*self._seen.problems, *more)
        texts = [(self._rights.cluster and self.text(str(each))) or plain_problem(each) for each in there]
        return list(dict.fromkeys(filter(None, texts)))

    def may(self, dags: Collection[str], status: JobStatus) -> bool:
        """Whether these DAGs are those of a job."""
        return dag_of(token_owner(status.token)) in dags

    def in_scope(self) -> set[str]:
        """Return the visible jobs and pools of the scope."""
        names = {job.name for job in self.jobs.values() if self.scope.covers(job)}
        return names | {pool.name for pool in self._pools(names)}

    def plan(self, done: RescaleOutcome) -> dict[str, Any]:
        """Return what a pass has decided about visible jobs."""
        plan = done.plan
        return {
            "at": plan.at,
            "why": self.text(plan.why),
            "window": plan.window,
            "targets": [
                {**msgspec.structs.asdict(target), "reason": self.text(target.reason)}
                for target in plan.targets
                if target.name in self.jobs
            ],
            "refused": {name: self.text(why) for name, why in done.refused.items() if name in self.jobs},
            "notes": self._notes(plan.notes),
        }

    def text(self, text: str, of: str = "") -> str:
        """Return a text, or nothing if it may name a job or pool that the user does not see.

        Such a name is one that any part of the state has, or has the form of those of tasks' jobs, or is in quotes,
        unless it is visible. `of`: the job of theirs that the text is about, which may quote what it likes. Hosts and
        ports are for those who may see the cluster's activity.
        """
        text = shown_text(text, MOST_CHARACTERS + LONGEST_NAME)  # a name at the end is whole
        key = (text, of)
        if key not in self._texts:
            self._texts[key] = shown_text(text if self._sees_all else self._told(text, of), MOST_CHARACTERS)
        return self._texts[key]

    def _told(self, text: str, of: str) -> str:
        if self._names_others(text, of):
            return ""
        return text if self._rights.cluster else without_addresses(text)

    def _names_others(self, text: str, of: str) -> bool:
        found, quoted = words(text)
        if not of and quoted - self._visible - self._windows:
            return True
        return any(self._is_other(word, of) for word in found)

    def _is_other(self, word: str, of: str) -> bool:
        """Whether a word is the name of a job that the user does not see, or of one of its instances."""
        for name in names_in(word):
            if name == of or name in self._visible:
                return False
            if name in self._hidden or is_of_task(name):
                return True
        return False

    def _sees(self, job: JobStatus) -> bool:
        dag_id = dag_of(token_owner(job.token))
        return dag_id in self._rights.sees or (job.kind == "pool" and not dag_id and self._rights.cluster)

    def _sees_pool(self, pool: PoolLine) -> bool:
        if pool.name in self._seen.jobs:
            return pool.name in self.jobs
        return self._rights.cluster or "" in self._rights.sees

    def _pools(self, jobs: set[str]) -> list[PoolLine]:
        """Return the visible pools of the scope: its own, and those that its jobs use."""
        shown = [pool for pool in self._seen.snapshot.pools if self._sees_pool(pool)]
        if self.scope.is_all:
            return shown
        own = {name for name, job in self.jobs.items() if self.scope.covers(job)}
        return [pool for pool in shown if pool.name in own or not jobs.isdisjoint(pool.jobs)]

    def _common(self, status: JobStatus, line: JobLine) -> dict[str, Any]:
        task = self._seen.tasks.get(status.name) or NOBODY
        return {
            "name": line.name,
            "state": line.state,
            "dag_id": task.dag_id or dag_of(token_owner(status.token)),
            "run_id": task.run_id,
            "task_id": task.task_id,
            "map_index": task.map_index,
            "running": line.running,
            "wanted": line.wanted,
            "bounds": line.bounds,
            "target": line.target,
            "next": self._next(line.name),
            "reason": self.text(line.reason),
            "trouble": self.text(line.trouble, line.name),
        }

    def _can(self, status: JobStatus) -> dict[str, bool]:
        changes = self.may(self._rights.changes, status)
        scaling = status.scaling
        active = changes and scaling is not None
        free = active and scaling is not None and not scaling.queue
        resizable = status.kind == "pool" or status.elastic
        return {
            "resize": active and resizable and scaling is not None and scaling.bounds.min < scaling.bounds.max,
            "suspend": free and status.wanted > 0,
            "resume": free and status.wanted == 0,
            "checkpoint": active and status.elastic and status.wanted > 0,
            "stop": changes and not status.has_ended,
            "log": self.may(self._rights.reads_log, status),
        }

    def _cluster(self) -> dict[str, Any]:
        snapshot, expected = self._seen.snapshot, self._seen.expected
        following = expected[0] if expected else None
        return {
            "use": {name: {**msgspec.structs.asdict(use), "unit": unit_of(name)} for name, use in snapshot.use.items()},
            "submitted": len(snapshot.submitted),
            "pending": [name for name in snapshot.pending if name in self.jobs],
            "suspended": [name for name in snapshot.suspended if name in self.jobs],
            **_planned(snapshot),
            "why": self.text(snapshot.why),
            "notes": self._notes(snapshot.notes),
            "next": following
            and {
                "name": following.name,
                "start": following.at,
                "end": following.end,
                "targets": {name: most for name, most in following.targets.items() if name in self.jobs},
            },
        }

    def _next(self, name: str) -> dict[str, Any] | None:
        """Return how many instances a job gets in the next traffic window, and from when on."""
        return next(
            ({"at": plan.at, "target": plan.targets[name]} for plan in self._seen.expected[:1] if name in plan.targets),
            None,
        )

    def _notes(self, notes: Iterable[str]) -> list[str]:
        return [shown for note in notes if (shown := self.text(note))]

    def _progress(self, line: JobLine) -> dict[str, Any] | None:
        if line.progress is None:
            return None
        shown = {name: getattr(line.progress, name) for name in _SHOWN_OF_PROGRESS}
        note = shown_text(self.text(line.progress.note, line.name), MOST_OF_NOTE)
        return {**shown, "metrics": _metrics(line.progress.metrics), "note": note}

    def _resize(self, line: JobLine) -> LastResize | None:
        return line.resize and msgspec.structs.replace(line.resize, reason=self.text(line.resize.reason, line.name))


def dags_in(seen: Seen) -> frozenset[str]:
    """Return the DAGs whose tasks have started jobs, with "" for those of none."""
    return frozenset({"", *(dag_of(token_owner(job.token)) for job in seen.jobs.values())})


_ACTIONS = ("resize", "suspend", "resume", "checkpoint", "stop", "log")

_NO_JOB: Mapping[str, Any] = {
    **msgspec.structs.asdict(NOBODY), "bounds": None, "target": None, "next": None, "reason": "", "trouble": "",
}  # fmt: skip


def _active_first(job: JobStatus) -> tuple[bool, str]:
    return job.has_ended, job.name


def _metrics(reported: Mapping[str, float]) -> dict[str, float]:
    return {shown_text(name, MOST_OF_NAME): value for name, value in islice(reported.items(), MOST_METRICS)}


def _planned(snapshot: MonitorSnapshot) -> dict[str, Any]:
    return {name: getattr(snapshot, name) for name in ("planned_at", "window", "until")}


def _names_in(seen: Seen) -> set[str]:
    """Return all names of jobs and pools that a text about this state may have, also of those that are removed."""
    names = set(seen.jobs)
    for pool in seen.snapshot.pools:
        names.update((pool.name,), pool.jobs)
    for plan in seen.expected:
        names.update(plan.targets)
    if seen.done:
        names.update(seen.done.refused, (target.name for target in seen.done.plan.targets))
    windows = _rules(seen)
    for sizes in (*(window.sizes for window in windows.windows), windows.default or Sizes()) if windows else ():
        names.update(sizes.jobs, sizes.pools)
    return names


def _windows_in(seen: Seen) -> set[str]:
    """Return the names of traffic windows, which messages quote, too."""
    names = {seen.snapshot.window, *(plan.name for plan in seen.expected)}
    if seen.done:
        names.update((seen.done.plan.window, *(window.name for window in seen.done.plan.following)))
    if windows := _rules(seen):
        names.update(window.name for window in windows.windows)
    return names


def _rules(seen: Seen) -> DeclaredWindows | None:
    return seen.done.rules.windows if seen.done and seen.done.rules else None


def plain_problem(problem: str | Exception) -> str:
    """Return what can't be read now in words that name no host, job or folder; empty for what is only old."""
    if OUTDATED in str(problem):
        return ""
    if isinstance(problem, RegistryError) or UNKNOWN in str(problem):
        return "Redis can't be read now."
    if isinstance(problem, ConnectionError):
        return "The backend can't be reached now."
    return "The backend can't do that now." if isinstance(problem, BackendError) else "Part of this can't be read now."
