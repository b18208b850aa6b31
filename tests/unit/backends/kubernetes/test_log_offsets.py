"""When a line was written, as nodes stamp it."""

from __future__ import annotations

import pytest

from edl_runtime.backends.kubernetes.logs import START_OF_LOG, LogOffset, parse_timestamp


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("1970-01-01T00:00:00.000000001Z", 1),
        ("1970-01-01T02:00:00.123456789+02:00", 123_456_789),
        ("1969-12-31T18:30:00.000000000-05:30", 0),
        ("2026-11-22T09:08:41.999999999Z", 1_795_338_521_999_999_999),
    ],
)
def test_a_moment_is_the_same_at_any_offset(text: str, moment: int) -> None:
    """To the nanosecond: a runtime of containers stamps lines in its node's zone."""
    assert parse_timestamp(text) == moment


@pytest.mark.parametrize(
    "text", ["", "up", "2026-11-22T09:08:41", "2026-11-22T09:08:41.Z", "2026-13-22T09:08:41Z", "2026-11-22T09:08:60Z"]
)
def test_what_is_no_moment_is_none(text: str) -> None:
    """A line that a program has written may begin with anything."""
    assert parse_timestamp(text) is None


def test_what_was_told_grows_with_each_part() -> None:
    """Parts of the same moment are counted; a later one begins anew, and the rest is read from its second on."""
    one = START_OF_LOG.then(5_000_000_001)
    two = one.then(5_000_000_001)
    three = two.then(6_999_999_999)
    assert (one, two, three) == (LogOffset(5_000_000_001, 1), LogOffset(5_000_000_001, 2), LogOffset(6_999_999_999, 1))
    assert START_OF_LOG < one < two < three
    assert [told.since for told in (START_OF_LOG, one, three)] == ["", "1970-01-01T00:00:05Z", "1970-01-01T00:00:06Z"]
