"""What is known of the web from pass to pass: learned from a source that speaks, and kept while it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from redis.asyncio import Redis
from support.autoscale.prometheus_server import FakePrometheus, prometheus

from edl_runtime.autoscale.errors import NoSamplesError
from edl_runtime.autoscale.traffic.capacity import TrainingCapacity, training_capacity
from edl_runtime.autoscale.traffic.forecast import DAY_S, LEARN_EVERY_S, ForecastOptions
from edl_runtime.autoscale.traffic.schema import to_windows
from edl_runtime.autoscale.traffic.sources.learner import check_source, fetch_forecast
from edl_runtime.autoscale.traffic.sources.spec import Prometheus, RedisStream, Traffic
from edl_runtime.errors import SpecError
from edl_runtime.store.errors import RegistryUnavailableError
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

NOW = datetime(2026, 6, 10, 9, 55, tzinfo=UTC)
NOW_S = NOW.timestamp()
TOTAL = {"gpu": 32.0}
WINDOWS = to_windows({"windows": [], "default": {"cluster": {"gpu": 24}}})


def requests(at_s: float) -> float:
    """Return how many requests come in a second: the rush is from 10:00 to 12:00."""
    return 10_000 if 10 <= at_s % DAY_S / 3600 < 12 else 2_000


@pytest.fixture
def server() -> Iterator[FakePrometheus]:
    """A server that has counted them for two weeks."""
    with prometheus() as stand_in:
        stand_in.series["requests"] = [({}, lambda at_s: requests(at_s) if at_s > NOW_S - 14 * DAY_S else None)]
        yield stand_in


def traffic(server: FakePrometheus, **forecast_options: float) -> Traffic:
    """Return a source of which a request per second needs a five-hundredth of a GPU."""
    spec = Prometheus(url=server.url, query="sum(requests)", step_s=600, timeout_s=20)
    return Traffic(resource="gpu", source=spec, times=0.002, forecast_options=ForecastOptions(**forecast_options))  # type: ignore[arg-type]


async def room(of: Traffic, client: Redis, namespace: str, later_s: float = 0) -> TrainingCapacity:
    """Return what training may use so much later, by what is known of the web then."""
    forecast = await fetch_forecast(of, client, namespace, NOW_S + later_s)
    return training_capacity(WINDOWS, TOTAL, now=NOW + timedelta(seconds=later_s), forecast=forecast)


FOUR_WEEKS = pytest.approx(28 * 24, abs=0.5)


def hours(asked: Sequence[Mapping[str, str]]) -> float:
    """Return of how many hours was asked."""
    return sum(float(each["end"]) - float(each["start"]) for each in asked) / 3600


async def test_a_profile_is_learned_once_an_hour(server: FakePrometheus, client: Redis, namespace: str) -> None:
    """A pass asks for four weeks at first, then for half an hour, and for four weeks again after an hour."""
    spans = []
    for later_s in (0, 300, LEARN_EVERY_S - 1, LEARN_EVERY_S):
        before = len(server.queries)
        await room(traffic(server), client, namespace, later_s)
        spans.append(hours(server.queries[before:]))
    assert spans == [FOUR_WEEKS, 0.5, 0.5, FOUR_WEEKS]


async def test_a_profile_is_of_one_source_and_one_namespace(
    server: FakePrometheus, client: Redis, namespace: str
) -> None:
    """Another query, other slots or another team's: each is learned on its own, and one does not undo the other."""
    await room(traffic(server), client, namespace)
    count = len(server.queries)
    await room(traffic(server, slot_s=3600), client, namespace)
    await room(traffic(server), client, f"{namespace}-2")
    assert len(server.queries) == 3 * count
    await room(traffic(server), client, namespace, 300)
    assert len(server.queries) == 3 * count + 1


async def test_one_pass_that_gets_no_answer_changes_nothing(
    server: FakePrometheus, client: Redis, namespace: str
) -> None:
    """The last word counts until it is too old; then windows hold, and the reason says what is wrong."""
    before = await room(traffic(server, lead_s=0), client, namespace)
    server.answer = 503, b"overloaded", {}
    after = await room(traffic(server, lead_s=0), client, namespace, 240)
    assert after.capacity == before.capacity == {"gpu": pytest.approx(32 - 4 * 1.15)}
    late = await room(traffic(server, lead_s=0), client, namespace, 2100)
    assert late.capacity == {"gpu": 24}
    assert late.why == (
        f"no sample from the source for 35 min (Prometheus at {server.url} can't be read "
        "(it answered 503: overloaded); try again, or see that it runs and that its address is right): "
        "the default sizes hold"
    )
    server.answer = None
    again = await room(traffic(server, lead_s=0), client, namespace, 2100)
    assert again.need is not None


async def test_a_stale_metric_leaves_it_to_windows(server: FakePrometheus, client: Redis, namespace: str) -> None:
    """A query that returns nothing any more, or nothing but what is no number."""
    await room(traffic(server), client, namespace)
    server.series["requests"] = [({}, lambda at_s: 1.0 if at_s < NOW_S - DAY_S else None)]
    silent = await room(traffic(server), client, namespace, 1860)
    assert silent.why.startswith("no sample from the source for 31 min (the query 'sum(requests)' of Prometheus at ")
    server.series["requests"] = [({}, lambda _: math.nan)]
    assert (await room(traffic(server), client, namespace, 1860)).why == (
        "no sample from the source for 31 min: the default sizes hold"
    )


