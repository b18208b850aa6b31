"""How a worker is launched: its command and whether that is elastic, its environment, its ports, and its job."""

from __future__ import annotations

import ast
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec

from edl_runtime.elastic.comm.agent_protocol import Gear
from edl_runtime.elastic.rendezvous.generation import Generation
from edl_runtime.errors import SpecError
from edl_runtime.exit_status import describe_exit
from edl_runtime.specs import Bounds, JobSpec

PRELOADABLE = ("numpy", "paddle", "torch")
"""Slow to import, and without side effects that a script could want to control."""

ELASTIC = "edl_runtime.elastic"

STANDBY = f"{ELASTIC}.agent.standby"
"""The module that a worker's process starts with."""

_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


class Entrypoint(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's command.

    - `command`: "python" as its first word stands for this interpreter.
    - `file`: the Python script in it, "" for other programs: those are neither preloaded nor parsed.
    - `options`: of the interpreter. `arguments`: of the script.
    - `imports`: modules to preload.
    - `elastic`: it joins generations by itself; others are restarted for each generation. A script that does so through
      another module is only recognized when it runs.
    """

    command: tuple[str, ...]
    file: str = ""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    elastic: bool = False

    def as_elastic(self) -> Entrypoint:
        """Return this script as elastic."""
        imports = dict.fromkeys([*self.imports, "paddle", f"{ELASTIC}.api"])
        return msgspec.structs.replace(self, imports=tuple(imports), elastic=True)


def parse_entrypoint(command: Sequence[str]) -> Entrypoint:
    """Return the entrypoint of `command`: "python train.py …", "train.py …" or another program. Parses the script.

    A first word that ends in .py is a script for this interpreter. A module (`python -m`) counts as another program,
    and so does a script of another interpreter, which may lack what is preloaded, unless it imports this project.
    Raises SpecError for a missing program, a script that this interpreter can't parse, and a script that imports this
    project with an interpreter that can't.
    """
    words = _with_program(command)
    first = _script_index(words) if _is_python(words[0]) else None
    if first is None:
        return Entrypoint(command=tuple(words))
    file = words[first]
    try:
        source = Path(file).read_bytes()
    except OSError as error:
        raise SpecError("command", file, f"a script that can be read ({error.strerror})") from None
    try:
        tree = ast.parse(source, file)
    except (SyntaxError, ValueError) as error:
        if not _is_this_interpreter(words[0]):
            return Entrypoint(command=tuple(words))
        cause = "".join(traceback.format_exception_only(error)).rstrip()
        raise SpecError("command", file, f"a script that Python can read:\n{cause}") from None
    modules = list(_imported_modules(tree))
    elastic = any(module == ELASTIC or module.startswith(f"{ELASTIC}.") for module in modules)
    if not _is_this_interpreter(words[0]):
        if not elastic:
            return Entrypoint(command=tuple(words))
        _check_runtime(words[0], words[1:first])
    worth = [name for name in PRELOADABLE if name in {module.partition(".")[0] for module in modules}]
    script = Entrypoint(
        command=tuple(words),
        file=file,
        options=tuple(words[1:first]),
        arguments=tuple(words[first + 1 :]),
        imports=tuple(worth),
    )
    return script.as_elastic() if elastic else script


def _with_program(command: Sequence[str]) -> list[str]:
    """Return the command with the program that runs it as its first word. Raises SpecError if there is none."""
    words = list(command)
    if not words:
        raise SpecError("command", words, "a script or a program with its arguments, as in -- python train.py")
    if words[0].endswith(".py"):
        words.insert(0, sys.executable)
    elif words[0] == "python":
        words[0] = sys.executable
    if shutil.which(words[0]) is None:
        raise SpecError("command", words[0], "a script that ends in .py, or a program on the PATH that can be run")
    return words


def _is_python(program: str) -> bool:
    return program == sys.executable or Path(program).name.startswith("python")


def _is_this_interpreter(program: str) -> bool:
    """Whether it is the running interpreter, in the same environment."""
    this, found = Path(sys.executable), Path(shutil.which(program) or program).absolute()
    return found.parent == this.parent and found.resolve() == this.resolve()


def _check_runtime(interpreter: str, options: Sequence[str]) -> None:
    """Raise SpecError if this interpreter can't import what a worker needs."""
    trial = [interpreter, *options, "-c", f"import {STANDBY}"]
    run = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if run.returncode:
        lines = run.stderr.decode(errors="replace").strip().splitlines() or [describe_exit(run.returncode)]
        raise SpecError("command", interpreter, f"an interpreter with edl-airflow installed ({lines[-1]})")


def _script_index(words: Sequence[str]) -> int | None:
    """Return the script's position in the words, None for a module, code or standard input."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] in ("-", "-c", "-m"):
            return None
        at += 2 if words[at] in _OPTIONS_WITH_VALUE else 1
    return at if at < len(words) else None


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that the source imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def generation_environment(generation: Generation, member: str, *, gpu: bool) -> dict[str, str]:
    """Return the variables by which `paddle.distributed` and `torch.distributed` join the generation as this member.

    Each instance has one worker, and with `gpu` one device, the first that it sees; Paddle sums by NCCL then, else by
    gloo.
    """
    rank = generation.members.index(member)
    world_size = str(len(generation.members))
    host, _, port = generation.store.rpartition(":")
    device = {"FLAGS_selected_gpus": "0", "PADDLE_LOCAL_DEVICE_IDS": "0"} if gpu else {}
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": world_size,
        "PADDLE_TRAINER_ENDPOINTS": ",".join(generation.endpoints),
        "PADDLE_CURRENT_ENDPOINT": generation.endpoints[rank],
        "PADDLE_MASTER": generation.store,
        "PADDLE_DISTRI_BACKEND": "nccl" if gpu else "gloo",
        "PADDLE_RANK_IN_NODE": "0",
        **device,
        "RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": world_size,
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "EDL_GENERATION": str(generation.number),
    }


class PortReservation:
    """Reserves two ports of `host`, others for each generation, by binding without listening.

    `store`: rank 0's port for the others; `trainer`: the script's own. A process that sets SO_REUSEADDR can listen on
    them. A context manager; entering raises SpecError when `host` is no address of this machine.
    """

    def __init__(self, host: str) -> None:
        self.store = 0
        self.trainer = 0
        self._host = host
        self._generation = -1
        self._kept: list[socket.socket] = []

    def __enter__(self) -> Self:
        self.renew(0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for kept in self._kept:
            kept.close()

    def renew(self, generation: int) -> None:
        """Reserve others, once for each generation; the last two pairs are kept."""
        if generation == self._generation:
            return
        self._generation = generation
        pair = [self._bind(), self._bind()]
        for kept in self._kept[:-2]:
            kept.close()
        self._kept = [*self._kept[-2:], *pair]
        self.store, self.trainer = (kept.getsockname()[1] for kept in pair)

    def _bind(self) -> socket.socket:
        try:
            family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
            bound = socket.socket(family, socket.SOCK_STREAM)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the later listener does
            bound.bind((self._host, 0))
        except OSError as error:
            allowed = f"an address of this machine that the job's other instances reach ({error.strerror})"
            raise SpecError("settings.host (EDL_HOST)", self._host, allowed) from None
        return bound


ELASTIC_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL of an elastic instance: it finishes its step, and may write a checkpoint."""


def agent_command(command: Sequence[str], bounds: Bounds, *, gear: Gear = "live") -> tuple[str, ...]:
    """Return the command of an agent that runs `command`.

    Python's -P keeps modules beside the script from shadowing the agent's libraries.
    """
    agent = ("python", "-P", "-m", "edl_runtime.cli", "agent", "--instances", str(bounds), "--gear", gear, "--")
    return (*agent, *command)


def elastic_job(
    spec: JobSpec, bounds: Bounds, *, gear: Gear = "live", start: int | None = None, grace_s: float = ELASTIC_GRACE_S
) -> JobSpec:
    """Return the job whose instances are agents, each an `edl agent` that runs `spec`'s command.

    It starts with `start` instances, by default the fewest. Raises SpecError for a `start` outside `bounds`.
    """
    return msgspec.structs.replace(
        spec,
        command=agent_command(spec.command, bounds, gear=gear),
        bounds=bounds,
        instances=bounds.min if start is None else start,
        elastic=True,
        grace_s=grace_s,
    )
