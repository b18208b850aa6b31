"""The instances of one run of a job: where they start, what they see and where they leave what they write."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from edl_runtime.backends.local.disks import NO_SPACE, full_folders
from edl_runtime.backends.local.folders import JobFolder
from edl_runtime.backends.local.logs import tail
from edl_runtime.backends.local.processes import InstanceProcess, Processes
from edl_runtime.backends.local.slots import Trouble
from edl_runtime.specs import JobSpec

LAST_LINES = 30
"""How many lines of a failed instance's log go into the status."""

AGENTS_WORD = "edl: "
"""An agent's last line begins so: what follows is why it ended."""


class Instances:
    """Starts instances of `spec`.

    - `run_folder`: where their logs go, and where they start when the spec names no folder.
    - `environ`: what every instance's environment starts from; the spec's variables and `secrets` come on top.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        folder: JobFolder,
        run_folder: Path,
        processes: Processes,
        environ: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> None:
        self._cwd = spec.cwd
        self._has_agents = spec.elastic
        self._folder = folder
        self._run_folder = run_folder
        self._processes = processes
        self._environ = {
            **environ,
            **spec.env,
            **secrets,
            "EDL_JOB": spec.name,
            "EDL_RUN": run_folder.name,
            "EDL_GRACE_S": str(spec.grace_s),
            "PYTHONUNBUFFERED": "1",
        }
        checkpoints = spec.env.get("EDL_CHECKPOINT", "")
        places = [spec.cwd, "" if "://" in checkpoints else checkpoints]
        self._folders = [*map(Path, filter(None, places)), run_folder, Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108
        self._command = [sys.executable if spec.command[0] == "python" else spec.command[0], *spec.command[1:]]

    def start(self, index: int) -> InstanceProcess:
        """Start the instance. Raises OSError; ValueError for a null byte in the command or a variable."""
        work, result = self._run_folder / "work" / str(index), self._folder.result_file(index)
        for folder in (work, result.parent):
            folder.mkdir(parents=True, exist_ok=True)
        environ = {**self._environ, "EDL_INSTANCE": str(index), "EDL_RESULT_FILE": str(result)}
        cwd = Path(self._cwd) if self._cwd else work
        return self._processes.start(self._command, env=environ, cwd=cwd, log=self._log(index))

    def trouble(self, index: int, reason: str) -> Trouble:
        """Return what is wrong with the instance, with the end of its log, and which folder is full if that is it.

        Of an agent, also why it ended by its own words.
        """
        lines = tuple(tail(self._log(index), LAST_LINES))
        said = next((line for line in reversed(lines) if line.startswith(AGENTS_WORD)), "") if self._has_agents else ""
        why = said.removeprefix(AGENTS_WORD).removeprefix(f"instance {index}: ")
        full = full_folders(self._folders) if any(NO_SPACE in line for line in lines) else []
        where = f"; no space is left in {', '.join(full)}" if full else ""
        return Trouble(f"instance {index} {reason}{f': {why}' if why else ''}{where}", lines)

    def _log(self, index: int) -> Path:
        return self._run_folder / f"{index}.log"
