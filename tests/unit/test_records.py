"""Records of other versions."""

from __future__ import annotations

import pytest

from edl_runtime.autoscale.approval import Answer
from edl_runtime.store.records import decoded


@pytest.mark.parametrize("content", [None, "", "{", "null", '{"approved": true}', '{"approved": "yes", "target": 1}'])
def test_what_cannot_be_read_is_none(content: str | None) -> None:
    """As what is not there."""
    assert decoded(content, Answer) is None


def test_what_this_version_or_a_later_one_wrote_is_read() -> None:
    """What is new in it is passed by."""
    for content in ('{"approved": true, "target": 3}', b'{"approved": true, "target": 3, "by": "somebody"}'):
        assert decoded(content, Answer) == Answer(approved=True, target=3)
