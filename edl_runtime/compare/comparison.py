"""Runs a script in each way and measures what it says of itself."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edl_runtime.compare.processes import answered, run_script, running_teachers
from edl_runtime.compare.ways import TITLES, Measured, Row, RunError, Way, measured_from
from edl_runtime.distill.offline import AnswerFolder
from edl_runtime.distill.standins import in_process, recorded, recording
from edl_runtime.errors import SpecError

Tell = Callable[[str], None]
"""Takes in words what is going on."""

_ASKED_NONE = (
    "the script did not ask the teachers it was given; its reader has to take them from the environment, and to have "
    "no answers of earlier runs in a cache"
)

_NOT_THEIRS = frozenset(
    {"EDL_TEACHERS", "EDL_POOL", "EDL_REDIS_URL", "EDL_DISCOVERY_URL", "EDL_JOB", "EDL_RESULT_FILE"}
)
"""Of the caller's environment, what would lead a script to other teachers or another job, or a teacher to a pool."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared.

    - `model`, `outputs`, `gpu_ids`: as `edl teacher` has them; each teacher gets one of the GPUs, in turn.
    - `teachers`: how many teachers serve.
    - `command`: the student's script and its flags.
    - `pure`: added to the command to train without distillation; words like NAME=value at its beginning are variables.
    - `repeat`: runs of each way.
    """

    model: str
    command: tuple[str, ...]
    teachers: int = 1
    outputs: str = ""
    gpu_ids: tuple[int, ...] = ()
    pure: str = ""
    repeat: int = 1

    def __post_init__(self) -> None:
        """Raise SpecError for counts below 1."""
        for field in ("teachers", "repeat"):
            if getattr(self, field) < 1:
                raise SpecError(field, getattr(self, field), "1 or more")


def compare(what: Comparison, way: Way, tell: Tell) -> Row:
    """Run one way as often as it is wanted. A failure is part of the row, and ends it."""
    with tempfile.TemporaryDirectory(prefix="edl-compare-") as folder:
        runs = _Runs(what, Path(folder), lambda line: tell(f"{TITLES[way]}: {line}"))
        row = Row(way=way, teachers=_teachers(what, way), student=_student(os.environ))
        try:
            return msgspec.structs.replace(row, runs=tuple(_RUNS[way](runs)), note=runs.note)
        except RunError as error:
            return msgspec.structs.replace(row, reason=error.reason, last_lines=error.last_lines, note=runs.note)


class _Runs:
    """The runs of one way, in a folder of their own."""

    def __init__(self, what: Comparison, folder: Path, tell: Tell) -> None:
        self.note = ""
        self._what = what
        self._folder = folder
        self._tell = tell

    def none(self) -> Iterator[Measured]:
        env, flags = split_pure(self._what.pure)
        try:
            yield from self._measured(env, [*self._what.command, *flags])
        except RunError as error:
            if self._what.pure:
                raise
            hint = "it ran without teachers; does it need a flag to train so? Give it with --pure"
            raise RunError(f"{error.reason} ({hint})", error.last_lines) from None

    def in_process(self) -> Iterator[Measured]:
        gpu_id = self._what.gpu_ids[0] if self._what.gpu_ids else None
        asked = self._folder / "asked"
        address = in_process(self._what.model, outputs=self._what.outputs, gpu_id=gpu_id, asked=asked)
        for measured in self._measured({"EDL_TEACHERS": address}, self._what.command):
            _check_asked(asked.exists())
            asked.unlink()
            yield measured

    def service(self) -> Iterator[Measured]:
        token = os.environ.get("EDL_TEACHER_TOKEN", "")
        with self._teachers() as addresses:
            before = 0
            for measured in self._measured({"EDL_TEACHERS": ",".join(addresses)}, self._what.command):
                now = sum(answered(address, token) for address in addresses)
                _check_asked(now > before)
                before = now
                yield measured

    def offline(self) -> Iterator[Measured]:
        answers = self._folder / "answers"
        with self._teachers() as addresses:
            began = time.monotonic()
            self._run({"EDL_TEACHERS": ",".join(recording(answers, one) for one in addresses)}, self._what.command, 0)
        count, size = _kept(answers)
        self.note = f"{count:,} answers, {-(-size // 1000):,} kB, written before in {time.monotonic() - began:.0f} s"
        yield from self._measured({"EDL_TEACHERS": recorded(answers)}, self._what.command)

    @contextmanager
    def _teachers(self) -> Iterator[list[str]]:
        what = self._what
        self._tell(f"starting {what.teachers} teacher{'s' if what.teachers > 1 else ''}")
        command = [sys.executable, "-m", "edl_runtime.cli", "teacher", "--json", "--model", what.model]
        command += ["--outputs", what.outputs] if what.outputs else []
        gpus = [
            ["--gpu_ids", str(what.gpu_ids[number % len(what.gpu_ids)])] if what.gpu_ids else []
            for number in range(what.teachers)
        ]
        with running_teachers(command, gpus, _environment(), self._folder) as addresses:
            yield addresses

    def _measured(self, env: Mapping[str, str], command: Sequence[str]) -> Iterator[Measured]:
        for number in range(1, self._what.repeat + 1):
            yield measured_from(self._run(env, command, number))

    def _run(self, env: Mapping[str, str], command: Sequence[str], number: int) -> bytes | None:
        """Run the script; return its result. Number 0 is a run that only writes answers."""
        result = self._folder / f"result-{number}.json"
        run = f"run {number} of {self._what.repeat}" if number else "writing answers"
        self._tell(run)
        log = self._folder / f"script-{number}.log"
        theirs = {**_environment(), **env, "EDL_RESULT_FILE": str(result)}
        run_script(command, theirs, log, lambda line: self._tell(f"{run}: {line}" if line else run))
        return result.read_bytes() if result.exists() else None


_RUNS: dict[Way, Callable[[_Runs], Iterator[Measured]]] = {
    "none": _Runs.none,
    "inprocess": _Runs.in_process,
    "offline": _Runs.offline,
    "service": _Runs.service,
}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_THEIRS}


def split_pure(pure: str) -> tuple[dict[str, str], list[str]]:
    """Split what makes a script train without distillation into variables and flags."""
    words = shlex.split(pure)
    env: dict[str, str] = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, env[name] = words.pop(0).partition("=")
    return env, words


def _kept(answers: Path) -> tuple[int, int]:
    """Return how many answers there are, and their bytes on disk. Raises RunError for none."""
    if answers.is_dir():
        kept = AnswerFolder(answers)
        count = len(kept)
        kept.close()
        if count:
            return count, kept.path.stat().st_size
    raise RunError(_ASKED_NONE)


def _check_asked(asked: bool) -> None:  # noqa: FBT001 - it is all there is to check
    if not asked:
        raise RunError(_ASKED_NONE)


def _teachers(what: Comparison, way: Way) -> str:
    if way == "none":
        return "none"
    if way == "inprocess":
        return f"in the student's process{f', GPU {what.gpu_ids[0]}' if what.gpu_ids else ''}"
    used = sorted({what.gpu_ids[number % len(what.gpu_ids)] for number in range(what.teachers)} if what.gpu_ids else ())
    where = f"GPU {', '.join(map(str, used))}" if used else "CPU"
    return f"{what.teachers} on {where}{', before' if way == 'offline' else ''}"


def _student(environ: Mapping[str, str]) -> str:
    if gpus := environ.get("CUDA_VISIBLE_DEVICES"):
        return f"GPU {gpus}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cores} CPU core{'s' if cores > 1 else ''}"
