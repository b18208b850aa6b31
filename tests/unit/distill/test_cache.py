"""A reader with a cache: whom it asks, and that it delivers the same as one without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_teachers import SIGNATURE, Behaviour, FakeTeachers, arithmetic
from unit.distill.reading import failing

from edl_runtime.distill import AnswerCache, DistillReader, Fixed, TopK
from edl_runtime.errors import ProtocolError, SampleIdError, SpecError
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.tensors import Array
from edl_runtime.settings import RuntimeSettings

TESTS = Path(__file__).parents[2]
SAMPLES = 100
X = np.arange(SAMPLES * 4, dtype=np.float32).reshape(SAMPLES, 4)


class Source:
    """Samples of X in the order of `order`, which may be changed between epochs, ten in a batch."""

    def __init__(self, kind: str = "batch", name: Callable[[int], Any] = int) -> None:
        self.kind = kind
        self.name = name
        self.x = X
        self.order = list(range(SAMPLES))

    def __call__(self) -> Iterator[Any]:
        for start in range(0, len(self.order), 10):
            numbers = self.order[start : start + 10]
            names = [self.name(number) for number in numbers]
            samples = [(self.x[number], name) for number, name in zip(numbers, names, strict=True)]
            if self.kind == "sample":
                yield from samples
            else:
                yield samples if self.kind == "sample_list" else (self.x[numbers], names)

    def samples(self, epoch: list[Any]) -> list[Any]:
        """The samples of an epoch's items."""
        if self.kind == "sample":
            return epoch
        return list(chain.from_iterable(epoch if self.kind == "sample_list" else [zip(*item) for item in epoch]))  # noqa: B905

    def check(self, epoch: list[Any]) -> None:
        """Every sample once, in order, with its own answers."""
        x, _, double, total = zip(*self.samples(epoch), strict=True)
        np.testing.assert_array_equal(x, X[self.order])
        np.testing.assert_array_equal(double, X[self.order] * 2)
        np.testing.assert_array_equal(total, X[self.order].sum(axis=1))


def reader_of(fakes: FakeTeachers, source: Source, cache: AnswerCache | None, /, **options: Any) -> DistillReader:
    return DistillReader(
        source,
        **{
            "inputs": ["x", "id"],
            "outputs": ["double", "sum"],
            "teachers": Fixed(tuple(fakes.behaviours)),
            "teacher_batch_size": 4,
            "format": source.kind,
            "settings": RuntimeSettings(teacher_wait_s=5),
            "connect": fakes.connect,
            "cache": cache,
            **options,
        },
    )


def teachers_with(signature: ModelSignature = SIGNATURE, behaviour: Behaviour = arithmetic) -> FakeTeachers:
    return FakeTeachers({"a:1": behaviour, "b:2": behaviour}, {"a:1": signature, "b:2": signature})


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> AnswerCache:
    return AnswerCache("id", folder=tmp_path / "answers" if request.param == "disk" else None)


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
def test_a_second_epoch_asks_nobody(cache: AnswerCache, kind: str) -> None:
    """In every format and any order of samples, order and content are as without a cache, even without a teacher."""
    source, teachers = Source(kind), teachers_with()
    with reader_of(teachers, source, cache) as reader:
        source.check(list(reader))
        assert (sum(teachers.rows), reader.stats().cached) == (SAMPLES, 0)
        teachers.behaviours.clear()
        asked = teachers.asked.copy()
        for epoch in (1, 2):
            np.random.default_rng(epoch).shuffle(source.order)
            source.check(list(reader))
            assert reader.stats().cached == epoch * SAMPLES
        assert teachers.asked == asked
        assert sum(reader.stats().answered.values()) == sum(asked.values())


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
def test_only_unknown_samples_are_asked(cache: AnswerCache, kind: str) -> None:
    """A batch that is known in part makes requests of the rest, as large as they may be."""
    source, teachers = Source(kind), teachers_with()
    source.order = list(range(0, SAMPLES, 2))
    with reader_of(teachers, source, cache) as reader:
        source.check(list(reader))
        teachers.rows.clear()
        source.order = list(range(SAMPLES))
        source.check(list(reader))
        assert reader.stats().cached == SAMPLES // 2
    assert sum(teachers.rows) == SAMPLES // 2
    if kind != "sample":
        assert sorted(teachers.rows) == [1] * 10 + [4] * 10


