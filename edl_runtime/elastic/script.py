"""What a trainer's command is: a Python script that can be loaded ahead, and whether it is known to be elastic."""

from __future__ import annotations

import ast
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from edl_runtime.errors import SpecError

WORTH_LOADING = ("numpy", "paddle", "torch")
"""What takes long to import, and does nothing that a script could want to have a say in."""

ELASTIC = "edl_runtime.elastic"

_IMPORTERS = {"builtins", "code", "codeop", "imp", "importlib", "pickle", "pkgutil", "runpy", "unittest", "zipimport"}
"""Modules by which a script can run others that it does not import."""

_CALL_NO_INIT = (sys.stdlib_module_names - _IMPORTERS) | {*WORTH_LOADING, "edl_runtime"}
"""Modules known not to call `elastic.init` for a script."""

_BY_OTHER_WAYS = {"exec", "eval", "compile", "globals", "locals", "vars", "__import__", "__builtins__"}
"""By these a script can call what it does not name."""

_TAKE_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's command.

    - `command`: as it is run alone; "python" as its first word stands for this interpreter.
    - `file`: the Python script in it, empty for other programs: those are neither loaded ahead nor looked into.
    - `options`: of the interpreter. `arguments`: of the script.
    - `imports`: modules to import ahead.
    - `elastic`: it joins generations by itself, live ones too; others are started for each generation anew. A script
      that does so by way of another module is only known when it runs.
    - `forgets`: it imports this project's elastic and surely never calls `init`; False where that can't be told.
    """

    command: tuple[str, ...]
    file: str = ""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    elastic: bool = False
    forgets: bool = False

    def that_joins(self) -> Script:
        """Return this script as one that joins generations by itself."""
        imports = dict.fromkeys([*self.imports, "paddle", f"{ELASTIC}.run"])
        return msgspec.structs.replace(self, imports=tuple(imports), elastic=True)


def read_script(command: Sequence[str]) -> Script:
    """Return what `command` is: "python train.py …", "train.py …" or another program. Reads the script.

    A first word that ends in .py is always a script that this interpreter runs, be it executable or not. A module
    (`python -m`) counts as another program, and so does a script of another interpreter than this one, which may lack
    what loading ahead takes; but not one that imports this project. Raises SpecError for a program that is not there,
    and a script that can't be read, or not by this interpreter that is to run it.
    """
    words = list(command)
    if not words:
        raise SpecError("command", words, "a script or a program with its arguments, as in -- python train.py")
    if words[0].endswith(".py"):
        words.insert(0, sys.executable)
    elif words[0] == "python":
        words[0] = sys.executable
    if shutil.which(words[0]) is None:
        raise SpecError("command", words[0], "a script that ends in .py, or a program on the PATH that can be run")
    first = _script_at(words) if _is_python(words[0]) else None
    if first is None:
        return Script(command=tuple(words))
    file = words[first]
    try:
        source = Path(file).read_bytes()
    except OSError as error:
        raise SpecError("command", file, f"a script that can be read ({error.strerror})") from None
    try:
        tree = ast.parse(source, file)
    except (SyntaxError, ValueError) as error:
        if not _is_this(words[0]):
            return Script(command=tuple(words))
        said = "".join(traceback.format_exception_only(error)).rstrip()
        raise SpecError("command", file, f"a script that Python can read:\n{said}") from None
    modules = list(_imported(tree))
    elastic = any(module == ELASTIC or module.startswith(f"{ELASTIC}.") for module in modules)
    if not elastic and not _is_this(words[0]):
        return Script(command=tuple(words))
    worth = [name for name in WORTH_LOADING if name in {module.partition(".")[0] for module in modules}]
    script = Script(
        command=tuple(words),
        file=file,
        options=tuple(words[1:first]),
        arguments=tuple(words[first + 1 :]),
        imports=tuple(worth),
        forgets=elastic and _calls_no_init(tree, modules, Path(file).parent),
    )
    return script.that_joins() if elastic else script


def _is_python(program: str) -> bool:
    return program == sys.executable or Path(program).name.startswith("python")


def _is_this(program: str) -> bool:
    """Whether it is the interpreter that runs this, in the same environment."""
    this, found = Path(sys.executable), Path(shutil.which(program) or program).absolute()
    return found.parent == this.parent and found.resolve() == this.resolve()


def _script_at(words: Sequence[str]) -> int | None:
    """Return where in the words the script is, None for a module, code or standard input."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] in ("-", "-c", "-m"):
            return None
        at += 2 if words[at] in _TAKE_A_VALUE else 1
    return at if at < len(words) else None


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that the source imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _calls_no_init(tree: ast.Module, modules: Sequence[str], folder: Path) -> bool:
    """Whether a script in this folder uses nothing of the elastic that it imports, and no module that may do so."""
    roots = {module.partition(".")[0] for module in modules}
    if not roots <= _CALL_NO_INIT or any(
        (folder / root).exists() or (folder / f"{root}.py").exists() for root in roots
    ):
        return False
    bound = set(_BY_OTHER_WAYS)
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [name for name in node.names if name.name.partition(".")[0] == "edl_runtime"]
            bound.update(name.asname or "edl_runtime" for name in ours)
        elif isinstance(node, ast.ImportFrom) and node.level:
            return False
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "edl_runtime":
            is_elastic = (node.module or "").startswith(ELASTIC)
            bound.update(name.asname or name.name for name in node.names if is_elastic or name.name in ("elastic", "*"))
        elif isinstance(node, ast.Name):
            used.add(node.id)
    return "*" not in bound and not bound & used
