"""What an agent does for all of them."""

from __future__ import annotations

from typing import cast

from edl_runtime.elastic.generation import Generation, GroupView, Presence, TrainerMember
from edl_runtime.elastic.leading import lead
from edl_runtime.elastic.membership import Membership
from edl_runtime.specs import Bounds


class Proposals:
    """A membership that keeps what is proposed."""

    def __init__(self) -> None:
        self.drafts: list[Generation] = []

    async def propose(self, draft: Generation) -> None:
        self.drafts.append(draft)


async def test_each_generation_has_a_word_that_nobody_can_guess() -> None:
    """Its trainers know each other by it, so not even those of an older generation may have it."""
    ready = TrainerMember(id="0-a", index=0, ready=True, live=True)
    view = GroupView(now=100.0, members=(Presence(member=ready, deadline=103.0, beaten_at=100.0, since=90.0),))
    proposals = Proposals()
    for _ in range(2):
        assert await lead(cast("Membership", proposals), view, Bounds(1, 4), "0-a", None) == 0.0
    first, second = (draft.word for draft in proposals.drafts)
    assert len(first) == len(second) == 32
    assert first != second
