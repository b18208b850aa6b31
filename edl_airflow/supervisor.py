"""The one use of Airflow's private SUPERVISOR_COMMS, the channel from a task to its supervisor."""

from __future__ import annotations


def lacks_async_channel() -> bool:
    """Whether connections can be looked up only by blocking calls, as under `dag.test()`.

    That runs a trigger in its own process, where the stand-in for the supervisor has no `asend`; Airflow then reports
    an existing connection as missing, and nothing public says so.
    """
    from airflow.sdk.execution_time import task_runner

    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return comms is not None and not hasattr(comms, "asend")
