"""The ledger on a real Redis through thousands of changes, beside plain Python and beside a model that is trained."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.depth import examples

from edl_runtime.shards.errors import LedgerMissingError, StaleGenerationError
from edl_runtime.shards.ledger import Ledger, LedgerState, Shard, ShardPlan
from edl_runtime.store import keys
from edl_runtime.store.redis_client import connect

RECORDS = 3
"""In each shard."""
LIMIT = 3
"""So often a shard may fail."""
PARTS = ("state", "doing", "back", "acked", "failures", "names", "answers")
"""The keys of a ledger."""

Answer = TypeVar("Answer")


@dataclass
class LedgerModel:
    """What the real one must answer: tickets and where they are; `doing` says whose, and where the lease began."""

    epochs: int
    added: int = 0
    closed: bool = False
    epoch: int = 0
    next: int = 0
    back: dict[int, int] = field(default_factory=dict)
    doing: dict[int, tuple[str, int]] = field(default_factory=dict)
    acked: dict[int, tuple[int, int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)

    def lease(self, worker: str, most: int) -> list[tuple[int, int]] | None:
        given: list[tuple[int, int]] = []
        while len(given) < most:
            if self.back:
                ticket = min(self.back, key=lambda ticket: (self.back[ticket], str(ticket)))
                offset = self.back.pop(ticket)
            elif self.next < (self.epoch + 1) * self.added:
                ticket, offset, self.next = self.next, 0, self.next + 1
            elif self.closed and not given and not self.doing and self.epoch + 1 < self.epochs:
                self.epoch += 1
                continue
            else:
                break
            if self.failures.get(ticket, 0) >= LIMIT:
                self.dropped.add(ticket)
            else:
                given.append((ticket, offset))
        self.doing |= {ticket: (worker, offset) for ticket, offset in given}
        return given or ([] if self.doing or not self.closed else None)

    def ack(self, ticket: int, step: int) -> None:
        _, start = self.doing.pop(ticket)
        self.acked[ticket] = (start, step)

    def fail(self, ticket: int, offset: int) -> bool:
        self.doing.pop(ticket)
        self.failures[ticket] = self.failures.get(ticket, 0) + 1
        if self.failures[ticket] < LIMIT:
            self.back[ticket] = offset
            return False
        self.dropped.add(ticket)
        return True

    def release(self, step: int, positions: Mapping[int, int], alive: Collection[str]) -> int:
        held = {ticket: start for ticket, (worker, start) in self.doing.items() if worker not in alive}
        later = {ticket: start for ticket, (start, acked_at) in self.acked.items() if acked_at > step}
        for ticket, start in held.items():
            del self.doing[ticket]
            self.back[ticket] = max(start, positions.get(ticket, 0))
        for ticket, start in later.items():
            del self.acked[ticket]
            self.back[ticket] = max(start, positions.get(ticket, 0))
        return len(held) + len(later)

    def commit(self, step: int, positions: Mapping[int, int]) -> LedgerModel:
        """Return what a checkpoint holds: all in hand has come back."""
        self.done |= {ticket for ticket, (_, acked_at) in self.acked.items() if acked_at <= step}
        self.acked = {ticket: acked for ticket, acked in self.acked.items() if acked[1] > step}
        saved = copy.deepcopy(self)
        saved.release(step, positions, ())
        return saved

    def restored(self, now: LedgerModel, *, failures: bool, stream: bool) -> LedgerModel:
        """Return this checkpoint's ledger, with what Redis knows besides of failures and of a stream that has grown."""
        back = copy.deepcopy(self)
        if failures:
            for ticket, count in now.failures.items():
                back.failures[ticket] = max(count, back.failures.get(ticket, 0))
        if stream:
            back.added, back.closed = max(now.added, self.added), now.closed or self.closed
        return back

    def counts(self) -> dict[str, int]:
        return {
            "todo": self.added * (self.epochs if self.closed else 1) - self.next + len(self.back),
            "doing": len(self.doing),
            "acked": len(self.acked),
            "done": len(self.done),
            "set_aside": len([count for count in self.failures.values() if count >= LIMIT]),
        }


