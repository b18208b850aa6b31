"""The next generation as a function of what Redis knows: every agent runs it, and the first to publish wins.

A generation that forms is ended only by a loss, by suspicion or by its time limit; who comes or goes meanwhile waits.
On the view that follows from its own proposal `decide` has nothing more to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edl_runtime.elastic.generation import Generation, GroupView, Outcome, Presence, TrainerMember
from edl_runtime.elastic.messages import Gear
from edl_runtime.specs import Bounds

GEARS: tuple[Gear, ...] = ("live", "warm", "cold")
"""The fastest first."""

MOST_DOUBLINGS = 4


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How long agents wait for what, in seconds.

    - `join_settle_s`, `leave_settle_s`: for others who come or go at the same time.
    - `confirm_s`: for a member to beat after somebody suspected it.
    - `join_limit_s`: for a generation to form; twice as long with each that did not in a row, up to 16 times.
    - `retry_s`: until a member whose trainer did not come up is added again to others who train; doubled likewise.
    """

    join_settle_s: float = 0.3
    leave_settle_s: float = 0.1
    confirm_s: float = 1.0
    join_limit_s: float = 20.0
    retry_s: float = 10.0

    def limit_s(self, generation: Generation) -> float:
        """How long this generation may take to form."""
        return _doubled(self.join_limit_s, generation.attempt)


TIMES = Times()


class Wait(msgspec.Struct, frozen=True):
    """Why there is no new generation, "" when none is needed; and in how many seconds there may be one without news."""

    why: str = ""
    for_s: float = math.inf


def decide(view: GroupView, bounds: Bounds, me: str, times: Times = TIMES) -> Generation | None:
    """Return the generation that is to follow, as a draft that `me` (a member's id) may propose; None for no change."""
    plan = _plan(view, bounds, times)
    return None if isinstance(plan, Wait) else _draft(view, plan, me)


def waits_for(view: GroupView, bounds: Bounds, times: Times = TIMES) -> Wait:
    """Return what a new generation waits for where `decide` returns None."""
    plan = _plan(view, bounds, times)
    return plan if isinstance(plan, Wait) else Wait(for_s=0.0)


def outcome_of(view: GroupView) -> Outcome | None:
    """Return how the job is to end now, None while it goes on or when it has ended already.

    Done: each member of the generation has trained all there is, or has left as planned; one that is lost is waited
    for. Stopped: that was asked for, and no trainer goes on.
    """
    if view.outcome:
        return None
    members = set(view.generation.members) if view.generation else set()
    if view.finished and members <= view.finished | view.left:
        return Outcome("done")
    goes_on = view.granted or any(each.member.ready and not each.member.finished for each in view.members)
    return None if view.stop is None or goes_on else Outcome("stopped", view.stop)


class _Plan(msgspec.Struct, frozen=True):
    """Who is to be in the next generation, why, and whether the one before it failed as such."""

    members: Sequence[TrainerMember]
    reason: str
    failed: bool
    barred: tuple[str, ...]


class _Roll(msgspec.Struct, frozen=True, kw_only=True):
    """The present generation's members: those who `stay`, those `lost` and why, and those nobody can tell of yet.

    `late` ones did not come up in time and stay all the same. `newcomers` are ready and not in it, or have another
    trainer. It is `overdue` when it takes too long to form, and `broken` when somebody lost the others.
    """

    stay: list[Presence]
    late: list[Presence]
    lost: Mapping[str, str]
    silent: list[str]
    away: list[str]
    newcomers: list[Presence]
    barred: tuple[str, ...]
    forming: bool
    overdue: bool
    broken: bool

    @property
    def urgent(self) -> bool:
        """Whether the generation can't go on."""
        return bool(self.lost) or self.overdue or self.broken


def _call_roll(view: GroupView, times: Times) -> _Roll:
    current = view.generation
    known = {each.member.id: each for each in view.members}
    ids = [each for each in current.members if each not in view.finished] if current else []
    lost = {each: why for each in ids if (why := _why_lost(view, each, known.get(each), times))}
    stay = {each: known[each] for each in ids if each in known and each not in lost}
    suspected_at = view.suspicion.since if view.suspicion else -math.inf
    forming = current is not None and view.state == "forming"
    overdue = current is not None and forming and view.now >= view.since + times.limit_s(current)
    barred = {each for each, there in known.items() if _is_barred(view, there)}
    come = [] if view.stop is not None else [known[each] for each in known if each not in stay and each not in barred]
    return _Roll(
        stay=list(stay.values()),
        late=[each for each in stay.values() if current and overdue and each.member.up < current.number],
        lost=lost,
        silent=[each for each, there in stay.items() if there.beaten_at < suspected_at],
        away=[each for each in ids if each not in lost and each not in known],
        newcomers=[
            each
            for each in come
            if each.member.standing == "ready" and not each.member.up and each.beaten_at >= suspected_at
        ],
        barred=tuple(sorted(barred)),
        forming=forming,
        overdue=overdue,
        broken=view.suspicion is not None,
    )


