"""The ledger of shards on a real Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
import redis
from structlog.testing import capture_logs

from edl_runtime.shards.errors import (
    ForkedLedgerError,
    LeaseLostError,
    LedgerMissingError,
    ShardsChangedError,
    StaleGenerationError,
    StreamError,
)
from edl_runtime.shards.ledger import BlockingLedger, Ledger, LedgerState, SetAside, Shard, ShardPlan
from edl_runtime.store import keys
from edl_runtime.store.errors import MalformedRecordError, RegistryUnavailableError
from edl_runtime.store.redis_client import connect
from edl_runtime.store.redis_server import RedisServer

if TYPE_CHECKING:
    from redis.asyncio import Redis

ABC = ["a", "b", "c"]

Make = Callable[..., Ledger]


@pytest.fixture
def ledger_of(client: Redis, namespace: str) -> Make:
    """A worker's ledger of three shards, unless said otherwise."""

    def make(worker: str = "w1", shards: list[str] | None = ABC, **plan: int) -> Ledger:
        return Ledger(client, namespace, "job", worker=worker, shards=shards, plan=ShardPlan(**plan))  # type: ignore[arg-type]

    return make


async def leased(ledger: Ledger, most: int = 1) -> list[Shard]:
    shards = await ledger.lease(most)
    assert shards
    return shards


def through_json(state: LedgerState) -> LedgerState:
    return msgspec.json.decode(msgspec.json.encode(state), type=LedgerState)


async def test_each_epoch_has_each_shard_once_in_an_order_of_its_own(ledger_of: Make) -> None:
    """The next epoch starts when the last shard of the one before is finished; then there is no more."""
    names = [f"s{number}" for number in range(20)]
    ledger = ledger_of(shards=names, epochs=2, shuffle=True, seed=1)
    await ledger.restore(None, 1)
    orders = []
    for epoch in range(2):
        shards = await leased(ledger, 1000)
        assert {shard.epoch for shard in shards} == {epoch}
        assert await ledger.lease() == []
        await ledger.ack(shards, step=epoch + 1)
        orders.append([shard.name for shard in shards])
    assert await ledger.lease() is None
    assert [sorted(order) for order in orders] == [sorted(names)] * 2
    assert len({tuple(order) for order in [*orders, names]}) == 3


async def test_a_checkpoint_has_what_is_not_done(ledger_of: Make) -> None:
    """Finished shards are not in it, begun ones are with what of them is applied, in whatever worker's hands."""
    one, other = ledger_of("w1"), ledger_of("w2")
    await one.restore(None, 1)
    await other.begin(1)
    first, second = await leased(one, 2)
    third = (await leased(other))[0]
    await one.ack([first], step=7)
    state = through_json(await one.commit(7, {first.ticket: 10, third.ticket: 4}))
    assert dict(state.pending) == {second.ticket: 0, third.ticket: 4}
    assert (await one.report()).done == 1

    await other.ack([third], step=8)
    await one.restore(state, 2)
    again = await leased(one, 3)
    assert {(shard.name, shard.start) for shard in again} == {(second.name, 0), (third.name, 4)}


async def test_what_finished_after_the_step_of_a_checkpoint_is_not_done_in_it(ledger_of: Make) -> None:
    """Also when another rank was quicker to acknowledge than the one that saves."""
    ledger = ledger_of()
    await ledger.restore(None, 1)
    first, second, _ = await leased(ledger, 3)
    await ledger.ack([first], step=3)
    await ledger.ack([second], step=4)
    state = await ledger.commit(3, {second.ticket: 5})
    assert dict(state.pending)[second.ticket] == 5
    assert first.ticket not in dict(state.pending)
    report = await ledger.report()
    assert (report.done, report.acked, report.committed) == (1, 1, 3)


