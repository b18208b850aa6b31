"""Naming teachers, and what stands in for those on the network: the model in the student's process, answers on disk."""

from __future__ import annotations

import multiprocessing
import re
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.teachers.fakes import FakeTeachers, arithmetic
from support.teachers.process import PATIENCE_S, wait_until

from edl_runtime.distill.errors import NotRecordedError, UnreadableAnswersError
from edl_runtime.distill.offline import RecordedAnswers, RecordedConnection, question_digests
from edl_runtime.distill.teacher_addresses import (
    Discovered,
    Fixed,
    InProcessConnection,
    check_teacher_address,
    connection_factory,
    in_process_address,
    recorded_address,
    recording_address,
    teachers_from_settings,
)
from edl_runtime.errors import SpecError
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.errors import InferenceError
from edl_runtime.protocol.oip import Normalise, TopK
from edl_runtime.settings import RuntimeSettings
from edl_runtime.teacher.errors import ModelError

SETTINGS = RuntimeSettings(teacher_timeout_s=1.0)
X = np.arange(20, dtype=np.float32).reshape(5, 4)
ODD = "a,b@c?d=e %f"


def test_fixed_teachers_are_read_from_text() -> None:
    """Blanks and repeats don't count."""
    assert Fixed.parse("a:1, b:2,,a:1") == Fixed(("a:1", "b:2"))


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:b", "a:0", "a:65536", "http://a:1", "a:1,https://b:2"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """The error names what was given; a URL would look like a host that is not there, which students wait for."""
    with pytest.raises(SpecError, match=r"teachers\.addresses: got .*allowed is .*host:port"):
        Fixed.parse(text)


@pytest.mark.parametrize(("pool", "at_most"), [("", None), ("Pool", None), ("pool", 0), ("pool", True)])
def test_a_wrong_wish_is_refused(pool: str, at_most: int | None) -> None:
    """A pool has a name, and at least one teacher is wanted."""
    with pytest.raises(SpecError, match=r"teachers\."):
        Discovered(pool, at_most)


def test_fixed_teachers_win_over_a_pool() -> None:
    """EDL_TEACHERS, then EDL_POOL; with neither the error says both."""
    assert teachers_from_settings(RuntimeSettings(teachers="a:1", pool="p")) == Fixed(("a:1",))
    assert teachers_from_settings(RuntimeSettings(pool="p")) == Discovered("p")
    with pytest.raises(SpecError, match="EDL_TEACHERS or EDL_POOL"):
        teachers_from_settings(RuntimeSettings())


@pytest.fixture
def teachers() -> FakeTeachers:
    return FakeTeachers({"a": arithmetic})


@pytest.fixture
def recorder(teachers: FakeTeachers, tmp_path: Path) -> RecordedConnection:
    """Keeps what the teacher answers."""
    recorder = RecordedConnection(tmp_path / "answers", teachers.connect("a"))
    recorder.open()
    recorder.signature()
    return recorder


@pytest.fixture
def disk(recorder: RecordedConnection, tmp_path: Path) -> RecordedConnection:
    """What is on disk once the teacher was asked about X."""
    recorder.infer({"x": X}, ["double", "sum"], {})
    disk = RecordedConnection(tmp_path / "answers")
    disk.open()
    return disk


def test_an_address_names_the_origin_of_answers() -> None:
    """Whatever is in the names of folders and models."""
    connect = connection_factory(SETTINGS)
    kinds = {
        in_process_address(ODD, outputs="b=c,d", gpu_id=1): InProcessConnection,
        recording_address(Path(ODD), "127.0.0.1:1"): RecordedConnection,
        recorded_address(Path(ODD)): RecordedConnection,
        "127.0.0.1:1": TeacherConnection,
    }
    for address, kind in kinds.items():
        check_teacher_address(address, "teachers")
        assert "," not in address
        assert isinstance(connect(address), kind)
    model = connect(in_process_address(ODD, outputs="b=c,d", gpu_id=1))
    assert isinstance(model, InProcessConnection)
    options = model._options
    assert (options.model, options.outputs, options.gpu_id) == (ODD, ("b=c", "d"), 1)


@pytest.mark.parametrize("address", ["nowhere", "elsewhere:model", "recording:folder", "recording:folder@x", None])
def test_other_addresses_are_refused(address: object) -> None:
    """A word that is no stand-in is taken for a host, and lacks its port."""
    with pytest.raises(SpecError, match="teachers"):
        check_teacher_address(address, "teachers")


def test_answers_on_disk_are_those_that_teachers_gave(disk: RecordedConnection) -> None:
    """In any order and any batches, as rows or as an array."""
    order = np.array([3, 0, 3])
    answers = disk.infer({"x": X[order]}, ["double", "sum"], {})
    assert np.array_equal(answers["double"], 2 * X[order])
    assert np.array_equal(answers["sum"], X[order].sum(axis=1))
    assert answers["double"].flags.writeable
    rows = disk.infer({"x": list(X)}, ["double", "sum"], {})
    assert np.array_equal(rows["double"], 2 * X)


def test_inputs_that_no_teacher_saw_are_noticed(disk: RecordedConnection) -> None:
    """So that nobody is trained on answers to something else: the error says what is wrong with the source."""
    other = X.copy()
    other[1, 2] += 1
    with pytest.raises(NotRecordedError, match=r"1 of a request's 5 rows.*without augmentation") as caught:
        disk.infer({"x": other}, ["double", "sum"], {})
    assert (caught.value.missing, caught.value.rows) == (1, 5)
    for inputs, outputs in (({"x": X.astype(np.float64)}, ["double", "sum"]), ({"x": X}, ["double"])):
        with pytest.raises(NotRecordedError, match="5 of a request's 5"):
            disk.infer(inputs, outputs, {})


