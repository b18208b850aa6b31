"""Which of a batch's answers are in the cache, and which have to be requested."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from edl_runtime.distill.bindings import Answers, InputBinding, RequestPlan, SampleName, SlotArrays
from edl_runtime.distill.cache.answer_cache import AnswerCache
from edl_runtime.distill.cache.answer_store import AnswerKey, AnswerStore
from edl_runtime.distill.errors import SampleIdError
from edl_runtime.errors import SpecError
from edl_runtime.protocol.oip import ModelSignature
from edl_runtime.protocol.tensors import Array, Tensor

CHECK_ONE_IN = 16
"""For one requested sample in so many, a digest of the inputs is stored and compared when the id comes again."""

CHECK_FIRST = 64
"""The first so many samples are all checked, to detect a few ids that many samples share."""

_ENCODE: dict[type, Callable[[Any], bytes]] = {
    int: lambda number: b"i%d" % number,
    str: lambda text: b"s" + text.encode(errors="surrogatepass"),
    bytes: lambda raw: b"b" + raw,
}


class CacheLookup:
    """A reader's cache of the answers to its plans."""

    def __init__(self, cache: AnswerCache, signatures: Sequence[ModelSignature], plans: Sequence[RequestPlan]) -> None:
        """Open the cache. Raises SpecError for models and outputs whose answers can't be cached."""
        self._name = cache.sample_id
        self._slot = plans[0].slots.index(cache.sample_id)
        subjects = [answer_key(signature, plan) for signature, plan in zip(signatures, plans, strict=True)]
        self._store = cache.open(subjects)
        self._plan_caches = [
            PlanCache(self._store, subject, plan) for subject, plan in zip(subjects, plans, strict=True)
        ]

    def of(
        self, payload: Sequence[Array | SlotArrays], inputs: Mapping[InputBinding, Tensor], rows: int, where: SampleName
    ) -> list[CachedAnswers]:
        """Return the cached answers to a batch's samples, for each plan. Raises SampleIdError.

        `payload` has all slots of the samples, `inputs` those for the model; `where` names the sample of a row.
        """
        ids = ids_of(self._name, payload[self._slot], rows, where)
        repeated = _repeated_ids(ids) if len(set(ids)) < rows else ()
        cached_answers = []
        for plan_cache in self._plan_caches:
            for row, first in repeated:
                if plan_cache.digest(inputs, row) != plan_cache.digest(inputs, first):
                    raise self._wrong(ids, row, where, "of several samples in a batch; ids have to be unique")
            known, entries = plan_cache.find(ids)
            for number in np.flatnonzero(entries["digest"]):
                if entries["digest"][number] != plan_cache.digest(inputs, known[number]):
                    raise self._wrong(ids, known[number], where, "with other inputs than before")
            cached_answers.append(CachedAnswers(plan_cache, ids, inputs, known, plan_cache.answers(entries)))
        return cached_answers

    def _wrong(self, ids: Sequence[bytes], row: int, where: SampleName, what: str) -> SampleIdError:
        return SampleIdError(self._name, where(row), f"{ids[row][1:].decode(errors='replace')!r} {what}")

    def close(self) -> None:
        self._store.close()


class CachedAnswers:
    """The cached answers of one pool to one batch; `missing` are the rows to request."""

    __slots__ = ("_answers", "_digests", "_ids", "_known", "_plan_cache", "missing")

    def __init__(
        self,
        plan_cache: PlanCache,
        ids: Sequence[bytes],
        inputs: Mapping[InputBinding, Tensor],
        known: Sequence[int],
        answers: Answers,
    ) -> None:
        self._plan_cache = plan_cache
        self._ids = ids
        self._known = known
        self._answers = answers
        all_rows = range(len(ids))
        self.missing: Sequence[int] = sorted(set(all_rows).difference(known)) if known else all_rows
        self._digests = plan_cache.digests(inputs, self.missing, len(ids))

    def cache_writer(self, rows: Sequence[int]) -> Callable[[Answers], None]:
        """Return a function that stores the answers to these rows, once they have been checked."""
        return partial(self._plan_cache.keep, [self._ids[row] for row in rows], self._digests[rows])

    def completed(self, parts: Sequence[Answers]) -> Sequence[Answers]:
        """Return the answers to all rows, given those to the missing rows."""
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