async def test_a_step_that_only_a_dead_rank_applied_is_not_done_for_the_others(ledger_of: Make) -> None:
    """Though that rank has written a checkpoint of it: survivors are at most one step behind, and go on from theirs."""
    dead, survivor = ledger_of("w1"), ledger_of("w2")
    await dead.restore(None, 1)
    await survivor.begin(1)
    (first,), (second,) = await leased(dead), await leased(survivor)
    await dead.ack([first], 1)
    await dead.commit(1, {first.ticket: 5, second.ticket: 2})
    await survivor.begin(2)
    assert await survivor.release(0, {}, ["w2"]) == 1
    assert first in await leased(survivor, 3)


async def test_who_is_of_an_old_generation_or_of_none_yet_changes_nothing(ledger_of: Make) -> None:
    """Both generations are said; a worker that knows of a later one than the ledger has to begin it first."""
    early, there = ledger_of("w1"), ledger_of("w2")
    await there.restore(None, 1)
    early.generation = 2
    with pytest.raises(StaleGenerationError, match=r"generation 2 .* belongs to generation 1") as caught:
        await early.lease()
    assert (caught.value.generation, caught.value.current) == (2, 1)
    assert await early.begin(2) == set()
    for ask in (there.lease, lambda: there.begin(1), lambda: there.restore(None, 1)):
        with pytest.raises(StaleGenerationError, match=r"generation 1 .* belongs to generation 2"):
            await ask()
    assert [shard.name for shard in await leased(early, 3)] == ABC


async def test_the_ledger_of_a_replaced_master_counts_as_lost(ledger_of: Make) -> None:
    """It still has the generation before the failover: who knows of a later one takes nothing of it."""
    before, later = ledger_of("w1"), ledger_of("w2")
    await before.restore(None, 6)
    with pytest.raises(LedgerMissingError):
        await later.begin(107, after=106)
    assert [shard.name for shard in await leased(before)] == ["a"]
    assert await before.begin(107, after=6) == {0}
    assert await later.begin(107, after=107) == set()


async def test_an_answer_that_was_lost_before_the_job_went_back_is_void(ledger_of: Make) -> None:
    """Until then asking again gives the same shards; afterwards they may be another's."""
    one, other = ledger_of("w1"), ledger_of("w2")
    await one.restore(None, 1)
    unheard = await leased(one)
    one._call -= 1
    assert await leased(one) == unheard
    one._call -= 1
    await other.restore(None, 2)
    await one.begin(2)
    assert await leased(other) == unheard
    mine = await leased(one)
    assert [shard.name for shard in mine] == ["b"]
    await one.ack(mine, step=1)


async def test_a_dead_worker_s_shard_continues_where_the_survivors_have_applied_it(ledger_of: Make) -> None:
    """Shards that it had finished in a step that no other worker has come back, too; other workers keep theirs."""
    dead, survivor = ledger_of("w1"), ledger_of("w2")
    await dead.restore(None, 1)
    await survivor.begin(1)
    first, second = await leased(dead, 2)
    kept = await leased(survivor)
    await dead.ack([first], step=6)
    await survivor.begin(2)
    assert await survivor.release(5, {first.ticket: 30, second.ticket: 20}, ["w2"]) == 2
    assert await survivor.release(5, {}, ["w2"]) == 0
    again = {shard.name: shard.start for shard in await leased(survivor, 3)}
    assert again == {first.name: 30, second.name: 20}
    await survivor.ack(kept, step=6)


async def test_an_acknowledgement_counts_once_and_is_refused_for_the_shard_of_another(ledger_of: Make) -> None:
    """All that are given are acknowledged, or none of them."""
    one, other = ledger_of("w1"), ledger_of("w2")
    await one.restore(None, 1)
    await other.begin(1)
    mine, theirs = (await leased(one))[0], (await leased(other))[0]
    with pytest.raises(
        LeaseLostError, match=f"'w1' does not hold ticket {theirs.ticket} .*If this happens again, check"
    ):
        await one.ack([mine, theirs], step=1)
    assert (await one.report()).acked == 0
    await one.ack([mine], step=1)
    await one.commit(1, {})
    await one.ack([mine], step=1)
    assert (await one.report()).done == 1