def test_each_row_is_sent_to_the_teacher_once(recorder: RecordedConnection, teachers: FakeTeachers) -> None:
    """What is on disk already comes from there."""
    for _ in range(3):
        assert np.array_equal(recorder.infer({"x": X}, ["double"], {})["double"], 2 * X)
    assert teachers.asked["a"] == 1


def test_an_answer_of_too_few_rows_is_not_kept(
    recorder: RecordedConnection, teachers: FakeTeachers, tmp_path: Path
) -> None:
    """Who asked refuses it, and asks again."""
    teachers.behaviours["a"] = lambda x: arithmetic(x[1:])
    assert len(recorder.infer({"x": X}, ["double"], {})["double"]) == 4
    assert len(RecordedAnswers(tmp_path / "answers")) == 0
    teachers.behaviours["a"] = arithmetic
    assert np.array_equal(recorder.infer({"x": X}, ["double"], {})["double"], 2 * X)
    assert len(RecordedAnswers(tmp_path / "answers")) == 5


def test_a_folder_without_answers_is_noticed_at_once(tmp_path: Path) -> None:
    """Before training begins, and no folder is made."""
    folder = tmp_path / "nothing"
    with pytest.raises(NotRecordedError, match="no answers were recorded"):
        RecordedConnection(folder).open()
    assert not folder.exists()
    RecordedAnswers(folder).close()
    empty = RecordedConnection(folder)
    empty.open()
    with pytest.raises(NotRecordedError, match="no answers were recorded"):
        empty.signature()


def test_damaged_recorded_answers_are_reported(disk: RecordedConnection, tmp_path: Path) -> None:
    """The model's description, a row, or the file itself."""
    folder = tmp_path / "answers"
    with closing(sqlite3.connect(folder / "answers.sqlite", isolation_level=None)) as database:
        database.execute("update models set signature = ?", [b'{"name": 7}'])
        database.execute("update answers set tensors = ?", [b"?"])
    with pytest.raises(UnreadableAnswersError, match=r"Expected `str`, got `int`"):
        disk.signature()
    with pytest.raises(UnreadableAnswersError, match=re.escape(str(folder))):
        disk.infer({"x": X}, ["double", "sum"], {})
    (folder / "answers.sqlite").write_bytes(b"?" * 4096)
    with pytest.raises(UnreadableAnswersError, match="not a database"):
        RecordedConnection(folder).open()


def test_the_digest_of_a_row_depends_on_inputs_and_outputs() -> None:
    """Numbers, dtype, shape, the names of inputs, outputs and what is done to inputs."""
    how = Normalise((0.0,), (1.0,))
    asked = [
        question_digests({"x": X[:1]}, ["y"], {}),
        question_digests({"x": X[1:2]}, ["y"], {}),
        question_digests({"x": X[:1].view(np.int32)}, ["y"], {}),
        question_digests({"x": X[:1].reshape(1, 2, 2)}, ["y"], {}),
        question_digests({"z": X[:1]}, ["y"], {}),
        question_digests({"x": X[:1]}, ["y", "w"], {}),
        question_digests({"x": X[:1]}, [TopK("y", 1)], {}),
        question_digests({"x": X[:1]}, [TopK("y", 2)], {}),
        question_digests({"x": X[:1]}, ["y"], {"x": how}),
    ]
    assert len({one for [one] in asked}) == len(asked)


def test_a_model_in_process_answers_as_a_teacher_does() -> None:
    """All of an output, or the largest of it."""
    teacher = connection_factory(SETTINGS)(in_process_address("support.models:arithmetic"))
    teacher.open()
    assert teacher.ready()
    assert "top_k" in teacher.signature().extensions
    answers = teacher.infer({"x": list(X)}, ["sum", TopK("double", 2)], {})
    assert np.array_equal(answers["sum"], X.sum(axis=1))
    assert np.array_equal(answers["double.values"], 2 * X[:, [3, 2]])
    assert answers["double.indices"].tolist() == [[3, 2]] * 5
    pixels = np.full((2, 4), 9, np.uint8)
    normalised = teacher.infer({"x": pixels}, ["double"], {"x": Normalise((1.0,), (4.0,))})
    assert np.array_equal(normalised["double"], np.full((2, 4), 4, np.float32))


def test_a_failing_model_in_process_is_not_retryable() -> None:
    """There is no other teacher that would do better."""
    teacher = connection_factory(SETTINGS)(in_process_address("support.models:fragile"))
    teacher.open()
    with pytest.raises(InferenceError, match="ArithmeticError: one is too many") as caught:
        teacher.infer({"x": np.ones((1, 4), np.float32)}, ["double"], {})
    assert not caught.value.retryable


def test_a_model_in_process_that_cant_be_loaded_is_an_error_that_names_it() -> None:
    """The same as a teacher's."""
    with pytest.raises(ModelError, match=r"support\.models:nothing"):
        connection_factory(SETTINGS)(in_process_address("support.models:nothing")).open()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_model_in_process_answers_in_a_forked_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the parent is in the middle of an answer: the child loads its own."""
    monkeypatch.setenv("HELD_MODEL_FOLDER", str(tmp_path))
    address = in_process_address("support.models:held")

    def answer(value: float) -> None:
        teacher = connection_factory(SETTINGS)(address)
        teacher.open()
        teacher.infer({"x": np.full((1, 4), value, np.float32)}, ["double"], {})

    busy = threading.Thread(target=answer, args=(1.0,), daemon=True)
    busy.start()
    wait_until((tmp_path / "begun").exists)
    child = multiprocessing.get_context("fork").Process(target=answer, args=(0.0,), daemon=True)
    child.start()
    child.join(PATIENCE_S)
    child.kill()
    (tmp_path / "go").touch()
    busy.join()
    assert child.exitcode == 0