async def test_nothing_learned_is_learned_at_the_next_pass(
    server: FakePrometheus, client: Redis, namespace: str
) -> None:
    """A server that is away at the first pass, or has no time for a long range at the second, costs no hour."""
    server.answer = 503, b"", {}
    assert "no sample from the source (Prometheus" in (await room(traffic(server), client, namespace)).why
    server.answer = None
    server.longest_s = 3600
    unknown = await room(traffic(server), client, namespace)
    assert unknown.why.startswith("no earlier day like this one has samples of this time (traffic.prometheus.")
    assert "execution: query processing would load too many samples" in unknown.why
    server.longest_s = math.inf
    assert (await room(traffic(server), client, namespace)).need is not None


async def test_what_was_learned_counts_until_it_is_learned_anew(
    server: FakePrometheus, client: Redis, namespace: str
) -> None:
    """When a long range is refused an hour later, the profile of before does, and this is said; samples are of now."""
    await room(traffic(server), client, namespace)
    server.longest_s = 3600
    found = await room(traffic(server), client, namespace, 2 * LEARN_EVERY_S)
    assert found.why.startswith("the web is expected to need 20 gpu now, and is left 23 (traffic.prometheus.query: ")
    before = len(server.queries)
    server.longest_s = math.inf
    await room(traffic(server), client, namespace, 2 * LEARN_EVERY_S)
    assert hours(server.queries[before:]) == FOUR_WEEKS


async def test_a_clock_that_jumps_back_is_no_trouble(server: FakePrometheus, client: Redis, namespace: str) -> None:
    """What was learned and said in a future that did not come counts no more."""
    await room(traffic(server), client, namespace, 5 * DAY_S)
    server.answer = 503, b"", {}
    found = await room(traffic(server), client, namespace)
    assert found.why.startswith("all samples are in the future, from 7200 min ahead on (Prometheus at ")
    server.answer = None
    before = len(server.queries)
    assert (await room(traffic(server), client, namespace)).need is not None
    assert hours(server.queries[before:]) == FOUR_WEEKS


async def test_a_profile_that_redis_lost_or_that_is_damaged_is_learned_again(
    server: FakePrometheus, client: Redis, namespace: str
) -> None:
    """A value of something else under the key does no harm."""
    await room(traffic(server), client, namespace)
    [key] = [key async for key in client.scan_iter(f"edl:{{{namespace}}}*")]
    for text in ("no JSON", '{"learned_s": 1, "profile": {}, "latest": null}', "{}"):
        await client.set(key, text)
        assert (await room(traffic(server), client, namespace)).need is not None
    assert 0 < await client.ttl(key) <= 2 * DAY_S


async def test_a_stream_teaches_as_well(client: Redis, namespace: str) -> None:
    """Two weeks in it lead to the same room."""
    times = [NOW_S - 60 - 600 * number for number in reversed(range(14 * 144))]
    stream = f"web-{namespace}"
    async with client.pipeline(transaction=False) as pipe:
        for at_s in times:
            pipe.xadd(stream, {"needed": requests(at_s)}, id=f"{at_s * 1000:.0f}-0")
        await pipe.execute()
    of = Traffic(resource="gpu", source=RedisStream(stream=stream), times=0.002)
    assert (await room(of, client, namespace)).why == "the web is expected to need 20 gpu by 10:00, and is left 23"
    assert (await check_source(of, client, now_s=NOW_S)).needed == 4


async def test_a_check_raises_what_is_wrong(
    server: FakePrometheus, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a source is relied on: its token, its samples, and where they are."""
    of = traffic(server)
    assert (await check_source(of, now_s=NOW_S)).needed == 4
    spec = of.source
    assert isinstance(spec, Prometheus)
    no_token = msgspec.structs.replace(of, source=msgspec.structs.replace(spec, token_env="EDL_TRAFFIC_NONE"))
    with pytest.raises(SpecError, match=r"traffic\.prometheus\.token_env: got 'EDL_TRAFFIC_NONE'"):
        await check_source(no_token, now_s=NOW_S)
    with pytest.raises(NoSamplesError, match='the Redis stream "nobody\'s" has nothing from'):
        await check_source(msgspec.structs.replace(of, source=RedisStream(stream="nobody's")), client, now_s=NOW_S)
    server.series["nan"] = [({}, lambda _: math.nan)]
    with pytest.raises(NoSamplesError, match="all its samples are below 0"):
        await check_source(msgspec.structs.replace(of, source=msgspec.structs.replace(spec, query="nan")), now_s=NOW_S)
    with pytest.raises(SpecError, match="a stream in the Redis of EDL_REDIS_URL, which is not set"):
        await check_source(msgspec.structs.replace(of, source=RedisStream(stream="a")), now_s=NOW_S)
    server.token = "open-sesame"
    monkeypatch.setenv("EDL_TRAFFIC_TOKEN", "open-sesame")
    with_token = msgspec.structs.replace(of, source=msgspec.structs.replace(spec, token_env="EDL_TRAFFIC_TOKEN"))
    assert (await check_source(with_token, now_s=NOW_S)).needed == 4


async def test_redis_away_is_no_word_of_the_source(server: FakePrometheus, own_redis: RedisServer) -> None:
    """Whoever rescales needs Redis for more than this, and is told."""
    async with connect(own_redis.url) as client:
        await room(traffic(server), client, "default")
        own_redis.stop()
        with pytest.raises(RegistryUnavailableError):
            await room(traffic(server), client, "default")
