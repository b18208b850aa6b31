"""The next generation as a function of what Redis knows: every agent runs it, and the first to publish wins.

A generation that forms is ended only by a loss, by suspicion or when for too long nothing has come of it; who comes or
goes meanwhile waits.
On the view that follows from its own proposal `decide` has nothing more to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from edl_runtime.elastic.generation import Generation, GroupView, Outcome, Presence, TrainerMember
from edl_runtime.elastic.handover import gear_of, has_yet_to_say, lacks_standbys, leaves_first, writer_of
from edl_runtime.elastic.messages import Gear
from edl_runtime.elastic.roll import (
    TIMES,
    Roll,
    Times,
    call_roll,
    doubled,
    has_trained,
    index_of,
    instances,
    is_over,
)
from edl_runtime.errors import InitNotCalledError
from edl_runtime.specs import Bounds


class Wait(msgspec.Struct, frozen=True):
    """Why there is no new generation, "" when none is needed; and in how many seconds there may be one without news.

    `told`: it is an event also when it ends by itself. `warns`: it may never end, so the log has it, too.
    """

    why: str = ""
    for_s: float = math.inf
    told: bool = False
    warns: bool = False


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
    for, but nobody who came too late to train. Stopped: that was asked for, and no trainer goes on.
    """
    if view.outcome:
        return None
    members = set(view.generation.members) if view.generation else set()
    rest = members - view.finished - view.left
    if view.state == "forming" and is_over(view):
        rest &= {each.member.id for each in view.members if has_trained(each)}
    if view.finished and not rest:
        return Outcome("done")
    goes_on = view.granted or any(each.member.ready and not each.member.finished for each in view.members)
    return None if view.stop is None or goes_on else Outcome("stopped", view.stop)


class _Plan(msgspec.Struct, frozen=True):
    """Who is to be in the next generation, and how and why."""

    members: Sequence[TrainerMember]
    gear: Gear
    writer: str
    reason: str
    barred: tuple[str, ...]
    setbacks: int


def _plan(view: GroupView, bounds: Bounds, times: Times) -> _Plan | Wait:
    times = times.stretched(view.stretch)
    roll = call_roll(view, times)
    hold = _uncertain(view, roll, times) or (None if roll.urgent else _nothing_due(view, roll, bounds, times))
    if hold := hold or _held_back(view, roll, times):
        return hold
    stay = [each for each in roll.stay if not each.member.leaving]
    newcomers = [
        each for each in roll.newcomers if not each.member.failures or _joins_in_s(view, roll, each, times) <= 0
    ]
    in_time = [each for each in stay if each not in roll.late]
    fewest = bounds.min - len(view.finished) - len(roll.done)
    if not in_time or len(in_time) + len(newcomers) < fewest:
        in_time = stay  # all of them once more, in another gear
    chosen = [each.member for each in (*in_time, *newcomers)][: bounds.max]
    if roll.moot:
        chosen = chosen or [each.member for each in roll.done]
        if {each.id for each in chosen} in (set(), set(view.generation.members if view.generation else ())):
            return _to_finish(view)
    if not chosen or len(chosen) < fewest:
        return _too_few(view, chosen, bounds, times)
    unready = [each.id for each in chosen if not each.ready]
    if unready:
        limit_s = view.since + times.limit_s(view.generation) - view.now if view.generation else math.inf
        forms = not (roll.overdue or roll.moot)
        return Wait(f"{instances(unready, 'is', 'are')} not ready yet", limit_s if forms else math.inf)
    current = view.generation
    kept = all(each.keeps for each in chosen if each.up)  # else their state would be gone with their trainers
    gear = gear_of(chosen, current.gear if current and kept and (roll.overdue or _got_nowhere(view, roll)) else None)
    if hold := _handing_over(view, roll, chosen, gear, times):
        return hold
    return _Plan(
        members=chosen,
        gear=gear,
        writer=writer_of(roll, chosen, gear),
        reason=_reason(view, roll, chosen, times),
        barred=(*roll.barred, *(each.member.id for each in stay if each not in in_time)),
        setbacks=_setbacks(view, roll, times),
    )


