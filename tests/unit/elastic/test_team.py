"""Whether a trainer's process can go on to another generation."""

from __future__ import annotations

import pytest

from edl_runtime.elastic.link import NoLink
from edl_runtime.elastic.team import MOST_LIVE, Team


@pytest.mark.parametrize(("made", "live"), [(0, True), (MOST_LIVE - 1, True), (MOST_LIVE, False)])
def test_a_process_that_has_been_in_many_groups_goes_into_no_other(made: int, live: bool) -> None:  # noqa: FBT001
    """Gloo keeps something of each: another process takes over."""
    team = Team(NoLink())
    team._made = made
    assert team.live == live