def _why_lost(view: GroupView, member_id: str, there: Presence | None, times: Times) -> str:
    """Return why a member of the generation is not in it any more, in words; "" for one that is."""
    number = view.generation.number if view.generation else 0
    index = index_of(member_id)
    if there is None:
        if member_id in view.left:
            return f"instance {index} has left"
        if any(each.member.index == index for each in view.members):
            return f"instance {index} was started anew"
        return "" if member_id in view.granted else f"instance {index} is gone"
    member = there.member
    active = view.state == "active"  # before, trainers are replaced as planned, but for those of who leaves
    fell = (active and member.up < number) or (not member.ready and (active or member.leaving))
    if member.lost >= number or fell:
        return f"instance {index} has left" if member.leaving else f"the trainer of instance {index} has ended"
    suspicion = view.suspicion
    if suspicion and there.beaten_at < suspicion.since and view.now >= suspicion.since + times.confirm_s:
        return f"instance {index} does not answer"
    return ""


def _is_barred(view: GroupView, there: Presence) -> bool:
    """Whether it did not come up when last it was to, and still has the trainer of then."""
    current = view.generation
    return current is not None and there.member.id in current.barred and there.since <= current.proposed_at


def _plan(view: GroupView, bounds: Bounds, times: Times) -> _Plan | Wait:
    roll = _call_roll(view, times)
    hold = _uncertain(view, roll, times) or (None if roll.urgent else _nothing_due(view, roll, bounds, times))
    if hold:
        return hold
    stay = [each for each in roll.stay if not each.member.leaving]
    newcomers = [
        each for each in roll.newcomers if not each.member.failures or _joins_in_s(view, roll, each, times) <= 0
    ]
    in_time = [each for each in stay if each not in roll.late]
    fewest = bounds.min - len(view.finished)
    if not in_time or len(in_time) + len(newcomers) < fewest:
        in_time = stay  # all of them once more, in another gear
    chosen = [each.member for each in (*in_time, *newcomers)][: bounds.max]
    if not chosen or len(chosen) < fewest:
        return _too_few(chosen, bounds)
    unready = [each.id for each in chosen if not each.ready]
    if unready:
        limit_s = view.since + times.limit_s(view.generation) - view.now if view.generation else math.inf
        return Wait(f"{_instances(unready, 'is', 'are')} not ready yet", math.inf if roll.overdue else limit_s)
    return _Plan(
        members=chosen,
        reason=_reason(view, roll, chosen, times),
        failed=roll.overdue or (roll.broken and not roll.lost and _got_nowhere(view)),
        barred=(*roll.barred, *(each.member.id for each in stay if each not in in_time)),
    )


def _uncertain(view: GroupView, roll: _Roll, times: Times) -> Wait | None:
    """Return what has to be known first, None if enough is."""
    if view.outcome:
        return Wait("the job has ended")
    if view.now < view.quiet_until:
        return Wait("others may come back to a Redis that was empty", view.quiet_until - view.now)
    if roll.silent and view.suspicion:
        return Wait(f"{_instances(roll.silent)} may not answer", view.suspicion.since + times.confirm_s - view.now)
    if roll.urgent and roll.away:
        return Wait(f"{_instances(roll.away)} may come back", min(view.granted.values()) - view.now)
    return None


def _nothing_due(view: GroupView, roll: _Roll, bounds: Bounds, times: Times) -> Wait | None:
    """Return why a generation that can go on does, None if somebody is to come or go now."""
    if view.generation and roll.forming:
        behind = _behind(view, view.generation)
        limit_s = view.since + times.limit_s(view.generation) - view.now
        return Wait(f"{_instances(behind, 'is', 'are')} not up yet in generation {view.generation.number}", limit_s)
    if view.finished:
        return Wait("others have yet to finish")
    leaving = [each for each in roll.stay if each.member.leaving]
    stay = len(roll.stay) - len(leaving)
    dues = [each.since + times.leave_settle_s - view.now for each in leaving]
    if stay < bounds.max:
        dues += [_joins_in_s(view, roll, each, times) for each in roll.newcomers]
    if stay > bounds.max or min(dues, default=math.inf) <= 0:
        return None
    if dues:
        return Wait("others may come or go at the same time", min(dues))
    return Wait() if stay else _too_few([], bounds)


