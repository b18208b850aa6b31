"""What of a batch's answers is known already, and what has to be asked."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edl_runtime.distill.cache import AnswerCache
from edl_runtime.distill.cache_store import Store, Subject
from edl_runtime.distill.feeds import Answers, Feed, Plan, Slots, Where
from edl_runtime.errors import SampleIdError, SpecError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tensors import Array, Tensor

CHECKED = 16
"""Of one sample in so many that are asked about, a digest of the inputs is kept, which they have to have again."""

CHECKED_FIRST = 64
"""Of so many samples each is checked, so that a few ids which many samples have don't all slip through."""

_ENCODE: dict[type, Callable[[Any], bytes]] = {
    int: lambda number: b"i%d" % number,
    str: lambda text: b"s" + text.encode(errors="surrogatepass"),
    bytes: lambda raw: b"b" + raw,
}


class Recall:
    """A reader's cache, for what its plans ask of each sample."""

    def __init__(self, cache: AnswerCache, signatures: Sequence[ModelSignature], plans: Sequence[Plan]) -> None:
        """Open the cache. Raises SpecError for models and outputs whose answers can't be kept."""
        self._name = cache.sample_id
        self._slot = plans[0].slots.index(cache.sample_id)
        subjects = [subject_of(signature, plan) for signature, plan in zip(signatures, plans, strict=True)]
        self._store = cache.open(subjects)
        self._shelves = [Shelf(self._store, subject, plan) for subject, plan in zip(subjects, plans, strict=True)]

    def of(
        self, payload: Sequence[Array | Slots], inputs: Mapping[Feed, Tensor], rows: int, where: Where
    ) -> list[Recalled]:
        """Return what is known of so many samples' answers, for each plan. Raises SampleIdError.

        `payload` has all slots of the samples, `inputs` those that are sent; `where` says which sample a row is.
        """
        ids = ids_of(self._name, payload[self._slot], rows, where)
        repeated = _repeated(ids) if len(set(ids)) < rows else ()
        recalled = []
        for shelf in self._shelves:
            for row, first in repeated:
                if shelf.digest(inputs, row) != shelf.digest(inputs, first):
                    raise self._wrong(ids, row, where, "of several samples in a batch; ids have to be unique")
            known, entries = shelf.find(ids)
            for number in np.flatnonzero(entries["digest"]):
                if entries["digest"][number] != shelf.digest(inputs, known[number]):
                    raise self._wrong(ids, known[number], where, "with other inputs than before")
            recalled.append(Recalled(shelf, ids, inputs, known, shelf.answers(entries)))
        return recalled

    def _wrong(self, ids: Sequence[bytes], row: int, where: Where, what: str) -> SampleIdError:
        return SampleIdError(self._name, where(row), f"{ids[row][1:].decode(errors='replace')!r} {what}")

    def close(self) -> None:
        """Free what the cache uses; from then on nothing is known nor kept."""
        self._store.close()


class Recalled:
    """What is known of one batch's answers of one pool; `missing` are the rows to ask about."""

    __slots__ = ("_answers", "_digests", "_ids", "_known", "_shelf", "missing")

    def __init__(
        self,
        shelf: Shelf,
        ids: Sequence[bytes],
        inputs: Mapping[Feed, Tensor],
        known: Sequence[int],
        answers: Answers,
    ) -> None:
        """Have the `answers` to the `known` rows."""
        self._shelf = shelf
        self._ids = ids
        self._known = known
        self._answers = answers
        all_rows = range(len(ids))
        self.missing: Sequence[int] = sorted(set(all_rows).difference(known)) if known else all_rows
        self._digests = shelf.digests(inputs, self.missing, len(ids))

    def memo(self, rows: Sequence[int]) -> Memo:
        """Return where the answers to these rows are to be kept."""
        return Memo(self._shelf, [self._ids[row] for row in rows], self._digests[rows])

    def completed(self, parts: Sequence[Answers]) -> Sequence[Answers]:
        """Return the answers to all rows, given those to the missing ones."""
        if not self._known:
            return parts
        if not parts:
            return [self._answers]
        whole = {}
        for name, known in self._answers.items():
            whole[name] = np.empty((len(self._ids), *known.shape[1:]), known.dtype)
            whole[name][self._known] = known
            whole[name][self.missing] = np.concatenate([part[name] for part in parts])
        return [whole]


class Memo(NamedTuple):
    """Where the answers to a request's rows are to be kept."""

    shelf: Shelf
    ids: Sequence[bytes]
    digests: Array

    def keep(self, answers: Answers) -> None:
        """Keep these answers, which are known to be what was asked for."""
        self.shelf.keep(self.ids, self.digests, answers)


