"""How much faster jobs train with more instances, by what was measured."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.autoscale.jobs import NOON, job

from edl_runtime.autoscale.cluster.throughput import FRESH_S, STEADY_S, fit_speedup, speedups, steady_speed
from edl_runtime.autoscale.policy.model import Speedup
from edl_runtime.backends.interface import JobStatus
from edl_runtime.progress import Progress, publish_progress
from edl_runtime.specs import Bounds
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

NOW = NOON


def at_rest(have: int, age: float = 4000, **more: Any) -> JobStatus:
    """Return a job whose instances have trained for so long."""
    status = job("job", Bounds(1, 9), 1.0, have, **more)
    begun = (msgspec.structs.replace(one, started_at=NOW - age) for one in status.instances)
    return msgspec.structs.replace(status, instances=tuple(begun))


def report(instances: int, speed: float = 90.0, age: float = 1.0) -> Progress:
    return Progress(step=1, updated_at=NOW - age, samples_per_s=speed, instances=instances)


@pytest.mark.parametrize("a", [0.0, 0.03, 0.4, 1.0])
def test_what_follows_the_law_is_found(a: float) -> None:
    """Whatever one instance alone does, and whichever sizes were measured."""
    true = Speedup(a=a)
    for sizes in ((1, 2), (2, 5), (3, 4, 9)):
        found = fit_speedup({size: 70 * true.goodput(size) for size in sizes})
        assert found
        assert found.a == pytest.approx(a, abs=1e-9)


def test_what_does_not_stays_within_its_limits() -> None:
    """More than twice as fast by twice as many is perfect, and slower by more is no gain at all."""
    assert fit_speedup({1: 10.0, 2: 25.0}) == Speedup(a=0.0)
    assert fit_speedup({1: 10.0, 4: 2.0}) == Speedup(a=1.0)
    assert fit_speedup({1: 1.0, 2: 0.1, 9: 0.01}) == Speedup(a=1.0)
    assert fit_speedup({4: 10.0}) is None
    assert fit_speedup({}) is None


@pytest.mark.parametrize(
    ("status", "said", "speed"),
    [
        (at_rest(3), report(3), 90.0),
        (at_rest(3), None, None),
        (at_rest(3), report(2), None),
        (at_rest(3, pending=1), report(3), None),
        (at_rest(3), report(3, age=FRESH_S + 1), None),
        (at_rest(3), report(3, speed=0.0), None),
        (at_rest(3, STEADY_S - 1), report(3), None),
        (at_rest(3, resized_at=NOW - STEADY_S + 1), report(3), None),
        (at_rest(3, resized_at=NOW - STEADY_S), report(3), 90.0),
    ],
)
def test_a_speed_is_that_of_a_job_at_rest(status: JobStatus, said: Progress | None, speed: float | None) -> None:
    """With as many as it is to have, all of which have trained together for a while."""
    assert steady_speed(status, said, NOW) == speed


async def test_speeds_are_kept_from_pass_to_pass(redis_url: str, namespace: str) -> None:
    """Of each size the mean of what was and what is; two sizes make a speed-up."""
    async with connect(redis_url) as client:
        for have, speed, expected in (
            (1, 100.0, None),
            (2, 100.0, 1.0),
            (2, 200.0, 1 / 3),
            (3, 150.0, None),
        ):
            await publish_progress(client, namespace, "job", report(have, speed))
            found = await speedups(client, namespace, [at_rest(have)], NOW)
            assert list(found) == ([] if have == 1 else ["job"])
            if expected is not None:
                assert found["job"].a == pytest.approx(expected)
        assert await speedups(client, namespace, [], NOW) == {}


async def test_a_speed_that_is_no_number_counts_as_none(redis_url: str, namespace: str) -> None:
    """Those of other sizes are of use."""
    async with connect(redis_url) as client:
        kept = {"1": "100.0", "2": "100.0", "3": "fast", "many": "1.0"}
        await client.hset(keys.speeds(namespace, "job"), mapping=kept)
        assert list(await speedups(client, namespace, [at_rest(2)], NOW)) == ["job"]
