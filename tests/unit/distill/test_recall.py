"""What a cache finds answers by: the ids of samples, and what is asked of which model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from support.students.caching import SAMPLES, Source, reader_of, teachers_with
from support.teachers.fakes import SIGNATURE

from edl_runtime.distill import AnswerCache, Normalise, TopK
from edl_runtime.distill.feeds import Plan
from edl_runtime.distill.recall import subject_of
from edl_runtime.errors import SampleIdError, SpecError
from edl_runtime.protocol.oip import ModelSignature, TensorSpec


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
        {"wishes": (TopK("double", 2),)},
        {"wishes": ("sum",)},
        {"normalise": {"x": Normalise((0.0,), (2.0,))}},
    ],
)
def test_another_question_is_another_entry(change: dict[str, Any]) -> None:
    """Whatever the answers depend on is part of what they are found by, even if they look alike."""
    plan = Plan.of(["x", "id"], ["double"], {}, SIGNATURE)
    other = subject_of(SIGNATURE, plan._replace(**change))
    subject = subject_of(SIGNATURE, plan)
    assert (subject.model, subject.version) == (other.model, other.version)
    assert subject.digest != other.digest
    for field, value in {"versions": ("2",), "platform": "another"}.items():
        newer = subject_of(msgspec.structs.replace(SIGNATURE, **{field: value}), plan)
        assert subject.version != newer.version
        assert subject.digest != newer.digest


@pytest.mark.parametrize("kind", ["sample", "sample_list", "batch"])
@pytest.mark.parametrize("name", [float, bool, lambda number: [number, number], lambda _: None])
def test_what_names_no_sample_is_said(kind: str, name: Callable[[int], Any]) -> None:
    """The error names the slot and the place, and nobody is asked."""
    teachers = teachers_with()
    with reader_of(teachers, Source(kind, name), AnswerCache("id")) as reader:
        with pytest.raises(SampleIdError, match=r"'id' of (sample 0|batch 0).*an integer, text or bytes for each"):
            list(reader)
        assert not teachers.asked


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
        ("cache.limit_mb", lambda: AnswerCache("id", limit_mb=True)),
        ("cache.limit_mb", lambda: AnswerCache("id", limit_mb=cast("Any", "256"))),
        ("cache.folder", lambda: AnswerCache("id", folder="")),
        ("cache.folder", lambda: AnswerCache("id", folder=cast("Any", 3))),
        ("cache.folder", lambda: AnswerCache("id", folder="~nobody-of-that-name/x").open([])),
        ("cache.sample_id", lambda: reader_of(teachers_with(), Source(), AnswerCache("name"))),
        ("cache", lambda: reader_of(teachers_with(), Source(), cast("Any", "id"))),
    ],
)
def test_wrong_arguments_are_said(field: str, make: Callable[[], object]) -> None:
    """Before anything is started."""
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.field == field


def test_a_folder_may_begin_with_ones_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell has it, and as the local backend's folder may."""
    monkeypatch.setenv("HOME", str(tmp_path))
    AnswerCache("id", folder="~/answers").open([]).close()
    assert (tmp_path / "answers" / "cache.sqlite").exists()