async def test_a_poisoned_shard_is_set_aside_and_reported(ledger_of: Make, client: Redis, namespace: str) -> None:
    """After three failures it is not leased again in this epoch, which ends without it; also after a restore."""
    ledger = ledger_of(epochs=2)
    await ledger.restore(None, 1)
    begin = await ledger.commit(0, {})
    for attempt in range(3):
        first = next(shard for shard in await leased(ledger) if shard.name == "a")
        assert first.start == (5 if attempt else 0)
        assert await ledger.fail(first, f"line {attempt} is torn", applied=5) == (attempt == 2)
    reasons = ("line 0 is torn", "line 1 is torn", "line 2 is torn")
    assert (await ledger.report()).set_aside == (SetAside("a", 0, 5, reasons),)

    await ledger.restore(begin, 2)
    rest = await leased(ledger, 10)
    assert [shard.name for shard in rest] == ["b", "c"]
    await ledger.ack(rest, step=1)
    state = through_json(await ledger.commit(1, {}))
    await client.delete(*keys.ledger_keys(namespace, "job"))
    await ledger.restore(state, 3)
    report = await ledger.report()
    assert (report.done, [aside.reasons for aside in report.set_aside]) == (2, [reasons])
    assert [shard.name for shard in await leased(ledger, 10)] == ABC


async def test_a_new_start_forgives_what_failed_before(ledger_of: Make) -> None:
    """Before a new start the shard may have been repaired; a restore of a checkpoint keeps the failures."""
    ledger = ledger_of(failure_limit=1)
    await ledger.restore(None, 1)
    first, _, third = await leased(ledger, 3)
    assert await ledger.fail(first, "torn")
    await ledger.restore(await ledger.commit(0, {third.ticket: 5}), 2)
    assert len((await ledger.report()).set_aside) == 1
    await ledger.restore(None, 3)
    assert (await ledger.report()).set_aside == ()
    assert [(shard.name, shard.start) for shard in await leased(ledger, 4)] == [("a", 0), ("b", 0), ("c", 0)]


async def test_other_shards_or_another_order_are_refused(ledger_of: Make) -> None:
    """A checkpoint's ledger is of one list, shuffled by one seed."""
    ledger = ledger_of(shuffle=True, seed=1)
    await ledger.restore(None, 1)
    state = await ledger.commit(1, {})
    for other in (
        ledger_of(shards=["a", "b"], shuffle=True, seed=1),
        ledger_of(shards=["a", "c", "b"], shuffle=True, seed=1),
        ledger_of(shuffle=True, seed=2),
        ledger_of(shards=None),
    ):
        with pytest.raises(ShardsChangedError, match="are not the 3 that this training began with"):
            await other.restore(state, 2)


async def test_a_stream_has_nothing_now_until_it_is_closed(ledger_of: Make) -> None:
    """Its producer may start before the training, may add twice what it is not sure of, and ends it."""
    producer, ledger = ledger_of("p", shards=None), ledger_of("w1", shards=None)
    await producer.add(["a", "b"], first=0)
    await ledger.restore(None, 1)
    assert [shard.name for shard in await leased(ledger, 5)] == ["a", "b"]
    assert await ledger.lease() == []
    await producer.add(["b", "c"], first=1)
    (third,) = await leased(ledger, 5)
    assert (third.ticket, third.name) == (2, "c")
    await producer.close_stream()
    await producer.add(ABC, first=0)
    await ledger.release(9, {}, [])
    assert await ledger.lease(3) is not None
    await ledger.ack([Shard(ticket, name, 0) for ticket, name in enumerate(ABC)], step=9)
    assert await ledger.lease() is None


async def test_what_cannot_be_a_stream_s_next_shard_is_refused(ledger_of: Make) -> None:
    """A gap, another shard of a number that is taken, and anything after the end."""
    ledger = ledger_of(shards=None)
    await ledger.add(ABC, first=0)
    with pytest.raises(StreamError, match="it has 3, so number 4 is missing"):
        await ledger.add(["f"], first=5)
    with pytest.raises(StreamError, match="number 1 is another shard"):
        await ledger.add(["x"], first=1)
    await ledger.close_stream()
    with pytest.raises(StreamError, match="it was closed with 3"):
        await ledger.add(["d"], first=3)


