"""Where a cache keeps answers: the same is asked of memory and disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from support.students.caching import names

from edl_runtime.distill import cache_file
from edl_runtime.distill.cache import AnswerCache
from edl_runtime.distill.cache_store import Store, Subject

SUBJECT = Subject("teacher", "1", b"logits of 1")
OTHER = Subject("teacher", "1", b"features of 1")

Open = Callable[..., Store]


@pytest.fixture(params=["memory", "disk"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens a store, all are closed at the end."""
    with_folder = {"folder": tmp_path / "made" / "answers"} if request.param == "disk" else {}
    opened = []

    def open_store(*subjects: Subject, limit_mb: float = 10) -> Store:
        opened.append(AnswerCache("id", limit_mb=limit_mb, **with_folder).open(subjects or [SUBJECT, OTHER]))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def test_what_is_kept_is_found(open_store: Open) -> None:
    """By subject and id, in the order of the ids; the latest entry of an id counts."""
    store = open_store()
    store.keep(SUBJECT, {b"a": b"1", b"b": b"2"})
    store.keep(SUBJECT, {b"b": b"3", b"c": b""})
    store.keep(OTHER, {b"a": b"4"})
    assert store.find(SUBJECT, [b"c", b"x", b"b", b"a", b"b"]) == [b"", None, b"3", b"1", b"3"]
    assert store.find(OTHER, [b"a", b"b"]) == [b"4", None]
    assert store.find(SUBJECT, []) == []


def test_the_oldest_are_dropped_for_the_newest(open_store: Open) -> None:
    """What is kept stays below the limit and close to it, which is logged once, and keeping one anew makes it new."""
    store = open_store(limit_mb=1)
    with structlog.testing.capture_logs() as logs:
        for start in range(0, 4000, 16):
            store.keep(SUBJECT, {name: bytes(1000) for name in names(4000)[start : start + 16]})
            store.keep(SUBJECT, {b"i0": bytes(1000)})
    known = [number for number, entry in enumerate(store.find(SUBJECT, names(4000))) if entry is not None]
    assert 500 < len(known) < 1000
    assert known == [0, *range(4001 - len(known), 4000)]
    assert [entry["event"] for entry in logs] == ["cache.full"]


def test_more_than_a_query_holds_is_found(open_store: Open) -> None:
    """A batch may have any number of samples."""
    store = open_store()
    many = names(2 * cache_file.AT_ONCE + 1)
    store.keep(SUBJECT, {name: name for name in many})
    assert store.find(SUBJECT, many) == many


def test_a_closed_store_knows_nothing(open_store: Open) -> None:
    """Lanes that answer late meet it; they must not fail for that."""
    store = open_store()
    store.keep(SUBJECT, {b"a": b"1"})
    store.close()
    store.close()
    store.keep(SUBJECT, {b"b": b"1"})
    assert store.find(SUBJECT, [b"a", b"b"]) == [None, None]
