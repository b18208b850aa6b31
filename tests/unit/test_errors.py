"""What messages show of a value that is not allowed."""

from __future__ import annotations

import pytest

from edl_runtime.errors import MOST_SHOWN, SpecError


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
