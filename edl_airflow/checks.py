"""What is wrong with a script or a model, as far as this machine's files tell, before anything is started for it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from edl_airflow.jobs import local_path, model_path
from edl_runtime.errors import SpecError
from edl_runtime.specs import TeacherSpec, TrainerSpec

_PYTHON = re.compile(r"python[\d.]*")
_WITH_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def check_script(field: str, trainer: TrainerSpec, folder: Path) -> None:
    """Raise SpecError unless program, script and folder of `trainer`, which errors call `field`, are there.

    `folder`: which relative paths start from.
    """
    cwd = Path(local_path(trainer.cwd, folder)) if trainer.cwd else None
    if cwd and not cwd.is_dir():
        raise SpecError(f"{field}.cwd", str(cwd), "a folder that is there")
    program, *words = trainer.command
    if "/" in program:
        _check_file(field, program, cwd)
    elif program != "python" and not shutil.which(program, path=trainer.env.get("PATH")):
        raise SpecError(f"{field}.command", program, "a program on the PATH, or the path of one")
    if _PYTHON.fullmatch(Path(program).name) and (script := _script_of(words)):
        _check_file(field, script, cwd)


def check_model(teacher: TeacherSpec, folder: Path) -> None:
    """Raise ModelError for what is seen to be wrong with the model without loading it."""
    from edl_runtime.teacher.models import ModelOptions, look_at

    look_at(ModelOptions(model=model_path(teacher.model, folder), outputs=tuple(teacher.outputs)))


def _check_file(field: str, path: str, cwd: Path | None) -> None:
    if cwd is None and not path.startswith("/"):
        raise SpecError(f"{field}.command", path, f"an absolute path, or one below the folder that {field}.cwd names")
    if not Path(cwd or "/", path).exists():
        raise SpecError(f"{field}.command", str(Path(cwd or "/", path)), "a file that is there")


def _script_of(words: Sequence[str]) -> str | None:
    """Return which script Python's arguments name, None for `-c`, `-m` or standard input."""
    given = iter(words)
    for word in given:
        if word in _WITH_A_VALUE:
            next(given, None)
        elif not word.startswith("-"):
            return word
        elif word == "-" or (not word.startswith("--") and {"c", "m"} & set(word)):
            return None
    return None