async def test_a_stream_outlives_a_redis_that_forgot_it(ledger_of: Make, client: Redis, namespace: str) -> None:
    """Its checkpoint has the names of all that is not done, and the producer adds the rest again."""
    ledger = ledger_of(shards=None)
    await ledger.add(ABC, first=0)
    await ledger.restore(None, 1)
    (first, _) = await leased(ledger, 2)
    await ledger.ack([first], step=1)
    state = through_json(await ledger.commit(1, {}))
    assert state.names == ((1, "b"), (2, "c"))
    await ledger.add(["d"], first=3)
    await client.delete(*keys.ledger_keys(namespace, "job"))
    with pytest.raises(LedgerMissingError, match=r"from a checkpoint by themselves.* If this happens again, keep"):
        await ledger.lease()
    await ledger.restore(state, 2)
    await ledger.add([*ABC, "d"], first=0)
    assert [shard.name for shard in await leased(ledger, 5)] == ["b", "c", "d"]


ALL_VERBS = ["lease", "ack", "fail", "commit", "release", "report", "begin"]


async def refused_verbs(ledger: Ledger, shard: Shard) -> list[str]:
    """Return which of a ledger's verbs say that it is missing, of all that use what is in it."""
    generation = ledger.generation
    verbs: dict[str, Callable[[], Awaitable[object]]] = {
        "lease": ledger.lease,
        "ack": lambda: ledger.ack([shard], step=2),
        "fail": lambda: ledger.fail(shard, "torn"),
        "commit": lambda: ledger.commit(2, {}),
        "release": lambda: ledger.release(2, {}, []),
        "report": ledger.report,
        "begin": lambda: ledger.begin(generation + 1),
    }
    refused = []
    for name, ask in verbs.items():
        with suppress(LedgerMissingError):
            await ask()
            continue
        refused.append(name)
    return refused


PARTS = ["state", "doing", "back", "acked", "failures", "names", "answers"]


async def begun_stream(ledger: Ledger) -> tuple[Shard, LedgerState]:
    """Begin a stream of six shards so that each part of its ledger has something; return one that is leased.

    In the checkpoint the first is done.
    """
    await ledger.add(list("abcdef"), first=0)
    await ledger.restore(None, 1)
    first, second, third, fourth, _ = await leased(ledger, 5)
    await ledger.ack([first], step=1)
    state = through_json(await ledger.commit(1, {}))
    await ledger.ack([second], step=2)
    await ledger.fail(third, "torn")
    return fourth, state


@pytest.mark.parametrize("part", range(len(PARTS)), ids=PARTS)
async def test_a_ledger_that_lacks_a_part_is_missing(ledger_of: Make, client: Redis, namespace: str, part: int) -> None:
    """Nothing of the rest is handed out or saved any more; from the checkpoint all comes back that is not done."""
    ledger = ledger_of(shards=None)
    held, state = await begun_stream(ledger)
    assert await client.delete(keys.ledger_keys(namespace, "job")[part])
    assert await refused_verbs(ledger, held) == ALL_VERBS
    await ledger.restore(state, 2)
    assert sorted(shard.name for shard in await leased(ledger, 9)) == list("bcdef")


async def test_a_redis_that_evicts_hands_out_nothing_of_the_rest(own_redis: RedisServer) -> None:
    """It is full, and its policy lets it delete whichever keys it likes."""
    async with connect(own_redis.url) as client:
        ledger = Ledger(client, "n", "job", worker="w")
        held, state = await begun_stream(ledger)
        await client.config_set("maxmemory-policy", "allkeys-random")
        while not (await client.info("stats"))["evicted_keys"]:  # memory of its clients comes and goes
            await client.config_set("maxmemory", (await client.info("memory"))["used_memory"] - 1)
        await client.config_set("maxmemory", 0)
        assert await refused_verbs(ledger, held) == ALL_VERBS
        await ledger.restore(state, 2)
        assert sorted(shard.name for shard in await leased(ledger, 9)) == list("bcdef")


