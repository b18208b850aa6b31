"""The answers of the page's API, from the state of a connection and a user's rights. Pure.

Names of jobs that the user may not see are in no answer: neither as entries, nor in the texts about others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from edl_airflow.identity import dag_of
from edl_airflow.plugin.airflow_state import TaskKey
from edl_airflow.plugin.live import Seen
from edl_airflow.plugin.log_lines import shown_line
from edl_airflow.plugin.rights import Rights
from edl_runtime.autoscale.history import RescaleOutcome
from edl_runtime.backends.interface import InstanceStatus, JobStatus, token_owner
from edl_runtime.monitor.snapshot import UNITS, JobLine, MonitorSnapshot, PoolLine
from edl_runtime.progress import Progress

NOBODY = TaskKey()

_SHOWN_OF_PROGRESS = (
    "step", "total_steps", "epoch", "loss", "metrics", "samples_per_s", "time_left_s", "waiting", "busy", "teachers",
    "cached", "queued", "note", "updated_at",
)  # fmt: skip


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a connection that is shown: all, or what `owners` have started, and the pools that they use."""

    task: TaskKey = NOBODY
    state: str = ""
    owners: frozenset[str] = frozenset()

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
        visible = {name for name, job in seen.jobs.items() if self._sees(job)}
        self._hidden = _any_of(seen.jobs.keys() - visible)
        self.jobs = {name: seen.jobs[name] for name in visible}

    def overview(self, conn_id: str, conns: Sequence[str], poll_s: float) -> dict[str, Any]:
        """Return the answer of `overview`."""
        snapshot, scope = self._seen.snapshot, self.scope
        shown = [job for job in self.jobs.values() if job.kind == "trainer" and scope.covers(job)]
        names = {job.name for job in shown}
        pools = [self.pool(line) for line in self._pools(names)]
        return {
            "conn": conn_id,
            "conns": conns,
            "at": snapshot.at,
            "poll_s": poll_s,
            "problems": self._texts(self._seen.problems),
            "scope": {**msgspec.structs.asdict(scope.task), "task": scope.state},
            "can": {"policy": self._rights.runs_policy},
            "cluster": self._cluster() if self._rights.cluster else None,
            "jobs": [self.job(self._seen.lines[job.name]) for job in sorted(shown, key=_active_first)],
            "pools": pools,
            "hidden": 0,
        }

    def job(self, line: JobLine) -> dict[str, Any]:
        """Return a job's entry. It has to be visible."""
        status = self.jobs[line.name]
        return {
            **self._common(status, line),
            "kind": line.kind,
            "elastic": status.elastic,
            "created_at": status.created_at,
            "progress": _progress(line.progress),
            "share": line.share,
            "limit": line.limit,
            "generation": line.generation,
            "checkpoint": line.checkpoint,
            "resize": line.resize,
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
                {**msgspec.structs.asdict(one), "quarantine": self._text(one.quarantine)} for one in line.members
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
        return [_instance(one, ranks.get(one.index)) for one in status.instances] if status else []

    def last_lines(self, name: str) -> Sequence[str]:
        """Return the last lines of a failed instance, for those who may read the log."""
        status = self.jobs.get(name)
        return (
            [shown_line(line) for line in status.last_lines]
            if status and self.may(self._rights.reads_log, status)
            else ()
        )

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
            "why": self._text(plan.why),
            "window": plan.window,
            "targets": [
                {**msgspec.structs.asdict(target), "reason": self._text(target.reason)}
                for target in plan.targets
                if target.name in self.jobs
            ],
            "refused": {name: self._text(why) for name, why in done.refused.items() if name in self.jobs},
            "notes": self._texts(plan.notes),
        }

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
            "reason": self._text(line.reason),
            "trouble": self._text(line.trouble),
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
            "why": self._text(snapshot.why),
            "notes": self._texts(snapshot.notes),
            "next": following
            and {
                "name": following.name,
                "start": following.at,
                "end": following.end,
                "targets": {name: most for name, most in following.targets.items() if name in self.jobs},
            },
        }

    def _text(self, text: str) -> str:
        """Return a text unless it names a job that the user may not see."""
        return "" if self._hidden and self._hidden(text) else text

    def _texts(self, texts: Iterable[str]) -> list[str]:
        return [text for text in texts if self._text(text)]


def dags_in(seen: Seen) -> frozenset[str]:
    """Return the DAGs whose tasks have started jobs, with "" for those of none."""
    return frozenset({"", *(dag_of(token_owner(job.token)) for job in seen.jobs.values())})


def unit_of(resource: str) -> str:
    """Return a resource's unit."""
    return UNITS.get(resource, "pieces")


_ACTIONS = ("resize", "suspend", "resume", "checkpoint", "stop", "log")

_NO_JOB: Mapping[str, Any] = {
    **msgspec.structs.asdict(NOBODY), "bounds": None, "target": None, "reason": "", "trouble": "",
}  # fmt: skip


def _any_of(names: Collection[str]) -> Callable[[str], object] | None:
    """Return a search for any of these names in a text, None for no names."""
    if not names:
        return None
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])").search


def _active_first(job: JobStatus) -> tuple[bool, str]:
    return job.has_ended, job.name


def _progress(progress: Progress | None) -> dict[str, Any] | None:
    return None if progress is None else {name: getattr(progress, name) for name in _SHOWN_OF_PROGRESS}


def _planned(snapshot: MonitorSnapshot) -> dict[str, Any]:
    return {name: getattr(snapshot, name) for name in ("planned_at", "window", "until")}


def _instance(one: InstanceStatus, rank: int | None) -> dict[str, Any]:
    return {**msgspec.structs.asdict(one), "rank": rank}