def test_answers_that_the_script_writes_to_are_kept_as_they_came(cache: AnswerCache) -> None:
    """What is delivered is the script's own, from a teacher and from the cache alike."""
    source = Source()
    with reader_of(teachers_with(), source, cache) as reader:
        for _ in range(3):
            epoch = []
            for item in reader:
                epoch.append((item[0], item[1], item[2].copy(), item[3].copy()))
                item[2][:] = item[3][:] = 0
            source.check(epoch)


def test_known_answers_outlive_the_reader(tmp_path: Path) -> None:
    """Another reader on the same folder asks only what the first did not; without a folder all goes with the reader."""
    source = Source()
    for cache, asked in ((AnswerCache("id", folder=tmp_path), 0), (AnswerCache("id"), SAMPLES)):
        with reader_of(teachers_with(), source, cache) as reader:
            source.check(list(reader))
        teachers = teachers_with()
        with reader_of(teachers, source, cache) as reader:
            source.check(list(reader))
        assert sum(teachers.rows) == asked


def test_another_version_is_asked_anew(tmp_path: Path) -> None:
    """A reader that sees a new version gets none of the old one's answers, and drops them for good."""
    source, cache = Source(), AnswerCache("id", folder=tmp_path)
    newer = msgspec.structs.replace(SIGNATURE, versions=("2",))
    for signature, asked in ((SIGNATURE, SAMPLES), (SIGNATURE, 0), (newer, SAMPLES), (SIGNATURE, SAMPLES)):
        teachers = teachers_with(signature)
        with reader_of(teachers, source, cache) as reader:
            source.check(list(reader))
        assert sum(teachers.rows) == asked


def test_a_limit_below_an_epoch_loses_nothing(cache: AnswerCache) -> None:
    """What has been dropped is asked again."""
    source, teachers = Source(), teachers_with()
    small = msgspec.structs.replace(cache, limit_mb=0.01 if cache.folder is None else 0.06)
    with reader_of(teachers, source, small) as reader:
        for _ in range(3):
            np.random.default_rng(1).shuffle(source.order)
            source.check(list(reader))
        assert reader.stats().cached < SAMPLES
    assert sum(teachers.rows) > SAMPLES


def test_only_right_answers_are_kept(cache: AnswerCache) -> None:
    """What a teacher answers wrongly, or not at all, is not kept; what has come is, though an epoch is left early."""

    def short(x: Array) -> dict[str, Array]:
        return {"double": x[1:] * 2, "sum": x.sum(axis=1)}

    source, teachers = Source(), FakeTeachers({"a:1": arithmetic, "b:2": short, "c:3": failing(ProtocolError)})
    with reader_of(teachers, source, cache, epochs=5) as reader:
        for taken, _ in enumerate(reader):
            if taken == 3:
                break
        for _ in range(3):
            source.check(list(reader))
        assert reader.stats().cached >= 2 * SAMPLES
        assert reader.stats().answered.keys() == {"a:1"}


