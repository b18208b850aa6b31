"""Trouble with a place that may pass, and trouble that lasts."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import stamina

from edl_runtime.errors import CheckpointStoreError, EdlError

_LASTING = {
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

_asking = stamina.RetryingCaller(attempts=3, wait_initial=0.2, wait_max=2.0, timeout=20.0)

P = ParamSpec("P")
T = TypeVar("T")


def trying(url: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns, `patiently`. Raises as `in_our_words`."""
    with in_our_words(url):
        return patiently(work, *args, **kwargs)


def patiently(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns; ask it again a few times when that may help. Raises what it has raised last."""
    return _asking(_may_pass, work, *args, **kwargs)


@contextlib.contextmanager
def in_our_words(url: str) -> Iterator[None]:
    """Raise this project's errors as they are, and CheckpointStoreError for all others of the place at `url`."""
    try:
        yield
    except EdlError:
        raise
    except Exception as error:  # every file system of fsspec's has errors of its own
        raise CheckpointStoreError(url, f"{type(error).__name__}: {error}") from error


def _may_pass(error: BaseException) -> bool:
    if not isinstance(error, Exception):  # an interrupt comes here, too
        return False
    if isinstance(error, OSError):
        lasting = error.errno in _LASTING or isinstance(error, PermissionError | FileNotFoundError)
        return not lasting
    return not isinstance(error, EdlError | ValueError | TypeError | LookupError)
