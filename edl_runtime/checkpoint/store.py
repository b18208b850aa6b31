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
from edl_runtime.checkpoint.storage import ask_storage, finished_name, storage_at, storage_errors
from edl_runtime.log import get_logger
from edl_runtime.specs import Checkpoint

ABANDONED_AFTER_S = 3600.0
"""An unfinished checkpoint in which nothing has changed for so long is nobody's any more."""

log = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class RestoredCheckpoint(NamedTuple):
    """The newest checkpoint that is whole, what it holds, and what is wrong with newer ones, of the newest first.

    `further`: one of an earlier generation in which training had come further, if any.
    """

    info: CheckpointInfo
    snapshot: Snapshot
    skipped: tuple[UnreadableCheckpointError, ...]
    further: CheckpointInfo | None = None


class CheckpointStore:
    """The checkpoints at `spec.url`, newest first: by generation, then by step.

    Several processes may use a place at once, also to write the same step: each writes a folder of its own. Trouble
    that may pass is tried again for a few seconds. Every method raises CheckpointStoreError when the place can't be
    used, and may be called from any thread.
    """

    def __init__(self, spec: Checkpoint, *, answered: Callable[[], None] = lambda: None) -> None:
        """Have the checkpoints of this place. `answered` is called whenever it has answered, with data or without."""
        self.spec = spec
        self._answered = answered
        self._storage = storage_at(spec.url)
        self._finished: set[str] = set()
        self._whole: dict[str, bool] = {}
        self._in_use: set[str] = set()
        self._written = ""

    def check(self) -> None:
        """Raise CheckpointStoreError unless this process can write here: better at the start than hours later."""
        self._ask(self._storage.check)

    def exists(self) -> bool:
        """Whether there is such a place, though no checkpoint may be there."""
        return ask_storage(self.spec.url, self._storage.exists)

    def write(self, snapshot: Snapshot) -> CheckpointInfo:
        """Store a snapshot and return once it is there for good.

        After an error nothing of it can be loaded; but all of it can, where a place that did get the last file said
        that it failed, and then could not remove it. Raises SpecError for arrays that can't be stored.
        """
        info = self._ask(self._write, snapshot)
        self._whole[info.name] = True
        self._written = info.name
        return info

    def load_newest(self, known: RestoredCheckpoint | None = None) -> RestoredCheckpoint | None:
        """Return the newest that is whole, None where none has ever been finished.

        One that is `known` from before is not read again. Damaged ones, those that have lost their manifest among them,
        are passed by with a warning. One of an earlier generation that
        is further on is warned of, too. Raises NoWholeCheckpointError when all are, and UnknownFormatError for one of
        another version that is newer than the newest whole one.
        """
        passed: dict[str, UnreadableCheckpointError] = {}
        while True:
            # listed anew each time: what goes missing while it is read may have been removed in favour of a newer one
            names = self.names()
            newer = list(takewhile(passed.__contains__, names))
            damaged = tuple(passed[name] for name in newer if not passed[name].is_draft)
            if len(newer) == len(names):
                break
            name = names[len(newer)]
            if known is not None and known.info.name == name:
                return known
            try:
                info = self.info(name)
                snapshot, further = self.load(info), self._further(names, name)
                if further:
                    log.warning("checkpoint.further", url=further.url, step=further.manifest.step, loaded=info.url)
                return RestoredCheckpoint(info, snapshot, damaged, further)
            except (DamagedCheckpointError, UnfinishedCheckpointError) as error:
                _log_unreadable(error)
                passed[name] = error
        if damaged:
            raise NoWholeCheckpointError(self.spec.url, len(damaged), damaged[0])
        return None

    def load(self, info: CheckpointInfo) -> Snapshot:
        """Return what a checkpoint holds; the arrays are the caller's own. Raises DamagedCheckpointError."""
        return parse_snapshot(info, self._read(info, keep=True))

    def verify(self, name: str) -> CheckpointInfo:
        """Return a checkpoint of which every byte is as it was written. Raises UnreadableCheckpointError."""
        info = self.info(name)
        self._read(info, keep=False)
        return info

    def info(self, name: str) -> CheckpointInfo:
        """Return what a checkpoint's manifest says. Raises UnreadableCheckpointError."""
        return self._ask(read_info, self._storage, name)

    def list(self) -> Sequence[CheckpointInfo]:
        """Return all that have a manifest that can be read. Their files are not read: `verify` does."""
        found = []
        for name in self.names():
            with _skip_unreadable():
                found.append(self.info(name))
        return found

    def names(self) -> Sequence[str]:
        """Return the names of all, unfinished, damaged and unknown ones too."""
        return _newest_first(self._folders())

    def prune(self, *, now: float | None = None, dry_run: bool = False) -> Sequence[str]:
        """Remove what `spec` does not keep, and what was abandoned before it was finished; return the names.

        The newest whole one stays with those before it, `keep_last` in all, and with newer ones that have a manifest;
        so does what this store reads or writes at this moment, and what it has written last, though a later generation
        writes here; and the one of an earlier generation that is further on than all, until training has come as far.
        As long as none is whole, all stay. Whether older ones are whole is not looked at. One with a manifest that
        can't be read is not abandoned, and stays for good: its arrays may be all there, and another version may know
        its format. Each loses its manifest first: an interruption leaves nothing that looks whole. `now` is a Unix
        time.
        """
        folders = self._folders()  # once: what another process adds from here on is not judged
        finished, unfinished = self._judged(folders)
        newest = self._newest_kept(finished)
        if not newest:
            return []
        doomed = [*self._old(finished, newest), *self._abandoned(unfinished, time.time() if now is None else now)]
        for name in doomed if not dry_run else ():
            self._ask(self._storage.remove, name)
            log.info("checkpoint.removed", url=self._storage.url_of(name))
        return doomed

    def _write(self, snapshot: Snapshot) -> CheckpointInfo:
        name = new_name(CheckpointPosition(snapshot.generation, snapshot.step))
        with self._using(name):
            return write_checkpoint(self._storage, name, snapshot, self._answered)

    def _read(self, info: CheckpointInfo, *, keep: bool) -> dict[str, np.ndarray]:
        with self._using(info.name):
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
                return self.info(name)
        return None

    def _newest_kept(self, finished: Sequence[str]) -> Sequence[str]:
        sound = [name for name in finished if self._whole.get(name, True)]
        for place, name in enumerate(sound):
            with _skip_unreadable():
                if name not in self._whole:
                    self.verify(name)
                return sound[place : place + self.spec.keep_last]
        return []

    def _old(self, finished: Sequence[str], newest: Sequence[str]) -> Sequence[str]:
        """Return what is older than the first of the newest and not to be kept, the oldest first."""
        good = kept_forever(map(position_of, finished), self.spec.keep_every)
        sound = [name for name in finished if self._whole.get(name, True)]
        kept = {*newest, *self._in_use, self._written, *_further_on(sound, newest[0])[:1]}
        candidates = [name for name in reversed(finished) if name not in kept]
        return [
            name for name in candidates if position_of(name) < position_of(newest[0]) and position_of(name) not in good
        ]

    def _abandoned(self, unfinished: Iterable[str], now: float) -> Sequence[str]:
        found = []
        for folder in sorted(unfinished):
            name = finished_name(folder)
            if not is_checkpoint_name(name) or name in self._in_use:
                continue
            if now - self._ask(self._storage.changed_at, folder) > ABANDONED_AFTER_S:
                found.append(folder)
        return found

    def _judged(self, folders: Iterable[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return those that have a manifest, newest first, and the unfinished ones, drafts among them."""
        finished, unfinished = [], [folder for folder in folders if finished_name(folder) != folder]
        for name in _newest_first(folders):
            try:
                if name not in self._finished:
                    self.info(name)
                self._finished.add(name)
                finished.append(name)
            except UnfinishedCheckpointError:
                unfinished.append(name)
            except UnreadableCheckpointError:
                pass  # neither: somebody finished it
        return finished, unfinished

    def _folders(self) -> Sequence[str]:
        return self._ask(self._storage.folders)

    def _ask(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        answer = ask_storage(self.spec.url, work, *args, **kwargs)
        self._answered()
        return answer

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[None]:
        self._in_use.add(name)
        try:
            yield
        finally:
            self._in_use.discard(name)


def _further_on(names: Iterable[str], newest: str) -> Sequence[str]:
    """Return those of earlier generations in which training had come further than in the newest, the furthest first."""
    at = position_of(newest)
    found = [
        name for name in names if position_of(name).generation < at.generation and position_of(name).step > at.step
    ]
    return sorted(found, key=lambda name: (position_of(name).step, position_of(name), name), reverse=True)


def _newest_first(folders: Iterable[str]) -> Sequence[str]:
    return sorted(filter(is_checkpoint_name, folders), key=lambda name: (position_of(name), name), reverse=True)


@contextlib.contextmanager
def _skip_unreadable() -> Iterator[None]:
    try:
        yield
    except UnreadableCheckpointError as error:
        _log_unreadable(error)


def _log_unreadable(error: UnreadableCheckpointError) -> None:
    if error.is_draft:
        log.info("checkpoint.unfinished", url=error.url)
    else:
        log.warning("checkpoint.unreadable", url=error.url, state=error.state, problem=error.problem)


# Which checkpoints may go.


def kept_forever(positions: Iterable[CheckpointPosition], every_steps: int | None) -> set[CheckpointPosition]:
    """Return the first at or after each multiple of `every_steps`, of those that training has not gone back behind.

    It has where a later generation has a checkpoint of the same step or an earlier one.
    """
    first: dict[int, CheckpointPosition] = {}
    if every_steps is not None:
        for position in sorted(_not_rewound(positions)):
            if position.step >= every_steps:
                first.setdefault(position.step // every_steps, position)
    return set(first.values())


def _not_rewound(positions: Iterable[CheckpointPosition]) -> Iterator[CheckpointPosition]:
    later = math.inf  # the earliest step of all later generations
    for _, generation in groupby(sorted(positions, reverse=True), key=lambda each: each.generation):
        steps = list(generation)
        yield from (position for position in steps if position.step < later)
        later = min(later, steps[-1].step)