def test_each_pool_of_a_mixture_has_its_own_answers(tmp_path: Path) -> None:
    """One pool's answers may be known and another's not; a sample is cached when nobody is asked about it."""
    source, cache = Source("sample_list"), AnswerCache("id", folder=tmp_path)
    source.order = list(range(0, SAMPLES, 2))
    with reader_of(teachers_with(), source, cache, outputs=["double"]) as reader:
        list(reader)
    source.order = list(range(SAMPLES))
    teachers = teachers_with()
    teachers.signatures["b:2"] = msgspec.structs.replace(SIGNATURE, name="another")
    pools = {"one": Fixed(("a:1",)), "two": Fixed(("b:2",))}
    outputs = {"one": ["double"], "two": ["sum", "double"]}
    with reader_of(teachers, source, cache, teachers=pools, outputs=outputs, teacher_batch_size=1) as reader:
        for cached in (0, SAMPLES):
            samples = source.samples(list(reader))
            assert reader.stats().cached == cached
            for answer, x in zip([sample[2] for sample in samples], X, strict=True):
                np.testing.assert_array_equal(answer["one"]["double"], x * 2)
                np.testing.assert_array_equal(answer["two"]["double"], x * 2)
                np.testing.assert_array_equal(answer["two"]["sum"], x.sum())
    assert teachers.asked == {"a:1": SAMPLES // 2, "b:2": SAMPLES}


def test_the_largest_of_an_output_are_kept_with_their_places(cache: AnswerCache) -> None:
    """TopK's two arrays come back as they were; another k is another question."""

    def largest(x: Array) -> dict[str, Array]:
        indices = np.argsort(-x, axis=1).astype(np.int32)
        return {"double.values": np.take_along_axis(x, indices, 1)[:, :k], "double.indices": indices[:, :k]}

    source = Source()
    signature = msgspec.structs.replace(SIGNATURE, extensions=("top_k",))
    for k in (2, 3):
        teachers = teachers_with(signature, largest)
        with reader_of(teachers, source, cache, outputs=[TopK("double", k)]) as reader:
            first, second = list(reader), list(reader)
        assert sum(teachers.rows) == SAMPLES
        for before, after in zip(first, second, strict=True):
            assert [array.dtype for array in after[2:]] == [np.float32, np.int32]
            for one, other in zip(before, after, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
@pytest.mark.parametrize("name", [np.int64, np.uint8, str, "ä{}".format, lambda number: f"{number}".encode()])
def test_ids_may_be_integers_text_or_bytes(kind: str, name: Callable[[int], Any]) -> None:
    """Of Python or numpy, as long as each sample has its own."""
    source, teachers = Source(kind, name), teachers_with()
    with reader_of(teachers, source, AnswerCache("id")) as reader:
        list(reader)
        source.order.reverse()
        source.check(list(reader))
        assert reader.stats().cached == SAMPLES


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
@pytest.mark.parametrize("name", [float, bool, lambda number: [number, number], lambda _: None])
def test_what_names_no_sample_is_said(kind: str, name: Callable[[int], Any]) -> None:
    """The error names the slot and the place, and nobody is asked."""
    teachers = teachers_with()
    with reader_of(teachers, Source(kind, name), AnswerCache("id")) as reader:
        with pytest.raises(SampleIdError, match=r"'id' of (sample 0|batch 0).*an integer, text or bytes for each"):
            list(reader)
        assert not teachers.asked


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
def test_augmented_data_is_noticed(cache: AnswerCache, kind: str) -> None:
    """Other inputs of the same id are an error within the next epoch, instead of another sample's answers."""
    source = Source(kind)
    with reader_of(teachers_with(), source, cache) as reader:
        source.check(list(reader))
        source.x = X + 1
        with pytest.raises(SampleIdError, match=r"'id' of .*got '\d+' with other inputs than before.*[Aa]ugmented"):
            list(reader)
        source.x = X
        source.check(list(reader))


FREE = msgspec.structs.replace(SIGNATURE, outputs=(*SIGNATURE.outputs, TensorSpec("free", "FP32", (-1, -1))))


@pytest.mark.parametrize(
    ("signature", "outputs", "text"),
    [
        (msgspec.structs.replace(SIGNATURE, versions=()), ["sum"], r"cache: got \(\).*nobody could tell"),
        (msgspec.structs.replace(SIGNATURE, versions=("",)), ["sum"], "nobody could tell when it has changed"),
        (FREE, ["sum", "free"], r"cache: got 'free'.*all have one shape; .* is \[-1\]"),
    ],
)
def test_answers_that_can_t_be_kept_are_said(signature: ModelSignature, outputs: list[str], text: str) -> None:
    """A model without a version can't be told from its next; rows of any size are not kept."""
    reader = reader_of(teachers_with(signature), Source(), AnswerCache("id"), outputs=outputs)
    with reader, pytest.raises(SpecError, match=text):
        list(reader)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("cache.sample_id", lambda: AnswerCache("")),
        ("cache.limit_mb", lambda: AnswerCache("id", limit_mb=0)),
        ("cache.folder", lambda: AnswerCache("id", folder="")),
        ("cache.sample_id", lambda: reader_of(teachers_with(), Source(), AnswerCache("name"))),
        ("cache", lambda: reader_of(teachers_with(), Source(), "id")),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_said(field: str, make: Callable[[], object]) -> None:
    """Before anything is started."""
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.field == field


FORKING = """
import os, sys, warnings
sys.path.insert(0, "")
warnings.simplefilter("ignore", DeprecationWarning)
from unit.distill.test_cache import AnswerCache, Source, reader_of, teachers_with

source, teachers = Source(), teachers_with()
with reader_of(teachers, source, AnswerCache("id", folder=sys.argv[1])) as reader:
    children = []
    for _ in reader:
        child = os.fork()
        if not child:
            for _ in range(2):
                source.check(list(reader))
            reader.close()
            os._exit(0)
        children.append(child)
    source.check(list(reader))
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
    source.check(list(reader))
"""


@pytest.mark.slow
def test_forked_children_share_the_folder(tmp_path: Path) -> None:
    """A process that forks while answers are written leaves children that read and write them, too."""
    run = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "cache." not in run.stdout  # no trouble is logged