async def test_a_stream_that_lacks_a_part_keeps_its_shards_if_their_names_are_there(
    ledger_of: Make, client: Redis, namespace: str
) -> None:
    """Its producer may have ended. Without their names it is told how many there are, and adds them again."""
    ledger = ledger_of(shards=None)
    _, state = await begun_stream(ledger)
    await ledger.add(["g", "h"], first=6)
    await ledger.close_stream()
    await client.delete(keys.ledger_keys(namespace, "job")[PARTS.index("acked")])
    await ledger.restore(state, 2)
    assert sorted(shard.name for shard in await leased(ledger, 9)) == list("bcdefgh")
    await client.delete(keys.ledger_keys(namespace, "job")[PARTS.index("names")])
    with pytest.raises(StaleGenerationError):
        await ledger_of("ghost", shards=None).restore(state, 1)
    with pytest.raises(StreamError, match="it has 0, so number 7 is missing"):
        await ledger.add(["i"], first=8)
    await ledger.restore(state, 3)
    await ledger.add(list("abcdefghi"), first=0)
    await ledger.close_stream()
    assert sorted(shard.name for shard in await leased(ledger, 9)) == list("bcdefghi")


async def restart(server: RedisServer, client: Redis) -> None:
    """Kill a Redis and start it with what it last saved."""
    server.kill()
    await client.connection_pool.disconnect()
    server.start()


async def test_a_redis_that_restarts_older_hands_out_nothing_of_its_ledger(own_redis: RedisServer) -> None:
    """It has forgotten what was acknowledged last, and to whom it had leased the rest; so all go back together."""
    async with connect(own_redis.url) as client:
        one, other = (Ledger(client, "n", "job", worker=name, shards=ABC) for name in ("w1", "w2"))
        await one.restore(None, 1)
        await other.begin(1)
        (first,) = await leased(one)
        state = through_json(await one.commit(0, {}))
        await client.save()
        (second,) = await leased(other)
        await one.ack([first], step=1)
        await restart(own_redis, client)
        assert await client.exists(keys.ledger_keys("n", "job")[0])
        for ledger, shard in ((one, first), (other, second)):
            assert await refused_verbs(ledger, shard) == ALL_VERBS
        await other.restore(state, 2)
        assert await one.begin(2) == set()
        assert [shard.name for shard in [*await leased(one, 2), *await leased(other)]] == ABC


async def test_a_replica_that_takes_over_may_lag_behind(own_redis: RedisServer, tmp_path: Path) -> None:
    """Its ledger counts as missing; and so does that of the first Redis when it takes over in its turn."""
    with RedisServer(tmp_path / "replica", password="lagging") as replica:
        async with connect(own_redis.url) as client, connect(replica.url) as lagging:
            await client.config_set("masterauth", "lagging")
            await lagging.config_set("masterauth", unquote(urlsplit(own_redis.url).password or ""))
            await follow(lagging, own_redis)
            ledger, there = (Ledger(each, "n", "job", worker="w", shards=ABC) for each in (client, lagging))
            await ledger.restore(None, 1)
            (first,) = await leased(ledger)
            await client.wait(1, 10_000)
            there.generation = 1

            await lagging.replicaof("NO", "ONE")
            await ledger.ack([first], step=1)
            assert await refused_verbs(there, first) == ALL_VERBS

            await follow(client, replica)
            await client.replicaof("NO", "ONE")
            assert await refused_verbs(ledger, first) == ALL_VERBS


async def follow(client: Redis, server: RedisServer) -> None:
    """Make one Redis a replica of another, and wait until it has all that the other has."""
    async with connect(server.url) as other:
        await other.config_set("repl-diskless-sync-delay", 0)
    await client.replicaof("127.0.0.1", str(server.port))
    until = time.monotonic() + 100
    while (await client.info("replication"))["master_link_status"] != "up":  # it has loaded what it was sent
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


