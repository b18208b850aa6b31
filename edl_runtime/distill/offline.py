"""Offline distillation: teachers' answers are written to disk once, and students are trained from there.

The key of an answer is a digest of a row's inputs and of the requested outputs. So rows may come in any order and any
batches, and inputs that were not recorded are detected, never given another row's answer.
"""

from __future__ import annotations

import hashlib
import sqlite3
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edl_runtime.distill.bindings import Answers
from edl_runtime.distill.errors import NotRecordedError, UnreadableAnswersError
from edl_runtime.distill.teacher_connections import InferenceConnection
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK
from edl_runtime.protocol.tensors import Array, Tensor

_WAIT_S = 60.0
_MOST_VARIABLES = 30_000  # of one query; SQLite allows 32,766
_SCHEMA = """
pragma synchronous=off;
create table if not exists answers (digest blob primary key, tensors blob not null) without rowid;
create table if not exists models (signature blob primary key) without rowid;
"""


class _Row(NamedTuple):
    """One row of one answered tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, _Row])
_signature_decoder = JsonDecoder(ModelSignature)


class RecordedAnswers:
    """The answers recorded in a folder, by digest. Several threads and processes may each open it."""

    def __init__(self, folder: Path) -> None:
        """Open it; creates an empty one if there is none. Raises OSError, UnreadableAnswersError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "answers.sqlite"
        self._database = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._database.close).atexit = False  # a connection's `close` comes from any thread
        with _reading(folder):
            self._database.executescript(_SCHEMA)

    def __len__(self) -> int:
        count: int = self._database.execute("select count(*) from answers").fetchone()[0]
        return count

    def close(self) -> None:
        self._database.close()

    def find(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for start in range(0, len(digests), _MOST_VARIABLES):
            some = digests[start : start + _MOST_VARIABLES]
            marks = ",".join("?" * len(some))
            query = f"select digest, tensors from answers where digest in ({marks})"  # noqa: S608
            found.update(self._database.execute(query, some).fetchall())
        return found

    def keep(self, answers: Mapping[bytes, bytes]) -> None:
        """Add these, all or none."""
        self._database.execute("begin immediate")
        with self._database:
            self._database.executemany("insert or ignore into answers values (?, ?)", answers.items())

    def signature(self) -> ModelSignature | None:
        """Return the signature of the teachers' model, None if nothing was recorded. Raises UnreadableAnswersError."""
        found = self._database.execute("select signature from models").fetchone()
        with _reading(self.path.parent):
            return _signature_decoder.decode(found[0]) if found else None

    def keep_signature(self, signature: ModelSignature) -> None:
        self._database.execute("insert or ignore into models values (?)", [msgspec.json.encode(signature)])


class RecordedConnection:
    """A connection that answers from a folder. Other requests go to `teacher`, whose answers are recorded there.

    Without a teacher it raises NotRecordedError for them.
    """

    def __init__(self, folder: Path, teacher: InferenceConnection | None = None) -> None:
        self._folder = folder
        self._teacher = teacher

    def open(self) -> None:
        """Raise NotRecordedError if there is neither folder nor teacher, UnreadableAnswersError for a damaged file."""
        if self._teacher is None and not self._folder.is_dir():
            raise NotRecordedError(str(self._folder), 0, 0)
        self._answers = RecordedAnswers(self._folder)
        if self._teacher is not None:
            self._teacher.open()

    def close(self) -> None:
        if self._teacher is not None:
            self._teacher.close()

    def ready(self) -> bool:
        return self._teacher is None or self._teacher.ready()

    def signature(self) -> ModelSignature:
        if self._teacher is None:
            recorded = self._answers.signature()
            if recorded is None:
                raise NotRecordedError(str(self._folder), 0, 0)
            return recorded
        signature = self._teacher.signature()
        self._answers.keep_signature(signature)
        return signature

    def infer(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise],
        *,
        alone: bool = False,
    ) -> Answers:
        digests = question_digests(inputs, outputs, normalise)
        known = self._answers.find(digests)
        missing = [digest for digest in digests if digest not in known]
        if not missing:
            return _joined(self._folder, [known[digest] for digest in digests])
        if self._teacher is None:
            raise NotRecordedError(str(self._folder), len(missing), len(digests))
        answers = self._teacher.infer(inputs, outputs, normalise, alone=alone)
        if all(array.shape[:1] == (len(digests),) for array in answers.values()):  # the caller refuses other answers
            self._answers.keep(dict(zip(digests, _rows(answers, len(digests)), strict=True)))
        return answers


def question_digests(
    inputs: Mapping[str, Tensor], outputs: Sequence[str | TopK], normalise: Mapping[str, Normalise]
) -> list[bytes]:
    """Return a digest of each row: equal for equal inputs of the same dtype and shape and equal requested outputs."""
    names = sorted(inputs)
    question = repr([*outputs, *sorted(normalise.items()), *names]).encode()
    digests = []
    for rows in zip(*(inputs[name] for name in names), strict=True):
        digest = hashlib.blake2b(question, digest_size=16)
        for row in rows:
            array = np.asarray(row)
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        digests.append(digest.digest())
    return digests


def _rows(answers: Answers, count: int) -> list[bytes]:
    tensors = [(name, array.dtype.str, array.shape[1:], np.ascontiguousarray(array)) for name, array in answers.items()]
    return [
        _encoder.encode({name: _Row(dtype, shape, array[row].tobytes()) for name, dtype, shape, array in tensors})
        for row in range(count)
    ]


def _joined(folder: Path, rows: Sequence[bytes]) -> dict[str, Array]:
    """Decode and stack such rows, as new arrays. Raises UnreadableAnswersError."""
    with _reading(folder):
        decoded = [_decoder.decode(row) for row in rows]
        return {
            name: np.stack([np.frombuffer(row[name].data, row[name].dtype).reshape(row[name].shape) for row in decoded])
            for name in decoded[0]
        }


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn errors of damaged data in `folder` into an UnreadableAnswersError."""
    try:
        yield
    except sqlite3.OperationalError:  # a full disk, or a lock held too long by another process
        raise
    except (sqlite3.DatabaseError, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise UnreadableAnswersError(str(folder), str(error)) from None
