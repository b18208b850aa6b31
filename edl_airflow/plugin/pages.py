"""Renders the plugin's pages. All values are escaped."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import jinja2

from edl_airflow.links import PageUrls
from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.backends.interface import JobStatus, LogLine
from edl_runtime.pool_reports import PoolDemand, StudentReport, TeacherReport
from edl_runtime.progress import Progress
from edl_runtime.registry.members import Member

MOST_BYTES = 1_000_000
"""Bytes of lines that are kept, in UTF-8."""


class _Kept(NamedTuple):
    number: int
    line: LogLine
    size: int


class LogTail:
    """Keeps the newest lines up to `most_bytes`; drops the oldest of the instance with the most bytes."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: defaultdict[int, deque[_Kept]] = defaultdict(deque)
        self._sizes: defaultdict[int, int] = defaultdict(int)
        self._size = 0
        self._added = 0
        self.left_out = 0

    def add(self, line: LogLine) -> None:
        """Add the next line."""
        size = len(line.text.encode(errors="replace")) + 1
        self._kept[line.instance].append(_Kept(self._added, line, size))
        self._sizes[line.instance] += size
        self._size += size
        self._added += 1
        while self._size > self._most_bytes:
            most = max(self._sizes, key=self._sizes.__getitem__)
            dropped = self._kept[most].popleft().size
            self._sizes[most] -= dropped
            self._size -= dropped
            self.left_out += 1

    def lines(self) -> list[LogLine]:
        """Return the kept lines in the order in which they were added."""
        return [kept.line for kept in sorted(kept for of_one in self._kept.values() for kept in of_one)]


