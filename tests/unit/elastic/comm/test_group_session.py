"""Whether a worker's process can enter another generation."""

from __future__ import annotations

import pytest

from edl_runtime.elastic.comm.agent_protocol import StandaloneClient
from edl_runtime.elastic.comm.process_group import MAX_LIVE_GROUPS, GroupSession


@pytest.mark.parametrize(("made", "live"), [(0, True), (MAX_LIVE_GROUPS - 1, True), (MAX_LIVE_GROUPS, False)])
def test_a_process_that_has_been_in_many_groups_enters_no_other(made: int, live: bool) -> None:  # noqa: FBT001
    """Gloo leaks something with each: another process takes over."""
    session = GroupSession(StandaloneClient())
    session._made = made
    assert session.live == live
