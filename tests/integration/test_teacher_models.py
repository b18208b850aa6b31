"""Real models: Paddle's and ONNX's, loaded, asked and refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.paths import SUPPORT
from support.teachers.process import PATIENCE_S, running_teacher, starting_teacher

from edl_runtime.errors import EX_CONFIG
from edl_runtime.protocol.client import TeacherConnection
from edl_runtime.protocol.oip import TensorSpec, digest_of
from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.models.loading import check_model_files, load_model
from edl_runtime.teacher.models.model import Model, ModelOptions
from edl_runtime.teacher.models.paddle import output_names
from edl_runtime.teacher.predictor.execute import with_extensions

IDS = np.arange(12).reshape(2, 6)
MASK = np.ones((2, 6), np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Paddle model in today's format in `new` and one in Paddle 2's in `old`."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "new").mkdir()
    (folder / "old").mkdir()
    subprocess.run(
        [sys.executable, SUPPORT / "teachers" / "save_paddle_models.py", folder], check=True, capture_output=True
    )
    return folder


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """An ONNX model that doubles and sums."""
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["double"]), helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [
            helper.make_tensor_value_info("double", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, []),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def outputs_of(model: Model, **inputs: np.ndarray) -> Mapping[str, np.ndarray]:
    return model.run(inputs, [spec.name for spec in model.signature.outputs])


@pytest.mark.slow
def test_a_paddle_model_is_served(saved: Path) -> None:
    """Inputs, outputs, datatypes and shapes are the model's; outputs can be renamed; rows are independent."""
    with running_teacher(str(saved / "new"), "--outputs", "logits=fetch_name_0,best=fetch_name_1") as teacher:
        with TeacherConnection(teacher.address) as connection:
            signature = connection.signature()
            assert signature.platform == "paddle"
            assert signature.inputs == (TensorSpec("ids", "INT64", (-1, 6)), TensorSpec("mask", "FP32", (-1, 6)))
            assert signature.outputs == (TensorSpec("logits", "FP32", (-1, 3)), TensorSpec("best", "INT64", (-1,)))
            both = connection.infer({"ids": IDS, "mask": MASK}, ["logits", "best"])
            one = connection.infer({"ids": IDS[1:], "mask": MASK[1:]}, ["logits"])
        assert np.array_equal(both["best"], both["logits"].argmax(axis=1))
        assert np.allclose(both["logits"][1:], one["logits"])
        assert np.ptp(both["logits"]) > 0


@pytest.mark.slow
def test_paddle_models_are_loaded_or_say_why_not(saved: Path, tmp_path: Path) -> None:
    """Both of Paddle's formats are served; equal files have equal versions; a corrupt one is a ModelError."""
    old = load_model(ModelOptions(model=str(saved / "old")))
    assert old.signature.inputs == (TensorSpec("image", "FP32", (-1, 4)),)
    (output,) = old.signature.outputs
    assert (output.datatype, output.shape) == ("FP32", (-1, 2))
    assert outputs_of(old, image=np.ones((3, 4), np.float32))[output.name].shape == (3, 2)

    copy = shutil.copytree(saved / "new", tmp_path / "copy")
    same = load_model(ModelOptions(model=str(copy))).signature.versions
    assert same == load_model(ModelOptions(model=str(saved / "new"))).signature.versions
    assert same != old.signature.versions

    with_mem_optim = load_model(ModelOptions(model=str(copy), mem_optim=True))  # a wish that Paddle can't fulfil here
    assert outputs_of(with_mem_optim, ids=IDS, mask=MASK)["fetch_name_0"].shape == (2, 3)

    with pytest.raises(ModelError, match="no output 'logits'; it has fetch_name_0, fetch_name_1"):
        load_model(ModelOptions(model=str(copy), outputs=("logits",)))
    with pytest.raises(ModelError, match="built for CPUs"):
        load_model(ModelOptions(model=str(copy), gpu_id=0))
    (copy / "net.json").write_text("{}")
    with pytest.raises(ModelError, match="can't load"):
        load_model(ModelOptions(model=str(copy)))


@pytest.mark.slow
@pytest.mark.deep
def test_a_corrupt_paddle_model_ends_the_teacher_with_config(saved: Path, tmp_path: Path) -> None:
    """Whatever Paddle does about parameters that are cut off, the message is ours and restarting is pointless."""
    copy = shutil.copytree(saved / "new", tmp_path / "copy")
    parameters = copy / "net.pdiparams"
    parameters.write_bytes(parameters.read_bytes()[:40])
    with starting_teacher(str(copy)) as process:
        _, said = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == EX_CONFIG
    assert f"edl: model '{copy}'" in said
    assert "Traceback" not in said


def test_an_onnx_model_is_served(onnx_file: Path) -> None:
    """Names, datatypes and shapes are the model's, and it computes."""
    model = load_model(ModelOptions(model=str(onnx_file)))
    assert model.signature.inputs == (TensorSpec("x", "FP32", (-1, 4)),)
    assert model.signature.outputs == (TensorSpec("double", "FP32", (-1, 4)), TensorSpec("sum", "FP32", ()))
    outputs = outputs_of(model, x=np.ones((2, 4), np.float32))
    assert np.array_equal(outputs["double"], np.full((2, 4), 2))
    assert outputs["sum"] == 8


def test_a_tokenizer_beside_a_model_is_told(onnx_file: Path) -> None:
    """As a digest of the file, beside what the teacher can do; a model without one tells none."""
    assert not load_model(ModelOptions(model=str(onnx_file))).signature.tokenizer
    onnx_file.with_name("vocab.txt").write_text("the\n")
    signature = with_extensions(load_model(ModelOptions(model=str(onnx_file))).signature)
    assert signature.extensions[0] == "top_k"
    assert signature.tokenizer == digest_of([onnx_file.with_name("vocab.txt")])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "program"), [("new", "net.json"), ("old", "net.pdmodel"), ("onnx", "model.onnx")])
def test_a_damaged_model_is_found_before_it_is_loaded(
    saved: Path, onnx_file: Path, tmp_path: Path, kind: str, program: str
) -> None:
    """So that nobody waits for a teacher of it: cut off, empty or garbage, but not as it was."""
    folder = tmp_path if kind == "onnx" else shutil.copytree(saved / kind, tmp_path / "copy")
    options = ModelOptions(model=str(onnx_file if kind == "onnx" else folder))
    check_model_files(options)
    file = folder / program
    whole = file.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"garbage", bytes(100)):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=rf"{program} is damaged"):
            check_model_files(options)


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_an_onnx_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty and corrupt files are ModelErrors that name the file."""
    file = tmp_path / "model.onnx"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.onnx"):
        load_model(ModelOptions(model=str(file)))


def test_without_onnxruntime_the_extra_is_named(onnx_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install stands in the error."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r"edl-airflow\[onnx\]"):
        load_model(ModelOptions(model=str(onnx_file)))


def test_outputs_are_read_from_the_file_of_a_paddle_model(saved: Path) -> None:
    """The same as the loaded model; for one in Paddle 2's format, none are known."""
    options = ModelOptions(model=str(saved / "new"))
    loaded = load_model(options)
    assert output_names(saved / "new", options) == [spec.name for spec in loaded.signature.outputs]
    assert output_names(saved / "old", options) == []
