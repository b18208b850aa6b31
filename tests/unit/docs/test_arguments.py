"""The arguments of what the reference lists."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.paths import ROOT

PAGES = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
LISTED = re.findall(r"(?m)^\.\. auto(?:class|function):: (\S+)\n(?:   :members:(.*)\n)?", PAGES)
NOT_CALLED = ("edl_runtime.elastic.api.Run", "edl_airflow.results.")
"""What scripts and DAGs get, and never make."""


def shown(thing: Any, members: str) -> Iterator[Any]:
    """Yield the methods that a page shows: all public ones of a class, or those that it names."""
    own = [name for name, one in vars(thing).items() if not name.startswith("_") and inspect.isfunction(one)]
    yield from (getattr(thing, name) for name in (members.split() or own))


@pytest.mark.parametrize(("name", "members"), LISTED, ids=[name for name, _ in LISTED])
def test_each_argument_is_described(name: str, members: str) -> None:
    """By its name in the docstring: in backticks, or as a `:param`."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    called = [] if name.startswith(NOT_CALLED) else [thing]
    if f":: {name}\n   :members:" in PAGES:
        called += shown(thing, members)
    for one in called:
        ours = (
            [each for each in inspect.getmro(one) if each.__module__.startswith("edl")]
            if inspect.isclass(one)
            else [one]
        )
        text = " ".join(inspect.getdoc(each) or "" for each in ours)
        named = re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|:param \w+:", text)))
        taken = [
            each.name for each in inspect.signature(one).parameters.values() if not each.kind.name.startswith("VAR")
        ]
        assert [each for each in taken if each not in {"self", "cls", *named}] == []