def _uncertain(view: GroupView, roll: Roll, times: Times) -> Wait | None:
    """Return what has to be known first, None if enough is."""
    if view.outcome:
        return Wait("the job has ended")
    if view.now < view.quiet_until:
        return Wait("others may come back to a Redis that was empty", view.quiet_until - view.now)
    if roll.silent and view.suspicion:
        return Wait(f"{instances(roll.silent)} may not answer", view.suspicion.since + times.confirm_s - view.now)
    if view.suspicion and _got_nowhere(view, roll):
        left_s = view.suspicion.since + times.confirm_s - view.now
        if left_s > 0:
            return Wait("it may show who was lost", left_s)
    if roll.urgent and roll.away:
        return Wait(f"{instances(roll.away)} may come back", min(view.granted.values()) - view.now)
    return None


def _nothing_due(view: GroupView, roll: Roll, bounds: Bounds, times: Times) -> Wait | None:
    """Return why a generation that can go on does, None if somebody is to come or go now."""
    if view.generation and roll.forming:
        behind = _behind(view, view.generation)
        limit_s = view.since + times.limit_s(view.generation) - view.now
        return Wait(f"{instances(behind, 'is', 'are')} not up yet in generation {view.generation.number}", limit_s)
    if view.finished or roll.over:
        return _to_finish(view)
    leaving = [each for each in roll.stay if each.member.leaving]
    stay = len(roll.stay) - len(leaving)
    dues = [each.since + times.leave_settle_s - view.now for each in leaving]
    if stay < bounds.max:
        dues += [_joins_in_s(view, roll, each, times) for each in roll.newcomers]
    if stay > bounds.max or min(dues, default=math.inf) <= 0:
        return None
    if dues:
        return Wait("others may come or go at the same time", min(dues))
    return Wait() if stay else _too_few(view, [], bounds, times)


def _to_finish(view: GroupView) -> Wait:
    """Return what who has finished, or came too late to train, waits for; nothing where nobody is who does."""
    members = view.generation.members if view.generation else ()
    wait = any(each.member.finished or each.member.id not in members for each in view.members)
    return Wait("others have yet to finish" if wait else "")


def _held_back(view: GroupView, roll: Roll, times: Times) -> Wait | None:
    """Return why a generation that is due is not to come yet, None if it is.

    Where one after the other loses a member before it gets anywhere, as on starved cores, each more would cost all of
    them another start. Meanwhile who was lost may come back. Nobody who leaves is kept waiting, nor a job that ends.
    """
    current = view.generation
    if current is None or roll.leaves or roll.over or view.stop is not None:
        return None
    setbacks = _setbacks(view, roll, times)
    apart_s = times.apart_s(setbacks)
    left_s = current.proposed_at + apart_s - view.now
    lost = f"{setbacks} generations in a row lost an instance before they got anywhere"
    why = f"{lost}; the next comes {apart_s:g} s after generation {current.number} at the soonest"
    return Wait(why, left_s, told=True) if left_s > 0 else None


def _setbacks(view: GroupView, roll: Roll, times: Times) -> int:
    """Return how many generations in a row have lost a member before they got anywhere, the present one included."""
    current = view.generation
    if current is None or _got_somewhere(view, times):
        return 0
    return current.setbacks + roll.failed


def _got_somewhere(view: GroupView, times: Times) -> bool:
    """Whether the generation has done a step; of scripts that tell of none, whether it has been up for long."""
    tells = any(each.member.elastic for each in view.members)
    return view.resumed or (not tells and view.state == "active" and view.now >= view.since + times.plain_s)


def _joins_in_s(view: GroupView, roll: Roll, newcomer: Presence, times: Times) -> float:
    """In how many seconds it may be added; one that failed is kept from those who train, and waits the longer.

    Standbys of those who train are waited for as well: without, adding it would take much longer.
    """
    failures = newcomer.member.failures
    wait_s = doubled(times.retry_s, failures - 1) if failures and roll.stay else times.join_settle_s
    joins_at = newcomer.since + wait_s
    if lacks_standbys(roll):
        joins_at = max(joins_at, max(newcomer.since, view.since) + times.standby_s)
    return joins_at - view.now


