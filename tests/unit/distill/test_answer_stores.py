"""Where a cache keeps answers: in memory or in a file, which others use too and which may be damaged."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from edl_runtime.distill.cache import sqlite_store
from edl_runtime.distill.cache.answer_cache import AnswerCache
from edl_runtime.distill.cache.answer_store import AnswerKey, AnswerStore
from edl_runtime.errors import SpecError

SUBJECT = AnswerKey("teacher", "1", b"logits of 1")
OTHER = AnswerKey("teacher", "1", b"features of 1")
NEWER = AnswerKey("teacher", "2", b"logits of 2")

Open = Callable[..., AnswerStore]


def names(count: int) -> list[bytes]:
    """So many ids as a store has them."""
    return [b"i%d" % number for number in range(count)]


@pytest.fixture(params=["memory", "disk"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens a store, all are closed at the end."""
    with_folder = {"folder": tmp_path / "made" / "answers"} if request.param == "disk" else {}
    opened = []

    def open_store(*subjects: AnswerKey, limit_mb: float = 10) -> AnswerStore:
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
    assert [entry["event"] for entry in logs] == ["cache.filled"]


def test_more_than_a_query_holds_is_found(open_store: Open) -> None:
    """A batch may have any number of samples."""
    store = open_store()
    many = names(2 * sqlite_store.AT_ONCE + 1)
    store.keep(SUBJECT, {name: name for name in many})
    assert store.find(SUBJECT, many) == many


def test_a_closed_store_knows_nothing(open_store: Open) -> None:
    """Workers that answer late meet it; they must not fail for that."""
    store = open_store()
    store.keep(SUBJECT, {b"a": b"1"})
    store.close()
    store.close()
    store.keep(SUBJECT, {b"b": b"1"})
    assert store.find(SUBJECT, [b"a", b"b"]) == [None, None]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with an entry of both subjects and one of another model."""
    store = AnswerCache("id", folder=tmp_path).open([SUBJECT, OTHER, AnswerKey("another", "1", b"another")])
    for subject in (SUBJECT, OTHER, AnswerKey("another", "1", b"another")):
        store.keep(subject, dict.fromkeys(names(1000), b"entry"))
    store.close()
    return tmp_path / "cache.sqlite"


def reopened(file: Path, *subjects: AnswerKey, limit_mb: float = 10) -> AnswerStore:
    return AnswerCache("id", folder=file.parent, limit_mb=limit_mb).open(subjects or [SUBJECT])


def test_entries_of_another_version_are_dropped(file: Path) -> None:
    """Those of the same model's name, and no others; also those that a reader of the old version adds afterwards."""
    older = reopened(file, SUBJECT)
    newer = reopened(file, NEWER)
    older.keep(SUBJECT, {b"late": b"entry"})
    newer.keep(NEWER, {b"a": b"new"})
    again = reopened(file, NEWER)
    assert again.find(NEWER, [b"a"]) == [b"new"]
    with sqlite3.connect(file) as connection:
        kept = connection.execute("SELECT DISTINCT subject FROM entries ORDER BY subject").fetchall()
    connection.close()
    assert kept == [(b"another",), (b"logits of 2",)]
    for store in (older, newer, again):
        store.close()