_LAYOUT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
{% if refresh_s %}<meta http-equiv="refresh" content="{{ refresh_s }}">{% endif %}
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #1f2937; background: #fff }
a { color: #1d4ed8 }
h1 { font-size: 1.25rem } h2 { font-size: 1.05rem } th { text-align: left }
td, th { padding: .15rem 1.2rem .15rem 0; vertical-align: top }
.bar { width: 10rem; height: .45rem; margin: .15rem 0; background: #8882 } .bar div { height: 100% }
.had { background: #9ca3af } .more { background: #15803d } .fewer { background: #d97706 }
pre { background: #f3f4f6; padding: 1rem; overflow-x: auto; white-space: pre-wrap }
.failed { color: #b91c1c } .succeeded { color: #15803d } .quiet { color: #6b7280 }
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark }
  body { background: #111827; color: #e5e7eb } pre { background: #1f2937 }
  a { color: #93c5fd } .failed { color: #fca5a5 } .succeeded { color: #86efac } .quiet { color: #9ca3af }
}
</style></head><body><h1>{{ title }}</h1>{% block body %}{% endblock %}</body></html>"""

_INSTANCES = """<table><tr><th>number</th>{% if ranks %}<th>rank</th>{% endif %}
{% if pods %}<th>pod</th><th>node</th>{% endif %}<th>phase</th><th>for</th><th>restarts</th>
{% if pods %}<th>ended by the cluster</th>{% endif %}<th>exit status</th><th></th><th></th></tr>
{% for one in status.instances %}<tr><td>{{ one.index }}</td>
{% if ranks %}<td>{{ ranks.get(one.index, "") }}</td>{% endif %}
{% if pods %}<td>{{ one.pod }}</td><td>{{ one.node }}</td>{% endif %}
<td class="{{ one.phase }}">{{ one.phase }}{{ ", given up" if one.given_up }}</td>
<td>{{ (now - one.started_at) | round | int ~ " s" if one.phase in ("running", "pending") }}</td>
<td>{{ one.restarts }}</td>
{% if pods %}<td>{{ one.disruptions }}{{ " of at most " ~ status.most_disruptions if
status.most_disruptions is not none }}</td>{% endif %}
<td>{{ "" if one.exit_code is none else one.exit_code }}</td>
<td><a href="{{ log }}?instance={{ one.index }}">log</a></td><td>{{ one.reason }}</td></tr>
{% else %}<tr><td class="quiet">none yet</td></tr>{% endfor %}</table>"""

_JOB = """{% extends "layout" %}{% block body %}
{% if status %}
<p><b class="{{ status.phase }}">{{ status.phase }}</b>{{ " · " ~ status.reason if status.reason }}
<br><a href="{{ log }}">log of all</a></p>
{% if progress %}<p>{{ progress.line() }}<br>{{ progress.verdict() }}</p>{% endif %}
<h2>Instances (wanted {{ status.wanted }})</h2>
{% include "instances" %}
{% if status.last_lines %}<pre>{% for line in status.last_lines %}{{ line }}
{% endfor %}</pre>{% endif %}
{% else %}<p class="quiet">ended and removed; <a href="{{ log }}">its log</a> is kept</p>{% endif %}{% endblock %}"""

_LOG = """{% extends "layout" %}{% block body %}
<p>{% if status %}<b class="{{ status.phase }}">{{ status.phase }}</b>{{ " · " ~ status.reason if status.reason }}
{% else %}<span class="quiet">ended and removed; its log is kept</span>{% endif %}
{% if status %}<br><a href="{{ up }}">all instances</a>{% endif %}</p>
{% if progress %}<p>{{ progress.line() }}<br>{{ progress.verdict() }}</p>{% endif %}
{% if log.left_out %}<p class="quiet">{{ log.left_out }} earlier lines are left out here; `edl logs {{ name }}` shows
them all.</p>{% endif %}
<pre>{% for line in lines %}{{ line.instance ~ " | " if many }}{{ line.text }}
{% else %}no output yet{% endfor %}</pre>{% endblock %}"""

_POOL = """{% extends "layout" %}{% block body %}
{% if trouble %}<p class="failed">{{ trouble }}</p>{% endif %}
<h2>Teachers ({{ teachers | length }})</h2>
<table><tr><th>address</th><th>weight</th><th>busy</th><th>id</th></tr>
{% for one in teachers %}<tr><td>{{ one.address }}</td><td>{{ one.weight }}</td>
<td>{{ percent(demand.teachers.get(one.id), "busy") }}</td><td>{{ one.id }}</td></tr>
{% else %}<tr><td class="quiet">none registered</td></tr>{% endfor %}</table>
<h2>Students ({{ students | length }})</h2>
<table><tr><th>id</th><th>runs on</th><th>wants</th><th>waits</th><th>samples/s</th></tr>
{% for one in students %}<tr><td>{{ one.id }}</td><td>{{ one.address }}</td>
<td>{{ "all" if one.want is none else one.want }}</td>
<td>{{ percent(demand.students.get(one.id), "waiting") }}</td>
<td>{{ demand.students[one.id].samples_per_s | round | int if demand.students.get(one.id) }}</td></tr>
{% else %}<tr><td class="quiet">none attached</td></tr>{% endfor %}</table>
{% if model %}<h2>Model</h2>
<table><tr><td>platform</td><td>{{ model.platform }}</td></tr>
{% for one in model.inputs %}<tr><td>takes</td><td>{{ one.name }} {{ one.datatype }} {{ one.shape | list }}</td></tr>
{% endfor %}
{% for one in model.outputs %}<tr><td>answers</td><td>{{ one.name }} {{ one.datatype }} {{ one.shape | list }}</td></tr>
{% endfor %}
</table>{% endif %}
{% if status %}<h2>Instances (wanted {{ status.wanted }})</h2>
<p class="{{ status.phase }}">{{ status.phase }}{{ ": " ~ status.reason if status.reason }}</p>
{% include "instances" %}
{% if status.last_lines %}<pre>{% for line in status.last_lines %}{{ line }}
{% endfor %}</pre>{% endif %}
{% else %}<p class="quiet">The backend runs no pool of this name.</p>{% endif %}{% endblock %}"""

_RESCALING = """{% extends "layout" %}{% block body %}
{% if trouble %}<p class="failed">{{ trouble }}</p>
{% elif not plan %}<p class="quiet">Nothing has been rescaled within a day.</p>
{% else %}
<p><time datetime="{{ clock(plan.at) }}">{{ clock(plan.at) }}</time>
{%- if plan.window %} · {{ "between windows" if plan.window == "default" else "window " ~ plan.window }}
{%- if plan.until %} until {{ clock(plan.until) }}{% endif %}{% endif %}
<br>{{ plan.why }}</p>
{% for note in plan.notes %}<p class="failed">{{ note }}</p>{% endfor %}
<h2>What training may use</h2>
<table>{% for name, amount in plan.capacity | dictsort %}<tr><td>{{ name }}</td><td>{{ amount_of(name, amount) }}</td>
</tr>{% else %}<tr><td class="quiet">no resource is known</td></tr>{% endfor %}</table>
<h2>Jobs and pools ({{ plan.targets | length }})</h2>
<table><tr><th>name</th><th>had</th><th></th><th>should have</th><th></th><th>why</th></tr>
{% for one in plan.targets %}<tr>
<td><a href="{{ link(one) }}">{{ one.name }}</a>{{ " (pool)" if one.kind == "pool" }}</td>
<td>{{ one.instances }}</td>
<td>{{ "↑" if one.target > one.instances else "↓" if one.target < one.instances }}</td>
<td>{{ one.target }}</td>
<td><div class="bar"><div class="had" style="width: {{ share(one.instances) }}%"></div></div>
<div class="bar"><div class="{{ "more" if one.target > one.instances else "fewer" if one.target < one.instances
else "had" }}" style="width: {{ share(one.target) }}%"></div></div></td>
<td>{{ one.reason }}</td></tr>
{% else %}<tr><td class="quiet">none that can be resized</td></tr>{% endfor %}</table>
{% endif %}{% endblock %}"""

_MESSAGE = """{% extends "layout" %}{% block body %}<p>{{ text }}</p>{% endblock %}"""

_TEMPLATES = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    loader=jinja2.DictLoader(
        {
            "layout": _LAYOUT,
            "instances": _INSTANCES,
            "job": _JOB,
            "log": _LOG,
            "pool": _POOL,
            "rescaling": _RESCALING,
            "message": _MESSAGE,
        }
    ),
)


def job_page(at: PageUrls, status: JobStatus | None, progress: Progress | None, members: Sequence[int]) -> str:
    """Show a job's instances, and reload until it has ended; `status` is None once the job is removed.

    `members`: the instances that train together, by rank.
    """
    return _TEMPLATES.get_template("job").render(
        title=f"Job {at.name}",
        refresh_s=5 if status and not status.has_ended else 0,
        progress=progress,
        ranks={instance: rank for rank, instance in enumerate(members)},
        **_instances(at, status),
    )


def log_page(
    at: PageUrls,
    status: JobStatus | None,
    progress: Progress | None,
    log: LogTail,
    instance: int | None,
    *,
    reloads: bool = True,
) -> str:
    """Show a job's log, or one instance's. Where it `reloads`, the page does so while the job runs.

    `status` is None once the job is removed.
    """
    lines = log.lines()
    return _TEMPLATES.get_template("log").render(
        title=f"Log of {at.name}" if instance is None else f"Log of instance {instance} of {at.name}",
        name=at.name,
        up=at.pool if status and status.kind == "pool" else at.job,
        refresh_s=5 if reloads and status and not status.has_ended else 0,
        log=log,
        status=status,
        progress=progress,
        lines=lines,
        many=len({line.instance for line in lines}) > 1,
    )


def pool_page(
    at: PageUrls,
    status: JobStatus | None,
    teachers: Sequence[Member],
    students: Sequence[Member],
    demand: PoolDemand,
    *,
    trouble: str,
) -> str:
    """Show a pool, with its members' reports (`demand`), and reload.

    `trouble`: why members could not be read, else empty.
    """
    return _TEMPLATES.get_template("pool").render(
        title=f"Pool {at.name}",
        refresh_s=5,
        ranks={},
        teachers=teachers,
        students=students,
        demand=demand,
        percent=_percent,
        model=next((teacher.signature for teacher in teachers if teacher.signature), None),
        trouble=trouble,
        **_instances(at, status),
    )


def rescaling_page(conn_id: str, plan: RescalingPlan | None, *, trouble: str) -> str:
    """Show the last rescaling, and reload. `trouble`: why it could not be read, else empty."""
    most = max((max(one.instances, one.target) for one in plan.targets), default=0) if plan else 0

    def link(one: JobTarget) -> str:
        at = PageUrls(conn_id, one.name)
        return at.pool if one.kind == "pool" else at.job

    return _TEMPLATES.get_template("rescaling").render(
        title=f"Rescaling of {conn_id}",
        refresh_s=10,
        plan=plan,
        trouble=trouble,
        link=link,
        share=lambda instances: round(100 * instances / most) if most else 0,
        clock=lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        amount_of=lambda name, amount: f"{amount / 2**30:.1f} GiB" if name == "memory" else f"{amount:g}",
    )


def _percent(report: TeacherReport | StudentReport | None, share: str) -> str:
    return "" if report is None else f"{100 * getattr(report, share):.0f} %"


def _instances(at: PageUrls, status: JobStatus | None) -> dict[str, Any]:
    """Return the values for the table of instances."""
    pods = any(one.pod for one in status.instances) if status else False
    return {"status": status, "pods": pods, "log": at.log, "now": time.time()}


def message_page(title: str, text: str) -> str:
    """Show one sentence."""
    return _TEMPLATES.get_template("message").render(title=title, refresh_s=0, text=text)
