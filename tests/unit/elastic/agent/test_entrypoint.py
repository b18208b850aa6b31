"""Commands of workers, and the variables of a generation for plain scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.elastic.generations import generation

from edl_runtime.elastic.agent.entrypoint import generation_environment, parse_entrypoint
from edl_runtime.elastic.rendezvous.generation import Generation
from edl_runtime.errors import SpecError


def of_three(store: str = "10.0.0.2:7000") -> Generation:
    endpoints = ("10.0.0.2:7001", "10.0.0.3:7101", "10.0.0.4:7201")
    return generation(4, ["0-a", "2-b", "1-c"], store=store, endpoints=endpoints, gear="warm")


def test_a_plain_script_finds_its_rank_in_the_variables_of_paddle_and_torch() -> None:
    """Ranks follow the order of members; rank 0's store is the address of all."""
    environ = generation_environment(of_three(), "2-b", gpu=False)
    assert (environ["PADDLE_TRAINER_ID"], environ["PADDLE_TRAINERS_NUM"]) == ("1", "3")
    assert environ["PADDLE_TRAINER_ENDPOINTS"] == "10.0.0.2:7001,10.0.0.3:7101,10.0.0.4:7201"
    assert (environ["PADDLE_CURRENT_ENDPOINT"], environ["PADDLE_MASTER"]) == ("10.0.0.3:7101", "10.0.0.2:7000")
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("1", "3", "0")
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.2", "7000")


@pytest.mark.parametrize(("gpu", "found"), [(False, ("gloo", None)), (True, ("nccl", "0"))])
def test_the_backend_is_set_and_with_nccl_a_device(found: tuple[str, str | None], *, gpu: bool) -> None:
    """Paddle on the CPU has to be set to gloo; with NCCL each instance has the first device that it sees."""
    environ = generation_environment(of_three(), "0-a", gpu=gpu)
    assert (environ["PADDLE_DISTRI_BACKEND"], environ.get("FLAGS_selected_gpus")) == found


def test_an_address_of_ipv6_loses_its_brackets() -> None:
    """MASTER_ADDR has none."""
    assert generation_environment(of_three("[fd00::2]:7000"), "1-c", gpu=False)["MASTER_ADDR"] == "fd00::2"


@pytest.mark.parametrize(
    ("source", "imports", "elastic"),
    [
        ("import paddle.nn as nn\nimport os", ("paddle",), False),
        ("from torch import nn\nimport numpy", ("numpy", "torch"), False),
        ("from edl_runtime import elastic", ("paddle", "edl_runtime.elastic.api"), True),
        ("def f():\n    import edl_runtime.elastic.data.indexed", ("paddle", "edl_runtime.elastic.api"), True),
        ("from edl_runtime.elastic import init\nimport numpy", ("numpy", "paddle", "edl_runtime.elastic.api"), True),
        ("import elastic\nfrom . import paddle", (), False),
    ],
)
def test_imports_decide_what_is_preloaded_and_what_is_elastic(
    tmp_path: Path, source: str, imports: tuple[str, ...], *, elastic: bool
) -> None:
    """Slow modules are preloaded; a script that imports `edl_runtime.elastic` is elastic."""
    script = tmp_path / "train.py"
    script.write_text(source)
    read = parse_entrypoint(["python", "-u", "-W", "error", str(script), "--lr", "1"])
    assert (read.file, read.arguments, read.options) == (str(script), ("--lr", "1"), ("-u", "-W", "error"))
    assert (read.imports, read.elastic) == (imports, elastic)


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_first_word_that_ends_in_py_is_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    """This interpreter runs it, executable or not, also from its own folder, where a shell would not find it."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("#!/bin/false\nfrom edl_runtime import elastic")
    script.chmod(mode)
    read = parse_entrypoint(["train.py", "--lr", "1"])
    assert read.command == (sys.executable, "train.py", "--lr", "1")
    assert (read.file, read.arguments, read.elastic) == ("train.py", ("--lr", "1"), True)


@pytest.mark.parametrize("command", [("sleep", "1"), ("python", "-m", "train"), ("python", "-c", "pass"), ("python",)])
def test_other_programs_are_taken_as_they_are(command: tuple[str, ...]) -> None:
    """They are neither preloaded nor parsed."""
    read = parse_entrypoint(command)
    assert (read.file, read.imports, read.elastic) == ("", (), False)
    assert read.command[1:] == command[1:]


def test_a_script_of_another_interpreter_is_another_program(tmp_path: Path) -> None:
    """It may lack what is preloaded; where the script imports this project, it has to have it."""
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)
    script = tmp_path / "train.py"
    script.write_text("import torch")
    read = parse_entrypoint([str(other), str(script)])
    assert (read.file, read.command) == ("", (str(other), str(script)))
    beside = Path(sys.executable).with_name("python3")
    assert parse_entrypoint([str(beside), str(script)]).imports == ("torch",)
    script.write_text("from edl_runtime import elastic")
    wrapping = tmp_path / "wrapping" / "python3"
    wrapping.parent.mkdir()
    wrapping.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapping.chmod(0o700)
    read = parse_entrypoint([str(wrapping), str(script)])
    assert (read.file, read.command[0], read.elastic) == (str(script), str(wrapping), True)
    with pytest.raises(SpecError, match=r"got '.*python3', allowed is an interpreter with edl-airflow .*No module"):
        parse_entrypoint([str(other), "-I", "-S", str(script)])
    script.write_text("print 'as it was in Python 2'")
    assert parse_entrypoint([str(other), str(script)]).file == ""
    with pytest.raises(SpecError, match=r"train\.py\", line 1\n.*\n.*\nSyntaxError"):
        parse_entrypoint([str(beside), str(script)])


def test_a_missing_script_is_an_error_at_once() -> None:
    """Before anything is started."""
    with pytest.raises(SpecError, match=r"nowhere\.py.*No such file"):
        parse_entrypoint(["python", "nowhere.py"])
    with pytest.raises(SpecError, match=r"got 'no-such-program', allowed is .* a program on the PATH"):
        parse_entrypoint(["no-such-program"])
    with pytest.raises(SpecError, match="command"):
        parse_entrypoint([])
