"""What Prometheus is shown of jobs, pools and nodes."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.autoscale.jobs import capacity, node, pool
from support.autoscale.jobs import running_job as job
from support.network.ports import free_ports
from support.teachers.process import wait_until

from edl_runtime.autoscale.planner import JobTarget, RescalingPlan
from edl_runtime.backends.interface import Capacity, Origin
from edl_runtime.elastic.rendezvous.group_status import GroupStatus
from edl_runtime.errors import SpecError
from edl_runtime.monitor.exporter import MOST_CONNECTIONS, MonitorCollector, parse_address, serving
from edl_runtime.monitor.reports import JobReport
from edl_runtime.monitor.snapshot import MonitorSnapshot, build_snapshot
from edl_runtime.pool_reports import TeacherReport
from edl_runtime.progress import Progress


def seen(plan: RescalingPlan | None = None) -> MonitorSnapshot:
    return build_snapshot(
        [
            job("a", 2, resources={"cpu": 1.0}),
            job("waits", 0, 1),
            job("rests", 0, 0),
            job("pool", 1, 3, kind="pool"),
        ],
        capacity(node(total={"cpu": 8.0, "memory": 100.0, "gpu": 4.0}, used={"cpu": 3.0, "gpu": 1.0})),
        plan,
        {"pool": pool("pool", {"t": TeacherReport(busy=0.5, over_s=10.0)}, {"s": None, "u": None})},
        5.0,
    )


def samples(text: str) -> dict[str, float]:
    """Return all samples by name, as Prometheus writes it, with labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            # a label without a value is none to Prometheus
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if value)
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def shown(monitor: MonitorSnapshot) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(MonitorCollector(lambda: monitor))
    return samples(generate_latest(registry).decode())


def test_all_that_is_seen_is_shown() -> None:
    """Jobs by phase, instances and targets by name, resources with their units, pools."""
    target = JobTarget(name="a", kind="trainer", instances=2, target=4, reason="grows")
    plan = RescalingPlan(at=3.0, window="night", capacity={"cpu": 6.0}, targets=(target,))
    assert shown(seen(plan)) == {
        "edl_look_timestamp_seconds": 5.0,
        "edl_plan_timestamp_seconds": 3.0,
        "edl_window{window=night}": 1.0,
        "edl_jobs{phase=running}": 1.0,
        "edl_jobs{phase=pending}": 1.0,
        "edl_jobs{phase=suspended}": 1.0,
        "edl_instances{kind=trainer,name=a}": 2.0,
        "edl_instances{kind=trainer,name=waits}": 0.0,
        "edl_instances{kind=trainer,name=rests}": 0.0,
        "edl_instances{kind=pool,name=pool}": 1.0,
        "edl_wanted_instances{kind=trainer,name=a}": 2.0,
        "edl_wanted_instances{kind=trainer,name=waits}": 1.0,
        "edl_wanted_instances{kind=trainer,name=rests}": 0.0,
        "edl_wanted_instances{kind=pool,name=pool}": 3.0,
        "edl_target_instances{kind=trainer,name=a}": 4.0,
        "edl_capacity_cores{resource=cpu}": 8.0,
        "edl_capacity_bytes{resource=memory}": 100.0,
        "edl_capacity_pieces{resource=gpu}": 4.0,
        "edl_reserved_cores{resource=cpu}": 3.0,
        "edl_reserved_bytes{resource=memory}": 0.0,
        "edl_reserved_pieces{resource=gpu}": 1.0,
        "edl_reserved_by_jobs_cores{resource=cpu}": 2.0,
        "edl_reserved_by_jobs_bytes{resource=memory}": 0.0,
        "edl_reserved_by_jobs_pieces{resource=gpu}": 0.0,
        "edl_training_capacity_cores{resource=cpu}": 6.0,
        "edl_pool_teachers{pool=pool}": 1.0,
        "edl_pool_students{pool=pool}": 2.0,
        "edl_pool_busy_ratio{pool=pool}": 0.5,
    }


def test_jobs_of_tasks_have_the_dag_and_the_task_as_labels() -> None:
    """So what their runs have in common can be asked for: a job's name differs from run to run."""
    origin = Origin(airflow="one", dag_id="digits", run_id="today", task_id="train", map_index=2)
    report = JobReport(
        progress=Progress(step=3, updated_at=4.0, instances=2), group=GroupStatus(members=(0, 1), stragglers={1: 2.0})
    )
    jobs = [job("digits-train-e66d", 2, origin=origin), job("by-hand", 1)]
    at = build_snapshot(jobs, Capacity(nodes=()), None, {}, 5.0, reports={"digits-train-e66d": report})
    of_task = "dag=digits,{}name=digits-train-e66d,task=train"
    assert {name: value for name, value in shown(at).items() if "digits" in name} == {
        f"edl_instances{{{of_task.format('kind=trainer,')}}}": 2.0,
        f"edl_wanted_instances{{{of_task.format('kind=trainer,')}}}": 2.0,
        f"edl_last_step_timestamp_seconds{{{of_task.format('')}}}": 4.0,
        f"edl_straggler_ratio{{{of_task.format('index=1,')}}}": 2.0,
    }
    assert shown(at)["edl_instances{kind=trainer,name=by-hand}"] == 1.0


