"""The next generation as a pure function of the group's view: every agent runs it, and the first to publish wins.

A forming generation ends only by a loss, by suspicion, or when it makes no progress for too long; instances that join
or leave meanwhile wait. On the view that follows from its own proposal `plan_generation` waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from edl_runtime.elastic.comm.agent_protocol import GEARS, Gear
from edl_runtime.elastic.errors import InitNotCalledError
from edl_runtime.elastic.rendezvous.generation import (
    DEFAULT_TIMEOUTS,
    Generation,
    GroupView,
    JobOutcome,
    MemberLease,
    Participants,
    Timeouts,
    TrainerMember,
    assess_participants,
    doubled,
    has_trained,
    instance_index,
    is_training_over,
    name_instances,
)
from edl_runtime.specs import Bounds


class WaitReason(msgspec.Struct, frozen=True):
    """Why there is no new generation, "" when none is needed; and after how many seconds one may come without news.

    `announced`: it is an event also when it ends by itself. `warns`: it may never end, so it is logged, too.
    """

    why: str = ""
    for_s: float = math.inf
    announced: bool = False
    warns: bool = False


def job_outcome(view: GroupView) -> JobOutcome | None:
    """Return how the job ends now, None while it continues or when it has ended already.

    Done: each member of the generation has trained everything, or has left as planned; a lost one is waited for, but
    none that came too late to train. Stopped: that was requested, and no worker is left.
    """
    if view.outcome:
        return None
    members = set(view.generation.members) if view.generation else set()
    rest = members - view.finished - view.left
    if view.state == "forming" and is_training_over(view):
        rest &= {each.member.id for each in view.members if has_trained(each)}
    if view.finished and not rest:
        return JobOutcome("done")
    goes_on = view.granted or any(each.member.ready and not each.member.finished for each in view.members)
    return None if view.stop is None or goes_on else JobOutcome("stopped", view.stop)


def plan_generation(
    view: GroupView, bounds: Bounds, me: str, timeouts: Timeouts = DEFAULT_TIMEOUTS
) -> Generation | WaitReason:
    """Return the next generation, as a draft that member `me` may propose, or what it waits for."""
    plan = _plan(view, bounds, me, timeouts)
    unsaved = next((each.member for each in view.members if each.member.unsaved), None)
    if isinstance(plan, Generation) or unsaved is None:
        return plan
    why = f"{name_instances([unsaved.id], 'waits')} to write its last checkpoint: {unsaved.unsaved}"
    return msgspec.structs.replace(plan, why=why, announced=True)


def _plan(view: GroupView, bounds: Bounds, me: str, timeouts: Timeouts) -> Generation | WaitReason:
    timeouts = timeouts.stretched(view.stretch)
    participants = assess_participants(view, timeouts)
    hold = _uncertain(view, participants, timeouts) or (
        None if participants.urgent else _nothing_due(view, participants, bounds, timeouts)
    )
    if hold := hold or _setback_wait(view, participants, timeouts):
        return hold
    stay = [each for each in participants.stay if not each.member.leaving]
    newcomers = [
        each
        for each in participants.newcomers
        if not each.member.failures or _join_delay_s(view, participants, each, timeouts) <= 0
    ]
    in_time = [each for each in stay if each not in participants.late]
    fewest = bounds.min - len(view.finished) - len(participants.done)
    if not in_time or len(in_time) + len(newcomers) < fewest:
        in_time = stay  # all of them again, in another gear
    chosen = [each.member for each in (*in_time, *newcomers)][: bounds.max]
    if participants.never_forms:
        chosen = chosen or [each.member for each in participants.done]
        if {each.id for each in chosen} in (set(), set(view.generation.members if view.generation else ())):
            return _to_finish(view)
    if not chosen or len(chosen) < fewest:
        return _too_few(view, chosen, bounds, timeouts)
    unready = [each.id for each in chosen if not each.ready]
    if unready:
        limit_s = view.since + timeouts.limit_s(view.generation) - view.now if view.generation else math.inf
        forms = not (participants.overdue or participants.never_forms)
        return WaitReason(f"{name_instances(unready, 'is', 'are')} not ready yet", limit_s if forms else math.inf)
    current = view.generation
    kept = all(each.keeps for each in chosen if each.up)  # else their state would be lost with their workers
    gear = fastest_gear(
        chosen,
        current.gear if current and kept and (participants.overdue or _made_no_progress(view, participants)) else None,
    )
    if hold := _handover_wait(view, participants, chosen, gear, timeouts):
        return hold
    return Generation(
        number=1 + max(view.number, *(each.member.seen for each in view.members)),
        members=tuple(each.id for each in chosen),
        store=f"{chosen[0].host}:{chosen[0].store_port}",
        endpoints=tuple(f"{each.host}:{each.trainer_port}" for each in chosen),
        gear=gear,
        writer=checkpoint_writer(participants, chosen, gear),
        reason=_reason(view, participants, chosen, timeouts),
        proposed_by=me,
        proposed_at=view.now,
        after=current.number if current else 0,
        attempt=current.attempt + 1 if current and participants.forming else 0,
        excluded=(*participants.excluded, *(each.member.id for each in stay if each not in in_time)),
        setbacks=_setbacks(view, participants, timeouts),
    )


def _uncertain(view: GroupView, participants: Participants, timeouts: Timeouts) -> WaitReason | None:
    """Return what has to be known first, None if enough is."""
    if view.outcome:
        return WaitReason("the job has ended")
    if view.now < view.quiet_until:
        return WaitReason("others may return to a Redis that lost its data", view.quiet_until - view.now)
    if participants.silent and view.suspicion:
        return WaitReason(
            f"{name_instances(participants.silent)} may be lost",
            view.suspicion.since + timeouts.confirm_s - view.now,
        )
    if view.suspicion and _made_no_progress(view, participants):
        left_s = view.suspicion.since + timeouts.confirm_s - view.now
        if left_s > 0:
            return WaitReason("the lost instance is not known yet", left_s)
    if participants.urgent and participants.away:
        return WaitReason(f"{name_instances(participants.away)} may return", min(view.granted.values()) - view.now)
    return None


def _nothing_due(view: GroupView, participants: Participants, bounds: Bounds, timeouts: Timeouts) -> WaitReason | None:
    """Return why a generation that can continue does, None if some instance has to join or leave now."""
    if view.generation and participants.forming:
        behind = _not_up_yet(view, view.generation)
        limit_s = view.since + timeouts.limit_s(view.generation) - view.now
        return WaitReason(
            f"{name_instances(behind, 'is', 'are')} not up yet in generation {view.generation.number}", limit_s
        )
    if view.finished or participants.over:
        return _to_finish(view)
    leaving = [each for each in participants.stay if each.member.leaving]
    stay = len(participants.stay) - len(leaving)
    dues = [each.since + timeouts.leave_settle_s - view.now for each in leaving]
    if stay < bounds.max:
        dues += [_join_delay_s(view, participants, each, timeouts) for each in participants.newcomers]
    if stay > bounds.max or min(dues, default=math.inf) <= 0:
        return None
    if dues:
        return WaitReason("others may join or leave at the same time", min(dues))
    return WaitReason() if stay else _too_few(view, [], bounds, timeouts)


def _to_finish(view: GroupView) -> WaitReason:
    """Return what instances that have finished, or came too late to train, wait for; nothing without any."""
    members = view.generation.members if view.generation else ()
    wait = any(each.member.finished or each.member.id not in members for each in view.members)
    return WaitReason("others have yet to finish" if wait else "")


def _setback_wait(view: GroupView, participants: Participants, timeouts: Timeouts) -> WaitReason | None:
    """Return why a generation that is due is delayed, None if it is not.

    Where one after the other loses a member before it makes progress, as on an overloaded machine, each further one
    would restart all workers. Leaving instances and a job that ends are not delayed.
    """
    current = view.generation
    if current is None or participants.leaves or participants.over or view.stop is not None:
        return None
    setbacks = _setbacks(view, participants, timeouts)
    apart_s = timeouts.apart_s(setbacks)
    left_s = current.proposed_at + apart_s - view.now
    lost = f"{setbacks} generations in a row lost an instance before they made progress"
    why = f"{lost}; the next comes {apart_s:g} s after generation {current.number} at the earliest"
    return WaitReason(why, left_s, announced=True) if left_s > 0 else None


def _setbacks(view: GroupView, participants: Participants, timeouts: Timeouts) -> int:
    """Return how many generations in a row have lost a member before they made progress, the current one included."""
    current = view.generation
    if current is None or _made_progress(view, timeouts):
        return 0
    return current.setbacks + participants.failed


def _made_progress(view: GroupView, timeouts: Timeouts) -> bool:
    """Whether the generation has done a step; with plain scripts, whether it has been up for long."""
    reports_steps = any(each.member.elastic for each in view.members)
    return view.resumed or (not reports_steps and view.state == "active" and view.now >= view.since + timeouts.plain_s)


def _join_delay_s(view: GroupView, participants: Participants, newcomer: MemberLease, timeouts: Timeouts) -> float:
    """In how many seconds it may be added. One that failed before waits longer if others train.

    Standbys of those that train are waited for: without them adding it would take much longer.
    """
    failures = newcomer.member.failures
    wait_s = doubled(timeouts.retry_s, failures - 1) if failures and participants.stay else timeouts.join_settle_s
    joins_at = newcomer.since + wait_s
    if lacks_standbys(participants):
        joins_at = max(joins_at, max(newcomer.since, view.since) + timeouts.standby_s)
    return joins_at - view.now


def _handover_wait(
    view: GroupView, participants: Participants, chosen: Sequence[TrainerMember], gear: Gear, timeouts: Timeouts
) -> WaitReason | None:
    """Return what has to happen before others can take over the state, None if nothing."""
    holders = _state_holders(participants, chosen)
    first = [each.member.id for each in participants.stay if each.member.up and each.member.leaving]
    if first and not holders:  # none of the chosen has the state
        return WaitReason(f"{name_instances(first, 'has', 'have')} yet to write a checkpoint, and leave")
    if gear == "live" or not participants.urgent or participants.forming or len(holders) < 2:
        return None
    # steps are reported a few times a second only, and survivors of a loss may differ by one
    number = view.generation.number if view.generation else 0
    missing = [each.member.id for each in holders if each.member.comm_failed < number]
    broke_at = [each.since for each in view.members if each.member.id in participants.lost]
    broke_at += [view.suspicion.since] if view.suspicion else []
    left_s = max(broke_at, default=-math.inf) + timeouts.report_s - view.now
    if missing and left_s > 0:
        return WaitReason(f"{name_instances(missing, 'has', 'have')} yet to report a step", left_s)
    return None


def _not_up_yet(view: GroupView, current: Generation) -> list[str]:
    """Return the members that a forming generation waits for: at least one, else it would be active."""
    up = {each.member.id for each in view.members if each.member.up >= current.number} | view.finished
    return [each for each in current.members if each not in up] or list(current.members)


def _made_no_progress(view: GroupView, participants: Participants) -> bool:
    """Whether members of the generation lost each other before a step, though none is known to be lost."""
    number = view.generation.number if view.generation else 0
    return (
        participants.broken
        and not participants.lost
        and not any(each.member.stepped >= number for each in view.members)
    )


def _reason(view: GroupView, participants: Participants, chosen: Sequence[TrainerMember], timeouts: Timeouts) -> str:
    current = view.generation
    ids = {each.id for each in chosen}
    leaving = [each.member.id for each in participants.stay if each.member.leaving]
    surplus = [
        each.member.id
        for each in participants.stay
        if each.member.id not in {*ids, *leaving} and each not in participants.late
    ]
    joined = [
        each.id for each in chosen if current is None or each.id not in current.members or each.id in participants.lost
    ]
    reasons: list[str] = []
    if participants.never_forms:
        reasons += ["the others came after everything had been trained"]
    if current and participants.overdue:
        behind = _not_up_yet(view, current)
        waited = f"not up, without progress for {timeouts.limit_s(current):.0f} s"
        reasons += [f"generation {current.number} did not form: {name_instances(behind, 'was', 'were')} {waited}"]
    for loss in dict.fromkeys(participants.lost.values()):
        reasons += [loss.of([each for each, why in participants.lost.items() if why == loss])]
    if view.suspicion and not participants.lost:
        reasons += [f"instance {instance_index(view.suspicion.by)} lost the others: {view.suspicion.reason}"]
    if leaving:
        reasons += [f"{name_instances(leaving, 'was', 'were')} told to leave"]
    if surplus:
        reasons += [f"{name_instances(surplus, 'exceeds', 'exceed')} the job's maximum"]
    if joined:
        reasons += [f"{name_instances(joined, 'has', 'have')} joined"]
    return "; ".join(reasons)


def _too_few(view: GroupView, chosen: Sequence[TrainerMember], bounds: Bounds, times: Timeouts) -> WaitReason:
    if _nobody_calls_init(view, times):
        so_far = "the script runs in several instances, and none has called elastic.init so far"
        return WaitReason(f"{so_far}. This is fine if it loads data first; if not, {InitNotCalledError()}", warns=True)
    return WaitReason(f"{len(chosen)} of at least {bounds.min} instances {'is' if len(chosen) == 1 else 'are'} ready")


def _nobody_calls_init(view: GroupView, times: Timeouts) -> bool:
    """Whether the script runs for long in several instances, has to call `elastic.init` there, and has in none.

    Where there has been a generation, it has.
    """
    members = [each.member for each in view.members]
    silent = [each for each in members if each.uncalled_since and view.now >= each.uncalled_since + times.init_s]
    return view.generation is None and len(silent) > 1 and not any(each.called for each in members)


# Handover: how a generation gets the state of the one before


def fastest_gear(members: Sequence[TrainerMember], failed: Gear | None) -> Gear:
    """Return the fastest gear that all members are capable of and allowed, slower than the one that has failed."""
    slowest = max(GEARS.index(each.gear) for each in members)
    if failed:
        slowest = max(slowest, GEARS.index(failed) + 1)
    if slowest < 1 and all(each.live for each in members):
        return "live"
    return "warm" if slowest < 2 and all(each.standby for each in members) else "cold"


def lacks_standbys(participants: Participants) -> bool:
    """Whether those that stay would continue in the slowest gear, but not once their standbys are loaded."""
    members = [each.member for each in participants.stay]
    allowed = all(each.gear != "cold" for each in members)
    return bool(members) and allowed and fastest_gear(members, None) == "cold"


def checkpoint_writer(participants: Participants, chosen: Sequence[TrainerMember], gear: Gear) -> str:
    """Return the id of the member that writes a checkpoint before its worker is replaced, "" for none.

    It is the first by rank of the `chosen` that have the state; after a loss, of those at the highest step.
    """
    holders = [each.member for each in _state_holders(participants, chosen)]
    if gear == "live" or not holders:
        return ""
    ahead = max(each.step for each in holders) if participants.urgent else 0
    return next(each.id for each in holders if each.step >= ahead)


def _state_holders(participants: Participants, chosen: Sequence[TrainerMember]) -> list[MemberLease]:
    ids = {each.id for each in chosen}
    return [each for each in participants.stay if each.member.id in ids and each.member.up]
