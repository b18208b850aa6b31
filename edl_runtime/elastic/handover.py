"""How a generation comes by the state of the one before: its gear, and who writes the checkpoint if not live. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edl_runtime.elastic.generation import GroupView, Presence, TrainerMember
from edl_runtime.elastic.messages import GEARS, Gear
from edl_runtime.elastic.roll import Roll, Times


def gear_of(members: Sequence[TrainerMember], failed: Gear | None) -> Gear:
    """Return the fastest gear that all members are capable of and allowed, slower than the one that has failed."""
    slowest = max(GEARS.index(each.gear) for each in members)
    if failed:
        slowest = max(slowest, GEARS.index(failed) + 1)
    if slowest < 1 and all(each.live for each in members):
        return "live"
    return "warm" if slowest < 2 and all(each.standby for each in members) else "cold"


def lacks_standbys(roll: Roll) -> bool:
    """Whether those who stay would go on in the slowest gear, and in a faster one once their standbys are loaded."""
    members = [each.member for each in roll.stay]
    allowed = all(each.gear != "cold" for each in members)
    return bool(members) and allowed and gear_of(members, None) == "cold"


def writer_of(roll: Roll, chosen: Sequence[TrainerMember], gear: Gear) -> str:
    """Return the id of who writes a checkpoint before its trainer makes room for the next, "" for nobody.

    It is the first by rank of the `chosen` that have the state; after a loss, of those who are ahead.
    """
    holders = [each.member for each in _holders(roll, chosen)]
    if gear == "live" or not holders:
        return ""
    ahead = max(each.step for each in holders) if roll.urgent else 0
    return next(each.id for each in holders if each.step >= ahead)


def leaves_first(roll: Roll, chosen: Sequence[TrainerMember]) -> list[str]:
    """Return who has to leave, and write what it has, before the `chosen` can begin: none of these has the state."""
    if _holders(roll, chosen):
        return []
    return [each.member.id for each in roll.stay if each.member.up and each.member.leaving]


def has_yet_to_say(
    view: GroupView, roll: Roll, chosen: Sequence[TrainerMember], gear: Gear, times: Times
) -> tuple[list[str], float]:
    """Return who has not said yet at which step a loss has found it, and for how long that is waited for.

    Steps are told now and then only, and survivors may differ by one.
    """
    holders = _holders(roll, chosen)
    if gear == "live" or not roll.urgent or roll.forming or len(holders) < 2:
        return [], 0.0
    number = view.generation.number if view.generation else 0
    broke_at = [each.since for each in view.members if each.member.id in roll.lost]
    broke_at += [view.suspicion.since] if view.suspicion else []
    left_s = max(broke_at, default=-math.inf) + times.say_s - view.now
    return [each.member.id for each in holders if each.member.fallen < number] if left_s > 0 else [], left_s


def _holders(roll: Roll, chosen: Sequence[TrainerMember]) -> list[Presence]:
    ids = {each.id for each in chosen}
    return [each for each in roll.stay if each.member.id in ids and each.member.up]
