"""Ranks that are lost on their way into a generation, at each of its steps, with a real ledger and a made-up group."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
from support.depth import DEEP

from edl_runtime.elastic.data.sharded import ShardedData
from edl_runtime.elastic.training.train_state import state_receivers
from edl_runtime.shards.errors import LedgerMissingError, StaleGenerationError
from edl_runtime.shards.ledger import BlockingLedger

SHARDS = list("pqrstu")
opened: list[str] = []
EACH_ONCE = [f"{shard}{number}" for shard in SHARDS for number in range(4)]

Came = TypeVar("Came")


class Loss(NamedTuple):
    """A generation is lost in its step of this number, counted from 1 with the empty ones; these ranks hear its sum."""

    step: int
    heard_by: str = ""


class Gone(Exception):  # noqa: N818 - what happened, not a mistake
    """There is no later generation with this rank in it."""


class State(NamedTuple):
    """What a rank comes with to a generation: all records in its model, after so many steps, None before any."""

    steps: int | None
    place: dict[str, Any]
    model: list[str]


class Share(NamedTuple):
    """What a rank adds to a step."""

    counts: list[int]
    batch: list[str]


class Hall:
    """Where ranks meet. `generations`: their members by rank, one letter each; `losses`: by number of generation."""

    def __init__(self, generations: list[str], losses: Mapping[int, Loss]) -> None:
        self.generations = generations
        self.losses = losses
        self._change = threading.Condition()
        self._come: dict[object, dict[str, Any]] = {}

    def enter(self, name: str, after: int, state: State) -> tuple[int, list[State]]:
        """Wait for the others of this rank's next generation; return its number, and what all come with."""
        for number in range(after + 1, len(self.generations) + 1):
            if name in self.generations[number - 1]:
                return number, self._gather(number, number, name, state)
        raise Gone

    def add(self, generation: int, step: int, name: str, share: Share) -> Share | None:
        """Return what all ranks add to a step, None if this one is lost in it."""
        loss = self.losses.get(generation)
        if loss and step > loss.step:
            return None
        shares = self._gather((generation, step), generation, name, share)
        if loss and step == loss.step and name not in loss.heard_by:
            return None
        counts = [sum(each) for each in zip(*[share.counts for share in shares], strict=True)]
        return Share(counts, [record for share in shares for record in share.batch])

    def _gather(self, what: object, generation: int, name: str, own: Came) -> list[Came]:
        members = self.generations[generation - 1]
        with self._change:
            come = self._come.setdefault(what, {})
            come[name] = own
            self._change.notify_all()
            assert self._change.wait_for(lambda: come.keys() == set(members), 100), f"{what}: only {[*come]} have come"
            return [come[member] for member in members]