class PlanCache:
    """The entries of one plan: for each sample, a digest of its inputs and all answers, as bytes."""

    def __init__(self, store: AnswerStore, subject: AnswerKey, plan: RequestPlan) -> None:
        self._store = store
        self._subject = subject
        self._inputs = plan.inputs
        self._requested = 0  # rows
        answers = np.dtype([(answer.name, answer.dtype, answer.shape) for answer in plan.outputs])
        self._layout = np.dtype([("digest", "<u4"), ("answers", answers)])
        self._names = [answer.name for answer in plan.outputs]

    def find(self, ids: Sequence[bytes]) -> tuple[list[int], Array]:
        size = self._layout.itemsize
        found = [entry if entry and len(entry) == size else b"" for entry in self._store.find(self._subject, ids)]
        known = [number for number, entry in enumerate(found) if entry]
        return known, np.frombuffer(bytearray().join(found), self._layout)

    def answers(self, entries: Array) -> Answers:
        return {name: np.ascontiguousarray(entries["answers"][name]) for name in self._names}

    def keep(self, ids: Sequence[bytes], digests: Array, answers: Answers) -> None:
        """Store the answers to these samples, whose inputs have these digests."""
        entries = np.empty(len(ids), self._layout)
        entries["digest"] = digests
        for name in self._names:
            entries["answers"][name] = answers[name]
        data, size = entries.tobytes(), self._layout.itemsize
        self._store.keep(self._subject, {sample: data[row * size : (row + 1) * size] for row, sample in enumerate(ids)})

    def digests(self, inputs: Mapping[InputBinding, Tensor], missing: Sequence[int], rows: int) -> Array:
        """Return digests of the inputs of those of the `missing` rows that will be checked, 0 for all others."""
        digests = np.zeros(rows, np.uint32)
        for number, row in enumerate(missing, self._requested):
            if number < CHECK_FIRST or number % CHECK_ONE_IN == 0:
                digests[row] = self.digest(inputs, row)
        self._requested += len(missing)
        return digests

    def digest(self, inputs: Mapping[InputBinding, Tensor], row: int) -> int:
        digest = 0
        for binding in self._inputs:
            digest = zlib.crc32(np.ascontiguousarray(inputs[binding][row]).data, digest)
        return digest


def _repeated_ids(ids: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return each row with the id of an earlier one, and the first row with that id."""
    first: dict[bytes, int] = {}
    return [(row, first[name]) for row, name in enumerate(ids) if first.setdefault(name, row) != row]


def answer_key(signature: ModelSignature, plan: RequestPlan) -> AnswerKey:
    """Return the key of the answers to a plan. Raises SpecError if they can't be cached."""
    model = f"the teachers' model {signature.name!r}"
    if not any(signature.versions):
        allowed = f"teachers that publish their model's version; {model} has none, so a change of it would go unnoticed"
        raise SpecError("cache", signature.versions, allowed)
    for answer in plan.outputs:
        if min(answer.shape, default=1) < 1:
            allowed = (
                f"outputs whose rows all have one shape; that of {answer.name!r} of {model} is {list(answer.shape)}"
            )
            raise SpecError("cache", answer.name, allowed)
    version = msgspec.json.encode([signature.platform, signature.versions])
    answers = [(answer.name, answer.dtype.str, answer.shape) for answer in plan.outputs]
    requested = msgspec.json.encode([signature.name, plan.requested, list(plan.normalise.items()), answers])
    digest = hashlib.blake2b(version + requested, digest_size=16).digest()
    return AnswerKey(signature.name, version.decode(), digest)


def ids_of(name: str, column: Array | SlotArrays, rows: int, where: SampleName) -> list[bytes]:
    """Return the ids in a slot of so many samples as bytes, different for different ids. Raises SampleIdError."""
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
