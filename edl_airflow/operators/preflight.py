"""Checks a script, checkpoint folder or model on this machine before anything is started."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edl_airflow.operators.job_specs import local_path, model_path
from edl_runtime.errors import SpecError
from edl_runtime.specs import Checkpoint, TeacherSpec, TrainerSpec

_PYTHON = re.compile(r"python[\d.]*")
_WITH_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def check_script(field: str, trainer: TrainerSpec, folder: Path) -> None:
    """Raise SpecError, naming `field`, unless the program, script and folder of `trainer` exist.

    `folder` is for relative paths.
    """
    cwd = Path(local_path(trainer.cwd, folder)) if trainer.cwd else None
    if cwd and not cwd.is_dir():
        raise SpecError(f"{field}.cwd", str(cwd), "an existing folder")
    program, *words = trainer.command
    if "/" in program:
        path = _file(field, program, cwd)
        if not os.access(path, os.X_OK):
            raise SpecError(f"{field}.command", str(path), "a program that may be run; `chmod +x` makes a file one")
    elif program != "python" and not shutil.which(program, path=trainer.env.get("PATH")):
        raise SpecError(f"{field}.command", program, "a program on the PATH, or the path of one")
    if _PYTHON.fullmatch(Path(program).name) and (script := _script_of(words)):
        _file(field, script, cwd, may_be_a_package=True)


def check_checkpoint_folder(checkpoint: Checkpoint | None, folder: Path) -> None:
    """Raise SpecError unless the checkpoint folder is writable or can be made; URLs pass.

    `folder` is for relative paths.
    """
    if checkpoint is None or "://" in checkpoint.url:
        return
    path = Path(local_path(checkpoint.url, folder))
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    try:
        if there != path:
            Path(tempfile.mkdtemp(prefix=".edl-", dir=there)).rmdir()
        else:
            os.scandir(path).close()
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        allowed = f"a writable folder, or one that can be made: {there}: {error.strerror}"
        raise SpecError("checkpoint.url", str(path), allowed) from None


def check_model(teacher: TeacherSpec, folder: Path) -> None:
    """Raise ModelError for mistakes in the model's files, without loading it."""
    from edl_runtime.teacher.models.loading import check_model_files
    from edl_runtime.teacher.models.model import ModelOptions

    check_model_files(ModelOptions(model=model_path(teacher.model, folder), outputs=tuple(teacher.outputs)))


def _file(field: str, path: str, cwd: Path | None, *, may_be_a_package: bool = False) -> Path:
    """Return the file's path. Raises SpecError if it is missing or a folder, but for a package that Python can run."""
    if cwd is None and not path.startswith("/"):
        raise SpecError(f"{field}.command", path, f"an absolute path, or one below the folder that {field}.cwd names")
    file = Path(cwd or "/", path)
    if not file.exists():
        raise SpecError(f"{field}.command", str(file), "an existing file")
    if file.is_dir() and not (may_be_a_package and (file / "__main__.py").is_file()):
        raise SpecError(f"{field}.command", str(file), "a file; this is a folder")
    return file


def _script_of(words: Sequence[str]) -> str | None:
    """Return the script in Python's arguments, None for `-c`, `-m` or standard input."""
    given = iter(words)
    for word in given:
        if word in _WITH_A_VALUE:
            next(given, None)
        elif not word.startswith("-"):
            return word
        elif word == "-" or (not word.startswith("--") and {"c", "m"} & set(word)):
            return None
    return None