class Rank:
    """What a `ShardData` knows of its training, and a model that is the records it has seen."""

    def __init__(self, hall: Hall, name: str, ledger: BlockingLedger) -> None:
        self.agent = SimpleNamespace(directive=lambda _generation: None)
        self.session = SimpleNamespace(generation=0, group=SimpleNamespace(rank=0, world_size=1), names=[])
        self.train_state = SimpleNamespace(steps=0, ended=False)
        self.over = False
        self.samples = 0
        self.model: list[str] = []
        self._begun = False
        self._hall = hall
        self._name = name
        self._step = 0  # of this generation
        self._batch: list[str] = []
        self.data = ShardedData(self, ledger, read, batch_size=2, epochs=1, collate_fn=list)  # type: ignore[arg-type]

    def train(self) -> str:
        """Train until the end, and return what that was."""
        try:
            self._regroup()
            for batch in self.data:
                self._batch = batch
                self.finish_step()
        except (Gone, StaleGenerationError):  # the latter when it is slow to notice
            return "gone"
        except LedgerMissingError:
            return "went back"
        return "done"

    def note_batch(self, micro: Any) -> None:
        pass

    def check_stepped(self) -> None:
        pass

    def between_steps(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def finish_step(self) -> None:
        """Do as `Training` does: the step counts where its sum is heard, and else there is another generation."""
        self._step += 1
        group = self.session.group
        batch, self._batch = self._batch, []
        own = Share([len(batch), *self.data.counts(group.rank, group.world_size)], batch)
        step = self._hall.add(self.session.generation, self._step, self._name, own)
        if step is None:
            self._regroup()
            return
        samples, *vector = step.counts
        self.data.check(samples, vector)
        self.data.advance(samples, vector)
        self.train_state.steps += samples > 0
        self.samples += samples
        self.model = self.model + step.batch

    def _regroup(self) -> None:
        """Do as `Training` does: who is ahead gives its state to those who stand elsewhere or have none."""
        own = State(self.train_state.steps if self._begun else None, self.data.position(durable=False), self.model)
        generation, states = self._hall.enter(self._name, self.session.generation, own)
        members = self._hall.generations[generation - 1]
        rank, steps = members.index(self._name), [state.steps for state in states]
        receivers, source = state_receivers(steps), rank
        while source in receivers:  # the nearest before that has it
            source = (source - 1) % len(members)
        if source != rank:
            self.train_state.steps, own = states[source].steps or 0, states[source]
            self.model = own.model
        group = SimpleNamespace(rank=rank, world_size=len(members))
        vars(self.session).update(generation=generation, group=group, names=list(members))
        self.data.seek(own.place, len(members))
        self._begun, self._step = True, 0


def read(shard: str) -> Iterator[str]:
    opened.append(shard)
    for number in range(4):
        yield f"{shard}{number}"


def trained(redis_url: str, namespace: str, hall: Hall) -> tuple[dict[str, str], list[list[str]]]:
    """Train as the hall's story has it; return what became of each rank, and the models of those that are done."""
    opened.clear()
    names = sorted(set("".join(hall.generations)))
    ledgers = [BlockingLedger(redis_url, namespace, "job", worker=name, shards=SHARDS) for name in names]
    ranks = [Rank(hall, name, ledger) for name, ledger in zip(names, ledgers, strict=True)]
    try:
        with ThreadPoolExecutor(len(ranks)) as pool:
            ends = dict(zip(names, pool.map(Rank.train, ranks), strict=True))
    finally:
        for ledger in ledgers:
            ledger.close()
    return ends, [sorted(rank.model) for rank, end in zip(ranks, ends.values(), strict=True) if end == "done"]


LOSSES = {
    "before it is known who has used the ledger": Loss(1),
    "when one knows who has used the ledger": Loss(1, "a"),
    "before it is known that the ledger is right": Loss(2),
    "when one has a batch in hand": Loss(2, "a"),
    "when one has, and the lost one, too": Loss(2, "ca"),
    "before the first step": Loss(3),
    "when one is a step ahead": Loss(3, "a"),
    "when the lost one is a step ahead": Loss(3, "c"),
    "when one has acknowledged its shard, and others have not": Loss(4, "a"),
}
FOLLOWING = ["ba", "ab", "nba", "nab"]
"""The generation after the loss: which of its ranks is first, with and without a newcomer."""
MOMENTS = ["first", "later"]
PAIRS = [
    (what, following, moment)
    for number, what in enumerate(LOSSES)
    for place, following in enumerate(FOLLOWING)
    for moment in (MOMENTS if DEEP else [MOMENTS[(number + place) % 2]])
]


@pytest.mark.parametrize(("what", "following", "moment"), PAIRS)
def test_each_record_counts_once_whichever_rank_is_lost_while_entering(
    redis_url: str, namespace: str, what: str, following: str, moment: str
) -> None:
    """Ranks at one step may differ in whether they have used the ledger; the next first rank may be any of them."""
    before = [] if moment == "first" else ["cab"]
    losses = {1: Loss(5), 2: LOSSES[what]} if before else {1: LOSSES[what]}
    ends, models = trained(redis_url, namespace, Hall([*before, "cab", following], losses))
    assert ends == {name: "gone" if name == "c" else "done" for name in ends}
    assert models == [EACH_ONCE] * len(following)


def test_what_a_rank_has_in_hand_is_not_thrown_away(redis_url: str, namespace: str) -> None:
    """It was through the empty steps, and the first rank of the next generation was not, but hears of it."""
    trained(redis_url, namespace, Hall(["cab", "ba"], {1: Loss(2, "a")}))
    assert sorted(opened) == SHARDS


@pytest.mark.parametrize("loss", [Loss(2, "a"), Loss(3)])
def test_who_is_lost_after_the_other_counts_as_well(redis_url: str, namespace: str, loss: Loss) -> None:
    """The only one that is through is lost in its turn, and a newcomer may be the next to put the ledger right."""
    hall = Hall(["cab", "bad", "db"], {1: loss, 2: Loss(2, "b")})
    ends, models = trained(redis_url, namespace, hall)
    assert ends == {"a": "gone", "b": "done", "c": "gone", "d": "done"}
    assert models == [EACH_ONCE] * 2


@pytest.mark.parametrize("last", [3, 4], ids=["a new shard", "a begun shard"])
def test_a_rank_that_a_generation_did_without_lets_go_of_its_shard(redis_url: str, namespace: str, last: int) -> None:
    """Others have it by then, though they have made no step; what it held counts once."""
    hall = Hall(["ab", "bc", "bac"], {1: Loss(last), 2: Loss(3)})
    ends, models = trained(redis_url, namespace, hall)
    assert ends == dict.fromkeys("abc", "done")
    assert models == [EACH_ONCE] * 3


def test_who_leaves_on_the_way_in_can_write_the_checkpoint(redis_url: str, namespace: str) -> None:
    """Though the first rank had begun to put the ledger right for the generation that never was."""
    ledgers = [BlockingLedger(redis_url, namespace, "job", worker=name, shards=SHARDS) for name in "ab"]
    with ledgers[0], ledgers[1]:
        rank = Rank(Hall(["a", "a"], {1: Loss(4), 2: Loss(1)}), "a", ledgers[0])
        assert rank.train() == "gone"
        ledgers[1].begin(2)
        place = rank.data.position(durable=True)
    assert (place["step"], place["ledger"]["pending"]) == (1, ((0, 2),))


def test_two_ranks_at_one_shard_go_back_before_its_records_count(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made it so, here that one does not let go: all end at that step."""
    monkeypatch.setattr(ShardedData, "_keep", lambda *_: None)
    ends, _ = trained(redis_url, namespace, Hall(["ab", "bc", "bac"], {1: Loss(3), 2: Loss(3)}))
    assert ends == dict.fromkeys("abc", "went back")