@pytest.mark.parametrize("subject", [SUBJECT, NEWER], ids=["same version", "newer version"])
def test_a_large_file_is_opened_as_fast_as_a_small_one(
    subject: AnswerKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its entries are used or dropped: others can't write meanwhile. Counted in steps of SQLite."""
    steps = 0
    connect = sqlite3.connect

    def count() -> None:
        nonlocal steps
        steps += 1

    def connect_counting(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_progress_handler(count, 1)
        return connection

    needed = []
    for entries in (10, 1000):
        file = tmp_path / str(entries) / "cache.sqlite"
        store = reopened(file)
        store.keep(SUBJECT, dict.fromkeys(names(entries), b"entry"))
        store.close()
        with monkeypatch.context() as patched:
            patched.setattr(sqlite3, "connect", connect_counting)
            steps = 0
            reopened(file, subject).close()
        needed.append(steps)
    assert needed[0] == needed[1] > 0


def test_one_reader_may_ask_two_models_of_a_name(file: Path) -> None:
    """A mixture's pools may be of the same name in two versions; neither drops the other's."""
    store = reopened(file, SUBJECT, NEWER)
    store.keep(NEWER, {b"a": b"new"})
    assert (store.find(SUBJECT, [b"i1"]), store.find(NEWER, [b"a"])) == ([b"entry"], [b"new"])
    store.close()


def test_a_smaller_limit_drops_at_once(file: Path) -> None:
    """What a run with a larger limit has left is made to fit."""
    reopened(file, SUBJECT, limit_mb=0.02).close()
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (0,)
    connection.close()


def damage_head(file: Path) -> None:
    file.write_bytes(b"no database at all" * 1000)


def damage_pages(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[16384:] = b"\xff" * (len(content) - 16384)
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: 16384 * 2 + 100])


@pytest.mark.parametrize("damage", [damage_head, damage_pages, cut_short])
@pytest.mark.parametrize("while_open", [False, True])
def test_a_damaged_file_is_set_aside(file: Path, damage: Callable[[Path], None], *, while_open: bool) -> None:
    """It is begun anew with a warning, whether it was damaged before or is meanwhile."""
    store = reopened(file) if while_open else None
    damage(file)
    with structlog.testing.capture_logs() as logs:
        store = store or reopened(file)
        for _ in range(3):  # whichever of these meets the damage
            store.keep(SUBJECT, {b"a": b"1"})
            found = store.find(SUBJECT, [b"a", b"i1", b"i999"])
    assert found[0] == b"1"
    assert set(found[1:]) <= {None, b"entry"}
    assert [entry["event"] for entry in logs] == ["cache.damaged"]
    assert file.with_name("cache.sqlite.damaged").exists()
    store.close()
    again = reopened(file)
    assert again.find(SUBJECT, [b"a"]) == [b"1"]
    again.close()


def test_a_damaged_file_is_set_aside_once(file: Path) -> None:
    """A second process that meets the damage goes on with the file that the first has begun."""
    first, second = reopened(file), reopened(file)
    damage_pages(file)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            first.keep(SUBJECT, {b"a": b"1"})
        for _ in range(2):
            second.keep(SUBJECT, {b"b": b"2"})
            found = second.find(SUBJECT, [b"a", b"b"])
    assert found == [b"1", b"2"]
    assert first.find(SUBJECT, [b"a", b"b"]) == [b"1", b"2"]
    assert [entry["event"] for entry in logs] == ["cache.damaged"]
    first.close()
    second.close()


def test_damage_inside_of_an_entry_is_noticed(file: Path) -> None:
    """SQLite takes any bytes for a value, so each has a checksum."""
    store = reopened(file)
    store.keep(SUBJECT, {b"a": b"a right answer", b"b": b"another"})
    store.close()
    file.write_bytes(file.read_bytes().replace(b"a right answer", b"a wrong answer"))
    store = reopened(file)
    assert store.find(SUBJECT, [b"a", b"b"]) == [None, b"another"]
    store.close()


def test_what_another_process_locks_is_not_waited_for_long(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are then not kept, which is logged once; when the lock is free they are again."""
    monkeypatch.setattr(sqlite_store, "BUSY_LIMIT_S", 0.1)
    store = reopened(file)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with structlog.testing.capture_logs() as logs:
        store.keep(SUBJECT, {b"a": b"1"})
        store.keep(SUBJECT, {b"a": b"1"})
    assert [entry["event"] for entry in logs] == ["cache.failed"]
    assert store.find(SUBJECT, [b"a", b"i1"]) == [None, b"entry"]
    other.execute("COMMIT")
    other.close()
    store.keep(SUBJECT, {b"a": b"1"})
    assert store.find(SUBJECT, [b"a"]) == [b"1"]
    store.close()


def test_an_unusable_folder_is_reported(tmp_path: Path) -> None:
    """Before training, where it can still be mended."""
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"cache\.folder: got .*file"):
        AnswerCache("id", folder=tmp_path / "file").open([SUBJECT])


PROCESSES = """
import os, sys, time
from pathlib import Path
from edl_runtime.distill.cache import sqlite_store
from edl_runtime.distill.cache.answer_cache import AnswerCache
from edl_runtime.distill.cache.answer_store import AnswerKey

sqlite_store.BUSY_LIMIT_S = 60.0  # a busy machine may keep whoever has the lock waiting for longer than usual
subject = AnswerKey("teacher", "1", b"shared")
for number in range(4):
    folder = Path(sys.argv[1], str(number))
    if number % 2:
        folder.mkdir()
        (folder / "cache.sqlite").write_bytes(b"no database at all" * 1000)
    begin = time.monotonic() + 0.05
    children = []
    for me in range(4):
        child = os.fork()
        if not child:
            while time.monotonic() < begin:
                pass
            store = AnswerCache("id", folder=folder).open([subject])
            for start in range(0, 100, 10):
                ids = [b"i%d" % number for number in range(start, start + 10)]
                store.keep(subject, {name: name for name in ids if int(name[1:]) % 4 == me})
                assert all(entry in (None, name) for name, entry in zip(ids, store.find(subject, ids)))
            store.close()
            os._exit(0)
        children.append(child)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
"""


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Some that begin at once, in a new folder or one with a damaged file, lose none of each other's entries."""
    run = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(tmp_path)], capture_output=True, text=True, timeout=110, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")
    assert ["cache.damaged" in line for line in run.stderr.splitlines()] == [True, True]
    for number in range(4):
        shared = AnswerKey("teacher", "1", b"shared")
        store = AnswerCache("id", folder=tmp_path / str(number)).open([shared])
        assert store.find(shared, names(100)) == names(100)
        store.close()
