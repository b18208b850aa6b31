"""What an agent tells the others of its instance."""

from __future__ import annotations

import msgspec

from edl_runtime.elastic.crew import Crew
from edl_runtime.elastic.gears import Post, is_ending
from edl_runtime.elastic.generation import GroupView, TrainerMember
from edl_runtime.elastic.ports import Ports


def record_of(before: TrainerMember, crew: Crew, post: Post, view: GroupView, ports: Ports) -> TrainerMember:
    """Return the record that follows `before`, with what the crew, the post and the ports are now.

    An instance stays ready while one of its processes makes room for the next on the way into a generation that none of
    them was told of: who is not ready counts as lost. While its trainer falls it is not, nor until the next can join.
    If its script fails after all was trained, it stays one that has trained until the next trainer joins.
    """
    phase = crew.mine.phase
    included = view.generation is not None and view.rank(post.member) is not None
    on_its_way = included and view.generation is not None and crew.mine.told < view.generation.number
    can_join = phase in ("ready", "member", "leaving", "done") or (phase == "loaded" and not crew.elastic)
    lost = max(before.lost, crew.mine.told) if crew.falling else before.lost
    in_none_yet = phase in ("loaded", "ready")
    is_to_call = crew.elastic and phase == "starting" and not crew.called
    return msgspec.structs.replace(
        before,
        store_port=ports.store,
        trainer_port=ports.trainer,
        ready=not crew.falling and (can_join or crew.finished or (on_its_way and not is_ending(post, view))),
        leaving=post.leaving_since is not None,
        elastic=crew.elastic,
        called=crew.called,
        uncalled_since=(before.uncalled_since or view.now) if is_to_call else 0.0,
        live=crew.live,
        standby=crew.mine.spare == "loaded" or in_none_yet,
        up=crew.mine.up,
        lost=lost,
        waits_for=crew.waits_for,
        moves=crew.moves,
        came_on=crew.moves > before.moves or _has_yet_to_come(crew, view),
        done=phase == "done" or crew.finished or (before.done and phase != "member"),
        keeps=crew.keeps,
        finished=crew.finished,
        seen=max(before.seen, crew.seen, view.number),
    )


def _has_yet_to_come(crew: Crew, view: GroupView) -> bool:
    """Whether the trainer is at something that it does before it comes to the generation that counts.

    It is the agent's own to end a step or a leave that takes too long.
    """
    mine, number = crew.mine, view.generation.number if view.generation else 0
    return mine.phase == "leaving" or (mine.trains and mine.up < number and not crew.waits_for)
