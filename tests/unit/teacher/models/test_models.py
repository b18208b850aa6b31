"""How a model is found, chosen from and warmed up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edl_runtime.protocol.oip import TensorSpec, digest_of
from edl_runtime.teacher.errors import ModelError
from edl_runtime.teacher.models.loading import load_model
from edl_runtime.teacher.models.model import ModelOptions


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no such folder"),
        ([], "the folder is empty"),
        (["readme.txt"], r"no model in it: .* one \.json or \.pdmodel file and its \.pdiparams; there are readme\.txt"),
        (["net.json"], "no model in it"),
        (["net.pdiparams"], "no model in it"),
        (["net.json", "other.pdiparams"], "no model in it"),
        (["a.json", "a.pdiparams", "b.pdmodel", "b.pdiparams"], r"several models in it \(a\.json, b\.pdmodel\)"),
        (["a.json", "a.pdmodel", "a.pdiparams"], "several models in it"),
    ],
)
def test_a_folder_without_one_model_is_refused(tmp_path: Path, files: list[str] | None, message: str) -> None:
    """The error names the files that are there and what a model is; Paddle is not even imported."""
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for file in files:
            (folder / file).touch()
    with pytest.raises(ModelError, match=message) as refused:
        load_model(ModelOptions(model=str(folder)))
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no.such.module:f", "No module named 'no'"),
        ("support.models:nothing", "has no attribute 'nothing'"),
        ("support.models:unmarked", "mark it with @served"),
        ("support.models:wrong", r"returned float64 \[1, 4\] for 'double', declared is float32"),
        ("support.models:narrow", r"returned float32 \[1, 3\] for 'double', declared is float32 \[1, 4\]"),
        ("support.models:in_place", "read-only"),
        ("support.models:short", r"returned float32 \[0, 4\] for 'double', declared is float32 \[1, 4\]"),
        (":f", "Empty module name"),
    ],
)
def test_a_function_that_can_not_be_served_is_refused(model: str, message: str) -> None:
    """A missing module or function, one without signature, and one that breaks its word."""
    with pytest.raises(ModelError, match=message):
        load_model(ModelOptions(model=model))


def test_an_output_may_have_nothing_to_do_with_the_batch() -> None:
    """Outputs must have the declared sizes, and the rows of the input where any size is declared."""
    model = load_model(ModelOptions(model="support.models:codebook"))
    assert model.run({"x": np.ones((3, 4), np.float32)}, ["double", "codes"])["codes"].shape == (5, 2)


def test_outputs_are_chosen_and_renamed() -> None:
    """Only the wanted outputs are in the signature, in the wanted order, under their new names."""
    options = ModelOptions(model="support.models:arithmetic", name="t", outputs=("total=sum", "double"))
    model = load_model(options)
    assert model.signature.name == "t"
    assert model.signature.outputs == (TensorSpec("total", "FP32", (-1,)), TensorSpec("double", "FP32", (-1, 4)))
    assert list(model.run({"x": np.ones((1, 4), np.float32)}, ["total"])) == ["total"]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [(("logits",), "no output 'logits'; it has double, sum"), (("a=sum", "a=double"), "output 'a' is given twice")],
)
def test_outputs_that_can_not_be_served_are_named(outputs: tuple[str, ...], message: str) -> None:
    """The error lists what there is."""
    with pytest.raises(ModelError, match=message):
        load_model(ModelOptions(model="support.models:arithmetic", outputs=outputs))


def test_a_version_is_the_content_of_the_files(tmp_path: Path) -> None:
    """Where a model lies does not matter; what is in it, and in which file, does."""
    one, other, changed = tmp_path / "one", tmp_path / "other", tmp_path / "changed"
    one.write_text("a")
    other.write_text("a")
    changed.write_text("b")
    assert digest_of([one, changed]) == digest_of([other, changed]) != digest_of([changed, one])


def test_two_functions_are_two_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of one file; and one function is another with another version of what it loads."""
    monkeypatch.chdir(tmp_path)
    Path("two_teachers.py").write_text(
        "from edl_runtime.teacher import TensorSpec, served\n"
        "SPEC = [TensorSpec('x', 'FP32', (-1, 2))]\n"
        "def as_is(inputs): return inputs\n"
        "def plus(inputs): return inputs\n"
        "as_is, plus = (served(inputs=SPEC, outputs=SPEC)(one) for one in (as_is, plus))\n"
        "def first(inputs): return inputs\n"
        "first = served(inputs=SPEC, outputs=SPEC, version='first weights')(first)\n"
        "def second(inputs): return inputs\n"
        "second.__qualname__ = 'first'\n"
        "second = served(inputs=SPEC, outputs=SPEC, version='second weights')(second)\n"
    )
    versions = [
        load_model(ModelOptions(model=f"two_teachers:{name}")).signature.versions
        for name in ("as_is", "plus", "first", "second")
    ]
    assert len(set(versions)) == 4
    assert all(len(one) == 1 for one in versions)