async def test_a_stream_grows_in_a_redis_that_restarted_older(own_redis: RedisServer) -> None:
    """Whoever fills it adds again what may be missing; what it had is not refused, before the way back and after it."""
    async with connect(own_redis.url) as client:
        producer, ledger = (Ledger(client, "n", "job", worker=name) for name in ("p", "w"))
        await producer.add(["a"], first=0)
        await ledger.restore(None, 1)
        await client.save()
        await producer.add(["a", "b", "c"], first=0)
        (first,) = await leased(ledger)
        await ledger.ack([first], step=1)
        state = through_json(await ledger.commit(1, {}))
        await restart(own_redis, client)
        await producer.add(["a", "b"], first=0)
        await ledger.restore(state, 2)
        await producer.add(["a", "b", "c", "d"], first=0)
        await producer.close_stream()
        assert [shard.name for shard in await leased(ledger, 5)] == ["b", "c", "d"]


async def test_names_that_are_gone_since_the_answer_are_not_left_out(
    ledger_of: Make, client: Redis, namespace: str
) -> None:
    """A Redis that comes back older between two commands of one call has forgotten the ledger."""
    ledger = ledger_of(shards=None)
    await ledger.add(ABC, first=0)
    await ledger.restore(None, 1)
    await client.hdel(keys.ledger_keys(namespace, "job")[PARTS.index("names")], "1")
    for ask in (lambda: ledger.lease(2), lambda: ledger.commit(0, {})):
        with pytest.raises(LedgerMissingError):
            await ask()


async def test_a_long_list_costs_a_checkpoint_nothing(ledger_of: Make, client: Redis, namespace: str) -> None:
    """Of 20,000 shards only those in hand are in Redis and in the state, in the middle of a shuffled epoch."""
    ledger = ledger_of(shards=[f"s3://bucket/folder/part-{number:06}" for number in range(20_000)], shuffle=True)
    await ledger.restore(None, 1)
    for step in range(10):
        await ledger.ack(await leased(ledger, 1000), step)
    in_hand = await leased(ledger, 8)
    state = await ledger.commit(10, {in_hand[0].ticket: 12})
    assert len(state.pending) == 8
    assert len(msgspec.json.encode(state)) < 500
    used = [await client.memory_usage(key) or 0 for key in keys.ledger_keys(namespace, "job")]
    assert sum(used) < 50_000


async def test_an_unused_ledger_expires(ledger_of: Make, client: Redis, namespace: str) -> None:
    """Every key of it has an end, a week from the last use."""
    ledger = ledger_of(shards=None)
    await ledger.add(ABC, first=0)
    await ledger.restore(None, 1)
    shards = await leased(ledger, 3)
    await ledger.ack(shards[:1], step=1)
    await ledger.fail(shards[1], "torn")
    lifetimes = [await client.ttl(key) for key in keys.ledger_keys(namespace, "job")]
    assert all(600_000 < lifetime <= 604_800 for lifetime in lifetimes)


def test_a_script_waits_for_redis_and_logs_the_reason(own_redis: RedisServer) -> None:
    """The call that found Redis away is answered when it is back."""
    with BlockingLedger(own_redis.url, "n", "job", worker="w", shards=None) as ledger, capture_logs() as logs:
        ledger.add(["a"], first=0)
        own_redis.kill()
        call = threading.Thread(target=ledger.add, args=(["a"],), kwargs={"first": 0})
        call.start()
        while not logs:
            call.join(0.01)
        own_redis.start()
        call.join(100)
        ledger.restore(None, 1)
        assert [shard.name for shard in ledger.lease(5) or []] == ["a"]
    assert [(entry["event"], entry.get("call")) for entry in logs] == [
        ("ledger.unavailable", "add"),
        ("ledger.recovered", None),
    ]


