"""A reader with a cache: whom it asks, what it finds answers by, and that it delivers the same as one without."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from support.paths import TESTS
from support.students.fake_readers import SAMPLES, Source, X, failing, never_hedge, teachers_with
from support.students.fake_readers import caching_reader_of as reader_of
from support.teachers.fakes import SIGNATURE, FakeTeachers, arithmetic
from support.teachers.process import wait_until

from edl_runtime.distill import AnswerCache, Fixed, Normalise, TopK, dispatch_policy
from edl_runtime.distill.bindings import RequestPlan
from edl_runtime.distill.cache.lookup import answer_key
from edl_runtime.distill.errors import SampleIdError
from edl_runtime.errors import SpecError
from edl_runtime.protocol.errors import ProtocolError
from edl_runtime.protocol.oip import ModelSignature, TensorSpec
from edl_runtime.protocol.tensors import Array


@pytest.fixture(autouse=True)
def each_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    never_hedge(monkeypatch)


@pytest.fixture(params=["memory", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> AnswerCache:
    return AnswerCache("id", folder=tmp_path / "answers" if request.param == "disk" else None)


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
def test_a_second_epoch_sends_no_requests(cache: AnswerCache, kind: str) -> None:
    """In every format and any order of samples, order and content are as without a cache, even without a teacher."""
    source, teachers = Source(kind), teachers_with()
    with reader_of(teachers, source, cache) as reader:
        source.check(list(reader))
        assert (sum(teachers.rows), reader.stats().cached) == (SAMPLES, 0)
        reader._own_engine._pools[0].use([])
        wait_until(lambda: not any(thread.name.startswith("edl teacher") for thread in threading.enumerate()))
        asked = teachers.asked.copy()
        for epoch in (1, 2):
            np.random.default_rng(epoch).shuffle(source.order)
            source.check(list(reader))
            assert reader.stats().cached == epoch * SAMPLES
        assert teachers.asked == asked
        assert sum(reader.stats().answered.values()) == sum(asked.values())


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
def test_only_unknown_samples_are_requested(cache: AnswerCache, kind: str) -> None:
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
                assert item[2].flags.c_contiguous
                epoch.append((item[0], item[1], item[2].copy(), item[3].copy()))
                item[2][:] = item[3][:] = 0
            source.check(epoch)


def test_a_late_answer_is_not_kept(cache: AnswerCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow teacher may be sent inputs that the script, which has another's answers, has written to meanwhile."""
    for delay in ("FIRST_HEDGE_DELAY_S", "MIN_HEDGE_DELAY_S"):
        monkeypatch.setattr(dispatch_policy, delay, 0.05)
    asked, may_answer = threading.Event(), threading.Event()

    def slow(x: Array) -> dict[str, Array]:
        asked.set()
        may_answer.wait()
        return arithmetic(x)

    def fast(x: Array) -> dict[str, Array]:
        asked.wait()
        return arithmetic(x)

    source = Source()
    with reader_of(FakeTeachers({"a:1": slow, "b:2": fast}), source, cache) as reader:
        for item in reader:
            item[0][:] = 0
        assert reader.stats().in_flight
        may_answer.set()
        wait_until(lambda: not reader.stats().in_flight)
        source.check(list(reader))


def test_answers_on_disk_outlive_the_reader_until_there_is_another_version(cache: AnswerCache) -> None:
    """A reader of a new version drops the old one's answers for good; without a folder all go with the reader."""
    source = Source()
    newer = msgspec.structs.replace(SIGNATURE, versions=("2",))
    for signature, known in ((SIGNATURE, False), (SIGNATURE, True), (newer, False), (SIGNATURE, False)):
        teachers = teachers_with(signature)
        with reader_of(teachers, source, cache) as reader:
            source.check(list(reader))
        assert sum(teachers.rows) == (0 if known and cache.folder else SAMPLES)


def short(x: Array) -> dict[str, Array]:
    """Answers a row too few."""
    return {"double": x[1:] * 2, "sum": x.sum(axis=1)}