def _handing_over(
    view: GroupView, roll: Roll, chosen: Sequence[TrainerMember], gear: Gear, times: Times
) -> Wait | None:
    """Return what has to be done or known before others can take over the state, None if nothing."""
    if first := leaves_first(roll, chosen):
        return Wait(f"{instances(first, 'has', 'have')} yet to write a checkpoint, and leave")
    unsaid, left_s = has_yet_to_say(view, roll, chosen, gear, times)
    return Wait(f"{instances(unsaid, 'has', 'have')} yet to say at which step it stands", left_s) if unsaid else None


def _behind(view: GroupView, current: Generation) -> list[str]:
    """Return the members for whom a generation that forms waits: there is one at least, else it would be active."""
    up = {each.member.id for each in view.members if each.member.up >= current.number} | view.finished
    return [each for each in current.members if each not in up] or list(current.members)


def _got_nowhere(view: GroupView, roll: Roll) -> bool:
    """Whether members of the generation lost each other before a step, though nobody is known to be lost."""
    number = view.generation.number if view.generation else 0
    return roll.broken and not roll.lost and not any(each.member.stepped >= number for each in view.members)


def _draft(view: GroupView, plan: _Plan, me: str) -> Generation:
    current = view.generation
    forming = current is not None and view.state == "forming"
    first = plan.members[0]
    return Generation(
        number=1 + max(view.number, *(each.member.seen for each in view.members)),
        members=tuple(each.id for each in plan.members),
        store=f"{first.host}:{first.store_port}",
        endpoints=tuple(f"{each.host}:{each.trainer_port}" for each in plan.members),
        gear=plan.gear,
        writer=plan.writer,
        reason=plan.reason,
        proposed_by=me,
        proposed_at=view.now,
        after=current.number if current else 0,
        attempt=current.attempt + 1 if current and forming else 0,
        barred=plan.barred,
        setbacks=plan.setbacks,
    )


def _reason(view: GroupView, roll: Roll, chosen: Sequence[TrainerMember], times: Times) -> str:
    current = view.generation
    ids = {each.id for each in chosen}
    leaving = [each.member.id for each in roll.stay if each.member.leaving]
    surplus = [each.member.id for each in roll.stay if each.member.id not in {*ids, *leaving} and each not in roll.late]
    joined = [each.id for each in chosen if current is None or each.id not in current.members or each.id in roll.lost]
    said: list[str] = []
    if roll.moot:
        said += ["the others came when all had been trained"]
    if current and roll.overdue:
        behind = _behind(view, current)
        waited = f"not up, and for {times.limit_s(current):.0f} s nothing came of it"
        said += [f"generation {current.number} did not form: {instances(behind, 'was', 'were')} {waited}"]
    for loss in dict.fromkeys(roll.lost.values()):
        said += [loss.of([each for each, why in roll.lost.items() if why == loss])]
    if view.suspicion and not roll.lost:
        said += [f"instance {index_of(view.suspicion.by)} lost the others: {view.suspicion.reason}"]
    if leaving:
        said += [f"{instances(leaving, 'was', 'were')} told to leave"]
    if surplus:
        said += [f"{instances(surplus, 'is', 'are')} more than there may be"]
    if joined:
        said += [f"{instances(joined, 'has', 'have')} joined"]
    return "; ".join(said)


def _too_few(view: GroupView, chosen: Sequence[TrainerMember], bounds: Bounds, times: Times) -> Wait:
    if _nobody_calls_init(view, times):
        so_far = "the script runs in several instances, and none has called elastic.init so far"
        return Wait(f"{so_far}. That is well if it loads data first; if not, {InitNotCalledError()}", warns=True)
    return Wait(f"{len(chosen)} of at least {bounds.min} instances {'is' if len(chosen) == 1 else 'are'} ready")


def _nobody_calls_init(view: GroupView, times: Times) -> bool:
    """Whether the script runs for long in two instances or more, is to call `elastic.init` there, and has in none.

    Where there has been a generation, it has.
    """
    members = [each.member for each in view.members]
    silent = [each for each in members if each.uncalled_since and view.now >= each.uncalled_since + times.init_s]
    return view.generation is None and len(silent) > 1 and not any(each.called for each in members)
