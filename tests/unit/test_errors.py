"""What messages show of a value that is not allowed, and failures of one of many."""

from __future__ import annotations

import asyncio
import re

import pytest

from edl_runtime.errors import MOST_SHOWN, SpecError, UnexpectedError, isolated, one_line
from edl_runtime.registry.pools import Quarantine


class Shy:
    """A value of somebody else's class."""

    def __repr__(self) -> str:
        raise RuntimeError


def test_a_long_value_is_shown_in_part() -> None:
    """As one of 5 MB is; the error itself has the whole, also of its name."""
    error = SpecError("key" * MOST_SHOWN, value := "x" * 5_000_000, "less")
    assert len(str(error)) < 3 * MOST_SHOWN
    assert "'xxx" in str(error)
    assert str(error).endswith("xxx… (5,000,002 characters), allowed is less")
    assert error.given == value
    assert str(SpecError("a", "x" * (MOST_SHOWN - 2), "b")) == f"a: got '{'x' * (MOST_SHOWN - 2)}', allowed is b"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(60**3000, "int that can't be shown (ValueError)"), ([Shy()], "list that can't be shown (RuntimeError)")],
    ids=["digits", "shy"],
)
def test_a_value_that_can_not_be_shown_has_a_message_all_the_same(value: object, shown: str) -> None:
    """Python writes out no whole number of more than 4,300 digits, and a class's own text may be an error."""
    assert str(SpecError("a", value, "b")).startswith(f"a: got a value of type {shown}")


def test_any_error_of_one_of_many_is_one_of_ours() -> None:
    """It says of which it is, and where it was raised, so that a loop can tell it and go on."""
    with pytest.raises(UnexpectedError) as caught, isolated("job 'evil'"):
        int("9" * 5000)
    said = r"job 'evil' can't be handled: ValueError: Exceeds the limit .*\(test_errors\.py:\d+\)"
    assert re.fullmatch(said, str(caught.value))
    with pytest.raises(SpecError, match="weight"), isolated("job 'evil'"):
        raise SpecError("weight", 0, "a number above 0")


async def test_of_several_tasks_that_fail_the_first_error_is_told() -> None:
    """A group of tasks raises a group of errors, whose text says nothing."""

    async def fail() -> None:
        raise KeyError("labels")

    async def fail_in_a_group() -> None:
        with isolated("namespace 'a'"):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())

    with pytest.raises(UnexpectedError, match="namespace 'a' can't be handled: KeyError: 'labels'"):
        await fail_in_a_group()


def test_what_others_wrote_is_one_line_of_a_log() -> None:
    """Whatever is in it, also what would turn a terminal's text around."""
    assert one_line("a\nb\x1b\u202e\ud800 \xe9") == "a\\nb\\x1b\\u202e\\ud800 \xe9"
    assert len(one_line("\U000e0001" * 10_000_000)) < 6000


def test_a_reason_of_quarantine_makes_no_line_of_its_own() -> None:
    """A student's words could look like other members of a pool."""
    assert str(Quarantine("slow\nh:1  teacher", 1)) == r"slow\nh:1  teacher (by 1 student)"
