"""Specs are valid once made, or not made at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edl_runtime.errors import SpecError
from edl_runtime.specs import (
    NAME_LIMIT,
    SECRET_VARIABLES,
    Bounds,
    Checkpoint,
    JobSpec,
    TeacherSpec,
    TrainerSpec,
    check_name,
)

SECRET = "redis://:open-sesame@127.0.0.1/0"


def teacher(**given: Any) -> TeacherSpec:
    return TeacherSpec(**{"model": "model.onnx", **given})


def student(**given: Any) -> TrainerSpec:
    return TrainerSpec(**{"command": ["python", "s.py"], **given})


def job(**given: Any) -> JobSpec:
    basic = {"name": "job", "kind": "pool", "command": ("sleep", "1"), "bounds": Bounds(1, 2), "instances": 1}
    return JobSpec(**{**basic, **given})


@pytest.mark.parametrize("name", ["a", "0", "a-b", "a" * NAME_LIMIT])
def test_a_name_that_fits_everywhere_is_taken(name: str) -> None:
    """Lower-case letters, digits and dashes in between, up to the limit."""
    assert check_name("name", name) == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "a/b", "..", "a\n", "a" * (NAME_LIMIT + 1), None, 5])
def test_any_other_name_is_refused(name: object) -> None:
    """The error names the field and what is allowed."""
    with pytest.raises(SpecError, match=r"pool: got .* allowed is 1 to 52 of a-z"):
        check_name("pool", name)


@pytest.mark.parametrize(("text", "bounds"), [("2", Bounds(2, 2)), ("1:3", Bounds(1, 3)), (" 1 : 3 ", Bounds(1, 3))])
def test_bounds_are_read_from_text(text: str, bounds: Bounds) -> None:
    """One number is both ends; what is printed can be read back."""
    assert Bounds.parse(text) == Bounds.parse(str(bounds)) == bounds


@pytest.mark.parametrize("text", ["", ":", "1:", "a", "1:2:3", "0", "-1", "3:1", "1.5"])
def test_text_that_is_no_bounds_is_refused(text: str) -> None:
    """Everything that is wrong with it is a SpecError about the bounds."""
    with pytest.raises(SpecError, match="bounds"):
        Bounds.parse(text)


def test_lists_are_kept_as_tuples() -> None:
    """What the user changes in the list afterwards does not change the spec."""
    words = ["python", "s.py"]
    spec = student(command=words)
    words.append("--fast")
    assert spec.command == ("python", "s.py")
    assert (teacher(outputs=["a"], gpu_ids=[0]).outputs, teacher(gpu_ids=[0]).gpu_ids) == (("a",), (0,))


def checkpoint(**given: Any) -> Checkpoint:
    return Checkpoint(**{"url": "x", **given})


WRONG: list[tuple[Callable[..., object], str, list[Any], str]] = [
    (student, "command", [[], (), "python s.py", ["python", 5], ["python", Path("s.py")], None], "a non-empty list"),
    (student, "command", [["python", "a\0b"]], "words without"),
    (student, "command", [["python", "a" * 100_000]], "100,000 characters at most"),
    (student, "cwd", [Path("jobs"), None, 5, "a\0b"], "a folder's path as text"),
    (job, "cwd", [Path("jobs"), None, 5, "a\0b"], "a folder's path as text"),
    (student, "pod", [{"image": "i"}], "a Pod"),
    (teacher, "pod", [{"image": "i"}], "a Pod"),
    (teacher, "model", [""], "a model folder"),
    (teacher, "outputs", ["logits"], "a list of output names"),
    (teacher, "gpu_ids", [["0"]], "a list of GPU numbers"),
    (teacher, "max_batch", [0, "64"], "1 or more rows"),
    (teacher, "hung_after_s", [0, float("nan"), "20"], "seconds above 0"),
    (job, "instances", [3], "1 to 2"),
    (checkpoint, "url", [""], "a folder's path"),
    (checkpoint, "every_steps", [0, True], "a whole number, 1 or more"),
    (checkpoint, "every_s", [0, float("nan")], "a number of seconds above 0"),
    (checkpoint, "keep_last", [0, None], "a whole number, 1 or more"),
    (checkpoint, "keep_every", [-5], "a whole number, 1 or more"),
]
PREFIXES: dict[Callable[..., object], str] = {teacher: r"teacher\.", checkpoint: r"checkpoint\."}


@pytest.mark.parametrize(("make", "field", "values", "allowed"), WRONG)
def test_what_can_not_be_is_refused(make: Callable[..., object], field: str, values: list[Any], allowed: str) -> None:
    """By field, with what is allowed: a string is no list of words, and a dict that looks like a Pod is not checked."""
    said = rf"^{PREFIXES.get(make, '')}{field}: got .*allowed is {allowed}"
    for value in values:
        with pytest.raises(SpecError, match=said):
            make(**{field: value})


@pytest.mark.parametrize("ends", [(0, 1), (2, 1), (1, 2.0), (True, 2), ("1", 2), (1, 10_001), (1, 10**30)])
def test_bounds_are_whole_numbers_in_order(ends: tuple[Any, Any]) -> None:
    """At least 1, min at most max, and no more than a cluster can have."""
    with pytest.raises(SpecError, match="bounds"):
        Bounds(*ends)


def test_checkpoints_come_every_five_minutes_unless_told_otherwise() -> None:
    """By steps only if by steps was asked for."""
    assert Checkpoint(url="x").every_s == 300
    assert Checkpoint(url="x", every_steps=10).every_s is None
    assert Checkpoint(url="x", every_steps=10, every_s=5) == Checkpoint(url="x", every_steps=10, every_s=5.0)


@pytest.mark.parametrize("make", [teacher, student, job])
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"LR": 0.1}, r"env\['LR'\]: got 'float', allowed is text"),
        ({"LR": None}, r"env\['LR'\]: got 'NoneType', allowed is text"),
        ({"LR": "a\0b"}, r"env\['LR'\]: .* null byte"),
        ({5: "x"}, "env: got 5, allowed is names of variables"),
        ({"": "x"}, "env: got '', allowed is names of variables"),
        ({"A=B": "x"}, "env: got 'A=B', allowed is names of variables"),
        ("LR=0.1", "env: got 'str', allowed is a dict"),
        (None, "env: got 'NoneType', allowed is a dict"),
    ],
)
def test_an_environment_that_no_process_can_have_is_refused(make: Any, env: object, said: str) -> None:
    """Names and values are text, and the error says which is not."""
    with pytest.raises(SpecError, match=said):
        make(env=env)


@pytest.mark.parametrize("make", [teacher, student, job])
@pytest.mark.parametrize("name", sorted(SECRET_VARIABLES))
def test_secrets_have_no_place_in_a_spec(make: Any, name: str) -> None:
    """They are refused by name, and the value is not in the error."""
    with pytest.raises(SpecError, match=name) as caught:
        make(env={name: SECRET})
    assert "sesame" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://me:open-sesame@host/job",
        "simplecache::sftp://:open-sesame@host:22/job",
        "s3://KEY:open/sesame@host/job",
        "s3://KEY:one@open-sesame@host/job",
        "https://open-sesame@host/job",
        "simplecache::HTTPS://open-sesame@host/job",
    ],
)
def test_a_password_has_no_place_in_a_url_of_checkpoints(url: str) -> None:
    """It stands in logs, events and results. The error says where it belongs, and does not show it."""
    with pytest.raises(SpecError, match=r"checkpoint\.url: .*\*\*\*@host.* without a password") as caught:
        Checkpoint(url=url)
    assert "sesame" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize(
    "url",
    [
        *("/a:b@c/d", "file:///a:b@c/d", "sftp://me@host/job", "abfs://runs@account.dfs.net/a:b", "s3://b/a:b@c"),
        *("hdfs://me@host:8020/job", "hdfs://host:8020/a@b"),
    ],
)
def test_other_urls_of_checkpoints_are_taken_as_they_are(url: str) -> None:
    """A name before the host is no secret, and a path may have any letter."""
    assert Checkpoint(url=url).url == url


def test_a_spec_is_plain_data() -> None:
    """It survives JSON, checks included."""
    spec = job(env={"LR": "0.1"}, cwd="jobs", grace_s=3)
    written = msgspec.json.encode(spec)
    assert msgspec.json.decode(written, type=JobSpec) == spec
    with pytest.raises(msgspec.ValidationError, match="instances"):
        msgspec.json.decode(written.replace(b'"instances":1', b'"instances":3'), type=JobSpec)


def test_the_digest_tells_specs_apart() -> None:
    """The same content has the same digest, whatever the order or kind of number; any other content has another."""
    spec = job(env={"A": "1", "B": "2"}, grace_s=10)
    assert spec.digest == job(env={"B": "2", "A": "1"}, grace_s=10.0).digest
    others = [
        job(),
        job(env={"A": "1", "B": "3"}),
        job(env=spec.env, instances=2),
        job(env=spec.env, pool_digest="another-teacher"),
    ]
    assert len({spec.digest, *(other.digest for other in others)}) == 5
