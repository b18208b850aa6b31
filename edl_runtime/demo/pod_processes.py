"""The processes of this node's pods: each a training script, restarted when it fails, and stopped gracefully."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from edl_runtime.backends.local.instances import InstanceProcess, InstanceSlot, ProcessTable
from edl_runtime.backends.local.job_folders import tail
from edl_runtime.backends.restarts import FailJob, Restart, RestartPolicy, decide_restart
from edl_runtime.concurrency import wait_for_event
from edl_runtime.demo.errors import PERMANENT, PodFailedError
from edl_runtime.exit_status import describe_exit
from edl_runtime.log import get_logger

_RUN_SCRIPT = """trap 'wait; exit 143' TERM; . "$0" "$@" """
"""For bash: by default it would end at SIGTERM at once, and leave its children no time."""

log = get_logger(__name__)


class PodScript:
    """What each pod runs, and where.

    - `package`: a bash script that prepares a pod, called with "-pod_id ID"; "" for none.
    - `script`, `arguments`: of bash, run in `folder`/ID, or here if that is None.
    - `logs`: a folder for a log of each pod. `grace_s`: from SIGTERM to SIGKILL.
    """

    def __init__(
        self, script: str, arguments: tuple[str, ...], *, package: str, folder: Path | None, logs: Path, grace_s: float
    ) -> None:
        script = script if "/" in script else f"./{script}"  # else bash would look on the PATH
        self.command = ("bash", "-c", _RUN_SCRIPT, script, *arguments)
        self.package = package
        self.logs = logs
        self.grace_s = grace_s
        self._folder = folder

    def folder(self, pod_id: str) -> Path:
        """Return where the pod's script runs."""
        return (self._folder / pod_id if self._folder else Path()).absolute()

    def log(self, pod_id: str) -> Path:
        """Return the log of the pod's script and of its preparation."""
        return (self.logs / f"pod_{pod_id}.log").absolute()


class LocalPod:
    """One pod on this node, with all its restarts.

    - `running`: its script runs. `succeeded`: it has exited with 0, and is not started again. `gone`: it has ended.
    - `after`: the pod before on the same place, whose end it waits for. `on_change`: called when any of this changes.
    """

    def __init__(
        self,
        pod_id: str,
        rank: int,
        script: PodScript,
        environ: Mapping[str, str],
        *,
        processes: ProcessTable,
        after: LocalPod | None,
        on_change: Callable[[], None],
    ) -> None:
        self.pod_id = pod_id
        self.rank = rank
        self.running = True
        self.succeeded = False
        self._slot = InstanceSlot(rank)
        self._script = script
        self._environ = environ
        self._processes = processes
        self._after = after
        self._on_change = on_change
        self.gone = asyncio.Event()

    def leave(self) -> None:
        """Stop it: SIGTERM to all of its process group, and SIGKILL after the grace period."""
        self._slot.leave.set()

    async def run(self) -> None:
        """Run it until it has succeeded or left. Raises PodFailedError once it has failed for good."""
        try:
            if self._after:
                await self._after.gone.wait()
                self._after = None
            if self._script.package and not self._slot.leave.is_set():
                await self._prepare()
            while not self._slot.leave.is_set():
                started = time.monotonic()
                exit_code = await self._run_once()
                if self._slot.leave.is_set():
                    log.info("pod.stopped", pod=self.pod_id, exit_code=exit_code)
                    return
                if exit_code == 0:
                    log.info("pod.succeeded", pod=self.pod_id)
                    self.succeeded = True
                    return
                await self._rest(self._delay_s(exit_code, time.monotonic() - started))
        finally:
            self._set_running(False)
            self.gone.set()

    async def _prepare(self) -> None:
        command = ("bash", self._script.package, "-pod_id", self.pod_id)
        exit_code = await self._run_process(self._start(command, Path()))
        if exit_code and not self._slot.leave.is_set():
            raise self._failure(exit_code, f"could not be prepared: {self._script.package} {describe_exit(exit_code)}")

    async def _run_once(self) -> int:
        folder = self._script.folder(self.pod_id)
        if not folder.is_dir():
            raise self._failure(1, f"has no folder {folder}; --package_sh makes it")
        process = self._start(self._script.command, folder)
        log.info("pod.started", pod=self.pod_id, pid=process.pid)
        self._set_running(True)
        return await self._run_process(process)

    def _start(self, command: tuple[str, ...], folder: Path) -> InstanceProcess:
        log_file = self._script.log(self.pod_id)
        try:
            return self._processes.start(command, env=self._environ, cwd=folder, log=log_file, to_group=True)
        except OSError as error:  # there is no room for the log, or no right to write it
            raise self._failure(1, f"could not be started: {error}") from None

    async def _run_process(self, process: InstanceProcess) -> int:
        return await process.run(self._slot.leave, self._script.grace_s)

    def _delay_s(self, exit_code: int, lived_s: float) -> float:
        """Return after how long it is started again. Raises PodFailedError."""
        if exit_code in PERMANENT:
            raise self._failure(exit_code)
        exits = self._slot.count_exit(time.monotonic())
        decision = decide_restart(
            RestartPolicy(), exit_code, lived_s, self._slot.short_lives, others=False, within_an_hour=exits
        )
        if not isinstance(decision, Restart):
            raise self._failure(exit_code, decision.reason if isinstance(decision, FailJob) else "")
        self._slot.short_lives = decision.short_lives
        log.warning("pod.failed", pod=self.pod_id, exit_code=exit_code, restart_in_s=decision.delay_s)
        return decision.delay_s

    async def _rest(self, delay_s: float) -> None:
        self._set_running(False)
        await wait_for_event(self._slot.leave, delay_s)

    def _failure(self, exit_code: int, reason: str = "") -> PodFailedError:
        file = self._script.log(self.pod_id)
        return PodFailedError(self.pod_id, exit_code, reason, str(file), tuple(tail(file)))

    def _set_running(self, running: bool) -> None:  # noqa: FBT001 -- a setter
        self.running = running
        self._on_change()
