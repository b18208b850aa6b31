"""Offline distillation: teachers' answers are written to disk once, and students are trained from there.

An answer is found by what was asked: a digest of a row's inputs, and of the outputs that were wanted. So rows may come
in any order and any batches, and inputs that differ from those that were asked about are noticed, never given the
answer to others.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edl_runtime.distill.bindings import Answers
from edl_runtime.distill.errors import NotRecordedError, UnreadableAnswersError
from edl_runtime.distill.teacher_worker import InferenceConnection
from edl_runtime.parsing import JsonDecoder
from edl_runtime.protocol.oip import ModelSignature, Normalise, TopK
from edl_runtime.protocol.tensors import Array, Tensor

FORMAT = 0
"""Of what is kept in a folder: the `user_version` of its database. To be counted up with each change of it."""

_WAIT_S = 60.0
_SCHEMA = """
pragma synchronous=off;
create table if not exists answers (asked blob primary key, tensors blob not null) without rowid;
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
    """The answers kept in a folder, by what was asked. Several threads and processes may each open it."""

    def __init__(self, folder: Path) -> None:
        """Open it; an empty one is made if there is none. Raises OSError, UnreadableAnswersError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "answers.sqlite"
        self._database = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        with _has_to_be_readable(folder):
            found = self._database.execute("pragma user_version").fetchone()[0]
            if found != FORMAT:
                raise ValueError(f"format {found}, this version reads format {FORMAT}")
            self._database.executescript(_SCHEMA)

    def __len__(self) -> int:
        count: int = self._database.execute("select count(*) from answers").fetchone()[0]
        return count

    def close(self) -> None:
        self._database.close()

    def find(self, asked: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return what is there of the answers to these."""
        marks = ",".join("?" * len(asked))
        found = self._database.execute(f"select asked, tensors from answers where asked in ({marks})", asked)  # noqa: S608
        return dict(found.fetchall())

    def keep(self, answers: Mapping[bytes, bytes]) -> None:
        """Add these, all of them or none."""
        self._database.execute("begin immediate")
        with self._database:
            self._database.executemany("insert or ignore into answers values (?, ?)", answers.items())

    def signature(self) -> ModelSignature | None:
        """Return what the teachers' model takes and answers, None if nobody said. Raises UnreadableAnswersError."""
        found = self._database.execute("select signature from models").fetchone()
        with _has_to_be_readable(self.path.parent):
            return _signature_decoder.decode(found[0]) if found else None

    def keep_signature(self, signature: ModelSignature) -> None:
        self._database.execute("insert or ignore into models values (?)", [msgspec.json.encode(signature)])


class RecordingConnection:
    """A connection that asks a teacher by another one and keeps the answers; what is known already it asks nobody."""

    def __init__(self, folder: Path, teacher: InferenceConnection) -> None:
        self._folder = folder
        self._teacher = teacher

    def open(self) -> None:
        self._answers = RecordedAnswers(self._folder)
        self._teacher.open()

    def close(self) -> None:
        self._teacher.close()

    def ready(self) -> bool:
        return self._teacher.ready()

    def signature(self) -> ModelSignature:
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
        asked = question_digests(inputs, outputs, normalise)
        known = self._answers.find(asked)
        if len(known) == len(set(asked)):
            return _joined(self._folder, [known[one] for one in asked])
        answers = self._teacher.infer(inputs, outputs, normalise, alone=alone)
        if all(array.shape[:1] == (len(asked),) for array in answers.values()):  # others are refused by who asked
            self._answers.keep(dict(zip(asked, _rows(answers, len(asked)), strict=True)))
        return answers


class ReplayConnection:
    """A connection to what a `RecordingConnection` has kept. Needs no teacher."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        """Raise NotRecordedError when nothing was kept there, UnreadableAnswersError when another version kept it."""
        if not self._folder.is_dir():
            raise NotRecordedError(str(self._folder), 0, 0)
        self._answers = RecordedAnswers(self._folder)

    def close(self) -> None:
        """Nothing is under way that would have to be ended."""

    def ready(self) -> bool:
        return True

    def signature(self) -> ModelSignature:
        signature = self._answers.signature()
        if signature is None:
            raise NotRecordedError(str(self._folder), 0, 0)
        return signature

    def infer(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str | TopK],
        normalise: Mapping[str, Normalise],
        *,
        alone: bool = False,  # noqa: ARG002 - nobody else is asked
    ) -> Answers:
        """Return what the teacher answered. Raises NotRecordedError for rows that it was not asked about."""
        asked = question_digests(inputs, outputs, normalise)
        known = self._answers.find(asked)
        if lacking := [one for one in asked if one not in known]:
            raise NotRecordedError(str(self._folder), len(lacking), len(asked))
        return _joined(self._folder, [known[one] for one in asked])


def question_digests(
    inputs: Mapping[str, Tensor], outputs: Sequence[str | TopK], normalise: Mapping[str, Normalise]
) -> list[bytes]:
    """Name what is asked about each row: equal for equal numbers, of the same dtype and shape, and equal requested."""
    names = sorted(inputs)
    question = repr([*outputs, *sorted(normalise.items()), *names]).encode()
    asked = []
    for rows in zip(*(inputs[name] for name in names), strict=True):
        digest = hashlib.blake2b(question, digest_size=16)
        for row in rows:
            array = np.asarray(row)
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        asked.append(digest.digest())
    return asked


def _rows(answers: Answers, count: int) -> list[bytes]:
    """Return each row of the answers by itself, all its tensors in one."""
    tensors = [(name, array.dtype.str, array.shape[1:], np.ascontiguousarray(array)) for name, array in answers.items()]
    return [
        _encoder.encode({name: _Row(dtype, shape, array[row].tobytes()) for name, dtype, shape, array in tensors})
        for row in range(count)
    ]


def _joined(folder: Path, rows: Sequence[bytes]) -> dict[str, Array]:
    """Put such rows together again, as fresh arrays. Raises UnreadableAnswersError."""
    with _has_to_be_readable(folder):
        decoded = [_decoder.decode(row) for row in rows]
        return {
            name: np.stack([np.frombuffer(row[name].data, row[name].dtype).reshape(row[name].shape) for row in decoded])
            for name in decoded[0]
        }


@contextmanager
def _has_to_be_readable(folder: Path) -> Iterator[None]:
    """Turn what the block raises about what is kept in `folder` into an UnreadableAnswersError."""
    try:
        yield
    except sqlite3.OperationalError:  # a full disk, or another process that takes too long
        raise
    except (sqlite3.DatabaseError, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise UnreadableAnswersError(str(folder), str(error)) from None
