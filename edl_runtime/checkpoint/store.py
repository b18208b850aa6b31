"""Checkpoints at one place: write, find, load, prune."""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np
import stamina
import structlog

from edl_runtime.checkpoint.files import read_checked, write_checked
from edl_runtime.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    CheckpointInfo,
    Manifest,
    Position,
    is_name,
    new_name,
    position_of,
)
from edl_runtime.checkpoint.retention import kept_for_good
from edl_runtime.checkpoint.snapshot import Snapshot
from edl_runtime.checkpoint.storage import finished_name, storage_at
from edl_runtime.checkpoint.tensors import parse, pieces
from edl_runtime.errors import CheckpointStoreError, DamagedCheckpointError, EdlError, UnfinishedCheckpointError
from edl_runtime.specs import Checkpoint

ABANDONED_AFTER_S = 3600.0
"""An unfinished checkpoint in which nothing has changed for so long is nobody's any more."""

EXTRA = "extra.json"
ARRAYS = ".safetensors"

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger(__name__)


class CheckpointStore:
    """The checkpoints at `spec.url`, newest first: by generation, then by step.

    Several processes may use a place at once, also to write the same step: each writes a folder of its own. Trouble
    that may pass is tried again for a few seconds. Every method raises CheckpointStoreError when the place can't be
    used, and may be called from any thread.
    """

    def __init__(self, spec: Checkpoint) -> None:
        self.spec = spec
        self._storage = storage_at(spec.url)
        self._finished: set[str] = set()
        self._whole: set[str] = set()
        self._in_use: set[str] = set()

    def check(self) -> None:
        """Raise CheckpointStoreError unless this process can write here: better at the start than hours later."""
        self._try(self._storage.check)

    def write(self, snapshot: Snapshot) -> CheckpointInfo:
        """Store a snapshot and return once it is there for good. After an error nothing is left that could be loaded.

        Raises SpecError for arrays that can't be stored.
        """
        return self._try(self._write, snapshot)

    def newest(self) -> CheckpointInfo | None:
        """Return the newest that is whole, None if there is none. Reads its files; damaged ones are passed by."""
        for name in self.names():
            with _passing_by_damaged():
                return self.verify(name)
        return None

    def load_newest(self) -> tuple[CheckpointInfo, Snapshot] | None:
        """Return the newest that is whole and what it holds. Reads it once, where `newest` and `load` read it twice."""
        for name in self.names():
            with _passing_by_damaged():
                info = self.info(name)
                return info, self.load(info)
        return None

    def load(self, info: CheckpointInfo) -> Snapshot:
        """Return what a checkpoint holds; the arrays are the caller's own. Raises DamagedCheckpointError."""
        contents = self._try(self._read, info)
        with _damaged_if_wrong(info.url, EXTRA):
            extra = msgspec.json.decode(contents.pop(EXTRA).data, type=dict[str, Any])
        arrays = {}
        for file, content in contents.items():
            with _damaged_if_wrong(info.url, file):
                arrays[file.removesuffix(ARRAYS)] = parse(content)
        manifest = info.manifest
        return Snapshot(
            generation=manifest.generation,
            step=manifest.step,
            arrays=arrays,
            extra=extra,
            world_size=manifest.world_size,
            epoch=manifest.epoch,
            metrics=manifest.metrics,
        )

    def verify(self, name: str) -> CheckpointInfo:
        """Return a checkpoint of which every byte is as it was written. Raises DamagedCheckpointError."""
        info = self.info(name)
        self._try(self._read, info, keep=False)
        self._whole.add(name)
        return info

    def info(self, name: str) -> CheckpointInfo:
        """Return what a checkpoint's manifest says. Raises DamagedCheckpointError."""
        return self._try(self._info, name)

    def list(self) -> Sequence[CheckpointInfo]:
        """Return all that have a manifest. Their files are not read: `verify` does."""
        found = []
        for name in self.names():
            with _passing_by_damaged():
                found.append(self.info(name))
        return found

    def names(self) -> Sequence[str]:
        """Return the names of all, unfinished and damaged ones too."""
        return sorted(filter(is_name, self._folders()), key=_age, reverse=True)

    def prune(self, *, now: float | None = None, dry_run: bool = False) -> Sequence[str]:
        """Remove what `spec` does not keep, and what was abandoned before it was finished; return the names.

        At least `keep_last` whole ones stay, besides all newer than the newest of these and those that this store reads
        at this moment. Each loses its manifest first: an interruption leaves nothing that looks whole. `now` is a Unix
        time.
        """
        doomed = self._doomed(time.time() if now is None else now)
        for name in doomed if not dry_run else ():
            self._try(self._storage.remove, name)
            log.info("checkpoint.removed", url=self._storage.url_of(name))
        return doomed

    def _write(self, snapshot: Snapshot) -> CheckpointInfo:
        name = new_name(Position(snapshot.generation, snapshot.step))
        self._in_use.add(name)
        try:
            with self._storage.draft(name) as draft:
                files = {}
                for group, arrays in snapshot.arrays.items():
                    with draft.create(group + ARRAYS) as file:
                        files[group + ARRAYS] = write_checked(file, pieces(arrays))
                with draft.create(EXTRA) as file:
                    files[EXTRA] = write_checked(file, [memoryview(msgspec.json.encode(snapshot.extra))])
                manifest = Manifest(
                    format=FORMAT,
                    generation=snapshot.generation,
                    step=snapshot.step,
                    epoch=snapshot.epoch,
                    world_size=snapshot.world_size,
                    metrics=snapshot.metrics,
                    created_at=time.time(),
                    files=files,
                )
                with draft.create(MANIFEST) as file:
                    file.write(manifest.encode())
        finally:
            self._in_use.discard(name)
        self._whole.add(name)
        return CheckpointInfo(url=self._storage.url_of(name), name=name, manifest=manifest)

    def _info(self, name: str) -> CheckpointInfo:
        url = self._storage.url_of(name)
        try:
            with self._storage.open(name, MANIFEST) as file:
                content = file.read()
        except FileNotFoundError:
            raise UnfinishedCheckpointError(url, [f"it has no {MANIFEST}"]) from None
        with _damaged_if_wrong(url, MANIFEST):
            manifest = Manifest.decode(content)
            if (manifest.generation, manifest.step) != position_of(name):
                raise ValueError(f"it is of step {manifest.step} in generation {manifest.generation}")
        return CheckpointInfo(url=url, name=name, manifest=manifest)

    def _read(self, info: CheckpointInfo, *, keep: bool = True) -> dict[str, np.ndarray]:
        """Return each file's bytes. All are opened first: a local one that is removed meanwhile can still be read."""
        self._in_use.add(info.name)
        try:
            with contextlib.ExitStack() as stack:
                files = {}
                for file in info.manifest.files:
                    with _damaged_if_wrong(info.url, file):
                        files[file] = stack.enter_context(self._storage.open(info.name, file))
                contents = {}
                for file, record in info.manifest.files.items():
                    with _damaged_if_wrong(info.url, file):
                        contents[file] = read_checked(files[file], record, keep=keep)
                return contents
        finally:
            self._in_use.discard(info.name)

    def _doomed(self, now: float) -> Sequence[str]:
        finished = {name: position_of(name) for name in self.names() if self._is_finished(name)}
        whole: list[str] = []
        for name in finished:
            if len(whole) < self.spec.keep_last and self._is_whole(name):
                whole.append(name)
        if not whole:
            return []
        good = kept_for_good(finished.values(), self.spec.keep_every)
        old = [
            name
            for name, position in finished.items()
            if position < finished[whole[0]] and name not in whole and position not in good
        ]
        unfinished = (name for name in self._folders() if is_name(finished_name(name)) and name not in finished)
        abandoned = [name for name in unfinished if now - self._changed_at(name) > ABANDONED_AFTER_S]
        return [name for name in [*reversed(old), *abandoned] if finished_name(name) not in self._in_use]

    def _is_finished(self, name: str) -> bool:
        if name not in self._finished:
            try:
                self.info(name)
            except DamagedCheckpointError:
                return False
            self._finished.add(name)
        return True

    def _is_whole(self, name: str) -> bool:
        if name not in self._whole:
            with _passing_by_damaged():
                self.verify(name)
        return name in self._whole

    def _folders(self) -> Sequence[str]:
        return self._try(self._storage.folders)

    def _changed_at(self, name: str) -> float:
        try:
            return self._try(self._storage.changed_at, name)
        except FileNotFoundError:
            return math.inf

    def _try(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what needs the place, a few times if it may be mended by waiting. Raises CheckpointStoreError."""
        try:
            return _patiently(_may_pass, work, *args, **kwargs)
        except EdlError:
            raise
        except Exception as error:  # every file system of fsspec's has errors of its own
            raise CheckpointStoreError(self.spec.url, f"{type(error).__name__}: {error}") from error


_patiently = stamina.RetryingCaller(attempts=3, wait_initial=0.2, wait_max=2.0, timeout=20.0)

_LASTING = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENOENT,
    errno.ENOTDIR,
}


def _may_pass(error: Exception) -> bool:
    if isinstance(error, EdlError | ValueError | TypeError | LookupError):
        return False
    lasting = isinstance(error, PermissionError | FileNotFoundError)
    return not lasting and not (isinstance(error, OSError) and error.errno in _LASTING)


def _age(name: str) -> tuple[Position, str]:
    return position_of(name), name


@contextlib.contextmanager
def _damaged_if_wrong(url: str, file: str) -> Iterator[None]:
    """Raise DamagedCheckpointError for a file that is not there, can't be read or holds something else."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpointError(url, [f"{file} is missing"]) from None
    except ValueError as error:
        raise DamagedCheckpointError(url, [f"{file}: {error}"]) from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedCheckpointError(url, [f"{file}: {error}"]) from error


@contextlib.contextmanager
def _passing_by_damaged() -> Iterator[None]:
    try:
        yield
    except UnfinishedCheckpointError as error:
        log.info("checkpoint.unfinished", url=error.url)
    except DamagedCheckpointError as error:
        log.warning("checkpoint.damaged", url=error.url, damage=error.damage)
