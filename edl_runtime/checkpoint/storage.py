"""Where checkpoints are stored: the storage protocol, the local file system, everything fsspec knows, and retries."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, Protocol, TypeVar, cast

import stamina

from edl_runtime.checkpoint.errors import CheckpointStoreError, MissingExtraError
from edl_runtime.errors import EdlError, SpecError

MANIFEST = "manifest.json"
"""The manifest's file name."""

DRAFT = "draft"
"""A file that an object store's folder has from its first byte until its manifest is there.

One with neither has lost its manifest, or is being removed. On a file system a draft has another name instead.
"""

READ_AT_ONCE = 1 << 23
"""Bytes that are asked of an object store at a time."""

IDENTITY_FILE = ".edl-place"
"""A file in a folder of checkpoints. Its first line, which is random, and its inode tell this folder from all others:
one that is made anew has another line, and a copy another inode."""

_TOKEN_LIMIT = 1 << 10

EXTRAS = {"s3": "the extra s3 (pip install 'edl-airflow[s3]')"}
"""What has to be installed for which protocol, as far as this package has a name for it."""


class Draft(Protocol):
    """A folder in the making."""

    def create(self, file: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Return a new file to write to; after the context it is stored for good."""


class Storage(Protocol):
    """Folders of files. Raises OSError, or what the place's own library raises."""

    @property
    def url(self) -> str:
        """Where it is: an absolute path, or a URL without a slash at its end."""

    def identity(self) -> str:
        """Return a word for this place that no other place has, by whatever name and from wherever it is reached.

        Makes a folder that is not there yet, and a small file in it.
        """

    def url_of(self, folder: str) -> str:
        """Return where a folder is, for people and for other programs."""

    def check(self) -> None:
        """Write a small file and remove it."""

    def exists(self) -> bool:
        """Whether there is anything: a folder, though it may be empty, or in an object store any object."""

    def folders(self) -> list[str]:
        """Return the names of all folders here, none if there is nothing yet. Drafts are among them."""

    def open(self, folder: str, file: str) -> BinaryIO:
        """Return a file to read. Raises FileNotFoundError."""

    def draft(self, folder: str) -> contextlib.AbstractContextManager[Draft]:
        """Make a folder, which holds all its files after the context; after an error in it, none if it can be removed.

        Who is killed in between leaves a draft: a folder of another name, or one that has the file DRAFT and lacks what
        is created last. So does an error, in a place from which nothing can be removed; one that comes after the last
        file, a whole folder.
        """

    def changed_at(self, folder: str) -> float:
        """Return the Unix time at which something last changed in a folder; now, if it has gone."""

    def remove(self, folder: str) -> None:
        """Remove a folder, its manifest first: an interruption leaves nothing that looks whole, and of a draft a draft.

        Does nothing if it has gone.
        """


def storage_at(url: str) -> Storage:
    """Return the place that a path or URL names. Raises nothing: `Storage.check` tells whether it can be used."""
    protocol, separator, path = url.partition("://")
    if separator and protocol not in ("file", "local"):
        return ObjectStorage(f"{protocol}://{path.rstrip('/')}")
    return LocalStorage(Path(path if separator else url).expanduser().absolute())


class LocalStorage:
    """Folders on a file system: a draft is made beside its place and renamed once all is on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def identity(self) -> str:
        mark = self._root / IDENTITY_FILE
        while True:
            with contextlib.suppress(FileNotFoundError), mark.open("rb") as file:
                token, end, _ = file.read(_TOKEN_LIMIT).partition(b"\n")
                if end or len(token) == _TOKEN_LIMIT:  # of whatever somebody else has written there
                    return f"folder {os.fstat(file.fileno()).st_ino} {token.decode('ascii', 'backslashreplace')}"
            _make_folder(self._root)
            with mark.open("ab") as file:  # of several processes that do so, the first one's line counts for all
                file.write(f"{secrets.token_hex(16)}\n".encode())

    def url_of(self, folder: str) -> str:
        return str(self._root / folder)

    def check(self) -> None:
        _make_folder(self._root)
        probe = self._root / _probe_name()
        probe.write_bytes(b"probe")
        probe.unlink()

    def exists(self) -> bool:
        return self._root.is_dir()

    def folders(self) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self._root) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def open(self, folder: str, file: str) -> BinaryIO:
        return (self._root / folder / file).open("rb", buffering=0)

    @contextlib.contextmanager
    def draft(self, folder: str) -> Iterator[Draft]:
        partial = self._root / draft_name(folder)
        _make_folder(self._root)
        partial.mkdir()
        try:
            yield _LocalDraft(partial)
            _sync(partial)
            partial.rename(self._root / folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(self._root)

    def changed_at(self, folder: str) -> float:
        path = self._root / folder
        try:
            return max(each.stat().st_mtime for each in (path, *path.iterdir()))
        except FileNotFoundError:
            return time.time()

    def remove(self, folder: str) -> None:
        path = self._root / folder
        (path / MANIFEST).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


class _LocalDraft:
    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        with (self._path / file).open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())


class ObjectStorage:
    """Folders in a store that fsspec knows. It need not rename: what is created last makes a folder complete.

    A draft says that it is one by a file, removed at its end: beside a manifest it means nothing.

    Where the store is and who may use it is said as its own library has it, as in AWS_ENDPOINT_URL_S3.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def identity(self) -> str:
        return self._url

    @cached_property
    def _fs(self) -> Any:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        protocol = self._url.partition("://")[0]
        try:
            return url_to_fs(self._url, use_listings_cache=False, skip_instance_cache=True)[0]
        except ImportError as error:
            raise MissingExtraError(self._url, EXTRAS.get(protocol, "a package"), str(error)) from error
        except ValueError as error:
            allowed = "a path, or a URL of a protocol that fsspec knows, as s3://bucket/job"
            raise SpecError("checkpoint.url", self._url, allowed) from error

    def url_of(self, folder: str) -> str:
        return f"{self._url}/{folder}"

    def check(self) -> None:
        probe = self.url_of(_probe_name())
        self._fs.pipe_file(probe, b"probe")
        self._fs.rm_file(probe)

    def exists(self) -> bool:
        return bool(self._fs.exists(self._url))

    def folders(self) -> list[str]:
        try:
            entries = self._fs.ls(self._url, detail=True)
        except FileNotFoundError:
            return []
        return [_last_name(entry["name"]) for entry in entries if entry["type"] == "directory"]

    def open(self, folder: str, file: str) -> BinaryIO:
        path = f"{self.url_of(folder)}/{file}"
        return cast(BinaryIO, self._fs.open(path, "rb", block_size=READ_AT_ONCE, cache_type="none"))

    @contextlib.contextmanager
    def draft(self, folder: str) -> Iterator[Draft]:
        mark = f"{self.url_of(folder)}/{DRAFT}"
        try:
            self._fs.pipe_file(mark, b"")
            yield _ObjectDraft(self._fs, self.url_of(folder))
        except Exception:
            with contextlib.suppress(Exception):  # what is left is a draft or whole; the first error is the one to tell
                self.remove(folder)
            raise
        with contextlib.suppress(Exception):  # it is whole, whatever else is in it
            self._fs.rm_file(mark)

    def changed_at(self, folder: str) -> float:
        files = self._fs.find(self.url_of(folder))
        return max((self._fs.modified(file).timestamp() for file in files), default=time.time())

    def remove(self, folder: str) -> None:
        url = self.url_of(folder)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{url}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm([file for file in self._fs.find(url) if _last_name(file) != DRAFT])
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(url, recursive=True)


class _ObjectDraft:
    def __init__(self, fs: Any, url: str) -> None:
        self._fs = fs
        self._url = url

    def create(self, file: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return cast(BinaryIO, self._fs.open(f"{self._url}/{file}", "wb"))


def draft_name(folder: str) -> str:
    """Return how a local draft of a folder is named."""
    return f".{folder}.partial"


def finished_name(name: str) -> str:
    """Return how a folder is named once it is finished."""
    return name.removeprefix(".").removesuffix(".partial")


def _probe_name() -> str:
    return f".probe-{secrets.token_hex(4)}"


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing; the entries of all that were are on the disk then."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        _sync(each.parent)


def _sync(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Trouble with a place that may pass, and trouble that lasts.

_PERMANENT = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
}

_retrying = stamina.RetryingCaller(attempts=3, wait_initial=0.2, wait_max=2.0, timeout=20.0)

P = ParamSpec("P")
T = TypeVar("T")


def ask_storage(url: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns, `patiently`. Raises as `in_our_words`."""
    with storage_errors(url):
        return with_retries(work, *args, **kwargs)


def with_retries(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns; ask it again a few times when that may help. Raises what it has raised last."""
    return _retrying(_is_transient, work, *args, **kwargs)


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Raise this project's errors as they are, and CheckpointStoreError for all others of the place at `url`."""
    try:
        yield
    except EdlError:
        raise
    except Exception as error:  # every file system of fsspec's has errors of its own
        raise CheckpointStoreError(url, f"{type(error).__name__}: {error}") from error


def _is_transient(error: BaseException) -> bool:
    if not isinstance(error, Exception):  # an interrupt comes here, too
        return False
    if isinstance(error, OSError):
        lasting = error.errno in _PERMANENT or isinstance(error, PermissionError | FileNotFoundError)
        return not lasting
    return not isinstance(error, EdlError | ValueError | TypeError | LookupError)
