"""The local backend: a detached supervisor a job, processes as instances, all on this machine."""

from edl_runtime.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