def test_an_unanswered_call_is_not_answered_by_an_older_ledger(own_redis: RedisServer) -> None:
    """Whoever waits for a shard while Redis restarts is not given one that another holds."""
    with BlockingLedger(own_redis.url, "n", "job", worker="w", shards=ABC) as ledger:
        ledger.restore(None, 1)
        with redis.Redis.from_url(own_redis.url) as client:
            client.save()
        ledger.lease()
        own_redis.kill()
        with capture_logs() as logs, ThreadPoolExecutor(1) as pool:
            call = pool.submit(ledger.lease)
            while not logs:
                assert not call.done()
                time.sleep(0.01)
            own_redis.start()
            with pytest.raises(LedgerMissingError):
                call.result(100)


def test_a_script_waits_for_redis_for_wait_s_at_most(own_redis: RedisServer) -> None:
    """Then the error says where Redis was to be."""
    with BlockingLedger(own_redis.url, "n", "job", worker="w", shards=ABC, wait_s=0.6) as ledger:
        ledger.restore(None, 1)
        own_redis.kill()
        with pytest.raises(RegistryUnavailableError, match=str(own_redis.port)):
            ledger.lease()


def test_a_script_that_leaves_stops_waiting_for_redis(own_redis: RedisServer) -> None:
    """Also a call that has begun, in another thread."""
    with (
        BlockingLedger(own_redis.url, "n", "job", worker="w", shards=ABC, wait_s=1e9) as ledger,
        ThreadPoolExecutor() as pool,
        capture_logs() as logs,
    ):
        own_redis.kill()
        call = pool.submit(ledger.report)
        while not logs:
            assert not call.done()
            time.sleep(0.01)
        ledger.wait_s = 0.0
        with pytest.raises(RegistryUnavailableError):
            call.result(100)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_not_use_its_parent_s_ledger(redis_url: str, namespace: str) -> None:
    """The thread that talks to Redis is not in it: a call would never return. The parent's ledger still works."""
    with BlockingLedger(redis_url, namespace, "job", worker="w", shards=ABC) as ledger:
        ledger.restore(None, 1)
        child = os.fork()
        if not child:
            signal.alarm(100)
            try:
                ledger.close()
                ledger.report()
            except ForkedLedgerError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert ledger.report().todo == 3


async def test_an_unreadable_failure_is_an_error(client: Redis, namespace: str, ledger_of: Make) -> None:
    """A checkpoint without it would lose what was set aside."""
    ledger = ledger_of()
    await ledger.restore(None, 1)
    [first] = await leased(ledger)
    await ledger.fail(first, "torn")
    failures = keys.ledger_keys(namespace, "job")[4]
    [ticket] = await client.hkeys(failures)
    await client.hset(failures, ticket, '{"reasons": 1}')
    with pytest.raises(MalformedRecordError, match="failures"):
        await ledger.report()


@pytest.mark.parametrize("field", ["added", "limit", "committed", "next"])
@pytest.mark.parametrize("content", [None, "many"])
async def test_a_ledger_that_lacks_a_number_is_none(
    client: Redis, namespace: str, ledger_of: Make, field: str, content: str | None
) -> None:
    """A checkpoint has all that it takes to restore it."""
    ledger = ledger_of()
    await ledger.restore(None, 1)
    state = await ledger.commit(0, {})
    key = keys.ledger_keys(namespace, "job")[0]
    await (client.hdel(key, field) if content is None else client.hset(key, field, content))
    for attempt in (ledger.report(), ledger.lease(), ledger.commit(1, {})):
        with pytest.raises(LedgerMissingError):
            await attempt
    await ledger.restore(state, 2)
    assert len(await leased(ledger, 3)) == 3


async def test_an_unreadable_lease_is_an_error(client: Redis, namespace: str, ledger_of: Make) -> None:
    """Whether the script meets it or the worker."""
    ledger = ledger_of()
    await ledger.restore(None, 1)
    await leased(ledger)
    doing = keys.ledger_keys(namespace, "job")[1]
    await client.hset(doing, "first", "0 w1")
    with pytest.raises(MalformedRecordError, match=r"doing.*invalid literal"):
        await ledger.begin(1)
    await client.hset(doing, "0", "mine")
    with pytest.raises(MalformedRecordError, match=r"ledger:\*.*bad argument"):
        await ledger.commit(1, {})