@dataclass
class Worker:
    """A trainer with the shards that it holds, of the first of which so many records are applied."""

    name: str
    ledger: Ledger
    held: list[Shard] = field(default_factory=list)
    at: int = 0
    position: tuple[int, int] | None = None

    def take(self, shards: list[Shard]) -> None:
        if not self.held and shards:
            self.at = shards[0].start
        self.held += shards

    def drop_first(self) -> None:
        del self.held[0]
        self.at = self.held[0].start if self.held else 0


@dataclass(frozen=True)
class Checkpoint:
    """What of a step was saved: the ledger's state as JSON, what plain Python makes of it, and the trained model."""

    step: int
    state: bytes
    ledger: LedgerModel
    applied: dict[int, int]


class LedgerMachine(RuleBasedStateMachine):
    """Workers of one group. `applied` is the trained model: how many records of each ticket are in it, in order."""

    redis_url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client = connect(self.redis_url)
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        self.workers: list[Worker] = []
        self.gone: list[Worker] = []
        self.checkpoints: list[Checkpoint] = []
        self.applied: dict[int, int] = {}
        self.generation = self.step = self.born = 0

    def run(self, asking: Coroutine[Any, Any, Answer]) -> Answer:
        return self.runner.run(asking)

    @initialize(count=st.integers(0, 6), epochs=st.integers(1, 2), stream=st.booleans(), seed=st.integers(0, 3))
    def start(self, *, count: int, epochs: int, stream: bool, seed: int) -> None:
        self.stream = stream
        self.names = [f"s{number}" for number in range(count)]
        self.plan = ShardPlan(epochs=epochs, seed=seed, shuffle=not stream, failure_limit=LIMIT)
        self.model = LedgerModel(epochs, added=0 if stream else count, closed=not stream)
        self.join()
        self.begin_anew(None)
        if stream:
            self.produce(0)

    @rule(more=st.integers(0, 3))
    @precondition(lambda self: self.stream and not self.model.closed)
    def produce(self, more: int) -> None:
        """The producer does not know how far it was, so it adds all again."""
        self.names += [f"s{len(self.names) + number}" for number in range(more)]
        self.run(self.workers[0].ledger.add(self.names, first=0))
        self.model.added = len(self.names)

    @rule()
    @precondition(lambda self: self.stream)
    def close(self) -> None:
        if not self.model.closed:
            self.produce(0)  # a Redis that forgot some may have to be told again
        self.run(self.workers[0].ledger.close_stream())
        self.model.closed = True

    @rule()
    @precondition(lambda self: len(self.workers) < 4)
    def join(self) -> None:
        self.born += 1
        shards = None if self.stream else self.names
        name = f"w {self.born}"
        ledger = Ledger(self.client, self.namespace, "job", worker=name, shards=shards, plan=self.plan)
        ledger.generation = self.generation
        self.workers.append(Worker(name, ledger))

    @rule(data=st.data(), most=st.integers(1, 4), answer_lost=st.booleans())
    def read_ahead(self, data: st.DataObject, *, most: int, answer_lost: bool) -> None:
        worker = self.any_worker(data)
        expected = self.model.lease(worker.name, most)
        given = self.run(worker.ledger.lease(most))
        if answer_lost and given:
            worker.ledger._call -= 1
            given = self.run(worker.ledger.lease(most))
        assert (given if not given else [(shard.ticket, shard.start) for shard in given]) == expected
        worker.take(given or [])

    @rule(amounts=st.lists(st.integers(0, RECORDS), min_size=4, max_size=4))
    def train(self, amounts: list[int]) -> None:
        self.step += 1
        for worker, amount in zip(self.workers, amounts, strict=False):
            self.apply(worker, amount)
        for worker in self.workers:
            self.acknowledge(worker)

    @rule(data=st.data())
    def break_a_shard(self, data: st.DataObject) -> None:
        worker = self.any_worker(data)
        if worker.held:
            shard, offset = worker.held[0], worker.at
            assert self.run(worker.ledger.fail(shard, "broken", applied=offset)) == self.model.fail(
                shard.ticket, offset
            )
            assert not self.run(worker.ledger.fail(shard, "broken", applied=offset))
            worker.drop_first()
            worker.position = None  # others may take it further

    @rule(
        data=st.data(),
        moment=st.sampled_from(["between", "before its acknowledgement", "a step ahead"]),
    )
    @precondition(lambda self: len(self.workers) > 1)
    def die(self, data: st.DataObject, *, moment: str) -> None:
        """A worker is lost; the others go on with their model, and what of its shards is not in that comes back."""
        dead = self.any_worker(data)
        if moment == "before its acknowledgement":
            self.step += 1
            self.apply(dead, RECORDS)
        elif moment == "a step ahead" and dead.held:
            shard = dead.held[0]
            self.run(dead.ledger.ack([shard], self.step + 1))
            self.model.ack(shard.ticket, self.step + 1)
        positions = self.positions()
        self.workers.remove(dead)
        self.gone.append(dead)
        self.generation += 1
        for worker in self.workers:
            self.run(worker.ledger.begin(self.generation))
        alive = [worker.name for worker in self.workers]
        expected = self.model.release(self.step, positions, alive)
        assert self.run(self.workers[0].ledger.release(self.step, positions, alive)) == expected

    @rule(data=st.data())
    @precondition(lambda self: self.gone)
    def come_from_the_past(self, data: st.DataObject) -> None:
        """Whoever was left behind changes nothing, whatever it tries."""
        stale = data.draw(st.sampled_from(self.gone))
        shard = Shard(0, "s0", 0)
        asked = data.draw(st.sampled_from(["lease", "ack", "fail", "release", "commit", "begin", "restore"]))
        arguments: dict[str, tuple[Any, ...]] = {
            "ack": ([shard], 1),
            "fail": (shard, "no"),
            "release": (0, {}, []),
            "commit": (99, {}),
            "begin": (stale.ledger.generation,),
            "restore": (None, stale.ledger.generation),
        }
        with pytest.raises(StaleGenerationError):
            self.runner.run(getattr(stale.ledger, asked)(*arguments.get(asked, ())))

    @rule()
    def save(self) -> None:
        state = self.run(self.workers[0].ledger.commit(self.step, self.positions()))
        ledger = self.model.commit(self.step, self.positions())
        self.checkpoints.append(Checkpoint(self.step, msgspec.json.encode(state), ledger, dict(self.applied)))

    @rule(data=st.data(), lost=st.sampled_from([(), PARTS, *((part,) for part in PARTS)]))
    @precondition(lambda self: self.checkpoints)
    def go_back(self, data: st.DataObject, lost: Collection[str]) -> None:
        """The whole group starts again from one of its checkpoints; Redis may have forgotten all, or evicted a part."""
        saved = data.draw(st.sampled_from(self.checkpoints))
        self.checkpoints = self.checkpoints[: self.checkpoints.index(saved) + 1]
        is_whole = not self.run(self.forget(lost))
        if not is_whole:
            with pytest.raises(LedgerMissingError):
                self.run(self.workers[0].ledger.lease())
        self.gone += self.workers
        self.workers = []
        self.join()
        grown = self.stream and (is_whole or not {"state", "names"} & set(lost))
        self.model = saved.ledger.restored(self.model, failures=is_whole, stream=grown)
        self.applied, self.step = dict(saved.applied), saved.step
        self.begin_anew(msgspec.json.decode(saved.state, type=LedgerState))

    @invariant()
    @precondition(lambda self: self.generation)
    def the_report_is_true(self) -> None:
        report = self.run(self.workers[0].ledger.report())
        found = {"todo": report.todo, "doing": report.doing, "acked": report.acked, "done": report.done}
        assert found | {"set_aside": len(report.set_aside)} == self.model.counts()
        assert (report.generation, report.epoch, report.added) == (self.generation, self.model.epoch, self.model.added)

    def teardown(self) -> None:
        """In the end each record is in the model once an epoch, but for those of shards that were set aside."""
        try:
            if self.generation:
                if self.stream:
                    self.close()
                self.drain()
                tickets = set(range(self.model.epochs * self.model.added))
                left = {ticket for ticket in tickets if self.applied.get(ticket, 0) != RECORDS}
                assert left <= self.model.dropped
        finally:
            self.run(self.client.aclose())
            self.runner.close()

    def drain(self) -> None:
        while any([self.has_work(worker) for worker in self.workers]):  # noqa: C419 - each of them has to lease
            self.train([RECORDS] * 4)

    def has_work(self, worker: Worker) -> bool:
        if not worker.held:
            expected = self.model.lease(worker.name, 1)
            given = self.run(worker.ledger.lease())
            assert (given is None) == (expected is None)
            worker.take(given or [])
            return given is not None
        return True

    def any_worker(self, data: st.DataObject) -> Worker:
        return self.workers[data.draw(st.integers(0, len(self.workers) - 1))]

    def positions(self) -> dict[int, int]:
        return dict(worker.position for worker in self.workers if worker.position)

    async def forget(self, lost: Collection[str]) -> int:
        """Return how many of these parts there were."""
        named = [key for key in keys.ledger_keys(self.namespace, "job") if key.rpartition(":")[2] in lost]
        return int(await self.client.delete(*named)) if named else 0

    def begin_anew(self, state: LedgerState | None) -> None:
        self.generation += 1
        self.run(self.workers[0].ledger.restore(state, self.generation))

    def apply(self, worker: Worker, amount: int) -> None:
        """A step of one worker: what it applies continues what of the shard is in the model, without gap or repeat."""
        if worker.held and (amount or worker.at == RECORDS):
            ticket = worker.held[0].ticket
            assert self.applied.get(ticket, 0) == worker.at
            worker.at = min(RECORDS, worker.at + amount)
            self.applied[ticket] = worker.at
            worker.position = ticket, worker.at

    def acknowledge(self, worker: Worker) -> None:
        if worker.held and worker.at == RECORDS and worker.position == (worker.held[0].ticket, RECORDS):
            shard = worker.held[0]
            self.run(worker.ledger.ack([shard], self.step))
            self.run(worker.ledger.ack([shard], self.step))
            self.model.ack(shard.ticket, self.step)
            worker.drop_first()


def test_a_lost_and_a_doubled_record_are_noticed(redis_url: str) -> None:
    """The machine's checks can fail: so they do where the model goes back without its ledger, or this without that."""

    class Here(LedgerMachine):
        pass

    Here.redis_url = redis_url
    for goes_back, said in (("model", r"\{0, 1\} <= set\(\)"), ("ledger", "3 == 0")):
        machine = Here()
        machine.start(count=2, epochs=1, stream=False, seed=0)
        machine.save()
        machine.drain()
        (saved,) = machine.checkpoints
        if goes_back == "model":
            machine.applied = saved.applied
        else:
            machine.model = saved.ledger
            machine.begin_anew(msgspec.json.decode(saved.state, type=LedgerState))
        with pytest.raises(AssertionError, match=said):
            machine.teardown()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ledger_is_as_plain_python_says_and_the_model_is_right(redis_url: str) -> None:
    """Leases, deaths, broken shards, checkpoints and ways back in any order: each record counts once an epoch."""

    class Here(LedgerMachine):
        pass

    Here.redis_url = redis_url
    few_but_long = settings(max_examples=examples(15, 200), stateful_step_count=40)
    run_state_machine_as_test(Here, settings=few_but_long, _min_steps=20)