class Shelf:
    """The entries of one plan: for each sample, a digest of its inputs and all answers, as bytes."""

    def __init__(self, store: Store, subject: Subject, plan: Plan) -> None:
        self._store = store
        self._subject = subject
        self._feeds = plan.feeds
        self._asked = 0
        answers = np.dtype([(answer.name, answer.dtype, answer.shape) for answer in plan.answers])
        self._layout = np.dtype([("digest", "<u4"), ("answers", answers)])
        self._names = [answer.name for answer in plan.answers]

    def find(self, ids: Sequence[bytes]) -> tuple[list[int], Array]:
        """Return which of these are known, by their numbers, and their entries."""
        size = self._layout.itemsize
        found = [entry if entry and len(entry) == size else b"" for entry in self._store.find(self._subject, ids)]
        known = [number for number, entry in enumerate(found) if entry]
        return known, np.frombuffer(bytearray().join(found), self._layout)

    def answers(self, entries: Array) -> Answers:
        """Return the answers in these entries."""
        return {name: np.ascontiguousarray(entries["answers"][name]) for name in self._names}

    def keep(self, ids: Sequence[bytes], digests: Array, answers: Answers) -> None:
        """Keep the answers to these samples, whose inputs have these digests."""
        entries = np.empty(len(ids), self._layout)
        entries["digest"] = digests
        for name in self._names:
            entries["answers"][name] = answers[name]
        data, size = entries.tobytes(), self._layout.itemsize
        self._store.keep(self._subject, {sample: data[row * size : (row + 1) * size] for row, sample in enumerate(ids)})

    def digests(self, inputs: Mapping[Feed, Tensor], asked: Sequence[int], rows: int) -> Array:
        """Return digests of the inputs of those of the `asked` rows that are to be checked, 0 for all others."""
        digests = np.zeros(rows, np.uint32)
        for number, row in enumerate(asked, self._asked):
            if number < CHECKED_FIRST or number % CHECKED == 0:
                digests[row] = self.digest(inputs, row)
        self._asked += len(asked)
        return digests

    def digest(self, inputs: Mapping[Feed, Tensor], row: int) -> int:
        """Return a digest of a row's inputs."""
        digest = 0
        for feed in self._feeds:
            digest = zlib.crc32(np.ascontiguousarray(inputs[feed][row]).data, digest)
        return digest


def _repeated(ids: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return each row whose id an earlier one has, and the first that has it."""
    first: dict[bytes, int] = {}
    return [(row, first[name]) for row, name in enumerate(ids) if first.setdefault(name, row) != row]


def subject_of(signature: ModelSignature, plan: Plan) -> Subject:
    """Return what the answers to a plan are about. Raises SpecError if they can't be kept."""
    model = f"the teachers' model {signature.name!r}"
    if not any(signature.versions):
        allowed = (
            f"teachers that tell their model's version; {model} has none, so nobody could tell when it has changed"
        )
        raise SpecError("cache", signature.versions, allowed)
    for answer in plan.answers:
        if min(answer.shape, default=1) < 1:
            allowed = (
                f"outputs whose rows all have one shape; that of {answer.name!r} of {model} is {list(answer.shape)}"
            )
            raise SpecError("cache", answer.name, allowed)
    version = msgspec.json.encode([signature.platform, signature.versions])
    answers = [(answer.name, answer.dtype.str, answer.shape) for answer in plan.answers]
    asked = msgspec.json.encode([signature.name, plan.wishes, list(plan.normalise.items()), answers])
    digest = hashlib.blake2b(version + asked, digest_size=16).digest()
    return Subject(signature.name, version.decode(), digest)


def ids_of(name: str, column: Array | Slots, rows: int, where: Where) -> list[bytes]:
    """Return the ids in a slot of so many samples as bytes, equal for equal ones only. Raises SampleIdError."""
    if isinstance(column, np.ndarray):
        if column.size != rows or not column.ndim:
            raise SampleIdError(name, where(0), f"an array {list(column.shape)} for {rows} samples")
        values = column.reshape(-1).tolist()
    else:
        values = [slot.item() if slot.size == 1 else slot for slot in column]
    ids = []
    for number, value in enumerate(values):
        encode = _ENCODE.get(type(value))
        if encode is None:
            raise SampleIdError(name, where(number), f"{value!r:.80}")
        ids.append(encode(value))
    return ids