def _joins_in_s(view: GroupView, roll: _Roll, newcomer: Presence, times: Times) -> float:
    """In how many seconds it may be added; one that failed is kept from those who train, and waits the longer."""
    failures = newcomer.member.failures
    wait_s = _doubled(times.retry_s, failures - 1) if failures and roll.stay else times.join_settle_s
    return newcomer.since + wait_s - view.now


def _behind(view: GroupView, current: Generation) -> list[str]:
    """Return the members for whom a generation that forms waits: there is one at least, else it would be active."""
    up = {each.member.id for each in view.members if each.member.up >= current.number} | view.finished
    return [each for each in current.members if each not in up] or list(current.members)


def _got_nowhere(view: GroupView) -> bool:
    """Whether the generation did not finish a step."""
    number = view.generation.number if view.generation else 0
    return not any(each.member.stepped >= number for each in view.members)


def _draft(view: GroupView, plan: _Plan, me: str) -> Generation:
    current = view.generation
    forming = current is not None and view.state == "forming"
    first = plan.members[0]
    return Generation(
        number=1 + max(view.number, *(each.member.seen for each in view.members)),
        members=tuple(each.id for each in plan.members),
        store=f"{first.host}:{first.store_port}",
        endpoints=tuple(f"{each.host}:{each.trainer_port}" for each in plan.members),
        gear=_gear(plan.members, current.gear if current and plan.failed else None),
        reason=plan.reason,
        proposed_by=me,
        proposed_at=view.now,
        after=current.number if current else 0,
        attempt=current.attempt + 1 if current and forming else 0,
        barred=plan.barred,
    )


def _gear(members: Sequence[TrainerMember], failed: Gear | None) -> Gear:
    """Return the fastest gear that all members are capable of and allowed, slower than the one that has failed."""
    slowest = max(GEARS.index(each.gear) for each in members)
    if failed:
        slowest = max(slowest, GEARS.index(failed) + 1)
    if slowest < 1 and all(each.live for each in members):
        return "live"
    return "warm" if slowest < 2 and all(each.standby for each in members) else "cold"


def _reason(view: GroupView, roll: _Roll, chosen: Sequence[TrainerMember], times: Times) -> str:
    current = view.generation
    ids = {each.id for each in chosen}
    leaving = [each.member.id for each in roll.stay if each.member.leaving]
    surplus = [each.member.id for each in roll.stay if each.member.id not in {*ids, *leaving} and each not in roll.late]
    joined = [each.id for each in chosen if current is None or each.id not in current.members or each.id in roll.lost]
    said: list[str] = []
    if current and roll.overdue:
        behind = _behind(view, current)
        took = f"not up after {times.limit_s(current):g} s"
        said += [f"generation {current.number} did not form: {_instances(behind, 'was', 'were')} {took}"]
    said += roll.lost.values()
    if view.suspicion and not roll.lost:
        said += [f"instance {index_of(view.suspicion.by)} lost the others: {view.suspicion.reason}"]
    if leaving:
        said += [f"{_instances(leaving, 'was', 'were')} told to leave"]
    if surplus:
        said += [f"{_instances(surplus, 'is', 'are')} more than there may be"]
    if joined:
        said += [f"{_instances(joined, 'has', 'have')} joined"]
    return "; ".join(said)


def _too_few(chosen: Sequence[TrainerMember], bounds: Bounds) -> Wait:
    return Wait(f"{len(chosen)} of at least {bounds.min} instances {'is' if len(chosen) == 1 else 'are'} ready")


def _doubled(seconds: float, times: int) -> float:
    return seconds * float(2 ** min(times, MOST_DOUBLINGS))


def index_of(member_id: str) -> int:
    """Return the number of the instance whose agent has this id."""
    return int(member_id.partition("-")[0])


def _instances(ids: Iterable[str], one: str = "", many: str = "") -> str:
    """Name instances: "instance 2", "instances 0, 2 and 3"; with a verb for one or many of them."""
    *others, last = map(str, sorted(map(index_of, ids)))
    if others:
        return f"instances {', '.join(others)} and {last} {many}".rstrip()
    return f"instance {last} {one}".rstrip()
