"""Names of jobs and hosts in texts that anybody may have written. Pure.

Finished texts are looked through, as most are others' (see ADR 39). The time of each function grows with the length of
its text alone, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

LONGEST_NAME = 63
"""Of a job and of each of its instances: a DNS label."""

_WORD = re.compile(r"(?<![a-z0-9-])[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_QUOTED = re.compile(r"""(['"`])([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)\1""")
"""As messages quote names."""

_OF_TASK = re.compile(r"-[0-9a-f]{10}$")
"""Ends the names of tasks' jobs; see edl_airflow.identity."""

_ADDRESS = re.compile(
    r"\b(?:https?|rediss?|grpcs?)://\S*[\w/]"
    r"|\[[0-9a-f:.]+\]:\d{2,5}\b"
    r"|(?<![\w.-])(?=(?:\w*+[.-]++)*?[a-z_])[\w.-]++:\d{2,5}\b"  # a part of it begins with a letter, unlike a time's
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)
def words(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words of a text that may be names or start with one, and those in quotes."""
    return frozenset(_WORD.findall(text)), frozenset(name for _, name in _QUOTED.findall(text))


def names_in(word: str) -> Iterator[str]:
    """Yield the names that a word may be, or begin with as that of an instance does, the longest first."""
    name = word if len(word) <= LONGEST_NAME else word[: LONGEST_NAME + 1].rpartition("-")[0]
    while name:
        yield name
        name = name.rpartition("-")[0]


def is_of_task(name: str) -> bool:
    """Whether a name has the form of those of tasks' jobs."""
    return _OF_TASK.search(name) is not None


def without_addresses(text: str) -> str:
    """Return a text without hosts with ports, IP addresses, and URLs of Redis and of servers."""
    return _ADDRESS.sub("…", text)
