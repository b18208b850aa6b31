"""The checkpoints in one folder: write, find, load, prune."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from edl_runtime.checkpoint.errors import (
    DamagedCheckpointError,
    NotFiniteCheckpointError,
    NoWholeCheckpointError,
    UnfinishedCheckpointError,
    UnreadableCheckpointError,
)
from edl_runtime.checkpoint.file_format import (
    CheckpointInfo,
    CheckpointPosition,
    Snapshot,
    is_checkpoint_name,
    new_name,
    parse_snapshot,
    position_of,
    read_files,
    read_info,
    write_checkpoint,
)
from edl_runtime.checkpoint.storage import MANIFEST, ask_storage, finished_name, storage_at, storage_errors
from edl_runtime.errors import DamagedFileError
from edl_runtime.log import get_logger
from edl_runtime.specs import Checkpoint

ABANDONED_AFTER_S = 3600.0
"""An unfinished checkpoint in which nothing has changed for so long has no writer any more, and is removed."""

log = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class RestoredCheckpoint(NamedTuple):
    """The newest checkpoint that is neither damaged nor marked as not finite, and its content.

    - `skipped`: the errors of newer ones, newest first.
    - `further`: a checkpoint of an earlier generation but a later step, if any.
    """

    info: CheckpointInfo
    snapshot: Snapshot
    skipped: tuple[UnreadableCheckpointError, ...]
    further: CheckpointInfo | None = None


class CheckpointStore:
    """The checkpoints at `spec.url`, newest first: by generation, then by step.

    Several processes may use one folder at a time, and even write the same step: each write creates a folder of its
    own. Temporary errors of the storage are retried for a few seconds. Every method raises CheckpointStoreError if the
    storage can't be used. `answered` is called after each answer of the storage.
    """

    def __init__(self, spec: Checkpoint, *, answered: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self._answered = answered
        self._storage = storage_at(spec.url)
        self._finished: set[str] = set()  # that are known to have a manifest
        self._marked: set[str] = set()  # of these, those with weights that are not finite
        self._whole: dict[str, bool] = {}  # of those that were read or written
        self._written = ""

    def check(self) -> None:
        """Raise CheckpointStoreError unless this process can write here."""
        self._ask(self._storage.check)

    def exists(self) -> bool:
        """Whether the folder exists, even without checkpoints."""
        return self._ask(self._storage.exists)

    def write(self, snapshot: Snapshot) -> CheckpointInfo:
        """Store a snapshot; return when it is stored durably.

        After an error nothing can be loaded, except if the storage reported an error for the last file although it had
        stored it, and then could not remove it. Raises SpecError for arrays that can't be stored.
        """
        name = new_name(CheckpointPosition(snapshot.generation, snapshot.step))
        info = self._ask(write_checkpoint, self._storage, name, snapshot, self._answered)
        self._whole[info.name] = True
        self._written = info.name
        return info

    def load_newest(self, known: RestoredCheckpoint | None = None) -> RestoredCheckpoint | None:
        """Return the newest checkpoint that is not damaged; None if none was ever finished. `known` is not read again.

        Logs a warning for each damaged one that it skips, including those without their manifest, and for one of an
        earlier generation but a later step. One whose weights are not finite counts as damaged, unless
        `spec.allow_not_finite` names it. Raises NoWholeCheckpointError if all are damaged, and UnknownFormatError if
        another version wrote a newer one.
        """
        errors: dict[str, UnreadableCheckpointError] = {}
        while True:
            names = self.names()  # listed each time: one that is gone may have been pruned in favour of a newer one
            newer = list(takewhile(errors.__contains__, names))
            damaged = tuple(errors[name] for name in newer if not errors[name].is_draft)
            if len(newer) == len(names):
                break
            name = names[len(newer)]
            if known is not None and known.info.name == name:
                return known
            try:
                info = self.info(name)
                if info.defect and name != self.spec.allow_not_finite:
                    raise NotFiniteCheckpointError(info.url, info.defect)  # noqa: TRY301 -- as others are skipped
                snapshot, further = self.load(info), self._further(names, name)
                if further:
                    log.warning("checkpoint.further", url=further.url, step=further.manifest.step, loaded=info.url)
                return RestoredCheckpoint(info, snapshot, damaged, further)
            except (DamagedCheckpointError, NotFiniteCheckpointError, UnfinishedCheckpointError) as error:
                _log_unreadable(error)
                errors[name] = error
        if damaged:
            raise NoWholeCheckpointError(self.spec.url, len(damaged), damaged[0])
        return None

    def load(self, info: CheckpointInfo) -> Snapshot:
        """Return a checkpoint's content; the arrays are the caller's own. Raises DamagedCheckpointError."""
        return parse_snapshot(info, self._read(info, keep=True))

    def verify(self, name: str) -> CheckpointInfo:
        """Read a whole checkpoint, and return what describes it. Raises UnreadableCheckpointError."""
        info = self.info(name)
        self._read(info, keep=False)
        return info

    def info(self, name: str) -> CheckpointInfo:
        """Read a checkpoint's manifest. Raises UnreadableCheckpointError."""
        try:
            return self._ask(read_info, self._storage, name)
        except DamagedFileError as error:
            raise DamagedCheckpointError(self._storage.url_of(name), f"{MANIFEST}: {error}") from error

    def list(self) -> Sequence[CheckpointInfo]:
        """Return all checkpoints with a readable manifest. Their other files are not read: `verify` does."""
        found = []
        for name in self.names():
            try:
                found.append(self.info(name))
            except UnreadableCheckpointError as error:
                _log_unreadable(error)
        return found

    def names(self) -> Sequence[str]:
        """Return the names of all checkpoints, including unfinished, damaged and unknown ones."""
        return _newest_first(self._ask(self._storage.folders))

    def prune(self, *, now: float | None = None, dry_run: bool = False) -> Sequence[str]:
        """Remove what `spec` does not keep, and abandoned drafts; return the names. `now` is a Unix time.

        It keeps

        - the newest one that verifies and those before it, `keep_last` in all, and all newer ones with a manifest;
        - the last one that this store has written, even if another process writes a later generation here;
        - the one of an earlier generation with the latest step, until training has reached that step;
        - those with an unreadable manifest: their arrays may be complete, and another version may know the format;
        - all, if none verifies. Older ones than the newest are not verified.

        Those whose weights are not finite count apart: of newer ones than that, `keep_last` stay, and none of older
        ones.

        The manifest is removed first, so that an interrupted removal leaves nothing that looks complete.
        """
        folders = self._ask(self._storage.folders)  # once: what another process adds from here on is not considered
        listed, unfinished = self._sorted_out(folders)
        finished = [name for name in listed if name not in self._marked]
        newest = self._newest_kept(finished)
        doomed = [*self._useless([name for name in listed if name in self._marked], newest)]
        if newest:
            doomed += [*self._old(finished, newest), *self._abandoned(unfinished, time.time() if now is None else now)]
        for name in doomed if not dry_run else ():
            self._ask(self._storage.remove, name)
            log.info("checkpoint.removed", url=self._storage.url_of(name))
        return doomed

    def _read(self, info: CheckpointInfo, *, keep: bool) -> dict[str, np.ndarray]:
        try:
            with storage_errors(self.spec.url):
                contents = read_files(self._storage, info, keep=keep, answered=self._answered)
        except DamagedCheckpointError:
            self._whole[info.name] = False
            raise
        self._whole[info.name] = True
        return contents

    def _further(self, names: Sequence[str], loaded: str) -> CheckpointInfo | None:
        for name in _further_on(names, loaded):
            with contextlib.suppress(UnreadableCheckpointError):
                info = self.info(name)
                if not info.defect:
                    return info
        return None

    def _newest_kept(self, finished: Sequence[str]) -> Sequence[str]:
        sound = [name for name in finished if self._whole.get(name, True)]
        for place, name in enumerate(sound):
            try:
                if name not in self._whole:
                    self.verify(name)
            except UnreadableCheckpointError as error:
                _log_unreadable(error)
                continue
            return sound[place : place + self.spec.keep_last]
        return []

    def _old(self, finished: Sequence[str], newest: Sequence[str]) -> Sequence[str]:
        """Return those to remove that are older than the newest, oldest first."""
        good = kept_forever(map(position_of, finished), self.spec.keep_every)
        sound = [name for name in finished if self._whole.get(name, True)]
        kept = {*newest, self._written, *_further_on(sound, newest[0])[:1]}
        older = [name for name in reversed(finished) if position_of(name) < position_of(newest[0])]
        return [name for name in older if name not in kept and position_of(name) not in good]

    def _useless(self, marked: Sequence[str], newest: Sequence[str]) -> Sequence[str]:
        """Return those to remove of the ones with weights that are not finite, oldest first."""
        ahead = [name for name in marked if not newest or position_of(name) > position_of(newest[0])]
        kept = {*ahead[: self.spec.keep_last], self._written, self.spec.allow_not_finite}
        return [name for name in reversed(marked) if name not in kept]

    def _abandoned(self, unfinished: Iterable[str], now: float) -> Sequence[str]:
        ours = [folder for folder in sorted(unfinished) if is_checkpoint_name(finished_name(folder))]
        return [each for each in ours if now - self._ask(self._storage.changed_at, each) > ABANDONED_AFTER_S]

    def _sorted_out(self, folders: Iterable[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return those with a manifest, newest first, and the unfinished ones, including drafts."""
        finished, unfinished = [], [folder for folder in folders if finished_name(folder) != folder]
        for name in _newest_first(folders):
            try:
                if name not in self._finished and self.info(name).defect:
                    self._marked.add(name)
                self._finished.add(name)
                finished.append(name)
            except UnfinishedCheckpointError:
                unfinished.append(name)
            except UnreadableCheckpointError:
                pass  # neither: it was finished, and is damaged or unknown
        return finished, unfinished

    def _ask(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        answer = ask_storage(self.spec.url, work, *args, **kwargs)
        self._answered()
        return answer


def _further_on(names: Iterable[str], newest: str) -> Sequence[str]:
    """Return those of earlier generations but later steps than the newest, the latest step first."""
    at = position_of(newest)
    by_step = sorted(names, key=lambda name: (position_of(name).step, position_of(name), name), reverse=True)
    return [
        name for name in by_step if position_of(name).generation < at.generation and position_of(name).step > at.step
    ]


def _newest_first(folders: Iterable[str]) -> Sequence[str]:
    return sorted(filter(is_checkpoint_name, folders), key=lambda name: (position_of(name), name), reverse=True)


def _log_unreadable(error: UnreadableCheckpointError) -> None:
    if error.is_draft:
        log.info("checkpoint.unfinished", url=error.url)
    else:
        log.warning("checkpoint.unreadable", url=error.url, state=error.state, problem=error.problem)


# Which checkpoints may go.


def kept_forever(positions: Iterable[CheckpointPosition], every_steps: int | None) -> set[CheckpointPosition]:
    """Return the first at or after each multiple of `every_steps`.

    Without those of steps that training has repeated: a later generation has a checkpoint of the same step or an
    earlier one.
    """
    first: dict[int, CheckpointPosition] = {}
    if every_steps is not None:
        for position in sorted(_not_repeated(positions)):
            if position.step >= every_steps:
                first.setdefault(position.step // every_steps, position)
    return set(first.values())


def _not_repeated(positions: Iterable[CheckpointPosition]) -> Iterator[CheckpointPosition]:
    later = math.inf  # the earliest step of all later generations
    for _, generation in groupby(sorted(positions, reverse=True), key=lambda each: each.generation):
        steps = list(generation)
        yield from (position for position in steps if position.step < later)
        later = min(later, steps[-1].step)