def test_failing_teachers_and_epochs_that_are_left_lose_nothing(cache: AnswerCache) -> None:
    """What is answered for them by others is kept, and so is what came before a break."""
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


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
@pytest.mark.parametrize(
    ("name", "order"),
    [
        (lambda _: 7, range(SAMPLES)),
        (lambda number: number % 10 + 1, range(SAMPLES)),
        (lambda number: number % 2 + 3, range(SAMPLES)),
        (lambda number: number // 30, [number * 30 % 100 for number in range(10)] * 2),
    ],
)
def test_ids_that_are_not_unique_are_noticed(
    cache: AnswerCache, kind: str, name: Callable[[int], int], order: Sequence[int]
) -> None:
    """A constant or a label in the place of an id is an error, and not another sample's answers."""
    source = Source(kind, name)
    source.order = list(order)
    with (
        reader_of(teachers_with(), source, cache) as reader,
        pytest.raises(SampleIdError, match=r"got '\d+' (of|with)"),
    ):
        list(chain(reader, reader))


def test_ids_that_are_not_unique_are_noticed_one_at_a_time() -> None:
    """Whatever the id, also in batches of one, where no two meet."""
    for constant in range(20):
        source = Source("sample", lambda _, constant=constant: constant)
        options: dict[str, Any] = {"teacher_batch_size": 1}
        with reader_of(teachers_with(), source, AnswerCache("id"), **options) as reader, pytest.raises(SampleIdError):
            list(chain(reader, reader))


def test_a_sample_may_come_several_times(cache: AnswerCache) -> None:
    """In one batch too, as long as it is the same one: some sources fill their last batch so."""
    source = Source()
    source.order = [5, 5, 5, 6, *range(90, 100), 99, 99]
    with reader_of(teachers_with(), source, cache) as reader:
        for _ in range(2):
            source.check(list(reader))


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


def test_ids_of_several_kinds_are_not_mixed_up() -> None:
    """1, "1" and b"1" are three samples."""
    source = Source("sample_list", lambda number: [number, str(number - 1), str(number - 2).encode()][number % 3])
    with reader_of(teachers_with(), source, AnswerCache("id")) as reader:
        for _ in range(2):
            source.check(list(reader))
        assert reader.stats().cached == SAMPLES


@pytest.mark.parametrize(
    "change",
    [
        {"requested": (TopK("double", 2),)},
        {"requested": ("sum",)},
        {"normalise": {"x": Normalise((0.0,), (2.0,))}},
    ],
)
def test_another_question_is_another_entry(change: dict[str, Any]) -> None:
    """Whatever the answers depend on is part of what they are found by, even if they look alike."""
    plan = RequestPlan.of(["x", "id"], ["double"], {}, SIGNATURE)
    other = answer_key(SIGNATURE, plan._replace(**change))
    subject = answer_key(SIGNATURE, plan)
    assert (subject.model, subject.version) == (other.model, other.version)
    assert subject.digest != other.digest
    for field, value in {"versions": ("2",), "platform": "another"}.items():
        newer = answer_key(msgspec.structs.replace(SIGNATURE, **{field: value}), plan)
        assert subject.version != newer.version
        assert subject.digest != newer.digest


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
@pytest.mark.parametrize("name", [float, bool, lambda number: [number, number], lambda _: None])
def test_an_unusable_sample_id_is_refused(kind: str, name: Callable[[int], Any]) -> None:
    """The error names the slot and the place, and nobody is asked."""
    teachers = teachers_with()
    with reader_of(teachers, Source(kind, name), AnswerCache("id")) as reader:
        with pytest.raises(SampleIdError, match=r"'id' of (sample 0|batch 0).*a unique integer, text or bytes"):
            list(reader)
        assert not teachers.asked


FREE = msgspec.structs.replace(SIGNATURE, outputs=(*SIGNATURE.outputs, TensorSpec("free", "FP32", (-1, -1))))


@pytest.mark.parametrize(
    ("signature", "outputs", "text"),
    [
        (msgspec.structs.replace(SIGNATURE, versions=()), ["sum"], r"cache: got \(\).*would go unnoticed"),
        (msgspec.structs.replace(SIGNATURE, versions=("",)), ["sum"], "would go unnoticed"),
        (FREE, ["sum", "free"], r"cache: got 'free'.*all have one shape; .* is \[-1\]"),
    ],
)
def test_answers_that_can_not_be_cached_are_refused(signature: ModelSignature, outputs: list[str], text: str) -> None:
    """A model without a version can't be told from its next; rows of any size are not kept."""
    reader = reader_of(teachers_with(signature), Source(), AnswerCache("id"), outputs=outputs)
    with reader, pytest.raises(SpecError, match=text):
        list(reader)


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("cache.sample_id", lambda: AnswerCache("")),
        ("cache.limit_mb", lambda: AnswerCache("id", limit_mb=0)),
        ("cache.limit_mb", lambda: AnswerCache("id", limit_mb=True)),
        ("cache.limit_mb", lambda: AnswerCache("id", limit_mb=cast("Any", "256"))),
        ("cache.folder", lambda: AnswerCache("id", folder="")),
        ("cache.folder", lambda: AnswerCache("id", folder=cast("Any", 3))),
        ("cache.folder", lambda: AnswerCache("id", folder="~nobody-of-that-name/x").open([])),
        ("cache.sample_id", lambda: reader_of(teachers_with(), Source(), AnswerCache("name"))),
        ("cache", lambda: reader_of(teachers_with(), Source(), cast("Any", "id"))),
    ],
)
def test_wrong_cache_arguments_are_refused(field: str, make: Callable[[], object]) -> None:
    """Before anything is started."""
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.field == field


def test_a_folder_may_begin_with_ones_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell has it, and as the local backend's folder may."""
    monkeypatch.setenv("HOME", str(tmp_path))
    AnswerCache("id", folder="~/answers").open([]).close()
    assert (tmp_path / "answers" / "cache.sqlite").exists()


FORKING = """
import os, sys, warnings
sys.path.insert(0, "")
warnings.simplefilter("ignore", DeprecationWarning)
from edl_runtime.distill import AnswerCache
from edl_runtime.distill.cache import sqlite_store
from support.teachers.process import wait_until
from support.students.fake_readers import Source, caching_reader_of as reader_of, teachers_with

sqlite_store.BUSY_LIMIT_S = 60.0  # a busy machine may keep whoever has the lock waiting for longer than usual
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


@pytest.mark.deep
def test_forked_children_share_the_folder(tmp_path: Path) -> None:
    """A process that forks while answers are written leaves children that read and write them, too."""
    run = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "cache." not in run.stderr  # no trouble is logged
