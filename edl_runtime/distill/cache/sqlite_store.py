"""Answers in a file, shared by the processes of one machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from edl_runtime.distill.cache.answer_store import AnswerKey, log_filled
from edl_runtime.log import get_logger

BUSY_LIMIT_S = 0.5
"""How long to wait for another process that writes. Answers that can't be stored by then are not stored."""
OPEN_LIMIT_S = 5.0
"""How long to wait for another process that opens the file."""

AT_ONCE = 500
"""The most ids in one query."""

T = TypeVar("T")

log = get_logger(__name__)

_SETTINGS = (
    "PRAGMA page_size = 16384",  # so that a thousand float32 logits lie within a page
    "PRAGMA journal_mode = WAL",  # one process writes while others read
    "PRAGMA synchronous = NORMAL",  # a machine that crashes may lose the last entries, never the file
    "PRAGMA journal_size_limit = 16777216",
)
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS subjects (digest BLOB PRIMARY KEY, model TEXT NOT NULL, version TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entries (subject BLOB NOT NULL, id BLOB NOT NULL, entry BLOB NOT NULL, UNIQUE (subject, id));
COMMIT;
"""

_in_sqlite = threading.RLock()
"""Held while SQLite runs and while this process forks: a child would inherit SQLite's internal locks, held for ever."""

os.register_at_fork(before=_in_sqlite.acquire, after_in_parent=_in_sqlite.release, after_in_child=_in_sqlite.release)


class SqliteAnswerStore:
    """Stores entries in `folder`/cache.sqlite.

    Opening it drops the entries of other versions of the models of `subjects`. A damaged file is renamed to
    cache.sqlite.damaged and replaced by an empty one. Raises OSError when the folder can't be written to.
    """

    def __init__(self, folder: Path, limit_bytes: int, subjects: Collection[AnswerKey]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "cache.sqlite"
        self._limit_bytes = limit_bytes
        self._subjects = subjects
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._full = self._troubled = False
        with _in_sqlite:
            self._open()

    def find(self, subject: AnswerKey, ids: Sequence[bytes]) -> list[bytes | None]:
        found: dict[bytes, bytes] = {}

        def select(connection: sqlite3.Connection) -> None:
            for start in range(0, len(ids), AT_ONCE):
                some = ids[start : start + AT_ONCE]
                marks = ",".join("?" * len(some))
                query = f"SELECT id, entry FROM entries WHERE subject = ? AND id IN ({marks})"  # noqa: S608 -- marks
                found.update(connection.execute(query, (subject.digest, *some)).fetchall())

        self._use(select)
        return [_unsealed(found.get(name)) for name in ids]

    def keep(self, subject: AnswerKey, entries: Mapping[bytes, bytes]) -> None:
        rows = [(subject.digest, name, _sealed(entry)) for name, entry in entries.items()]

        def insert(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)
                self._drop_oldest(connection, 2 * len(rows))

        self._use(insert)

    def close(self) -> None:
        with _in_sqlite:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _use(self, work: Callable[[sqlite3.Connection], None]) -> None:
        with _in_sqlite:
            if self._connection is None:
                return
            try:
                work(self._connection)
            except sqlite3.OperationalError as error:  # another process writes for too long, or the disk is full
                self._log_failure(error)
            except sqlite3.DatabaseError as error:
                self._connection.close()
                self._connection = None
                try:
                    self._open(damaged_by=error)
                except OSError as trouble:
                    self._log_failure(trouble)
            else:
                self._troubled = False

    def _open(self, damaged_by: sqlite3.DatabaseError | None = None) -> None:
        """Connect to the file, or to a new one if it is damaged; if that fails, the store finds and stores nothing."""
        with _exclusive(self._path.with_suffix(".lock")):
            if damaged_by is not None and self._path.exists() and self._path.stat().st_ino == self._inode:
                self._set_aside(damaged_by)
            for _ in range(2):  # the second time with a new file
                try:
                    self._connection = self._connected()
                except sqlite3.OperationalError as error:
                    self._log_failure(error)
                except sqlite3.DatabaseError as error:
                    self._set_aside(error)
                    continue
                return

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_LIMIT_S, isolation_level=None, check_same_thread=False)
        try:
            for setting in _SETTINGS:
                connection.execute(setting)
            connection.executescript(_SCHEMA)
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                self._drop_other_versions(connection)
                self._drop_oldest(connection, 1000)
            self._inode = self._path.stat().st_ino
        except BaseException:
            connection.close()
            raise
        return connection

    def _drop_other_versions(self, connection: sqlite3.Connection) -> None:
        ours = {(subject.model, subject.version) for subject in self._subjects}
        models = {model for model, _ in ours}
        for kept in connection.execute("SELECT DISTINCT model, version FROM subjects").fetchall():
            if kept[0] in models and kept not in ours:
                log.info("cache.outdated", model=kept[0], version=kept[1])
                connection.execute("DELETE FROM subjects WHERE model = ? AND version = ?", kept)
        connection.executemany(
            "INSERT OR IGNORE INTO subjects VALUES (?, ?, ?)",
            [(subject.digest, subject.model, subject.version) for subject in self._subjects],
        )
        listed = {digest for (digest,) in connection.execute("SELECT digest FROM subjects")}
        used = set(_subjects_of_entries(connection))
        if used & listed:
            connection.executemany("DELETE FROM entries WHERE subject = ?", [(digest,) for digest in used - listed])
        else:
            connection.execute("DELETE FROM entries")  # SQLite then drops the table's pages without reading the rows

    def _drop_oldest(self, connection: sqlite3.Connection, at_once: int) -> None:
        """Drop entries until the contents fit the limit; SQLite reuses the freed pages."""
        while _used_bytes(connection) > self._limit_bytes:
            if not self._full:
                self._full = True
                log_filled(self._limit_bytes)
            oldest = "SELECT rowid FROM entries ORDER BY rowid LIMIT ?"
            if not connection.execute(f"DELETE FROM entries WHERE rowid IN ({oldest})", [at_once]).rowcount:  # noqa: S608
                return

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged")
        log.warning("cache.damaged", path=str(self._path), cause=str(error), set_aside=str(aside))
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._path.replace(aside)

    def _log_failure(self, error: Exception) -> None:
        if not self._troubled:
            log.warning("cache.failed", path=str(self._path), cause=str(error))
        self._troubled = True


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Lock the file; after `OPEN_LIMIT_S` continue without the lock, so that a stopped process can't block others."""
    with path.open("a") as file:
        until = time.monotonic() + OPEN_LIMIT_S
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                break
        yield


def _subjects_of_entries(connection: sqlite3.Connection) -> Iterator[bytes]:
    """Yield each subject that has entries, by one look into the index for each: a scan would read the whole file."""
    last = b""
    while last := connection.execute("SELECT min(subject) FROM entries WHERE subject > ?", [last]).fetchone()[0]:
        yield last


def _used_bytes(connection: sqlite3.Connection) -> int:
    ((pages,), (free,), (size,)) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _sealed(entry: bytes) -> bytes:
    return entry + zlib.crc32(entry).to_bytes(4, "little")


def _unsealed(sealed: bytes | None) -> bytes | None:
    """Return the entry, None if its checksum is wrong: SQLite does not detect damage inside a value."""
    if sealed is None:
        return None
    entry = sealed[:-4]
    return entry if zlib.crc32(entry).to_bytes(4, "little") == sealed[-4:] else None
