"""Runs a script in each way and collects the metrics that it writes."""

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

from edl_runtime.compare.child_processes import answered_requests, run_script, running_teachers
from edl_runtime.compare.results import TITLES, ComparisonRow, MeasuredRun, RunError, Way, measured_run
from edl_runtime.distill.offline import RecordedAnswers
from edl_runtime.distill.teacher_addresses import in_process_address, recorded_address, recording_address
from edl_runtime.settings import RuntimeSettings

SEED = "{seed}"
"""What a command has in the place of its run's seed."""

OnProgress = Callable[[str], None]
"""Called with a line of progress."""

_ASKED_NONE = (
    "the script sent no request to its teachers; its reader must take them from the environment, and must not have "
    "answers of earlier runs in a cache"
)

_NOT_THEIRS = frozenset(
    {"EDL_TEACHERS", "EDL_POOL", "EDL_REDIS_URL", "EDL_DISCOVERY_URL", "EDL_JOB", "EDL_RESULT_FILE"}
)
"""Variables that are not inherited: they would give a script other teachers or another job, or a teacher a pool."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `edl compare`.

    - `model`, `outputs`, `gpu_ids`: as of `edl teacher`; each teacher gets one of the GPUs, in turn.
    - `teachers`: number of teachers.
    - `command`: the student's script and its flags. `{seed}` in a word is replaced by the run's seed: 0 in the first
      run of each way, 1 in the second, and so on.
    - `pure`: added to the command to train without distillation; leading words like NAME=value are variables.
    - `repeat`: runs of each way.
    """

    model: str
    command: tuple[str, ...]
    teachers: int = 1
    outputs: str = ""
    gpu_ids: tuple[int, ...] = ()
    pure: str = ""
    repeat: int = 1

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs, empty if the command takes none."""
        return tuple(range(self.repeat)) if any(SEED in word for word in self.command) else ()


def compare(comparison: Comparison, way: Way, on_progress: OnProgress) -> ComparisonRow:
    """Run one way `comparison.repeat` times. A failure ends the way and is reported in the row."""
    with tempfile.TemporaryDirectory(prefix="edl-compare-") as folder:
        runs = _WayRunner(comparison, Path(folder), lambda line: on_progress(f"{TITLES[way]}: {line}"))
        row = ComparisonRow(way=way, teachers=_teachers(comparison, way), student=_student(os.environ))
        try:
            return msgspec.structs.replace(row, runs=tuple(_RUNS[way](runs)), seeds=comparison.seeds, note=runs.note)
        except RunError as error:
            return msgspec.structs.replace(row, reason=error.reason, last_lines=tuple(error.last_lines), note=runs.note)


class _WayRunner:
    """Runs one way, in a folder of its own."""

    def __init__(self, comparison: Comparison, folder: Path, on_progress: OnProgress) -> None:
        self.note = ""
        self._comparison = comparison
        self._folder = folder
        self._on_progress = on_progress

    def none(self) -> Iterator[MeasuredRun]:
        env, flags = split_pure(self._comparison.pure)
        try:
            yield from self._measured(env, [*self._comparison.command, *flags])
        except RunError as error:
            if self._comparison.pure:
                raise
            hint = "it ran without teachers; give the flag for that, if it needs one, with --pure"
            raise RunError(f"{error.reason} ({hint})", error.last_lines) from None

    def in_process(self) -> Iterator[MeasuredRun]:
        gpu_id = self._comparison.gpu_ids[0] if self._comparison.gpu_ids else None
        asked = self._folder / "asked"
        address = in_process_address(
            self._comparison.model, outputs=self._comparison.outputs, gpu_id=gpu_id, asked=asked
        )
        for measured in self._measured({"EDL_TEACHERS": address}, self._comparison.command):
            if not asked.exists():
                raise RunError(_ASKED_NONE)
            asked.unlink()
            yield measured

    def service(self) -> Iterator[MeasuredRun]:
        token = RuntimeSettings.from_env(os.environ).teacher_token
        with self._teachers() as addresses:
            before = 0
            for measured in self._measured({"EDL_TEACHERS": ",".join(addresses)}, self._comparison.command):
                now = sum(answered_requests(address, token) for address in addresses)
                if now <= before:
                    raise RunError(_ASKED_NONE)
                before = now
                yield measured

    def offline(self) -> Iterator[MeasuredRun]:
        answers = self._folder / "answers"
        with self._teachers() as addresses:
            began = time.monotonic()
            recording = ",".join(recording_address(answers, address) for address in addresses)
            for number in range(1, len(self._comparison.seeds or (None,)) + 1):  # each seed may have other samples
                self._run({"EDL_TEACHERS": recording}, self._comparison.command, number, "writing answers")
        count, size = _recorded_size(answers)
        self.note = f"{count:,} answers, {-(-size // 1000):,} kB, written in {time.monotonic() - began:.0f} s"
        yield from self._measured({"EDL_TEACHERS": recorded_address(answers)}, self._comparison.command)

    @contextmanager
    def _teachers(self) -> Iterator[list[str]]:
        comparison = self._comparison
        self._on_progress(f"starting {comparison.teachers} teacher{'s' if comparison.teachers > 1 else ''}")
        command = [sys.executable, "-m", "edl_runtime.cli", "teacher", "--json", "--model", comparison.model]
        command += ["--outputs", comparison.outputs] if comparison.outputs else []
        gpus = [
            ["--gpu-ids", str(comparison.gpu_ids[number % len(comparison.gpu_ids)])] if comparison.gpu_ids else []
            for number in range(comparison.teachers)
        ]
        with running_teachers(command, gpus, _environment(), self._folder) as addresses:
            yield addresses

    def _measured(self, env: Mapping[str, str], command: Sequence[str]) -> Iterator[MeasuredRun]:
        for number in range(1, self._comparison.repeat + 1):
            yield measured_run(self._run(env, command, number))

    def _run(self, env: Mapping[str, str], command: Sequence[str], number: int, what: str = "run") -> bytes | None:
        """Run the script with the seed of a run; return its result."""
        name = f"{what.replace(' ', '-')}-{number}"
        result = self._folder / f"{name}.json"
        title = f"{what} {number} of {self._comparison.repeat}" if what == "run" or self._comparison.seeds else what
        self._on_progress(title)
        log = self._folder / f"{name}.log"
        seed = str(number - 1)
        full = {**_environment(), **env, "EDL_RESULT_FILE": str(result)}
        words = [word.replace(SEED, seed) for word in command]
        run_script(words, full, log, lambda line: self._on_progress(f"{title}: {line}" if line else title))
        return result.read_bytes() if result.exists() else None


_RUNS: dict[Way, Callable[[_WayRunner], Iterator[MeasuredRun]]] = {
    "none": _WayRunner.none,
    "inprocess": _WayRunner.in_process,
    "offline": _WayRunner.offline,
    "service": _WayRunner.service,
}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_THEIRS}


def split_pure(pure: str) -> tuple[dict[str, str], list[str]]:
    """Split `Comparison.pure` into variables and flags."""
    words = shlex.split(pure)
    env: dict[str, str] = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, env[name] = words.pop(0).partition("=")
    return env, words


def _recorded_size(answers: Path) -> tuple[int, int]:
    """Return the number of answers, and their bytes on disk. Raises RunError if there are none."""
    if answers.is_dir():
        kept = RecordedAnswers(answers)
        count = len(kept)
        kept.close()
        if count:
            return count, kept.path.stat().st_size
    raise RunError(_ASKED_NONE)


def _teachers(comparison: Comparison, way: Way) -> str:
    if way == "none":
        return "none"
    if way == "inprocess":
        return f"in the student's process{f', GPU {comparison.gpu_ids[0]}' if comparison.gpu_ids else ''}"
    used = sorted(set(comparison.gpu_ids[: comparison.teachers]))
    where = f"GPU {', '.join(map(str, used))}" if used else "CPU"
    return f"{comparison.teachers} on {where}{', beforehand' if way == 'offline' else ''}"


def _student(environ: Mapping[str, str]) -> str:
    if gpus := environ.get("CUDA_VISIBLE_DEVICES"):
        return f"GPU {gpus}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cores} CPU core{'s' if cores > 1 else ''}"