def test_names_are_as_prometheus_wants_them() -> None:
    """No gauge has a counter's suffix, and a family has one unit, so that its samples can be added up."""
    nodes = capacity(node(total={"cpu": 8.0, "memory": 100.0, "hugepages-2Mi": 4.0, "nvidia.com/gpu": 2.0}, used={}))
    found = [*MonitorCollector(lambda: build_snapshot([], nodes, None, {}, 5.0)).collect()]
    assert not [family.name for family in found if family.name.endswith(("_total", "_count", "_sum"))]
    assert not [sample for family in found for sample in family.samples if "unit" in sample.labels]
    resources = {family.name: [sample.labels.get("resource") for sample in family.samples] for family in found}
    assert resources["edl_capacity_cores"] == ["cpu"]
    assert resources["edl_capacity_bytes"] == ["memory", "hugepages-2Mi"]
    assert resources["edl_capacity_pieces"] == ["nvidia.com/gpu"]


def test_the_time_of_the_last_step_is_shown() -> None:
    """Of elastic trainers: a student's report has the time of the report."""
    reports = {
        "a": JobReport(progress=Progress(step=3, updated_at=4.5, instances=2)),
        "b": JobReport(progress=Progress(step=3, updated_at=4.5)),
    }
    at = build_snapshot([job("a", 2), job("b", 1)], Capacity(nodes=()), None, {}, 5.0, reports=reports)
    steps = {name: value for name, value in shown(at).items() if "last_step" in name}
    assert steps == {"edl_last_step_timestamp_seconds{name=a}": 4.5}


def test_stragglers_are_shown_by_instance() -> None:
    report = JobReport(group=GroupStatus(stragglers={2: 1.8}))
    at = build_snapshot([job("a", 3)], Capacity(nodes=()), None, {}, 5.0, reports={"a": report})
    ratios = {name: value for name, value in shown(at).items() if "straggler" in name}
    assert ratios == {"edl_straggler_ratio{index=2,name=a}": 1.8}


def test_what_nobody_knows_is_not_shown() -> None:
    """No target, capacity or window is made up when nobody rescales."""
    missing = ("edl_target", "edl_training", "edl_window", "edl_plan", "edl_pool_waiting")
    assert [name for name in shown(seen()) if name.startswith(missing)] == []


def test_it_is_served_as_long_as_it_is_wanted() -> None:
    """What was seen last, on this machine alone; then the port is free again."""
    last = seen()
    (port,) = free_ports(1)
    with serving(lambda: last, *parse_address(str(port))) as url:
        assert url.startswith(f"http://127.0.0.1:{port}/")
        with urllib.request.urlopen(url) as answer:
            assert samples(answer.read().decode())["edl_look_timestamp_seconds"] == 5.0
        last = build_snapshot([], capacity(), None, {}, 6.0)
        with urllib.request.urlopen(url) as answer:
            assert samples(answer.read().decode())["edl_look_timestamp_seconds"] == 6.0
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_named() -> None:
    """An error, for the command was asked to show metrics there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=rf"127.0.0.1:{port}.*in use"), serving(seen, "127.0.0.1", port):
            pass


def test_off_loopback_metrics_need_a_token() -> None:
    """Off loopback a token is required, and with one other clients are refused."""
    with pytest.raises(SpecError, match="EDL_MONITOR_TOKEN"), serving(seen, "0.0.0.0", 0):
        pass
    with serving(seen, "127.0.0.1", 0, "t0ken") as url:
        for header in ({}, {"Authorization": "Bearer wr0ng"}, {"Authorization": "Bearer t\u00f6ken"}):
            request = urllib.request.Request(url, headers=header)
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                urllib.request.urlopen(request, timeout=60)
            assert b"EDL_MONITOR_TOKEN" in refused.value.read()
        request = urllib.request.Request(url, headers={"Authorization": "Bearer t0ken"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "edl_jobs" in answer.read().decode()


def test_silent_clients_have_few_threads() -> None:
    """They have not shown the token: beyond a few, the oldest is closed, and a scrape is answered."""
    before = threading.active_count()
    with ExitStack() as stack:
        url = stack.enter_context(serving(seen, "127.0.0.1", 0, "t0ken"))
        port = int(url.split(":")[2].split("/")[0])
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(2 * MOST_CONNECTIONS)
        ]
        for oldest in silent[:MOST_CONNECTIONS]:
            assert oldest.recv(1) == b""
        request = urllib.request.Request(url, headers={"Authorization": "Bearer t0ken"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        wait_until(lambda: threading.active_count() <= before + 1 + MOST_CONNECTIONS)


def test_strangers_that_hang_up_leave_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a token, in the middle of a request, by a reset, as often as they like."""
    before = threading.active_count()
    with serving(seen, "127.0.0.1", 0) as url:
        port = int(url.split(":")[2].split("/")[0])
        for sent in (b"", b"GET /metrics HTTP/1.1\r\nHost:", b"GET /metrics HTTP/1.1\r\n\r\n") * 5:
            stranger = socket.create_connection(("127.0.0.1", port), 60)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.sendall(sent)
            stranger.close()
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.status == 200
        wait_until(lambda: threading.active_count() <= before + 1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "address"),
    [("9100", ("127.0.0.1", 9100)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:9100", ("::1", 9100))],
)
def test_an_address_is_a_port_or_more(text: str, address: tuple[str, int]) -> None:
    """Without a host it is this machine's own."""
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "http", "70000", ":9100", "host:", "-1"])
def test_what_is_no_address_is_an_error(text: str) -> None:
    """It names the flag and what is allowed."""
    with pytest.raises(SpecError, match=r"--metrics.*HOST:PORT"):
        parse_address(text)
