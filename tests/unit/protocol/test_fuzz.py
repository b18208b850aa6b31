"""Whatever comes from the network is understood or refused; nothing else happens. `make fuzz` tries many more."""

from __future__ import annotations

import os
from contextlib import closing

import pytest
from support.depth import examples
from support.fuzzing.cases import Case, is_worth_tracing, make
from support.fuzzing.oracles import Oracle
from support.fuzzing.peers import BreachError

SEED = int(os.environ.get("EDL_FUZZ_SEED", "2026"))
FIRST = int(os.environ.get("EDL_FUZZ_FIRST", "0"))
END = FIRST + int(os.environ.get("EDL_FUZZ_INPUTS", examples(1_500, 50_000)))
SHARE = 10_000


@pytest.mark.slow
@pytest.mark.no_cover  # tracing would take longer than all the rest, and find nothing that smaller tests don't
@pytest.mark.parametrize("first", range(FIRST, END, SHARE))
def test_whatever_comes_is_understood_or_refused(first: int) -> None:
    """Damaged, lying and random bytes: no other error, no wait, no memory beyond a bound; good messages arrive."""
    with closing(Oracle()) as oracle:
        for number in range(first, min(first + SHARE, END)):
            case = make(SEED, number)
            try:
                oracle.check(case, traces_memory=is_worth_tracing(case, number))
            except BreachError as breach:
                pytest.fail(f"make fuzz SEED={SEED} FIRST={number} INPUTS=1: {breach}")


@pytest.mark.parametrize(
    "case",
    [
        Case(target="head", parts=[b"GET / HTTP/1.1\r\nContent-Length: 1\r\n\r\n"]),
        Case(target="answer", parts=[b'{"outputs":[]}'], size=0),
    ],
)
def test_messages_that_were_good_before_fuzzing_are_good(case: Case) -> None:
    """The oracle lets by what is right."""
    with closing(Oracle()) as oracle:
        oracle.check(case)


def test_a_good_message_that_is_refused_is_noticed() -> None:
    """The oracle can fail: so it does when a good answer is not understood, or is another than was sent."""
    good = next(case for case in (make(SEED, number) for number in range(10_000)) if case.expected and case.size)
    with closing(Oracle()) as oracle:
        oracle.check(good)
        with pytest.raises(BreachError, match="refused"):
            oracle.check(Case(target=good.target, parts=[good.parts[0][:-20]], size=good.size, expected=good.expected))
