"""What is in a checkpoint's folder: a file a group of arrays, one for all else, and the manifest, written last."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from edl_runtime.checkpoint.files import read_checked, write_checked
from edl_runtime.checkpoint.manifest import DRAFT, FORMAT, MANIFEST, CheckpointInfo, Manifest, position_of
from edl_runtime.checkpoint.snapshot import Snapshot
from edl_runtime.checkpoint.storage import Storage
from edl_runtime.checkpoint.tensors import parse, pieces
from edl_runtime.checkpoint.trying import patiently
from edl_runtime.errors import DamagedCheckpointError, UnfinishedCheckpointError, UnreadableCheckpointError

EXTRA = "extra.json"
ARRAYS = ".safetensors"


def write_folder(storage: Storage, name: str, snapshot: Snapshot, answered: Callable[[], None]) -> CheckpointInfo:
    """Store a snapshot in a new folder. After an error none is left that could be loaded, unless it is whole.

    `answered` is called after each part that is written.
    """
    files = {}
    with storage.draft(name) as draft:
        for group, arrays in snapshot.arrays.items():
            with draft.create(group + ARRAYS) as file:
                files[group + ARRAYS] = write_checked(file, pieces(arrays), answered)
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
        content = manifest.encode()
        with draft.create(MANIFEST) as file:
            file.write(content)
    return CheckpointInfo(url=storage.url_of(name), name=name, manifest=manifest)


def read_info(storage: Storage, name: str) -> CheckpointInfo:
    """Return what a folder's manifest says. Raises UnreadableCheckpointError."""
    url = storage.url_of(name)
    content = _manifest_of(storage, name)
    with _damaged_if_wrong(url, MANIFEST):
        manifest = Manifest.decode(content, url)
        if (manifest.generation, manifest.step) != position_of(name):
            raise ValueError(f"it is of step {manifest.step} in generation {manifest.generation}")
    return CheckpointInfo(url=url, name=name, manifest=manifest)


def _manifest_of(storage: Storage, name: str) -> bytes:
    for file in (MANIFEST, DRAFT, MANIFEST):  # twice: the draft may have been finished between the first two
        with contextlib.suppress(FileNotFoundError), storage.open(name, file) as found:
            if file == DRAFT:
                raise UnfinishedCheckpointError(storage.url_of(name), is_draft=True)
            return found.read()
    raise UnfinishedCheckpointError(storage.url_of(name), is_draft=False)


def read_files(
    storage: Storage, info: CheckpointInfo, *, keep: bool, answered: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Return each file's bytes, all of them if they are to be kept. Raises DamagedCheckpointError.

    All files are opened before the first is read: a local one that is removed meanwhile can still be read. `answered`
    is called after each that is opened, and each piece that is read.
    """
    contents = {}
    with contextlib.ExitStack() as stack:
        files = {}
        for file in info.manifest.files:
            with _damaged_if_wrong(info.url, file):
                files[file] = stack.enter_context(patiently(storage.open, info.name, file))
            answered()
        for file, record in info.manifest.files.items():
            with _damaged_if_wrong(info.url, file):
                contents[file] = read_checked(files[file], record, keep=keep, answered=answered)
    return contents


def snapshot_of(info: CheckpointInfo, contents: dict[str, np.ndarray]) -> Snapshot:
    """Return what the bytes of a checkpoint's files mean. Raises DamagedCheckpointError."""
    arrays, extra = {}, {}
    for file, content in contents.items():
        with _damaged_if_wrong(info.url, file):
            if file == EXTRA:
                extra = msgspec.json.decode(content.data, type=dict[str, Any])
            else:
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


@contextlib.contextmanager
def _damaged_if_wrong(url: str, file: str) -> Iterator[None]:
    """Raise DamagedCheckpointError for a file that is not there, can't be read or holds something else."""
    try:
        yield
    except UnreadableCheckpointError:
        raise
    except FileNotFoundError:
        raise DamagedCheckpointError(url, f"{file} is missing") from None
    except (ValueError, RecursionError) as error:  # the latter: JSON nested too deep
        raise DamagedCheckpointError(url, f"{file}: {error}") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedCheckpointError(url, f"{file}: {error}") from error
